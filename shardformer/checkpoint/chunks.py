"""Decide which rank writes which chunks of each tensor into a checkpoint.

Each rank stores rectangular chunks of a full tensor. If several ranks store the same elements, only one of them writes
each element: the rank with the fewest bytes to write.
"""

from __future__ import annotations

from collections import Counter
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
NamedChunk = tuple[str, Offsets, Offsets]
"""A chunk of a named tensor: name, start and size."""
LocalChunks = tuple[list[NamedChunk], dict[str, tuple[Offsets, int]]]
"""The chunks that one rank stores, and the full shape and element size in bytes of each tensor."""


def intersect_chunks(first_chunk: ChunkBounds, second_chunk: ChunkBounds) -> ChunkBounds | None:
    """Return the overlap of two chunks of a tensor, or None if they have no elements in common."""
    low = tuple(max(a, b) for a, b in zip(first_chunk[0], second_chunk[0], strict=True))
    high = [min(a + n, b + m) for a, n, b, m in zip(*first_chunk, *second_chunk, strict=True)]
    if all(a < b for a, b in zip(low, high, strict=True)):
        return low, tuple(b - a for a, b in zip(low, high, strict=True))
    return None


@dataclass(frozen=True, eq=False)
class LocalTensorChunk:
    """Rectangular chunk of a full tensor that this rank stores.

    Args:
        start: index of its first element in the full tensor.
        values: a view of its elements.
    """

    start: Offsets
    values: Tensor

    @property
    def bounds(self) -> ChunkBounds:
        return self.start, tuple(self.values.shape)

    def get_subview(self, start: Offsets, size: Offsets) -> Tensor:
        """Return a view of a rectangular region of this chunk. ``start`` is an index in the full tensor."""
        return self.values[tuple(slice(a - o, a - o + n) for a, o, n in zip(start, self.start, size, strict=True))]


@dataclass(frozen=True, eq=False)
class CheckpointTensor:
    """A tensor to save or load: its name, its full shape and this rank's chunks of it.

    Args:
        name: name in the checkpoint, which is the same on all ranks and under all layouts.
        shape: shape of the full tensor.
        dtype: dtype of the chunks in memory.
        chunks: this rank's chunks, which do not overlap.
        is_checked: whether the chunks count toward the checksum; False for a second copy that a rank reads.
    """

    name: str
    shape: Offsets
    dtype: torch.dtype
    chunks: Sequence[LocalTensorChunk]
    is_checked: bool = True


