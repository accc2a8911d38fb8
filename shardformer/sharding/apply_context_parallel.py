"""Set up context parallelism: check the model, choose ring and Ulysses sizes, and install hooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from shardformer.context_parallel import attention
from shardformer.context_parallel.model_hooks import FullSequenceHook, ModelInputHook, StackHook, run_on_local_positions
from shardformer.context_parallel.sequence_layout import ContextParallelState, Dims
from shardformer.errors import ConfigError
from shardformer.kernels.attention_registration import find_attention_classes, find_attention_configs
from shardformer.kernels.model_specific_attention import uses_attention_interface
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.module_paths import find_module
from shardformer.pipeline.layer_sequence import StackDescription
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.transformers_compat import get_uniform_field

RING, GROUP = "ring", "ulysses"
"""Names of the two axes into which the sequence axis is split."""


@dataclass(frozen=True)
class RingSizes:
    """The sizes of the ring and Ulysses groups into which context parallelism divides the sequence axis.

    Args:
        ring: number of ranks that exchange keys and values.
        group: number of ranks in a Ulysses group, which exchange attention heads for sequence positions.
        gathers: whether keys and values are all-gathered instead of sent around the ring.
    """

    ring: int
    group: int
    gathers: bool = False

    def __str__(self) -> str:
        if self.gathers:
            return f"keys gathered over {self.ring} ranks"
        parts = [f"ring of {self.ring}"] if self.ring > 1 else []
        parts += [f"Ulysses over {self.group}"] if self.group > 1 else []
        return " x ".join(parts)


def check_context_parallel(
    model: nn.Module,
    stacks: Sequence[StackDescription],
    context: ParallelContext,
    method: str,
    notes: Sequence[str] = (),
) -> None:
    """Raise ConfigError if context parallelism does not support the model.

    Args:
        notes: the policy's notes about the stacks.
    """
    if not stacks:
        raise ConfigError(
            f"sequence={context.sequence.size} needs a stack of layers, but the policy of {type(model).__name__} has "
            "none" + (f". {' '.join(notes).removesuffix('.')}" if notes else ""),
            remedy="Write a RolePolicy with a LayerStack, or remove the sequence axis.",
        )
    if why := explain_unsupported_attention(model):
        if is_explicit_method(context, method):
            raise ConfigError(
                f"context_parallel={method!r} with sequence={context.sequence.size} does not support "
                f"{type(model).__name__}, which {why}.",
                rule="Ring attention, Ulysses and gathered keys use the AttentionInterface of transformers.",
                remedy="To compute this attention in full on every rank, use context_parallel='auto' with one size for "
                "the axis. Or remove the sequence axis and use enable_sequence_parallelism=True.",
            )
        return
    choose_ring_sizes(model, context, method)


def explain_unsupported_attention(model: nn.Module) -> str | None:
    """Return the reason why context parallelism cannot replace the model's attention, or None if it can."""
    classes = find_attention_classes(model)
    own = sorted(cls.__name__ for cls, source in classes.items() if not uses_attention_interface(source))
    if own:
        return f"implements its own attention in {', '.join(own)}"
    return None if classes else "has no attention module that uses the AttentionInterface"


def is_explicit_method(context: ParallelContext, method: str) -> bool:
    """Return whether the config specifies a method of context-parallel attention instead of ``"auto"``."""
    return method != "auto" or (RING in context.sizes and GROUP in context.sizes)


def choose_ring_sizes(model: nn.Module, context: ParallelContext, method: str) -> RingSizes:
    """Choose how many ranks form a ring and how many form a Ulysses group.

    ``"auto"`` minimizes the communicated bytes, by the formulas of ring attention and Ulysses, with Ulysses groups
    within a host. Raises ConfigError if the method does not fit the sizes of the sequence axis.
    """
    size, view = context.sequence.size, context.sizes
    if RING in view and GROUP in view:
        sizes = RingSizes(view[RING], view[GROUP], method == "gather")
        if (method == "ring" and sizes.group > 1) or (method in ("ulysses", "gather") and sizes.ring > 1 < sizes.group):
            raise ConfigError(
                f"context_parallel={method!r} does not fit the sequence axis of size {sizes.ring} x {sizes.group}.",
                rule="Two sizes define a ring of Ulysses groups. Ranks exchange keys along the ring, and heads within "
                "a group.",
                remedy="Use context_parallel='auto', or pass one size for the axis.",
            )
        return sizes
    if method == "ulysses":
        return RingSizes(1, size)
    if method in ("ring", "gather"):
        return RingSizes(size, 1, method == "gather")
    return min(_iterate_candidate_sizes(model, context), key=lambda found: found[0])[1]


