"""Opens the tensor-parallel blocks of a model whose layers were replaced, and installs the gradient reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.context_parallel.sequence_sharded_tensor import map_local_positions
from shardformer.errors import ConfigError, PolicyError
from shardformer.gradients.buckets import GradientSlot
from shardformer.gradients.reducer import BUCKET_BYTES, GradientReducer
from shardformer.layout.activation_layout import ActivationLayout, ModelRegion, ShardedFrom
from shardformer.layout.shard_spec import ShardSpec
from shardformer.layout.sharding_metadata import (
    ParamEntry,
    Reduction,
    ShardingMetadata,
    reduction_of,
    sharded_parameters,
)
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.pipeline.layer_sequence import StackDescription
from shardformer.policies.module_descriptions import BlockArguments, BlockDescription
from shardformer.random_state import uses_dropout
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.block import TensorParallelBlock, change_argument, select_local_heads, wrap_as_block
from shardformer.tensor_parallel.grid.layers import LAYERS_BY_MODE, GridModule, ModeLayers
from shardformer.tensor_parallel.grid.region import GridStackActivations, GridTensorParallelBlock
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.tensor_parallel.region import enter_region, same_random_in
from shardformer.tensor_parallel.sequence_parallel import StackActivations

InstalledBlock = tuple[nn.Module, TensorParallelBlock]
"""The module at the entry of a block, and the block."""


def install_regions(
    model: nn.Module, plan: ShardingPlan, state: ShardingMetadata, config: ShardConfig, grid: TensorGrid | None = None
) -> list[InstalledBlock]:
    """Registers the hooks of every stack and block, after all other changes: they stand on modules that stay."""
    axis, random = state.context.tensor, uses_dropout(model)
    classes = LAYERS_BY_MODE[config.tensor_parallel_mode]
    _check_stream(plan, state.activations)
    streams: dict[str, StackActivations] = {}
    for stack in plan.stacks:
        layout = stack.layout_in(state.activations)
        if stack.whole_sequence and layout != state.activations:
            state.notes.append(f"The sequence stays whole in {stack.layers}: {stack.whole_sequence}.")
        stream = (
            StackActivations(layout, axis, overlap=config.enable_sequence_overlap, random=random)
            if grid is None
            else GridStackActivations(layout, grid, random=random)
        )
        streams[f"{stack.layers}."] = stream
        if grid is not None and stack.final_norm and state.stages is not None:
            norm: Any = model.get_submodule(stack.final_norm)
            if state.stages.placeholders.has_any(norm):  # of another stage, and over all features
                norm.forward = _handed_on
        _open_stack(model, stack, stream, axis, random)
    if any(stream.layout.shard_at_stack(axis.name) for stream in streams.values()):
        for module in model.modules():
            if isinstance(module, classes.embedding):
                module.__dict__["sums_later"] = True
    alone = StackActivations(ActivationLayout(), axis)
    arounds: list[Any] = []
    for path in (*plan.full_sequence_modules, *plan.token_free_modules):
        of, module = _stream_at(path, streams, alone), model.get_submodule(path)
        arounds.append(
            (of.register_full_sequence if path in plan.full_sequence_modules else of.register_token_free)(
                module, random
            )
        )
    for path, name in plan.per_token_args:
        of, module = _stream_at(f"{path}.", streams, alone), model.get_submodule(path)
        module.register_forward_pre_hook(of.recall_before, with_kwargs=True)
        change_argument(module, name, of.shard_argument if _is_layer(path, plan) else of.gather_argument)
    without_stream = tuple(f"{path}." for path in (*plan.full_sequence_modules, *plan.token_free_modules))
    blocks: list[InstalledBlock] = []
    for path, description in plan.blocks:
        stream, of_block = _stream_at(f"{path}.", streams, alone), classes
        if stream is alone:
            of_block = LAYERS_BY_MODE["1d"]
        elif description.gather_module is not None:
            arounds.append(stream.register_full_sequence(model.get_submodule(description.gather_module), random))
            stream = StackActivations(ActivationLayout(), stream.axis)
        elif f"{description.entry}.".startswith(without_stream):
            stream = StackActivations(ActivationLayout(), stream.axis)
        opened = _open_block(model, description, of_block, stream, random, axis)
        if opened is not None:
            blocks.append(opened)
    # what is entered last is left first
    outer = [around for around in arounds if around is not None] + list(streams.values())
    state.region_hooks[:] = [*(block for _, block in blocks), *state.region_hooks, *outer]
    return blocks


def _is_layer(path: str, plan: ShardingPlan) -> bool:
    return path.rpartition(".")[0] in {stack.layers for stack in plan.stacks}


def _handed_on(x: Tensor) -> Tensor:
    return x


def _stream_at(path: str, streams: Mapping[str, StackActivations], alone: StackActivations) -> StackActivations:
    return next((stream for prefix, stream in streams.items() if path.startswith(prefix)), alone)


def _check_stream(plan: ShardingPlan, stream: ActivationLayout) -> None:
    """Raises ConfigError where a stack would cut the stream, and a layer of it needs more than its own part."""
    cut = {
        stack.layers
        for stack in plan.stacks
        if any(c.begin is ShardedFrom.STACK for c in stack.layout_in(stream).shards)
    }
    for _, block in plan.blocks:
        if block.entry.rpartition(".")[0] in cut and block.gather_module is None:
            raise ConfigError(
                f"Sequence parallelism in {block.entry}, whose layers are blocks themselves",
                rule="The sequence is cut from the first layer to the last: residuals are added inside of layers",
                remedy="Leave enable_sequence_parallelism off, or name in LayerStack(layers=...) modules that add it",
            )


def _open_stack(model: nn.Module, stack: StackDescription, stream: StackActivations, axis: Axis, random: bool) -> None:
    """Another stack's states enter once for all layers; the stream is cut from the first layer to the last.

    Where something reads it between two layers, each layer is a stack of its own; what none reads is not gathered.
    """
    if stack.context is not None and stack.reads_context:
        path, name = stack.context
        change_argument(model.get_submodule(path), name, partial(map_local_positions, partial(enter_region, axis=axis)))
    layers = model.get_submodule(stack.layers)
    children = [layer for layer in layers._modules.values() if layer is not None]  # one may be there several times
    ends = [*children, *([model.get_submodule(stack.final_norm)] if stack.final_norm else [])]
    is_repeated = len(set(ends)) < len(ends)  # then the first layer is no beginning, or the last no end
    if stream.layout.shards_stacks and (is_repeated or stack.sequence.between):
        for module in dict.fromkeys(ends):
            stream.register(module, module)
    else:
        stream.register(ends[0], ends[-1])
    alike = stream.shares_samples
    if random and alike is not None:
        for module in layers.modules():  # each rank has a part of every sample: all drop the same samples
            if type(module).__name__.endswith("DropPath"):  # in timm, and in each of transformers' families with one
                same_random_in(alike, module)


def _open_block(
    model: nn.Module,
    description: BlockDescription,
    classes: ModeLayers,
    stream: StackActivations,
    random: bool,
    axis: Axis,
) -> InstalledBlock | None:
    """Opens one block; None where it needs no hooks of its own, or stands in two layers and is open already.

    Args:
        axis: of the ranks that are given the same.
    """
    row = model.get_submodule(description.row)
    if isinstance(row, classes.row) and getattr(row, "block", None) is not None:
        return None
    if description.replicated_terms is not None:
        wrap_as_block(row, stream, description.replicated_terms)
        return None
    arguments = description.arguments or BlockArguments("")
    brings = model.get_submodule(arguments.at)
    for name in arguments.region_inputs:
        change_argument(brings, name, partial(enter_region, axis=axis))
    for name, dim in arguments.head_dims.items():
        change_argument(brings, name, partial(select_local_heads, dim=dim, bounds=arguments.bounds, axis=axis))
    block = (GridTensorParallelBlock if issubclass(classes.row, GridModule) else TensorParallelBlock)(
        stream, random, arguments.width
    )
    for name in [*description.columns, *description.cross_columns]:
        column = _expected(model, name, classes.column, "columns")
        column.block = block
        if name in description.columns:
            block.columns.append(column)
    _expected(model, description.row, classes.row, "row").block = block
    if description.shared_exit is not None:
        other = _expected(model, description.shared_exit, classes.row, "row")
        other.shared_exit = (row,)
    entry = model.get_submodule(description.entry)
    block.register_entry(entry, holds_exit=description.holds_exit)
    return entry, block


def _expected(model: nn.Module, name: str, kind: type[nn.Module], what: str) -> Any:
    module = model.get_submodule(name)
    if not isinstance(module, kind):
        raise PolicyError(
            f"{name} is a {type(module).__name__}",
            rule=f"The {what} of a block {'are' if what.endswith('s') else 'is'} replaced by {kind.__name__}",
            remedy="Name the same path in sub_module_replacement",
        )
    return module


def install_gradient_reduction(
    model: nn.Module, plan: ShardingPlan, blocks: Sequence[InstalledBlock], state: ShardingMetadata
) -> None:
    """Fills the table of parameters, and sees to it that every gradient is the one of the plain model.

    One reducer for what is this stage's own, and one for each set of stages that hold something together: these fill
    buckets in one order, whatever each calls the parameters. Communicates when groups are made, on all processes.
    """
    shared: dict[str, tuple[int, ...]] = {} if state.stages is None else state.stages.shared
    places = ParameterRegions(plan, state.activations)
    specs = {id(param): spec for _, param, spec in sharded_parameters(model)}
    for name, param in model.named_parameters():
        spec = specs.get(id(param), ShardSpec(param.shape))
        layout, place = places.of(name)
        reduction = reduction_of(spec, layout, place, state.context.sizes, shared.get(name, ()))
        state.entries.append(ParamEntry(name, param, spec, reduction))
    axis_of = _axes(state, list(dict.fromkeys(shared.values())))
    order = {name: at for at, name in enumerate(shared)}
    gradients: dict[tuple[int, ...], list[GradientSlot]] = {}
    for entry in sorted(state.entries, key=lambda entry: order.get(entry.name, 0)):
        axis = axis_of(entry.reduction)
        if axis.size > 1 or entry.reduction.divisor != 1:
            gradients.setdefault(entry.reduction.stages, []).append(GradientSlot(entry, axis, state.coords))
    by_param = {id(g.param): g for found in gradients.values() for g in found if not g.entry.spec.is_sharded}
    for module, block in blocks:
        if block.stream.layout.shard_at_stack(block.axis.name) is None:
            _watch_side(module, block, by_param)
    size = state.request.extra.get("bucket_bytes", BUCKET_BYTES)
    state.reducers = [
        GradientReducer(gradients[stages], size, watch=None if stages else state.monitor)  # stages hold other weights
        for stages in sorted(gradients)
    ]


class ParameterRegions:
    """Where each parameter stands: the stream there, and whether inside of a block, between blocks or outside."""

    def __init__(self, plan: ShardingPlan, stream: ActivationLayout) -> None:
        self._stream, blocks = stream, [block for _, block in plan.blocks]
        self._inside = tuple(_prefix(block.entry) for block in blocks)
        # of a block whose module is a block by itself, each rank adds a part of the bias
        self._biases = {f"{_prefix(block.row)}bias" for block in blocks if block.replicated_terms is None}
        whole = [
            *plan.full_sequence_modules,
            *plan.token_free_modules,
            *(b.gather_module for b in blocks if b.gather_module is not None),
        ]
        self._whole = tuple(map(_prefix, whole))
        self._stacks = [
            (prefix, stack.layout_in(stream))
            for stack in plan.stacks
            for prefix in map(_prefix, (stack.layers, stack.final_norm or ""))
            if prefix
        ]

    def of(self, name: str) -> tuple[ActivationLayout, ModelRegion]:
        """The stream around a parameter, and its place in it."""
        layout = next((layout for prefix, layout in self._stacks if name.startswith(prefix)), None)
        if name not in self._biases and name.startswith(self._inside):
            return layout or self._stream, ModelRegion.BLOCK
        if layout is None:
            return self._stream, ModelRegion.OUTSIDE
        return layout, ModelRegion.GATHERED if name.startswith(self._whole) else ModelRegion.STACK


def _prefix(path: str) -> str:
    """What the names of all that is in the module at this path begin with."""
    return f"{path}." if path else ""


def _axes(state: ShardingMetadata, held: Sequence[tuple[int, ...]]) -> Callable[[Reduction], Axis]:
    """The ranks that agree on a gradient, by how it is agreed on. All processes make them alike, in one order.

    Args:
        held: the sets of stages that hold a parameter together.
    """
    context = state.context
    names = ("data", *state.activations.partial_axes(ModelRegion.OUTSIDE))
    outside = tuple(name for name in names if context.axis(name).size > 1)
    block = [name for name in state.activations.block if context.sizes.get(name, 1) > 1]
    choices = [(*outside, *chosen) for count in range(len(block) + 1) for chosen in combinations(block, count)]
    of_stages = {
        (tuple(sorted(names)), stages): context.flatten(*names, "pipe", only={"pipe": stages})
        for stages in held
        for names in choices
    }
    for names in choices:
        context.flatten(*names or ("data",))

    def axis_of(reduction: Reduction) -> Axis:
        if reduction.stages:
            return of_stages[tuple(sorted(reduction.sum_over)), reduction.stages]
        return context.flatten(*reduction.sum_over) if reduction.sum_over else Axis("none")

    return axis_of


@dataclass(eq=False)
class _RegionSideHook:
    """Before a module's forward: its gradients are summands between a block's entry and exit, and whole behind it."""

    block: TensorParallelBlock
    gradients: list[GradientSlot]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for gradient in self.gradients:
            alike = 1 if self.block.is_open else self.block.axis.size
            gradient.divisor = gradient.entry.reduction.divisor * alike


def _watch_side(at: nn.Module, block: TensorParallelBlock, by_param: dict[int, GradientSlot]) -> None:
    """ALBERT's attention holds its own norm behind the exit, T5's none: which side a module is on shows when it runs.

    Where the stack cuts the stream it makes no difference: behind the exit a rank sees its part of it.
    """
    for module in at.modules():
        params: list[Tensor] = list(module.parameters(recurse=False))
        mine = [by_param[id(p)] for p in params if id(p) in by_param]
        if mine and not isinstance(module, ParallelModule):
            module.register_forward_pre_hook(_RegionSideHook(block, mine))
