"""What a table of roles is made of: attentions, MLPs and experts of one layer, and the stack that the layers form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardformer.errors import PolicyError, did_you_mean
from shardformer.module_paths import resolve_path
from shardformer.pipeline.layer_sequence import PipelineHints, SequenceParallelHints
from shardformer.policies.module_descriptions import check_field_types
from shardformer.public_names import renamed_arguments

LocalAttr = str | tuple[str, int]
"""What something counts, and which of its dims does where that has to be said."""
LOCAL_ATTR_KINDS = {
    "attribute": ("heads", "kv_heads", "groups", "width"),
    "parameter": ("heads", "kv_heads", "width", "inside"),
    "norm": ("heads", "kv_heads"),
    "embedding": ("heads",),
    "argument": ("heads",),
}
"""What each of the things that an attention's ``local_attrs`` may name can count."""


@dataclass(frozen=True, kw_only=True)
class AttentionProjections:
    """The linears of an attention. Name those it has: q, k and v, or a fused qkv, or q and a fused kv.

    Args:
        out: the output projection.
        q, k, v, qkv, kv: the projections; fused ones lie behind each other (q, then k, then v).
        interleaved: the fused ones lie by KV head instead: the query heads that read it, its k, its v; then the next.
        partitions: in how many equal parts the heads lie, one after the other, where the forward takes them apart:
            each rank has the same heads of each.
        gates: further projections, with equally many features for each query head.
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

    def __post_init__(self) -> None:
        check_field_types(self)


Q_K_V_O = AttentionProjections(q="q_proj", k="k_proj", v="v_proj", out="o_proj")
Q_K_V_OUT = AttentionProjections(q="q_proj", k="k_proj", v="v_proj", out="out_proj")


@renamed_arguments(
    {
        "from_context": "cross_attention",
        "from_inside": "inner_inputs",
        "give_width": "reads_width",
        "whole_sequence": "full_sequence",
    }
)
@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """What enters an attention, where that is not the first tensor argument of its module alone.

    Args:
        entry: the module whose first tensor argument enters instead: the first of the projections, for an attention
            that adds its residual itself.
        arguments: arguments of the forward, beside the first, that projections read; each enters by itself.
        cross_attention: k and v read another stack's states (cross-attention).
        inner_inputs: those of the projections that read what other modules inside made of the input (a low-rank
            projection and its norm), instead of the input itself.
        reads_width: whether the forward takes the width of the heads from the last dim of what enters.
        full_sequence: whether the module needs the whole sequence outside of the block too (it adds its residual
            itself): sequence parallelism gathers it before the module and cuts it behind.
    """

    entry: str | None = None
    arguments: Sequence[str] = ()
    cross_attention: bool = False
    inner_inputs: Sequence[str] = ()
    reads_width: bool = False
    full_sequence: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)


@renamed_arguments({"counts": "local_attrs"})
@dataclass(frozen=True)
class Attention:
    """An attention of a layer.

    Args:
        at: path of the module; its first tensor argument is what enters, if ``inputs`` says nothing else.
        projections: its linears.
        local_attrs: what its forward reads and has to be this rank's -> what that counts: "heads", "kv_heads", "groups"
            (query heads a KV head) or "width" (heads times head dim). The name is that of

            - an attribute of the module;
            - a parameter or unsaved buffer that it holds itself, of which one dim counts: ("heads", dim) where two dims
              have that size, "inside" for one that counts nothing;
            - a norm between entry and exit over all heads at once (a norm over each head needs no word);
            - an embedding with one column a head (relative position bias);
            - an argument of its forward, with the dim that counts heads, or samples times heads: ("heads", 0) (alibi).
        inputs: what enters.
        num_heads, num_kv_heads: these numbers, or the config's fields that hold them, where not the policy's; a leading
            dot makes a name that of an attribute of the module (".num_heads"), for heads that differ by layer.
        optional: whether some layers or models lack this attention.
    """

    at: str
    projections: AttentionProjections
    local_attrs: Mapping[str, LocalAttr] = field(default_factory=dict)
    inputs: AttentionInputs = AttentionInputs()
    num_heads: int | str | None = None
    num_kv_heads: int | str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in self.local_attrs:
            self.local_attr_kind(name)

    def local_attr_kind(self, name: str, what: str | None = None) -> str:
        """What ``name`` counts. Raises PolicyError where nothing counts that, or not ``what`` it is the name of."""
        said = self.local_attrs[name]
        kind = said if isinstance(said, str) else said[0]
        kinds = (
            LOCAL_ATTR_KINDS[what]
            if what
            else tuple(dict.fromkeys(kind for each in LOCAL_ATTR_KINDS.values() for kind in each))
        )
        if kind not in kinds:
            raise PolicyError(
                f"local_attrs={{{name!r}: {said!r}}} of the attention {self.at!r}",
                rule=f"What {f'an {what}' if what else 'something'} counts is {', '.join(kinds)}",
                remedy=did_you_mean(kind, kinds),
            )
        return kind


@renamed_arguments({"exits_with": "shared_exit"})
@dataclass(frozen=True)
class MLP:
    """An MLP of a layer.

    Args:
        at: path of the module, its first tensor argument is what enters; ``*`` stands for each of several (experts).
        up: the linears that read the input (gate and up), of which those with a ``?`` may be lacking.
        down: the linear at the exit.
        fused: how many blocks lie behind each other in each of ``up`` (2 for a fused gate and up); None: as many as
            the sizes say.
        norm: a norm over all features between entry and exit.
        shared_exit: the output projection of the attention before it, relative to the layer, where the layer adds both
            outputs at once: they leave together, in one collective.
        optional: whether some layers or models lack it.
    """

    at: str
    up: str | Sequence[str]
    down: str
    fused: int | None = 1
    norm: str | None = None
    shared_exit: str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)


@renamed_arguments({"summands": "replicated_terms"})
@dataclass(frozen=True)
class Experts:
    """The experts of a layer whose weights are stacked into parameters with three dims; each expert is cut inside.

    All tensors that the module is given enter, its output leaves.

    Args:
        at: path of the module.
        up: parameters (experts, width, hidden) or (experts, hidden, width) that read the input, and their biases.
        down: the parameter (experts, hidden, width) at the exit; the other way round too where ``fused`` is not one.
        replicated_terms: what is added to the experts' sum and is not cut: a bias (experts, hidden) behind ``down``,
        the module
            that stands for experts that change nothing.
        fused: how many blocks lie behind each other in each of ``up``.
        interleaved: those of ``up`` lie feature by feature instead.
        dims: parameter -> its dim of ``width``, where the sizes do not tell (as many features as the hidden states).
        optional: whether some layers or models lack them.
    """

    at: str
    up: str | Sequence[str]
    down: str
    replicated_terms: Sequence[str] = ()
    fused: int = 1
    interleaved: bool = False
    dims: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)


Role = Attention | MLP | Experts


def exit_path(role: Role) -> str | None:
    """Path of the module at the role's exit in its layer; None where that is no one module."""
    if isinstance(role, Experts) or "*" in role.at:
        return None
    return resolve_path(role.at, role.projections.out if isinstance(role, Attention) else role.down)