def _iterate_candidate_sizes(model: nn.Module, context: ParallelContext) -> Iterator[tuple[float, RingSizes]]:
    size, queries, keys = context.sequence.size, *_get_head_counts(model)
    queries, keys = max(queries // context.tensor.size, 1), max(keys // context.tensor.size, 1)
    for group in range(1, size + 1):
        if size % group or group > queries or (group > 1 and not _is_inside_host(context, group)):
            continue
        ring = size // group
        local_keys = max(keys / group, 1)
        sent = 4.5 * local_keys * (ring - 1) / ring
        sent += 4 * (queries + max(keys, group)) / ring * (group - 1) / group**2
        yield sent, RingSizes(ring, group)


def _get_head_counts(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of query heads and KV heads in the config, or (1, 1) if they differ between layers."""
    config = getattr(model, "config", None)
    inner = getattr(config, "get_text_config", lambda: config)()
    for name in ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads"):
        if isinstance(queries := get_uniform_field(inner, name), int):
            keys = get_uniform_field(inner, "num_key_value_heads")
            return queries, keys if isinstance(keys, int) else queries
    return 1, 1


def _is_inside_host(context: ParallelContext, group: int) -> bool:
    """Return whether each Ulysses group of this size stays on one host, as far as the hosts are known.

    A Ulysses group consists of consecutive ranks of the sequence axis.
    """
    lines = context.grid.rank_groups("sequence")
    return not any(
        context.grid.crosses_hosts(line[i : i + group]) for line in lines for i in range(0, len(line), group)
    )


@dataclass(frozen=True)
class ContextFindings:
    """The results of validating context parallelism on a reduced model.

    Args:
        dims: sequence dimensions of the arguments of layers and full-sequence modules.
        gathers: (path of a stack's layers, path of a module in each layer) of modules that need the full sequence.
        is_whole: whether the full-sequence modules include the attention modules, which then stay unmodified.
        reads_between: whether the model reads or writes positions of the hidden states between two layers.
        unproven: name of an input with which the sequence cannot be sharded -> reason.
    """

    dims: Dims = field(default_factory=dict)
    gathers: Sequence[tuple[str, str]] = ()
    is_whole: bool = False
    reads_between: bool = False
    unproven: Mapping[str, str] = field(default_factory=dict)


def install_context_attention(
    model: nn.Module, state: ShardingMetadata, method: str, findings: ContextFindings, *, uses_random: bool
) -> None:
    """Install context-parallel attention, and hooks that gather the full sequence for modules that need it.

    Communicates to create process groups.
    """
    context = state.context
    sizes = choose_ring_sizes(model, context, method)
    has_view = RING in context.axes and GROUP in context.axes
    view = context if has_view else context.reshape_axis("sequence", **{RING: sizes.ring, GROUP: sizes.group})
    state.context_run = run = ContextParallelState(
        context.sequence, view.axis(RING), view.axis(GROUP), sizes.gathers, findings.is_whole, dims=dict(findings.dims)
    )
    classes = () if findings.is_whole else tuple(find_attention_classes(model))
    if not findings.is_whole:
        _configure_attention(model, run, classes)
    ModelInputHook(run, model, draws=uses_random)
    for path, name in findings.gathers:
        for layer in model.get_submodule(path).children():
            mixing = find_module(layer, name)
            if mixing is not None and not any(type(inner) in classes for inner in mixing.modules()):
                state.region_hooks.append(FullSequenceHook(run, (path, name), mixing, draws=uses_random))
    how = "attention is computed in full on every rank" if findings.is_whole else sizes
    state.notes.append(f"Context parallelism: {how}.")
    if findings.gathers:
        named = ", ".join(f"{layers}.*.{name}" for layers, name in findings.gathers)
        what = "" if findings.is_whole else " (other than attention)"
        state.notes.append(f"Every rank computes all positions of modules that mix positions{what}: {named}.")


def _configure_attention(model: nn.Module, run: ContextParallelState, classes: tuple[type, ...]) -> None:
    attention.register_context_attention()
    for config in find_attention_configs(model):
        config._attn_implementation = attention.NAME
    for module in model.modules():
        if type(module) in classes:
            module.__dict__[attention.RUN] = run
        attention.pass_relative_bias(module, run)


def install_context_hooks(
    model: nn.Module,
    stacks: Sequence[StackDescription],
    state: ShardingMetadata,
    findings: ContextFindings,
    *,
    uses_random: bool,
) -> None:
    """Install the hooks that shard the sequence in the layers of a model.

    Call this after modules were replaced with parallel layers.
    """
    run, inside = state.context_run, set[int]()
    for stack in stacks:
        if stack.whole_sequence:
            state.notes.append(f"The sequence is not sharded in {stack.layers}: {stack.whole_sequence}.")
            continue
        layers = [layer for layer in model.get_submodule(stack.layers)._modules.values() if layer is not None]
        norm = model.get_submodule(stack.final_norm) if stack.final_norm else None
        last = [*(layers if findings.reads_between else ()), norm or layers[-1]]
        state.region_hooks.append(StackHook(run, stack.layers, layers, last, draws=uses_random))
        inside |= {id(m) for layer in (*layers, *([norm] if norm is not None else [])) for m in layer.modules()}
    for module in model.modules():
        if isinstance(module, ParallelModule) and id(module) not in inside:
            run_on_local_positions(module)


def warn_unsharded_attention(model: nn.Module, context: ParallelContext) -> None:
    """Warn on rank 0 that context parallelism computes the attention of this model in full on every rank."""
    if context.rank == 0:
        warnings.warn(
            f"The attention of {type(model).__name__} cannot read positions of other ranks. Each of the "
            f"{context.sequence.size} ranks of the sequence axis therefore computes the attention for all positions, "
            "and saves time and memory only in the other layers. shardformer.describe_sharding(model) shows details.",
            stacklevel=5,
        )


def plan_for_context(plan: ShardingPlan, findings: ContextFindings, *, has_sequence_parallelism: bool) -> ShardingPlan:
    """Return a plan in which no two blocks share a collective, if every rank computes the attention in full.

    Args:
        has_sequence_parallelism: whether sequence parallelism over the tensor axis is also enabled, which raises
            ConfigError for such attention.
    """
    if not findings.is_whole:
        return plan
    if has_sequence_parallelism:
        raise ConfigError(
            f"enable_sequence_parallelism=True with sequence > 1 does not support {type(plan.model).__name__}: every "
            "rank computes its attention in full.",
            remedy="Set enable_sequence_parallelism=False, or remove the sequence axis.",
        )
    return replace(plan, blocks=[(path, replace(block, shared_exit=None)) for path, block in plan.blocks])
