"""Rectangular chunks of the tensors that each rank stores, and the assignment of chunks to writing ranks.

If several ranks store the same elements, only one of them writes each element: the rank with the least to write.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shardformer.comm.collectives import all_gather_objects
from shardformer.layout.shard_spec import Box, Coords, Offsets, ShardSpec
from shardformer.mesh.parallel_context import Axis

ChunkBounds = tuple[Offsets, Offsets]
"""Start and size of a rectangular chunk, in indices of the full tensor."""


def overlap(one: ChunkBounds, other: ChunkBounds) -> ChunkBounds | None:
    """Return the intersection of two chunks, or None if they do not overlap."""
    low = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    high = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    if all(a < b for a, b in zip(low, high, strict=True)):
        return low, tuple(b - a for a, b in zip(low, high, strict=True))
    return None


@dataclass(frozen=True, eq=False)
class LocalChunk:
    """A chunk of the full tensor on this rank: its start, and a view of its values."""

    start: Offsets
    values: Tensor

    def part(self, start: Offsets, size: Offsets) -> Tensor:
        """Return the view of the values in a box of the full tensor that this chunk contains."""
        return self.values[tuple(slice(a - o, a - o + n) for a, o, n in zip(start, self.start, size, strict=True))]


@dataclass(frozen=True, eq=False)
class TensorItem:
    """One tensor of a checkpoint, with the chunks that this rank can write or wants to read.

    Args:
        name: name in the checkpoint, identical on all ranks and under all layouts.
        shape: shape of the full tensor.
        dtype: dtype of the chunks in memory.
        held: this rank's chunks, which do not overlap.
        is_checked: whether these chunks count toward the checksum. False for the second copy of a tensor that a rank
            reads twice.
    """

    name: str
    shape: Offsets
    dtype: torch.dtype
    held: Sequence[LocalChunk]
    is_checked: bool = True


@dataclass(frozen=True)
class FlatRegion:
    """The elements of a full tensor that a flat buffer of this rank stores.

    Args:
        shape: shape of the full tensor.
        spec: how the full tensor is sharded; None: it is not sharded.
        coords: this rank's mesh coordinates.
        stretch: range of elements in this rank's flattened shard; None: the shard in its own shape.
    """

    shape: Offsets
    spec: ShardSpec | None
    coords: Coords
    stretch: slice | None = None

    @property
    def local_shape(self) -> Offsets:
        """Shape of this rank's shard, which contains ``stretch``."""
        return self.shape if self.spec is None else self.spec.local_shape(self.coords)

    @property
    def numel(self) -> int:
        """Number of elements in the region."""
        return prod(self.local_shape) if self.stretch is None else self.stretch.stop - self.stretch.start

    @property
    def is_whole(self) -> bool:
        """Whether the region covers the full tensor."""
        return self.numel == prod(self.shape)

    def new(self, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized CPU buffer for the region."""
        return torch.empty(self.local_shape if self.stretch is None else self.numel, dtype=dtype)

    def item(self, name: str, x: Tensor) -> TensorItem:
        """Return the ``TensorItem`` called ``name`` for the buffer ``x`` of this region."""
        return TensorItem(name, self.shape, x.dtype, self.views(x))

    def views(self, x: Tensor) -> list[LocalChunk]:
        """Return the chunks of the full tensor that the buffer ``x`` stores, as views."""
        if self.stretch is None:
            return [LocalChunk(box.full, box.of_local(x)) for box in self._boxes() if all(box.size)]
        parts = list(_of_stretch(self.local_shape, self.stretch, x.reshape(-1)))
        found = []
        for box in self._boxes():
            for at, values in parts:
                if (common := overlap((box.local, box.size), (at, tuple(values.shape)))) is not None:
                    start, size = common
                    full = tuple(f + a - o for f, a, o in zip(box.full, start, box.local, strict=True))
                    found.append(LocalChunk(full, LocalChunk(at, values).part(start, size)))
        return found

    def _boxes(self) -> Sequence[Box]:
        if self.spec is None:
            nothing = (0,) * len(self.shape)
            return (Box(nothing, nothing, self.shape),)
        return self.spec.boxes(self.coords)


def _of_stretch(shape: Offsets, stretch: slice, flat: Tensor) -> Iterator[tuple[Offsets, Tensor]]:
    """Yield (start, values) of the boxes that cover the flat range ``stretch`` of a tensor of this shape.

    >>> [(at, tuple(x.shape)) for at, x in _of_stretch((3, 4), slice(2, 9), torch.arange(7))]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    used = 0
    for start, size in flat_range_to_chunks(shape, stretch.start, stretch.stop):
        numel = prod(size)
        yield start, flat[used : used + numel].view(size)
        used += numel


def flat_range_to_chunks(shape: Offsets, begin: int, end: int) -> Iterator[tuple[Offsets, Offsets]]:
    """Yield (start, size) of the boxes that cover the elements ``begin`` to ``end`` of a tensor in row-major order."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    (first, low), (last, high) = divmod(begin, inner), divmod(end, inner)
    if first == last:
        for start, size in flat_range_to_chunks(shape[1:], low, high):
            yield (first, *start), (1, *size)
        return
    if low:
        for start, size in flat_range_to_chunks(shape[1:], low, inner):
            yield (first, *start), (1, *size)
        first += 1
    if last > first:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if high:
        for start, size in flat_range_to_chunks(shape[1:], 0, high):
            yield (last, *start), (1, *size)


ChunkOwners = tuple[str, Offsets, Offsets]
"""A chunk of a named tensor: name, start and size."""

LocalChunks = tuple[list[ChunkOwners], dict[str, tuple[Offsets, int]]]
"""The chunks of one rank, and the shape and element size in bytes of each tensor."""


def list_local_chunks(items: Sequence[TensorItem]) -> LocalChunks:
    """Describe the chunks of this rank for the other ranks."""
    cells = [(item.name, held.start, tuple(held.values.shape)) for item in items for held in item.held]
    return cells, {item.name: (item.shape, item.dtype.itemsize) for item in items}


def without_tensors(held: LocalChunks, gone: Container[str]) -> LocalChunks:
    """Return the chunks of a rank without the tensors named in ``gone``."""
    cells, tensors = held
    return [cell for cell in cells if cell[0] not in gone], {n: x for n, x in tensors.items() if n not in gone}


def assign_writes(items: Sequence[TensorItem], world: Axis) -> dict[ChunkOwners, list[ChunkBounds]]:
    """Return the boxes that this rank writes of each of its chunks.

    Communicates one gather of all ranks' chunk bounds.
    """
    return assigned_chunks(all_gather_objects(list_local_chunks(items), world), world)


def assigned_chunks(held: Sequence[LocalChunks], world: Axis) -> dict[ChunkOwners, list[ChunkBounds]]:
    """Return the boxes that this rank writes of each of its chunks, from the chunks of all ranks.

    Chunks of different ranks may be identical, disjoint, or overlap partially.
    """
    holders: dict[ChunkOwners, list[int]] = {}
    shapes: dict[str, Offsets] = {}
    widths: dict[str, int] = {}
    for rank, (cells, tensors) in enumerate(held):
        for name, (shape, width) in tensors.items():
            shapes[name], widths[name] = shape, width
        for cell in cells:
            holders.setdefault(cell, []).append(rank)
    overlapping = _overlapping(holders, shapes)
    covered: dict[str, list[ChunkBounds]] = {}
    load = [0] * world.size
    mine: dict[ChunkOwners, list[ChunkBounds]] = {}
    for cell in sorted(holders, key=lambda cell: (len(holders[cell]), -prod(cell[2]), cell)):
        name, start, size = cell
        rest: list[ChunkBounds] = [(start, size)]
        if name in overlapping:
            rest = list(subtract_chunks((start, size), covered.get(name, ())))
            covered.setdefault(name, []).extend(rest)
        rank = min(holders[cell], key=lambda rank: (load[rank], rank))
        load[rank] += widths[name] * sum(prod(each) for _, each in rest)
        if rank == world.rank and rest:
            mine[cell] = rest
    return mine


def _overlapping(cells: Iterable[ChunkOwners], shapes: dict[str, Offsets]) -> set[str]:
    """Return the names of the tensors whose chunks overlap."""
    numel: dict[str, int] = {}
    for name, _, size in cells:
        numel[name] = numel.get(name, 0) + prod(size)
    return {name for name, count in numel.items() if count != prod(shapes[name])}


def subtract_chunks(piece: ChunkBounds, others: Sequence[ChunkBounds]) -> Iterator[ChunkBounds]:
    """Yield boxes that cover ``piece`` except for the ``others``.

    >>> list(subtract_chunks(((0, 0), (2, 4)), [((1, 1), (5, 2))]))
    [((0, 0), (1, 4)), ((1, 0), (1, 1)), ((1, 3), (1, 1))]
    """
    found = next((common for other in others if (common := overlap(piece, other)) is not None), None)
    if found is None:
        yield piece
        return
    start, size = list(piece[0]), list(piece[1])
    for dim, (low, n) in enumerate(zip(*found, strict=True)):
        for a, b in ((start[dim], low), (low + n, start[dim] + size[dim])):
            if a < b:
                left = (*start[:dim], a, *start[dim + 1 :]), (*size[:dim], b - a, *size[dim + 1 :])
                yield from subtract_chunks(left, others)
        start[dim], size[dim] = low, n
