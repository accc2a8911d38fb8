"""How the gradient of each parameter is agreed on, by where it stands in the model, and what sees to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from shardformer.layers.tensor.block import Block
from shardformer.layers.tensor.parallel_module import ParallelModule
from shardformer.layout.reduction import Reduction, reduction_of
from shardformer.layout.spec import ShardSpec
from shardformer.layout.state import Entry, ShardedState, cut_in
from shardformer.layout.stream import Place, StreamLayout
from shardformer.mesh.axis import Axis
from shardformer.reduce.bucket import Gradient
from shardformer.reduce.buckets import BUCKET_BYTES, GradientReducer
from shardformer.sharding.plan import Plan
from shardformer.sharding.regions import OpenBlock


def agree_on_gradients(model: nn.Module, plan: Plan, blocks: Sequence[OpenBlock], state: ShardedState) -> None:
    """Fills the table of parameters, and sees to it that every gradient is the one of the plain model.

    One reducer for what is this stage's own, and one for each set of stages that hold something together: these fill
    buckets in one order, whatever each calls the parameters. Communicates when groups are made, on all processes.
    """
    shared: dict[str, tuple[int, ...]] = {} if state.stages is None else state.stages.shared
    places = Places(plan, state.stream)
    specs = {id(param): spec for _, param, spec in cut_in(model)}
    for name, param in model.named_parameters():
        spec = specs.get(id(param), ShardSpec(param.shape))
        layout, place = places.of(name)
        reduction = reduction_of(spec, layout, place, state.context.sizes, shared.get(name, ()))
        state.entries.append(Entry(name, param, spec, reduction))
    axis_of = _axes(state, list(dict.fromkeys(shared.values())))
    order = {name: at for at, name in enumerate(shared)}
    gradients: dict[tuple[int, ...], list[Gradient]] = {}
    for entry in sorted(state.entries, key=lambda entry: order.get(entry.name, 0)):
        axis = axis_of(entry.reduction)
        if axis.size > 1 or entry.reduction.divisor != 1:
            gradients.setdefault(entry.reduction.stages, []).append(Gradient(entry, axis, state.coords))
    by_param = {id(g.param): g for found in gradients.values() for g in found if not g.entry.spec.is_sharded}
    for module, block in blocks:
        if block.stream.layout.cut_at_stack(block.axis.name) is None:
            _watch_side(module, block, by_param)
    size = state.request.extra.get("bucket_bytes", BUCKET_BYTES)
    state.reducers = [
        GradientReducer(gradients[stages], size, watch=None if stages else state.watch)  # stages hold other weights
        for stages in sorted(gradients)
    ]


class Places:
    """Where each parameter stands: the stream there, and whether inside of a block, between blocks or outside."""

    def __init__(self, plan: Plan, stream: StreamLayout) -> None:
        self._stream, blocks = stream, [block for _, block in plan.blocks]
        self._inside = tuple(_prefix(block.entry) for block in blocks)
        # of a block whose module is a block by itself, each rank adds a part of the bias
        self._biases = {f"{_prefix(block.row)}bias" for block in blocks if block.summands is None}
        whole = [*plan.gathered, *plan.apart, *(b.gathers_around for b in blocks if b.gathers_around is not None)]
        self._whole = tuple(map(_prefix, whole))
        self._stacks = [
            (prefix, stack.layout_in(stream))
            for stack in plan.stacks
            for prefix in map(_prefix, (stack.layers, stack.final_norm or ""))
            if prefix
        ]

    def of(self, name: str) -> tuple[StreamLayout, Place]:
        """The stream around a parameter, and its place in it."""
        layout = next((layout for prefix, layout in self._stacks if name.startswith(prefix)), None)
        if name not in self._biases and name.startswith(self._inside):
            return layout or self._stream, Place.BLOCK
        if layout is None:
            return self._stream, Place.OUTSIDE
        return layout, Place.GATHERED if name.startswith(self._whole) else Place.STACK


def _prefix(path: str) -> str:
    """What the names of all that is in the module at this path begin with."""
    return f"{path}." if path else ""


def _axes(state: ShardedState, held: Sequence[tuple[int, ...]]) -> Callable[[Reduction], Axis]:
    """The ranks that agree on a gradient, by how it is agreed on. All processes make them alike, in one order.

    Args:
        held: the sets of stages that hold a parameter together.
    """
    context = state.context
    names = ("data", *state.stream.partial_over(Place.OUTSIDE))
    outside = tuple(name for name in names if context.axis(name).size > 1)
    block = [name for name in state.stream.block if context.sizes.get(name, 1) > 1]
    choices = [(*outside, *chosen) for count in range(len(block) + 1) for chosen in combinations(block, count)]
    of_stages = {
        (tuple(sorted(names)), stages): context.merged(*names, "pipe", only={"pipe": stages})
        for stages in held
        for names in choices
    }
    for names in choices:
        context.merged(*names or ("data",))

    def axis_of(reduction: Reduction) -> Axis:
        if reduction.stages:
            return of_stages[tuple(sorted(reduction.sum_over)), reduction.stages]
        return context.merged(*reduction.sum_over) if reduction.sum_over else Axis("none")

    return axis_of


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
