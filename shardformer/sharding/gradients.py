"""How the gradient of each parameter is agreed on, by where it stands in the model, and what sees to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardformer.layers.tensor.block import Block
from shardformer.layers.tensor.parallel_module import ParallelModule
from shardformer.layout.reduction import Reduction, reduction_of
from shardformer.layout.spec import ShardSpec
from shardformer.layout.state import Entry, ShardedState
from shardformer.layout.stream import Place, StreamLayout
from shardformer.mesh.axis import Axis
from shardformer.reduce.buckets import BUCKET_BYTES, Gradient, GradientReducer
from shardformer.sharding.plan import Plan
from shardformer.sharding.regions import OpenBlock, layout_of


def agree_on_gradients(model: nn.Module, plan: Plan, blocks: Sequence[OpenBlock], state: ShardedState) -> None:
    """Fills the table of parameters, and sees to it that every gradient is the one of the plain model.

    One reducer for what is this stage's own, and one for each set of stages that hold something together: these fill
    buckets in one order, whatever each calls the parameters. Communicates when groups are made, on all processes.
    """
    shared: dict[str, tuple[int, ...]] = {} if state.stages is None else state.stages.shared
    places = Places(plan, state.stream)
    specs = specs_in(model)
    for name, param in model.named_parameters():
        spec = specs.get(id(param), ShardSpec(param.shape))
        layout, place = places.of(name)
        reduction = reduction_of(spec, layout, place, state.context.sizes, shared.get(name, ()))
        state.entries.append(Entry(name, param, spec, reduction))
    axes = _Axes(state, list(dict.fromkeys(shared.values())))
    order = {name: at for at, name in enumerate(shared)}
    gradients: dict[tuple[int, ...], list[Gradient]] = {}
    for entry in sorted(state.entries, key=lambda entry: order.get(entry.name, 0)):
        axis = axes.of(entry.reduction)
        if axis.size > 1 or entry.reduction.divisor != 1:
            gradients.setdefault(entry.reduction.stages, []).append(Gradient(entry, axis, state.coords))
    by_param = {id(g.param): g for found in gradients.values() for g in found if not g.entry.spec.is_sharded}
    for module, block in blocks:
        if block.stream.layout.cut_at_stack(block.axis.name) is None:
            _watch_side(module, block, by_param)
    size = state.request.extra.get("bucket_bytes", BUCKET_BYTES)
    state.reducers = [GradientReducer(gradients[stages], size) for stages in sorted(gradients)]


def specs_in(model: nn.Module) -> dict[int, ShardSpec]:
    """The layouts that the layers noted when they cut their parameters, by the identity of the part."""
    return {
        id(module._parameters[name]): spec
        for module in model.modules()
        for name, spec in module.__dict__.get("shard_specs", {}).items()
        if module._parameters.get(name) is not None
    }


class Places:
    """Where each parameter stands: the stream there, and whether inside of a block, between blocks or outside."""

    def __init__(self, plan: Plan, stream: StreamLayout) -> None:
        self._stream = stream
        self._inside: list[str] = []
        self._whole: list[str] = []
        self._biases: set[str] = set()
        for target in plan.targets:
            for block in target.description.blocks or []:
                self._inside.append(_prefix(target.path, block.entry))
                self._biases.add(f"{_prefix(target.path, block.row)}bias")
                if block.gathers_around is not None:
                    self._whole.append(_prefix(target.path, block.gathers_around))
        self._stacks = [
            (prefix, layout_of(stream, stack))
            for stack in plan.stacks
            for prefix in (f"{stack.layers}.", f"{stack.final_norm}." if stack.final_norm else "")
            if prefix
        ]

    def of(self, name: str) -> tuple[StreamLayout, Place]:
        """The stream around a parameter, and its place in it."""
        layout = next((layout for prefix, layout in self._stacks if name.startswith(prefix)), None)
        if name not in self._biases and name.startswith(tuple(self._inside)):
            return layout or self._stream, Place.BLOCK
        if layout is None or name.startswith(tuple(self._whole)):
            return self._stream, Place.OUTSIDE
        return layout, Place.STACK


def _prefix(*path: str) -> str:
    """What the names of all that is in the module at this path begin with."""
    return "".join(f"{part}." for part in path if part)


class _Axes:
    """The ranks that agree on a gradient. All processes make them alike, in one order.

    Args:
        held: the sets of stages that hold a parameter together.
    """

    def __init__(self, state: ShardedState, held: Sequence[tuple[int, ...]]) -> None:
        self._context = state.context
        names = ("data", *state.stream.partial_over(Place.OUTSIDE))
        outside = tuple(name for name in names if state.context.axis(name).size > 1)
        inside = (*outside, "tensor") if state.context.tensor.size > 1 else outside
        self._of_stages: dict[tuple[tuple[str, ...], tuple[int, ...]], Axis] = {
            (tuple(sorted(names)), stages): state.context.merged(*names, "pipe", only={"pipe": stages})
            for stages in held
            for names in dict.fromkeys((outside, inside))
        }

    def of(self, reduction: Reduction) -> Axis:
        if reduction.stages:
            return self._of_stages[tuple(sorted(reduction.sum_over)), reduction.stages]
        return self._context.merged(*reduction.sum_over) if reduction.sum_over else Axis("none")


@dataclass(eq=False)
class _Side:
    """Before a module's forward: its gradients are summands between a block's entry and exit, and whole behind it."""

    block: Block
    gradients: list[Gradient]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for gradient in self.gradients:
            alike = 1 if self.block.is_open else self.block.axis.size
            gradient.divisor = gradient.entry.reduction.divisor * alike


def _watch_side(at: nn.Module, block: Block, by_param: dict[int, Gradient]) -> None:
    """ALBERT's attention holds its own norm behind the exit, T5's none: which side a module is on shows when it runs.

    Where the stack cuts the stream it makes no difference: behind the exit a rank sees its part of it.
    """
    for module in at.modules():
        params: list[Tensor] = list(module.parameters(recurse=False))
        mine = [by_param[id(p)] for p in params if id(p) in by_param]
        if mine and not isinstance(module, ParallelModule):
            module.register_forward_pre_hook(_Side(block, mine))
