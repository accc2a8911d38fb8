"""Dataclasses that describe the attention modules, MLPs and experts in a model's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from shardformer.errors import PolicyError
from shardformer.module_paths import resolve_relative_path
from shardformer.pipeline.layer_sequence import PipelineHints, SequenceParallelHints
from shardformer.policies.module_descriptions import check_dataclass_field_types
from shardformer.public_names import deprecate_renamed_arguments

LocalAttr = str | tuple[str, int]
"""What an attribute counts, or (what it counts, the dim that counts it)."""
LOCAL_ATTR_KINDS = {
    "attribute": ("heads", "kv_heads", "groups", "width"),
    "parameter": ("heads", "kv_heads", "width", "inside"),
    "norm": ("heads", "kv_heads"),
    "embedding": ("heads",),
    "argument": ("heads",),
}
"""Allowed values in ``local_attrs``, for each kind of entry."""


@dataclass(frozen=True)
class _TypeCheckedDataclass:
    """Base class that raises PolicyError if a dataclass field has a value of the wrong type."""

    def __post_init__(self) -> None:
        check_dataclass_field_types(self)


@dataclass(frozen=True, kw_only=True)
class AttentionProjections(_TypeCheckedDataclass):
    """The paths of the linear layers in an attention module. These are q, k and v, or qkv, or q and kv.

    Args:
        out: the output projection.
        q, k, v, qkv, kv: the input projections. Fused ones are concatenated in the order q, k, v.
        interleaved: whether fused ones are instead grouped by KV head: its query heads, its k, its v.
        partitions: number of equal partitions of the heads, if the forward pass splits the features into consecutive
            partitions. Each rank gets the same heads of each partition.
        gates: further projections with the same number of features for each query head.
    """

    out: str
    q: str | None = None
    k: str | None = None
    v: str | None = None
    qkv: str | None = None
    kv: str | None = None
    interleaved: bool = False
    partitions: int = 1
    gates: Sequence[str] = ()


Q_K_V_O = AttentionProjections(q="q_proj", k="k_proj", v="v_proj", out="o_proj")
Q_K_V_OUT = AttentionProjections(q="q_proj", k="k_proj", v="v_proj", out="out_proj")


@deprecate_renamed_arguments(
    {
        "from_context": "cross_attention",
        "from_inside": "inner_inputs",
        "give_width": "reads_width",
        "whole_sequence": "full_sequence",
    }
)
@dataclass(frozen=True, kw_only=True)
class AttentionInputs(_TypeCheckedDataclass):
    """Describes which inputs an attention module reads in addition to its first tensor argument.

    Args:
        entry: the module whose first tensor argument is the input. For an attention module that adds its residual
            itself, the first of the projections.
        arguments: further arguments of `forward` that projections read. Each enters the tensor-parallel region.
        cross_attention: whether k and v read the states of another stack.
        inner_inputs: projections that read the output of other modules inside the attention module (such as a low-rank
            projection and its norm) instead of its input.
        reads_width: whether the forward pass reads the features of all heads from the last dim of its input.
        full_sequence: whether the module needs the full sequence outside the block, too, because it adds its residual
            itself. Sequence parallelism gathers the sequence before the module and shards it after the module.
    """

    entry: str | None = None
    arguments: Sequence[str] = ()
    cross_attention: bool = False
    inner_inputs: Sequence[str] = ()
    reads_width: bool = False
    full_sequence: bool = False


@deprecate_renamed_arguments({"counts": "local_attrs"})
@dataclass(frozen=True)
class Attention(_TypeCheckedDataclass):
    """Describes an attention module in a layer by its projections, inputs and head counts.

    Args:
        at: path of the module. Its first tensor argument is the input, unless ``inputs`` specifies another.
        projections: its linear layers.
        local_attrs: name -> what it counts on this rank: "heads", "kv_heads", "groups" (query heads per KV head) or
            "width" (heads times head dim). The name is that of

            - an attribute of the module;
            - a direct parameter or non-persistent buffer with one dim that counts: ("heads", dim) if two dims have
              that size, "inside" if no dim counts;
            - a norm over all heads between entry and exit (a norm over each head needs no entry);
            - an embedding with one column per head (relative position bias);
            - an argument of `forward`, with the dim that counts heads or samples times heads: ("heads", 0) (ALiBi).
        inputs: its inputs.
        num_heads, num_kv_heads: the counts, or the config fields with them; default: those of the policy. A leading dot
            names an attribute of the module (".num_heads"), for head counts that differ between layers.
        optional: whether some layers or models do not have this attention.
    """

    at: str
    projections: AttentionProjections
    local_attrs: Mapping[str, LocalAttr] = field(default_factory=dict)
    inputs: AttentionInputs = AttentionInputs()
    num_heads: int | str | None = None
    num_kv_heads: int | str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        every = tuple(dict.fromkeys(chain(*LOCAL_ATTR_KINDS.values())))
        for name, entry in self.local_attrs.items():
            if (entry if isinstance(entry, str) else entry[0]) not in every:
                raise make_unknown_attr_kind_error(self, name, every)


def make_unknown_attr_kind_error(
    attention: Attention, attr_name: str, allowed_kinds: Sequence[str], entry_kind: str = ""
) -> PolicyError:
    entry = attention.local_attrs[attr_name]
    kind = entry if isinstance(entry, str) else entry[0]
    return PolicyError(
        f"local_attrs={{{attr_name!r}: {entry!r}}} of the attention module {attention.at!r} has the unknown kind "
        + (f"{kind!r} for {'an' if entry_kind[0] in 'ae' else 'a'} {entry_kind}" if entry_kind else repr(kind)),
        remedy=f"Use {' or '.join(map(repr, allowed_kinds))}.",
    )


@deprecate_renamed_arguments({"exits_with": "shared_exit"})
@dataclass(frozen=True)
class MLP(_TypeCheckedDataclass):
    """Describes an MLP by the linear layers that read its input and compute its output.

    Args:
        at: path of the module. Its first tensor argument is the input. ``*`` matches several modules (experts).
        up: linear layers that read the input (gate and up). Those that end in ``?`` are optional.
        down: the linear layer at the exit.
        fused: number of blocks fused in each layer of ``up`` (2 for a fused gate and up). None derives it from sizes.
        norm: a norm over all features between entry and exit.
        shared_exit: output projection of the attention before it, relative to the layer, if the layer adds both
            outputs directly. Both then use one collective.
        optional: whether some layers or models do not have it.
    """

    at: str
    up: str | Sequence[str]
    down: str
    fused: int | None = 1
    norm: str | None = None
    shared_exit: str | None = None
    optional: bool = False


@deprecate_renamed_arguments({"summands": "replicated_terms"})
@dataclass(frozen=True)
class Experts(_TypeCheckedDataclass):
    """Describes a mixture of experts whose weights are stacked into 3-D parameters.

    Each expert is sharded along its features. All tensor inputs of the module enter the tensor-parallel region, and its
    output leaves the region.

    Args:
        at: path of the module.
        up: parameters (experts, width, hidden) or (experts, hidden, width) that read the input, and their biases.
        down: the parameter (experts, hidden, width) at the exit. Any order of the last dims if ``fused`` is not 1.
        replicated_terms: parameters or modules added to the output that are not sharded: a bias (experts, hidden) of
            ``down``, or a module of identity experts.
        fused: number of blocks fused in each parameter of ``up``.
        interleaved: whether fused blocks are interleaved feature by feature.
        dims: parameter -> its dim of ``width``, if the sizes are ambiguous (width equal to hidden).
        optional: whether some layers or models do not have them.
    """

    at: str
    up: str | Sequence[str]
    down: str
    replicated_terms: Sequence[str] = ()
    fused: int = 1
    interleaved: bool = False
    dims: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False


Role = Attention | MLP | Experts


def get_output_layer_path(role: Role) -> str | None:
    """Return the path of the output layer of an attention module or MLP, or None if there are several."""
    if isinstance(role, Experts) or "*" in role.at:
        return None
    return resolve_relative_path(role.at, role.projections.out if isinstance(role, Attention) else role.down)


@deprecate_renamed_arguments({"context": "cross_states", "whole_sequence": "no_sequence_parallel"})
@dataclass(frozen=True)
class LayerStack(_TypeCheckedDataclass):
    """Describes a ModuleList of layers, and the attention modules and MLPs in each layer.

    Args:
        layers: path of the ModuleList, with ``*`` for an index if the model has several stages ("layers.*.blocks").
        blocks: the attention modules, MLPs and experts of one layer.
        final_norm: the norm after the last layer.
        cross_states: (path of a module, name of its argument) of the states that attention modules with
            ``cross_attention`` read. They enter the tensor-parallel region once for all layers. A pipeline passes the
            states of the stack before there.
        no_sequence_parallel: why sequence parallelism does not support this stack, if it supports other stacks.
        optional: whether some models do not have it.
        stages: hints for pipelines.
        sequence: hints for sequence parallelism.
    """

    layers: str
    blocks: Sequence[Role]
    final_norm: str | None = None
    cross_states: tuple[str, str] | None = None
    no_sequence_parallel: str | None = None
    optional: bool = False
    stages: PipelineHints = field(default_factory=PipelineHints)
    sequence: SequenceParallelHints = field(default_factory=SequenceParallelHints)
    reads_context: bool = field(init=False, repr=False, compare=False)
    """Whether an attention module in the stack reads the states of another stack (``cross_states``)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads_context", False)
        super().__post_init__()
        reads = any(isinstance(role, Attention) and role.inputs.cross_attention for role in self.blocks)
        object.__setattr__(self, "reads_context", reads)
        name = self.cross_states[1] if self.cross_states and reads else None
        for role in self.blocks:
            arguments = list(role.inputs.arguments) if isinstance(role, Attention) else []
            if name in arguments or (arguments and isinstance(role, Attention) and role.inputs.cross_attention):
                raise PolicyError(
                    f"AttentionInputs(arguments={arguments}) repeats cross_states of the LayerStack {self.layers!r}, "
                    f"which already passes these hidden states to the attention module {role.at!r}.",
                    remedy="Remove `arguments` from the AttentionInputs of this module.",
                )
