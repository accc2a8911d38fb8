"""Context parallelism of one model: what it must be, how its ranks are laid out, and what is changed in it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shardformer.context_parallel import attention
from shardformer.context_parallel.model_hooks import FullSequenceHook, ModelInputHook, StackHook, pass_through
from shardformer.context_parallel.sequence_layout import ContextParallelState, Dims
from shardformer.errors import ConfigError
from shardformer.kernels.attention_registration import attention_classes, attention_configs, is_on_interface
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.module_paths import find_module
from shardformer.pipeline.layer_sequence import StackDescription
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.parallel_module import ParallelModule

RING, GROUP = "ring", "ulysses"
"""The views of the sequence axis."""


@dataclass(frozen=True)
class RingSizes:
    """How the ranks of the sequence axis are laid out.

    Args:
        ring: between whom keys and values travel.
        group: who exchange heads for positions.
        gathers: whether keys are gathered.
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


def check_context(
    model: nn.Module,
    stacks: Sequence[StackDescription],
    context: ParallelContext,
    way: str,
    notes: Sequence[str] = (),
) -> None:
    """Raises ConfigError for a model whose sequence cannot be cut over ranks. Changes nothing.

    Args:
        notes: what its policy says of the stacks.
    """
    if not stacks:
        raise ConfigError(
            f"sequence={context.sequence.size} for {type(model).__name__}, whose policy names no stack of layers"
            + (f". {' '.join(notes).removesuffix('.')}" if notes else ""),
            rule="The sequence is cut from the first layer of a stack to its last",
            remedy="Write the policy as roles (RolePolicy with a Stack), or leave the sequence axis out",
        )
    if why := attention_not_on_interface(model):
        if is_explicit(context, way):
            raise ConfigError(
                f"sequence={context.sequence.size} for {type(model).__name__}, which {why}",
                rule="A ring, Ulysses or gathered keys are put in through transformers' AttentionInterface",
                remedy="Leave context_parallel at 'auto', which computes such an attention whole on every rank, or the "
                "sequence axis out: enable_sequence_parallelism cuts the sequence between the blocks of tensor "
                "parallelism",
            )
        return
    choose_ring_sizes(model, context, way)


def attention_not_on_interface(model: nn.Module) -> str | None:
    """Why no other attention can be put in the place of a model's own; None where it can."""
    classes = attention_classes(model)
    own = sorted(cls.__name__ for cls, source in classes.items() if not is_on_interface(source))
    if own:
        return f"computes attention by itself in {', '.join(own)}"
    return None if classes else "has no attention that is dispatched"


def is_explicit(context: ParallelContext, way: str) -> bool:
    """Whether somebody asks for a way of attending to other ranks' positions, and takes no other."""
    return way != "auto" or (RING in context.sizes and GROUP in context.sizes)


def choose_ring_sizes(model: nn.Module, context: ParallelContext, way: str) -> RingSizes:
    """The ring and the groups in it. Raises ConfigError where the way that was asked for does not fit.

    "auto" takes what sends the least by the formulas of ring attention and of Ulysses, with Ulysses inside of a host.
    """
    size, view = context.sequence.size, context.sizes
    if RING in view and GROUP in view:
        sizes = RingSizes(view[RING], view[GROUP], way == "gather")
        if (way == "ring" and sizes.group > 1) or (way in ("ulysses", "gather") and sizes.ring > 1 < sizes.group):
            raise ConfigError(
                f"context_parallel={way!r} on a sequence axis of {sizes.ring} x {sizes.group}",
                rule="An axis of two numbers is a ring of groups: keys travel in the ring, heads in the groups",
                remedy="Leave context_parallel at 'auto', or give the axis one number",
            )
        return sizes
    if way == "ulysses":
        return RingSizes(1, size)
    if way in ("ring", "gather"):
        return RingSizes(size, 1, way == "gather")
    return min(_possible(model, context), key=lambda found: found[0])[1]


