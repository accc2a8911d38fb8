"""ActivationLayout: how the activations between the blocks of a model lie over the grid.

A stream is what flows from layer to layer: (batch, sequence, hidden). Each way of being parallel cuts it in its way:

    1D tensor parallel    nothing is cut: all tensor ranks hold the same
    sequence parallel     sequence over ``tensor``, from the first layer of a stack to its last
    context parallel      sequence over ``sequence``, from the model's inputs on
    2D tensor parallel    batch over ``row`` from the inputs on, hidden over ``column`` in the stack

Plain data: it can be printed, compared between ranks and tested without processes. The layers, the gradients, the
random numbers and what a stage sends are derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod

from shardformer.layout.shard_spec import Coords, Split


class Dim(StrEnum):
    """A dim of the stream."""

    BATCH = "batch"
    SEQUENCE = "sequence"
    HIDDEN = "hidden"

    @property
    def position(self) -> int:
        """Its place in (batch, sequence, hidden)."""
        return list(Dim).index(self)


class IndexOrder(StrEnum):
    """Which indices of the dim a rank has. Of 8 over 2 ranks, rank 0 has

    contiguous  0 1 2 3
    zigzag      0 1 6 7     one piece from the start and one from the end: causal attention costs all ranks the same
    striped     0 2 4 6
    """

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    STRIPED = "striped"


class ShardedFrom(StrEnum):
    """From where on the stream is cut."""

    INPUTS = "inputs"  # of the model
    STACK = "stack"  # from the first layer of a stack to the last one, or the norm behind it


class ModelRegion(StrEnum):
    """Where in a model a module stands."""

    OUTSIDE = "outside"  # before and behind the stacks: embeddings, heads
    STACK = "stack"  # in a stack, between its blocks
    BLOCK = "block"  # between the entry and the exit of a block, where a rank has its heads or features only
    GATHERED = "gathered"  # in a module of a stack that is given whole samples: each rank has its samples only


@dataclass(frozen=True)
class ActivationShard:
    """One dim of the stream, cut over one axis."""

    dim: Dim
    axis: str
    order: IndexOrder = IndexOrder.CONTIGUOUS
    begin: ShardedFrom = ShardedFrom.STACK

    def split(self, length: int, ranks: int) -> Split:
        """Which indices of a dim of ``length`` each rank has.

        >>> ActivationShard(Dim.SEQUENCE, "sequence", IndexOrder.ZIGZAG).split(8, 2).parts
        (((0, 2), (6, 8)), ((2, 4), (4, 6)))
        """
        if self.order is IndexOrder.CONTIGUOUS:
            return Split.even(length, ranks, axes=(self.axis,))
        if self.order is IndexOrder.STRIPED:
            return Split(tuple(tuple((i, i + 1) for i in range(r, length, ranks)) for r in range(ranks)), (self.axis,))
        halves = Split.even(length, 2 * ranks).parts
        return Split(tuple((*halves[r], *halves[2 * ranks - 1 - r]) for r in range(ranks)), (self.axis,))


@dataclass(frozen=True)
class ActivationLayout:
    """How the stream is cut: nowhere, or along these cuts, each over an axis of its own.

    Args:
        block: the axes over which what is inside of blocks is cut: by heads or features, and by samples.
    """

    shards: tuple[ActivationShard, ...] = ()
    block: tuple[str, ...] = ("tensor",)

    def shards_at(self, place: ModelRegion) -> tuple[ActivationShard, ...]:
        """The cuts of what a module at this place reads: a block's entry undoes those that begin at the stack."""
        if not self.shards:
            return ()
        in_stack = {ModelRegion.STACK: list(Dim), ModelRegion.GATHERED: [Dim.BATCH]}.get(place, [])
        return tuple(c for c in self.shards if c.begin is ShardedFrom.INPUTS or c.dim in in_stack)

    @property
    def shards_stacks(self) -> bool:
        """Whether ranks have parts of what flows through a stack that they have whole before and behind it."""
        return any(cut.begin is ShardedFrom.STACK for cut in self.shards)

    def shard_at_stack(self, axis: str) -> ActivationShard | None:
        """What the layers of a stack cut over this axis."""
        return next((c for c in self.shards if c.begin is ShardedFrom.STACK and c.axis == axis), None)

    def partial_axes(self, place: ModelRegion) -> tuple[str, ...]:
        """The axes over whose ranks a whole parameter at this place has summands of its gradient."""
        axes = [cut.axis for cut in self.shards_at(place)]
        return tuple(dict.fromkeys((*axes, *self.block) if place is ModelRegion.BLOCK else axes))

    @cached_property
    def input_axes(self) -> tuple[str, ...]:
        """The axes over which the model's inputs are cut."""
        return tuple(cut.axis for cut in self.shards_at(ModelRegion.OUTSIDE))

    def num_parts(self, sizes: Mapping[str, int]) -> int:
        """Into how many parts the model's inputs are cut. Each rank's loss is the mean of its own part."""
        return prod(map(sizes.__getitem__, self.input_axes))

    def random_stream_index(self, place: ModelRegion, coords: Coords, sizes: Mapping[str, int]) -> int:
        """Which of several independent streams of random numbers a rank draws from at this place.

        0 where all ranks hold the same activations and have to draw alike; other numbers for ranks that hold parts.
        """
        axes = self.partial_axes(place)
        if not any(sizes.get(axis, 1) > 1 for axis in axes):
            return 0
        number = 0
        for axis in axes:
            number = number * sizes.get(axis, 1) + coords.get(axis, 0)
        return number + 1

    def __str__(self) -> str:
        return (
            ", ".join(f"{c.dim} over {c.axis} ({c.order}, from the {c.begin} on)" for c in self.shards) or "nothing cut"
        )


SEQUENCE_PARALLEL = ActivationLayout((ActivationShard(Dim.SEQUENCE, "tensor"),))
"""Between blocks each tensor rank holds consecutive positions of the sequence (Korthikanti et al. 2022)."""

GRID_AXES = ("row", "column", "depth")
"""How the tensor axis is also seen where it is a grid, the last of which counts fastest."""

GRID_LAYOUTS = {
    "2d": ActivationLayout((ActivationShard(Dim.BATCH, "row"), ActivationShard(Dim.HIDDEN, "column")), GRID_AXES),
    "2.5d": ActivationLayout(
        (ActivationShard(Dim.BATCH, "row"), ActivationShard(Dim.BATCH, "depth"), ActivationShard(Dim.HIDDEN, "column")),
        GRID_AXES,
    ),
    "3d": ActivationLayout(
        (ActivationShard(Dim.BATCH, "row"), ActivationShard(Dim.BATCH, "column"), ActivationShard(Dim.HIDDEN, "depth")),
        GRID_AXES,
    ),
}
"""``tensor_parallel_mode`` -> how the stream lies between the blocks.

Xu et al. 2021, Wang et al. 2021 and Bian et al. 2021 describe such grids: see
``shardformer/tensor_parallel/grid/region.py``."""

CONTEXT_PARALLEL = ActivationLayout((ActivationShard(Dim.SEQUENCE, "sequence", IndexOrder.ZIGZAG, ShardedFrom.INPUTS),))
"""Each rank of the sequence axis holds some positions, two chunks of them (Liu et al. 2023, Jacobs et al. 2023)."""
