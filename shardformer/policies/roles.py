"""What a table of roles is made of: attentions, MLPs and experts of one layer, and the stack that the layers form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardformer.errors import PolicyError, nearest
from shardformer.policies.paths import relative

CountedDim = str | tuple[str, int]
"""What a dim of a parameter counts, and which dim, where several are of that size."""
COUNTED = {
    "attributes": ("heads", "kv_heads", "groups", "width"),
    "parameters": ("heads", "width", "inside"),
    "norms": ("heads", "kv_heads"),
}


@dataclass(frozen=True)
class Attention:
    """An attention of a layer. Name the projections it has: q, k and v, or a fused qkv, or q and a fused kv.

    Args:
        at: path of the module; its first tensor argument is what enters.
        out: the output projection.
        q, k, v, qkv, kv: the projections; fused ones lie behind each other (q, then k, then v).
        interleaved: the fused ones lie by KV head instead: the query heads that read it, its k, its v; then the next.
        partitions: in how many equal parts the heads lie, one after the other, where the forward takes them apart:
            each rank has the same heads of each.
        gates: further projections, with equally many features for each query head.
        reads_inner: those of the projections that read what other modules inside made of the input (a low-rank
            projection and its norm), instead of the input itself.
        reads_context: k and v read another stack's states (cross-attention).
        attributes: attribute of the module -> what it counts: "heads", "kv_heads", "groups" (query heads a KV head)
            or "width" (heads times head dim). Only those that the forward reads.
        parameters: parameter or unsaved buffer that the module holds itself -> what one of its dims counts: "heads" or
            "width", or ("heads", dim) where two dims have that size; "inside" for one that counts neither.
        inputs: arguments of the module's forward, beside the first, that its projections read; each enters by itself.
        arguments: argument of the module's forward -> which of its dims counts heads, or samples times heads (alibi).
        width_of_input: whether the forward takes the width of the heads from the last dim of what enters.
        norms: norm between entry and exit over all heads at once -> "heads", or "kv_heads" for the one of k. A norm
            over each head needs no word.
        tables: embeddings with one column a head (relative position bias).
        entry: the module whose first tensor argument enters, where that is not the one at ``at``: the first of the
            projections, for an attention that adds its residual itself.
        whole_sequence: whether the module needs the whole sequence outside of the block too (it adds its residual
            itself): sequence parallelism gathers it before the module and cuts it behind.
        num_heads, num_kv_heads: these numbers, or the config's fields that hold them, where not the policy's; a leading
            dot makes a name that of an attribute of the module (".num_heads"), for heads that differ by layer.
        optional: whether some layers or models lack this attention.
    """

    at: str
    out: str
    q: str | None = None
    k: str | None = None
    v: str | None = None
    qkv: str | None = None
    kv: str | None = None
    interleaved: bool = False
    partitions: int = 1
    gates: Sequence[str] = ()
    reads_inner: Sequence[str] = ()
    reads_context: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, CountedDim] = field(default_factory=dict)
    inputs: Sequence[str] = ()
    arguments: Mapping[str, int] = field(default_factory=dict)
    width_of_input: bool = False
    norms: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[str] = ()
    entry: str | None = None
    whole_sequence: bool = False
    num_heads: int | str | None = None
    num_kv_heads: int | str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        _check_counted(self)


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
        exits_with: the output projection of the attention before it, relative to the layer, where the layer adds both
            outputs at once: they leave together, in one collective.
        optional: whether some layers or models lack it.
    """

    at: str
    up: str | Sequence[str]
    down: str
    fused: int | None = 1
    norm: str | None = None
    exits_with: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class Experts:
    """The experts of a layer whose weights are stacked into parameters with three dims; each expert is cut inside.

    All tensors that the module is given enter, its output leaves.

    Args:
        at: path of the module.
        up: parameters (experts, width, hidden) or (experts, hidden, width) that read the input, and their biases.
        down: the parameter (experts, hidden, width) at the exit; the other way round too where ``fused`` is not one.
        summands: what is added to the experts' sum and is not cut: a bias (experts, hidden) behind ``down``, the module
            that stands for experts that change nothing.
        fused: how many blocks lie behind each other in each of ``up``.
        interleaved: those of ``up`` lie feature by feature instead.
        dims: parameter -> its dim of ``width``, where the sizes do not tell (as many features as the hidden states).
        optional: whether some layers or models lack them.
    """

    at: str
    up: str | Sequence[str]
    down: str
    summands: Sequence[str] = ()
    fused: int = 1
    interleaved: bool = False
    dims: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False


def _check_counted(attention: Attention) -> None:
    """Raises PolicyError for an attribute or parameter that is said to count what there is not."""
    for table, kinds in COUNTED.items():
        for name, value in getattr(attention, table).items():
            kind = value if isinstance(value, str) else value[0]
            if kind not in kinds:
                raise PolicyError(
                    f"{table}={{{name!r}: {value!r}}} of the attention {attention.at!r}",
                    rule=f"What {table} count is {', '.join(kinds)}",
                    remedy=nearest(str(kind), kinds),
                )


Role = Attention | MLP | Experts


def exit_of(role: Role) -> str | None:
    """Path of the module at the role's exit in its layer; None where that is no one module."""
    if isinstance(role, Experts) or "*" in role.at:
        return None
    return relative(role.at, role.out if isinstance(role, Attention) else role.down)


@dataclass(frozen=True)
class Stack:
    """A stack of layers.

    Args:
        layers: path of the ModuleList, with ``*`` for an index where each stage of a model has one ("layers.*.blocks").
        blocks: the attentions, MLPs and experts of one layer.
        final_norm: the norm behind the last layer.
        context: (path of a module, name of its argument): the states that ``reads_context`` attentions read, which
            enter there once for all of them; for a pipeline, where the states of the stack before come in.
        whole_sequence: why sequence parallelism cannot cut its sequence, where it does cut those of other stacks.
        optional: whether some models lack it.
        before, after: for a pipeline, what goes with the first layer and with the last, where the model does not
            register the one before the layers and the other behind them.
        returns: for a pipeline, how many things a layer returns; 0 for its hidden states alone.
        from_first: for a pipeline, attributes of the first layer that the first layer of every stage needs too.
        everywhere: for a pipeline, what every layer reads beside its own weights.
    """

    layers: str
    blocks: Sequence[Role]
    final_norm: str | None = None
    context: tuple[str, str] | None = None
    whole_sequence: str | None = None
    optional: bool = False
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    returns: int = 0
    from_first: Sequence[str] = ()
    everywhere: Sequence[str] = ()

    def __post_init__(self) -> None:
        name = self.context[1] if self.context and self.reads_context else None
        for role in self.blocks:
            if isinstance(role, Attention) and (name in role.inputs or (role.reads_context and role.inputs)):
                raise PolicyError(
                    f"The states of another stack enter the attention {role.at!r} twice: by the context of the stack "
                    f"{self.layers!r} and by inputs={list(role.inputs)}",
                    rule="The gradients of what enters are summed over the ranks once",
                    remedy="Leave out `inputs` where an attention has reads_context=True, or say `inputs` of all",
                )

    @property
    def reads_context(self) -> bool:
        """Whether an attention reads the context as one; else it only tells a pipeline what comes in."""
        return any(isinstance(role, Attention) and role.reads_context for role in self.blocks)
