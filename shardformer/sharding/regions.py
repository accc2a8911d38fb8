"""Opens the tensor-parallel regions of a model whose layers are replaced: its streams and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, PolicyError
from shardformer.layers.context.sequence_cut import of_positions
from shardformer.layers.grid.block import GridBlock
from shardformer.layers.grid.linear import OnGrid
from shardformer.layers.grid.stream import GridStream
from shardformer.layers.random_stream import agree_on_draws
from shardformer.layers.tensor.arguments import change_argument, enclose, of_local_heads
from shardformer.layers.tensor.block import Block
from shardformer.layers.tensor.edges import enter
from shardformer.layers.tensor.modes import MODES, ParallelLayers
from shardformer.layers.tensor.stream import Stream
from shardformer.layout.state import ShardedState
from shardformer.layout.stream import Begin, StreamLayout
from shardformer.mesh.axis import Axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.pipeline.chain import StackDescription
from shardformer.policies.describe import BlockArguments, BlockDescription
from shardformer.policies.paths import configs_in
from shardformer.sharding.plan import Plan

READ_LIBRARIES = ("torch", "transformers", "timm", "shardformer")
"""Where dropout is a module, a rate called ``drop_prob`` or a field of the config."""

OpenBlock = tuple[nn.Module, Block]
"""The module at the entry of a block, and the block."""


def open_regions(
    model: nn.Module, plan: Plan, state: ShardedState, config: ShardConfig, grid: TensorGrid | None = None
) -> list[OpenBlock]:
    """Registers the hooks of every stack and block, after all other changes: they stand on modules that stay."""
    axis, random = state.context.tensor, uses_dropout(model)
    classes = MODES[config.tensor_parallel_mode]
    _check_stream(plan, state.stream)
    streams: dict[str, Stream] = {}
    for stack in plan.stacks:
        layout = stack.layout_in(state.stream)
        if stack.whole_sequence and layout != state.stream:
            state.notes.append(f"The sequence stays whole in {stack.layers}: {stack.whole_sequence}.")
        stream = (
            Stream(layout, axis, overlap=config.enable_sequence_overlap, random=random)
            if grid is None
            else GridStream(layout, grid, random=random)
        )
        streams[f"{stack.layers}."] = stream
        if grid is not None and stack.final_norm and state.stages is not None:
            norm: Any = model.get_submodule(stack.final_norm)
            if state.stages.placeholders.has_any(norm):  # of another stage, and over all features
                norm.forward = _handed_on
        _open_stack(model, stack, stream, axis, random)
    if any(stream.layout.cut_at_stack(axis.name) for stream in streams.values()):
        for module in model.modules():
            if isinstance(module, classes.embedding):
                module.__dict__["sums_later"] = True
    alone = Stream(StreamLayout(), axis)
    arounds: list[Any] = []
    for path in (*plan.gathered, *plan.apart):
        of, module = _stream_at(path, streams, alone), model.get_submodule(path)
        arounds.append((of.register_whole if path in plan.gathered else of.register_apart)(module, random))
    for path, name in plan.beside:
        of, module = _stream_at(f"{path}.", streams, alone), model.get_submodule(path)
        module.register_forward_pre_hook(of.recall_before, with_kwargs=True)
        change_argument(module, name, of.cut_beside if _is_layer(path, plan) else of.join_beside)
    without_stream = tuple(f"{path}." for path in (*plan.gathered, *plan.apart))
    blocks: list[OpenBlock] = []
    for path, description in plan.blocks:
        stream, of_block = _stream_at(f"{path}.", streams, alone), classes
        if stream is alone:
            of_block = MODES["1d"]
        elif description.gathers_around is not None:
            arounds.append(stream.register_whole(model.get_submodule(description.gathers_around), random))
            stream = Stream(StreamLayout(), stream.axis)
        elif f"{description.entry}.".startswith(without_stream):
            stream = Stream(StreamLayout(), stream.axis)
        opened = _open_block(model, description, of_block, stream, random, axis)
        if opened is not None:
            blocks.append(opened)
    # what is entered last is left first
    outer = [around for around in arounds if around is not None] + list(streams.values())
    state.edges[:] = [*(block for _, block in blocks), *state.edges, *outer]
    return blocks


def _is_layer(path: str, plan: Plan) -> bool:
    return path.rpartition(".")[0] in {stack.layers for stack in plan.stacks}


def _handed_on(x: Tensor) -> Tensor:
    return x


def _stream_at(path: str, streams: Mapping[str, Stream], alone: Stream) -> Stream:
    return next((stream for prefix, stream in streams.items() if path.startswith(prefix)), alone)


def _check_stream(plan: Plan, stream: StreamLayout) -> None:
    """Raises ConfigError where a stack would cut the stream, and a layer of it needs more than its own part."""
    cut = {stack.layers for stack in plan.stacks if any(c.begin is Begin.STACK for c in stack.layout_in(stream).cuts)}
    for _, block in plan.blocks:
        if block.entry.rpartition(".")[0] in cut and block.gathers_around is None:
            raise ConfigError(
                f"Sequence parallelism in {block.entry}, whose layers are blocks themselves",
                rule="The sequence is cut from the first layer to the last: residuals are added inside of layers",
                remedy="Leave enable_sequence_parallelism off, or name in Stack(layers=...) modules that add it",
            )


def _open_stack(model: nn.Module, stack: StackDescription, stream: Stream, axis: Axis, random: bool) -> None:
    """Another stack's states enter once for all layers; the stream is cut from the first layer to the last.

    Where something reads it between two layers, each layer is a stack of its own; what none reads is not gathered.
    """
    if stack.context is not None and stack.reads_context:
        path, name = stack.context
        change_argument(model.get_submodule(path), name, partial(of_positions, partial(enter, axis=axis)))
    layers = model.get_submodule(stack.layers)
    children = [layer for layer in layers._modules.values() if layer is not None]  # one may be there several times
    ends = [*children, *([model.get_submodule(stack.final_norm)] if stack.final_norm else [])]
    is_repeated = len(set(ends)) < len(ends)  # then the first layer is no beginning, or the last no end
    if stream.layout.cuts_stacks and (is_repeated or stack.sequence.between):
        for module in dict.fromkeys(ends):
            stream.register(module, module)
    else:
        stream.register(ends[0], ends[-1])
    alike = stream.shares_samples
    if random and alike is not None:
        for module in layers.modules():  # each rank has a part of every sample: all drop the same samples
            if type(module).__name__.endswith("DropPath"):  # in timm, and in each of transformers' families with one
                agree_on_draws(alike, module)


def _open_block(
    model: nn.Module,
    description: BlockDescription,
    classes: ParallelLayers,
    stream: Stream,
    random: bool,
    axis: Axis,
) -> OpenBlock | None:
    """Opens one block; None where it needs no hooks of its own, or stands in two layers and is open already.

    Args:
        axis: of the ranks that are given the same.
    """
    row = model.get_submodule(description.row)
    if isinstance(row, classes.row) and getattr(row, "block", None) is not None:
        return None
    if description.summands is not None:
        enclose(row, stream, description.summands)
        return None
    arguments = description.arguments or BlockArguments("")
    brings = model.get_submodule(arguments.at)
    for name in arguments.entering:
        change_argument(brings, name, partial(enter, axis=axis))
    for name, dim in arguments.by_head.items():
        change_argument(brings, name, partial(of_local_heads, dim=dim, bounds=arguments.bounds, axis=axis))
    block = (GridBlock if issubclass(classes.row, OnGrid) else Block)(stream, random, arguments.width)
    for name in [*description.columns, *description.others]:
        column = _expected(model, name, classes.column, "columns")
        column.block = block
        if name in description.columns:
            block.columns.append(column)
    _expected(model, description.row, classes.row, "row").block = block
    if description.exits_with is not None:
        other = _expected(model, description.exits_with, classes.row, "row")
        other.exits_with = (row,)
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


def uses_dropout(model: nn.Module) -> bool:
    """Whether the model may draw random numbers when it trains.

    Of transformers' own classes the dropout modules and the config tell; any other class may call a function for it.
    """
    for module in model.modules():
        if type(module).__module__.partition(".")[0] not in READ_LIBRARIES or getattr(module, "drop_prob", None):
            return True
        if isinstance(module, _DropoutNd) and module.p > 0:
            return True
    fields = [item for config in configs_in(model) for item in vars(config).items()]
    return any("drop" in name and isinstance(v, float) and v > 0 for name, v in fields)