@dataclass(frozen=True)
class LocalTensorRegion:
    """Elements of a full tensor that this rank stores in one buffer.

    Args:
        shape: shape of the full tensor.
        spec: how the full tensor is sharded, or None if it is replicated.
        coords: this rank's mesh coordinates.
        flat_range: range of elements of this rank's flattened shard, or None if the region is the whole shard.
    """

    shape: Offsets
    spec: ShardSpec | None
    coords: Coords
    flat_range: slice | None = None

    @property
    def local_shape(self) -> Offsets:
        """Shape of this rank's whole shard, regardless of ``flat_range``."""
        return self.shape if self.spec is None else self.spec.get_local_shape(self.coords)

    @property
    def numel(self) -> int:
        return prod(self.local_shape) if self.flat_range is None else self.flat_range.stop - self.flat_range.start

    @property
    def covers_full_tensor(self) -> bool:
        return self.numel == prod(self.shape)

    def allocate_buffer(self, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized CPU tensor for the elements that this rank stores."""
        return torch.empty(self.local_shape if self.flat_range is None else self.numel, dtype=dtype)

    def make_tensor_item(self, tensor_name: str, buffer: Tensor) -> CheckpointTensor:
        """Create a ``CheckpointTensor`` whose chunks are views of this rank's elements in ``buffer``."""
        return CheckpointTensor(tensor_name, self.shape, buffer.dtype, self.split_into_chunks(buffer))

    def split_into_chunks(self, buffer: Tensor) -> list[LocalTensorChunk]:
        """Split this rank's elements in ``buffer`` into rectangular chunks of the full tensor."""
        origin = (0,) * len(self.shape)
        boxes = (Box(origin, origin, self.shape),) if self.spec is None else self.spec.boxes(self.coords)
        if self.flat_range is None:
            return [LocalTensorChunk(box.full, box.view_in_local(buffer)) for box in boxes if all(box.size)]
        bounds = list(split_flat_range_into_chunks(self.local_shape, self.flat_range.start, self.flat_range.stop))
        values = buffer.reshape(-1).split([prod(size) for _, size in bounds])
        chunks = []
        for box in boxes:
            for (start, size), flat in zip(bounds, values, strict=True):
                if (common := intersect_chunks((box.local, box.size), (start, size))) is not None:
                    full = tuple(f + a - o for f, a, o in zip(box.full, common[0], box.local, strict=True))
                    chunks.append(LocalTensorChunk(full, LocalTensorChunk(start, flat.view(size)).get_subview(*common)))
        return chunks


def split_flat_range_into_chunks(shape: Offsets, start: int, end: int) -> Iterator[ChunkBounds]:
    """Convert a range of a flattened tensor into rectangular chunks of the original tensor.

    Yields the (start, size) of each chunk.

    >>> list(split_flat_range_into_chunks((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    (first, low), (last, high) = divmod(start, inner), divmod(end, inner)
    if first == last:
        yield from _split_range_of_row_into_chunks(shape, first, low, high)
        return
    if low:
        yield from _split_range_of_row_into_chunks(shape, first, low, inner)
        first += 1
    if last > first:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _split_range_of_row_into_chunks(shape, last, 0, high)


def _split_range_of_row_into_chunks(
    tensor_shape: Offsets, row_index: int, start_in_row: int, end_in_row: int
) -> Iterator[ChunkBounds]:
    for start, size in split_flat_range_into_chunks(tensor_shape[1:], start_in_row, end_in_row):
        yield (row_index, *start), (1, *size)


def get_local_chunk_bounds(tensor_items: Sequence[CheckpointTensor]) -> LocalChunks:
    """List the names and bounds of this rank's tensor chunks, to send them to other ranks."""
    chunks = [(item.name, *chunk.bounds) for item in tensor_items for chunk in item.chunks]
    return chunks, {item.name: (item.shape, item.dtype.itemsize) for item in tensor_items}


def exclude_tensors(local_chunks: LocalChunks, tensor_names: Container[str]) -> LocalChunks:
    """Remove the tensors in ``tensor_names`` from a rank's list of chunks."""
    chunks, tensors = local_chunks
    return [chunk for chunk in chunks if chunk[0] not in tensor_names], {
        n: x for n, x in tensors.items() if n not in tensor_names
    }


def assign_chunks_to_write(
    tensor_items: Sequence[CheckpointTensor], world: Axis
) -> dict[NamedChunk, list[ChunkBounds]]:
    """Choose one rank to write each tensor element, and return the chunks that this rank must write.

    Communicates one gather of all ranks' chunk bounds.
    """
    return select_chunks_to_write(all_gather_objects(get_local_chunk_bounds(tensor_items), world), world)


def select_chunks_to_write(chunks_by_rank: Sequence[LocalChunks], world: Axis) -> dict[NamedChunk, list[ChunkBounds]]:
    """Select the chunks that this rank must write, so that each element is written once.

    Chunks of different ranks may be identical, disjoint, or overlap partially.
    """
    owners: dict[NamedChunk, list[int]] = {}
    tensors: dict[str, tuple[Offsets, int]] = {}
    for rank, (chunks, local_tensors) in enumerate(chunks_by_rank):
        tensors |= local_tensors
        for chunk in chunks:
            owners.setdefault(chunk, []).append(rank)
    overlapping = _find_tensors_with_overlapping_chunks(owners, tensors)
    covered: dict[str, list[ChunkBounds]] = {}
    load = [0] * world.size
    assigned: dict[NamedChunk, list[ChunkBounds]] = {}
    for chunk in sorted(owners, key=lambda chunk: (len(owners[chunk]), -prod(chunk[2]), chunk)):
        name, start, size = chunk
        boxes = [(start, size)]
        if name in overlapping:
            boxes = list(subtract_chunks((start, size), covered.get(name, ())))
            covered.setdefault(name, []).extend(boxes)
        rank = min(owners[chunk], key=lambda rank: (load[rank], rank))
        load[rank] += tensors[name][1] * sum(prod(size) for _, size in boxes)
        if rank == world.rank and boxes:
            assigned[chunk] = boxes
    return assigned


def _find_tensors_with_overlapping_chunks(
    chunks: Iterable[NamedChunk], shape_and_itemsize_by_tensor: dict[str, tuple[Offsets, int]]
) -> set[str]:
    numel: Counter[str] = Counter()
    for name, _, size in chunks:
        numel[name] += prod(size)
    return {name for name, count in numel.items() if count != prod(shape_and_itemsize_by_tensor[name][0])}


def subtract_chunks(chunk: ChunkBounds, chunks_to_subtract: Sequence[ChunkBounds]) -> Iterator[ChunkBounds]:
    """Split the part of ``chunk`` that does not overlap ``chunks_to_subtract`` into smaller chunks.

    >>> list(subtract_chunks(((0, 0), (2, 4)), [((1, 1), (5, 2))]))
    [((0, 0), (1, 4)), ((1, 0), (1, 1)), ((1, 3), (1, 1))]
    """
    found = next(
        (common for other in chunks_to_subtract if (common := intersect_chunks(chunk, other)) is not None), None
    )
    if found is None:
        yield chunk
        return
    start, size = list(chunk[0]), list(chunk[1])
    for dim, (low, n) in enumerate(zip(*found, strict=True)):
        for a, b in ((start[dim], low), (low + n, start[dim] + size[dim])):
            if a < b:
                box = (*start[:dim], a, *start[dim + 1 :]), (*size[:dim], b - a, *size[dim + 1 :])
                yield from subtract_chunks(box, chunks_to_subtract)
        start[dim], size[dim] = low, n