@renamed_arguments({"context": "cross_states", "whole_sequence": "no_sequence_parallel"})
@dataclass(frozen=True)
class LayerStack:
    """A stack of layers.

    Args:
        layers: path of the ModuleList, with ``*`` for an index where each stage of a model has one ("layers.*.blocks").
        blocks: the attentions, MLPs and experts of one layer.
        final_norm: the norm behind the last layer.
        cross_states: (path of a module, name of its argument): the states that attentions with ``cross_attention``
            read, which enter there once for all of them; for a pipeline, where the states of the stack before come in.
        no_sequence_parallel: why sequence parallelism cannot cut its sequence, where it does cut those of other stacks.
        optional: whether some models lack it.
        stages: what a pipeline has to know of it.
        sequence: what sequence parallelism has to know of it beside its blocks.
    """

    layers: str
    blocks: Sequence[Role]
    final_norm: str | None = None
    cross_states: tuple[str, str] | None = None
    no_sequence_parallel: str | None = None
    optional: bool = False
    stages: PipelineHints = field(default_factory=PipelineHints)
    sequence: SequenceParallelHints = field(default_factory=SequenceParallelHints)

    def __post_init__(self) -> None:
        check_field_types(self)
        name = self.cross_states[1] if self.cross_states and self.reads_context else None
        for role in self.blocks:
            arguments = role.inputs.arguments if isinstance(role, Attention) else ()
            if name in arguments or (arguments and isinstance(role, Attention) and role.inputs.cross_attention):
                raise PolicyError(
                    f"The states of another stack enter the attention {role.at!r} twice: by the context of the stack "
                    f"{self.layers!r} and by the arguments {list(arguments)}",
                    rule="The gradients of what enters are summed over the ranks once",
                    remedy="Leave out `arguments` where an attention has cross_attention=True, or say them of all",
                )

    @property
    def reads_context(self) -> bool:
        """Whether an attention reads the context as one; else it only tells a pipeline what comes in."""
        return any(isinstance(role, Attention) and role.inputs.cross_attention for role in self.blocks)
