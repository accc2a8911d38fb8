"""Description of how the activations of a model are sharded over the process grid (``ActivationLayout``).

Activations between layers have dims (batch, sequence, hidden). Each kind of parallelism shards them differently:

    1D tensor parallel    not sharded: all tensor ranks have the same activations
    sequence parallel     sequence over ``tensor``, from the first layer of a stack to the last
    context parallel      sequence over ``sequence``, from the model inputs on
    2D tensor parallel    batch over ``row`` and hidden over ``column``, from the first layer of a stack to the last

A layout is plain data: it can be printed, compared between ranks and tested without processes. The parallel layers,
gradient reductions, random states and pipeline messages are derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod

from shardformer.layout.shard_spec import Coords, Split


class Dim(StrEnum):
    """Dimension of an activation tensor: batch, sequence or hidden."""

    BATCH = "batch"
    SEQUENCE = "sequence"
    HIDDEN = "hidden"

    @property
    def position(self) -> int:
        """Index of this dimension in an activation of shape (batch, sequence, hidden)."""
        return list(Dim).index(self)


class IndexOrder(StrEnum):
    """Order in which the elements of a sharded dimension, such as tokens, are assigned to ranks.

    With 8 indices over 2 ranks, rank 0 gets:

    contiguous  0 1 2 3
    zigzag      0 1 6 7     a chunk from each end, which balances causal attention over ranks
    striped     0 2 4 6
    """

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    STRIPED = "striped"


class ShardedFrom(StrEnum):
    """Point in the model at which an activation dimension starts to be sharded."""

    INPUTS = "inputs"  # the inputs of the model
    STACK = "stack"  # the first layer of a stack, until its last layer or the norm that follows


class ModelRegion(StrEnum):
    """Part of a model, such as its layers, in which all activations are sharded in the same way."""

    OUTSIDE = "outside"  # before and after the stacks: embeddings, heads
    STACK = "stack"  # in a stack, between its blocks
    BLOCK = "block"  # inside a tensor-parallel block, where each rank has some heads or features
    GATHERED = "gathered"  # in a module of a stack that reads full sequences of this rank's samples


@dataclass(frozen=True)
class ActivationShard:
    """Sharding of one activation dimension over one axis of the process grid."""

    dim: Dim
    axis: str
    order: IndexOrder = IndexOrder.CONTIGUOUS
    begin: ShardedFrom = ShardedFrom.STACK

    def make_split(self, dim_size: int, num_ranks: int) -> Split:
        """Split a dimension of size ``dim_size`` into the indices that each rank stores.

        >>> ActivationShard(Dim.SEQUENCE, "sequence", IndexOrder.ZIGZAG).make_split(8, 2).parts
        (((0, 2), (6, 8)), ((2, 4), (4, 6)))
        """
        if self.order is IndexOrder.CONTIGUOUS:
            return Split.even(dim_size, num_ranks, axes=(self.axis,))
        if self.order is IndexOrder.STRIPED:
            return Split(
                tuple(tuple((i, i + 1) for i in range(r, dim_size, num_ranks)) for r in range(num_ranks)), (self.axis,)
            )
        halves = Split.even(dim_size, 2 * num_ranks).parts
        return Split(tuple((*halves[r], *halves[2 * num_ranks - 1 - r]) for r in range(num_ranks)), (self.axis,))


@dataclass(frozen=True)
class ActivationLayout:
    """Sharding of a model's activations over axes of the process grid. Each sharded dimension has its own axis.

    Args:
        shards: sharded activation dimensions, or an empty tuple if activations are not sharded.
        block: axes that shard the activations inside tensor-parallel blocks: by heads or features, and by samples.
    """

    shards: tuple[ActivationShard, ...] = ()
    block: tuple[str, ...] = ("tensor",)

    def get_region_shards(self, region: ModelRegion) -> tuple[ActivationShard, ...]:
        """Return the activation dimensions that are sharded in one part of the model."""
        if not self.shards:
            return ()
        in_stack = {ModelRegion.STACK: list(Dim), ModelRegion.GATHERED: [Dim.BATCH]}.get(region, [])
        return tuple(s for s in self.shards if s.begin is ShardedFrom.INPUTS or s.dim in in_stack)

    @property
    def is_stack_sharded(self) -> bool:
        """Whether an activation dimension is sharded in the layers but not in the embeddings and heads."""
        return any(shard.begin is ShardedFrom.STACK for shard in self.shards)

    def get_stack_shard(self, axis_name: str) -> ActivationShard | None:
        """Return the activation dimension that is sharded over ``axis_name`` in the layers only, or None."""
        return next((s for s in self.shards if s.begin is ShardedFrom.STACK and s.axis == axis_name), None)

    def get_gradient_sum_axes(self, region: ModelRegion) -> tuple[str, ...]:
        """Return the axes over which to sum the gradients of replicated parameters in a part of the model."""
        axes = [shard.axis for shard in self.get_region_shards(region)]
        return tuple(dict.fromkeys((*axes, *self.block) if region is ModelRegion.BLOCK else axes))

    @cached_property
    def input_axes(self) -> tuple[str, ...]:
        """Axes over which the model inputs are sharded."""
        return tuple(shard.axis for shard in self.get_region_shards(ModelRegion.OUTSIDE))

    def get_num_input_shards(self, axis_sizes: Mapping[str, int]) -> int:
        """Return the number of shards of the model inputs. Each rank's loss is the mean over its shard."""
        return prod(map(axis_sizes.__getitem__, self.input_axes))

    def get_random_stream_index(self, region: ModelRegion, coords: Coords, axis_sizes: Mapping[str, int]) -> int:
        """Return the index of the random number stream that a rank uses in one part of the model.

        The index is 0 where all ranks have the same activations and must draw the same numbers. Ranks with different
        shards get different positive indices.
        """
        axes = self.get_gradient_sum_axes(region)
        if not any(axis_sizes.get(axis, 1) > 1 for axis in axes):
            return 0
        number = 0
        for axis in axes:
            number = number * axis_sizes.get(axis, 1) + coords.get(axis, 0)
        return number + 1

    def __str__(self) -> str:
        shards = [f"{s.dim} over {s.axis} ({s.order}, from the {s.begin} on)" for s in self.shards]
        return ", ".join(shards) or "not sharded"


SEQUENCE_PARALLEL = ActivationLayout((ActivationShard(Dim.SEQUENCE, "tensor"),))
"""Each tensor rank has consecutive sequence positions between blocks (Korthikanti et al. 2022)."""

GRID_AXES = ("row", "column", "depth")
"""Axes that reshape the tensor axis into a grid, the last one varying fastest."""

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
"""``tensor_parallel_mode`` -> activation layout between blocks (Xu et al. 2021, Wang et al. 2021, Bian et al. 2021).

See ``shardformer/tensor_parallel/grid_layers.py``."""

CONTEXT_PARALLEL = ActivationLayout((ActivationShard(Dim.SEQUENCE, "sequence", IndexOrder.ZIGZAG, ShardedFrom.INPUTS),))
"""Each rank of the sequence axis has two chunks of positions (Liu et al. 2023, Jacobs et al. 2023)."""