def _possible(model: nn.Module, context: ParallelContext) -> Iterator[tuple[float, RingSizes]]:
    size, queries, keys = context.sequence.size, *_head_counts(model)
    queries, keys = max(queries // context.tensor.size, 1), max(keys // context.tensor.size, 1)
    for group in range(1, size + 1):
        if size % group or group > queries or (group > 1 and not _is_inside_host(context, group)):
            continue
        ring = size // group
        mine = max(keys / group, 1)
        sent = 4.5 * mine * (ring - 1) / ring
        sent += 4 * (queries + max(keys, group)) / ring * (group - 1) / group**2
        yield sent, RingSizes(ring, group)


def _head_counts(model: nn.Module) -> tuple[int, int]:
    """Of the attention, by the config: query heads and key heads; of one that says others for each layer, one."""
    config = getattr(model, "config", None)
    inner = getattr(config, "get_text_config", lambda: config)()
    for name in ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads"):
        if isinstance(queries := _said_of_all(inner, name), int):
            keys = _said_of_all(inner, "num_key_value_heads")
            return queries, keys if isinstance(keys, int) else queries
    return 1, 1


def _said_of_all(config: Any, name: str) -> Any:
    """A field of a config; None where it has none, or says it for each layer (transformers raises a RuntimeError)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _is_inside_host(context: ParallelContext, group: int) -> bool:
    """Whether so many neighbours on the axis are on one host, as far as is known."""
    lines = context.grid.rank_groups("sequence")
    return not any(
        context.grid.crosses_hosts(line[i : i + group]) for line in lines for i in range(0, len(line), group)
    )


@dataclass(frozen=True)
class ContextFindings:
    """What a proof learnt of a model.

    Args:
        dims: of the arguments of layers, and of what is given the whole sequence.
        gathers: (path of a stack's layers, path of a module in each of them) of what is given the whole sequence.
        is_whole: whether the model's attentions are among these, and stay as they are.
        reads_between: whether the model reads or writes positions of the states between its layers.
        unproven: the inputs with which the sequence cannot be cut, and why.
    """

    dims: Dims = field(default_factory=dict)
    gathers: Sequence[tuple[str, str]] = ()
    is_whole: bool = False
    reads_between: bool = False
    unproven: Mapping[str, str] = field(default_factory=dict)


def install_context_attention(
    model: nn.Module, state: ShardingMetadata, way: str, learned: ContextFindings, *, draws: bool
) -> None:
    """Puts in what attends to other ranks' positions, and stands around what is given all of them.

    Before the regions of tensor parallelism are opened, inside of whose edges it is. Communicates when groups are made.
    """
    context = state.context
    sizes = choose_ring_sizes(model, context, way)
    has_view = RING in context.axes and GROUP in context.axes
    view = context if has_view else context.reshape_axis("sequence", **{RING: sizes.ring, GROUP: sizes.group})
    state.context_run = run = ContextParallelState(
        context.sequence, view.axis(RING), view.axis(GROUP), sizes.gathers, learned.is_whole, dims=dict(learned.dims)
    )
    classes = () if learned.is_whole else tuple(attention_classes(model))
    if not learned.is_whole:
        _put_in(model, run, classes)
    ModelInputHook(run, model, draws=draws)
    for path, name in learned.gathers:
        for layer in model.get_submodule(path).children():
            mixing = find_module(layer, name)
            if mixing is not None and not any(type(inner) in classes for inner in mixing.modules()):
                state.region_hooks.append(FullSequenceHook(run, (path, name), mixing, draws=draws))
    how = "attention is computed whole on every rank" if learned.is_whole else sizes
    state.notes.append(f"Context parallelism: {how}.")
    if learned.gathers:
        named = ", ".join(f"{layers}.*.{name}" for layers, name in learned.gathers)
        what = "" if learned.is_whole else " without attention"
        state.notes.append(f"All positions are computed on every rank of what mixes them{what}: {named}.")


def _put_in(model: nn.Module, run: ContextParallelState, classes: tuple[type, ...]) -> None:
    attention.register_context_attention()
    for config in attention_configs(model):
        config._attn_implementation = attention.NAME
    for module in model.modules():
        if type(module) in classes:
            module.__dict__[attention.RUN] = run
        attention.pass_relative_bias(module, run)


def install_context_hooks(
    model: nn.Module,
    stacks: Sequence[StackDescription],
    state: ShardingMetadata,
    learned: ContextFindings,
    *,
    draws: bool,
) -> None:
    """Cuts the sequence in the layers of a model, whose other changes are done. Communicates nothing."""
    run, inside = state.context_run, set[int]()
    for stack in stacks:
        if stack.whole_sequence:
            state.notes.append(f"The sequence stays whole in {stack.layers}: {stack.whole_sequence}.")
            continue
        layers = [layer for layer in model.get_submodule(stack.layers)._modules.values() if layer is not None]
        norm = model.get_submodule(stack.final_norm) if stack.final_norm else None
        last = [*(layers if learned.reads_between else ()), norm or layers[-1]]
        state.region_hooks.append(StackHook(run, stack.layers, layers, last, draws=draws))
        inside |= {id(m) for layer in (*layers, *([norm] if norm is not None else [])) for m in layer.modules()}
    for module in model.modules():
        if isinstance(module, ParallelModule) and id(module) not in inside:
            pass_through(module)


def warn_unsharded_attention(model: nn.Module, context: ParallelContext) -> None:
    """Says on the first rank that a model's attention is not shared out."""
    if context.rank == 0:
        warnings.warn(
            f"The attention of {type(model).__name__} cannot read other ranks' positions, so each of the "
            f"{context.sequence.size} ranks of the sequence axis computes it for all positions: time and memory shrink "
            "with the ranks in the rest of the model alone. shardformer.describe_sharding(model) says more.",
            stacklevel=5,
        )


def plan_for_context(plan: ShardingPlan, learned: ContextFindings, *, has_stream: bool) -> ShardingPlan:
    """The plan for a model whose attentions are given all positions: none of them exits with what is given some.

    Args:
        has_stream: whether the sequence is cut over the tensor axis, too. Raises ConfigError then.
    """
    if not learned.is_whole:
        return plan
    if has_stream:
        raise ConfigError(
            f"enable_sequence_parallelism beside the sequence axis for {type(plan.model).__name__}, whose attention is "
            "computed whole on every rank",
            rule="Its attentions are given all positions of the sequence axis, and would leave with those of the "
            "tensor axis",
            remedy="Leave enable_sequence_parallelism off, or the sequence axis out",
        )
    return replace(plan, blocks=[(path, replace(block, shared_exit=None)) for path, block in plan.blocks])
