"""Describe which shard of a tensor each rank stores (``ShardSpec``), and how dims and attention heads are split.

``AttentionHeadLayout`` also assigns heads if there are fewer KV heads than ranks, so that several ranks store the same
head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import prod

import torch
from torch import Tensor

from shardformer.errors import ConfigError, PolicyError

Slice = tuple[int, int]  # Start and end (exclusive) of consecutive indices
Coords = Mapping[str, int]  # Axis name -> rank on that axis. Axes of size 1 may be omitted
Axes = tuple[str, ...]


def get_even_split_bounds(num_elements: int, num_ranks: int) -> list[int]:
    """Compute the boundaries of ``num_ranks`` nearly equal slices: (10, 4) -> [0, 3, 6, 8, 10]."""
    base, more = divmod(num_elements, num_ranks)
    return [r * base + min(r, more) for r in range(num_ranks + 1)]


@dataclass(frozen=True)
class Split:
    """Sharding of one tensor dimension, as the index ranges that each rank stores.

    >>> Split.even(10, 4).parts
    (((0, 3),), ((3, 6),), ((6, 8),), ((8, 10),))
    >>> Split.fused([4, 4, 4], 2).parts    # q, k and v concatenated, each sharded separately
    (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12)))
    >>> Split((((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),))).multiplicity   # each slice on two of four ranks
    (2, 2, 2, 2)
    >>> Split.even(8, 4, axes=("row", "column"), sizes=(2, 2)).slices(8, {"row": 1, "column": 0})
    ((4, 6),)

    Args:
        parts: the slices of each rank. With several axes, ranks are ordered row-major: the last axis varies fastest.
        axes: axes over which the dimension is sharded.
        sizes: axis sizes, which are optional for a single axis.
    """

    parts: tuple[tuple[Slice, ...], ...]
    axes: Axes = ("tensor",)
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.sizes and len(self.axes) == 1:
            object.__setattr__(self, "sizes", (len(self.parts),))
        assert len(self.sizes) == len(self.axes) and prod(self.sizes) == len(self.parts), (self.axes, self.sizes)

    @classmethod
    def even(
        cls, size: int, ranks: int, unit: int = 1, *, axes: Axes = ("tensor",), sizes: tuple[int, ...] = ()
    ) -> Split:
        """Split a dimension as evenly as possible in multiples of ``unit``. The first ranks get the remaining units."""
        parts = tuple(((a * unit, b * unit),) for a, b in pairwise(get_even_split_bounds(size // unit, ranks)))
        return cls(parts, axes, sizes)

    @classmethod
    def fused(cls, sizes: Sequence[int], ranks: int, unit: int = 1) -> Split:
        """Split each block of a fused dimension, such as q, k and v in one weight, over the ranks."""
        return cls.concat([cls.even(size, ranks, unit) for size in sizes], sizes)

    @classmethod
    def concat(cls, splits: Sequence[Split], dim_sizes: Sequence[int]) -> Split:
        """Combine the splits of several dimensions into the split of their concatenation."""
        offsets = [0, *accumulate(dim_sizes)]
        parts = [
            merge_adjacent_slices(
                [(a + o, b + o) for s, o in zip(splits, offsets, strict=False) for a, b in s.parts[r]]
            )
            for r in range(len(splits[0].parts))
        ]
        return cls(tuple(parts), splits[0].axes, splits[0].sizes)

    def with_axis(self, axis: str) -> Split:
        """Return a copy of this split over another axis of the process grid."""
        return Split(self.parts, (axis,))

    def get_shard_index(self, coords: Coords) -> int:
        """Return the index of the shard that the process at ``coords`` stores. The last axis varies fastest."""
        return _compute_shard_index(self.axes, self.sizes, coords)

    def slices(self, dim_size: int, coords: Coords) -> tuple[Slice, ...]:
        """Return the index ranges that the rank at ``coords`` stores."""
        assert dim_size == self.full, (dim_size, self.full)
        return self.parts[self.get_shard_index(coords)]

    def get_local_length(self, rank: int) -> int:
        return sum(b - a for a, b in self.parts[rank])

    def get_local_lengths(self) -> tuple[int, ...]:
        return tuple(map(self.get_local_length, range(len(self.parts))))

    @cached_property
    def full(self) -> int:
        """Length of the full, unsharded dimension."""
        return max([b for part in self.parts for _, b in part], default=0)

    @cached_property
    def ranges_with_rank_counts(self) -> list[tuple[int, int, int]]:
        """Index ranges and the number of ranks that store each of them, as a list of (start, end, count)."""
        return count_ranks_per_range(self.parts)

    def indices(self, rank: int) -> Tensor:
        """Return the indices of the full dimension that a rank stores, in the order of its local shard."""
        return torch.cat([torch.arange(a, b) for a, b in self.parts[rank]] or [torch.arange(0)])

    @property
    def multiplicity(self) -> tuple[int, ...]:
        """Number of ranks that store each index of the full dimension."""
        return tuple(count for a, b, count in self.ranges_with_rank_counts for _ in range(a, b))

    @property
    def stores_each_index_once(self) -> bool:
        """Whether every index is stored by exactly one rank."""
        return all(count == 1 for *_, count in self.ranges_with_rank_counts)


@dataclass(frozen=True)
class EvenSplit:
    """Even split of every local shard of a dimension that is already sharded over another axis.

    >>> EvenSplit("data", 2).slices(5, {"data": 1})
    ((3, 5),)
    """

    axis: str
    ranks: int
    unit: int = 1

    @property
    def axes(self) -> Axes:
        return (self.axis,)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.ranks,)

    def slices(self, dim_size: int, coords: Coords) -> tuple[Slice, ...]:
        """Return the index ranges that the rank at ``coords`` stores."""
        units = -(-dim_size // self.unit)
        bounds = [min(b * self.unit, dim_size) for b in get_even_split_bounds(units, self.ranks)]
        rank = _compute_shard_index(self.axes, self.sizes, coords)
        return merge_adjacent_slices([(bounds[rank], bounds[rank + 1])])


AnySplit = Split | EvenSplit


def count_ranks_per_range(slices_by_rank: Sequence[Sequence[Slice]]) -> list[tuple[int, int, int]]:
    """Count the ranks that store each index range, as tuples (start, end, count).

    >>> count_ranks_per_range([[(0, 2)], [(1, 3)], [(4, 5)]])
    [(0, 1, 1), (1, 2, 2), (2, 3, 1), (3, 4, 0), (4, 5, 1)]
    """
    changes: dict[int, int] = {0: 0}
    for part in slices_by_rank:
        for a, b in part:
            if a < b:
                changes[a], changes[b] = changes.get(a, 0) + 1, changes.get(b, 0) - 1
    places = sorted(changes)
    counts = accumulate(map(changes.__getitem__, places))
    runs: list[tuple[int, int, int]] = []
    for (a, b), count in zip(pairwise(places), counts, strict=False):
        if runs and runs[-1][2] == count:
            runs[-1] = (runs[-1][0], b, count)
        else:
            runs.append((a, b, count))
    return runs


def merge_adjacent_slices(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    """Remove empty index ranges, and merge ranges that are adjacent."""
    out: list[Slice] = []
    for a, b in slices:
        if a == b:
            continue
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)


def _compute_shard_index(axes: Axes, axis_sizes: Sequence[int], coords: Coords) -> int:
    if len(axes) == 1 and axis_sizes[0] > 1:
        return coords[axes[0]]
    rank = 0
    for axis, size in zip(axes, axis_sizes, strict=True):
        rank = rank * size + (coords.get(axis, 0) if size == 1 else coords[axis])
    return rank


Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangular block of a tensor: its size, and its offsets in the full tensor and in the local shard."""

    full: Offsets
    local: Offsets
    size: Offsets

    def view_in_full(self, full_tensor: Tensor) -> Tensor:
        return _narrow_dims(full_tensor, self.full, self.size)

    def view_in_local(self, local_shard: Tensor) -> Tensor:
        return _narrow_dims(local_shard, self.local, self.size)


@dataclass(frozen=True, init=False)
class ShardSpec:
    """Sharding of a tensor over the process grid: its full shape and the split of each sharded dimension.

    Splits of one dimension are applied in order: the first to the full dimension, the next to the local slices of the
    previous one. An axis may shard only one dimension of a tensor.

    >>> spec = ShardSpec((6, 4), {0: Split.even(6, 2), 1: Split.even(4, 2, axes=("column",))})
    >>> spec.boxes({"tensor": 1, "column": 0})
    (Box(full=(3, 0), local=(0, 0), size=(3, 2)),)
    >>> ShardSpec((6,), {0: [Split.even(6, 2), EvenSplit("data", 2)]}).boxes({"tensor": 1, "data": 1})
    (Box(full=(5,), local=(0,), size=(1,)),)

    Args:
        shape: full shape of the tensor.
        splits: dimension -> one split, or an ordered sequence of splits.

    Raises:
        ConfigError: if a split has another length than its dimension or omits indices, or if an axis is used twice.
    """

    shape: Offsets
    splits: Mapping[int, tuple[AnySplit, ...]]

    def __init__(self, shape: Sequence[int], splits: Mapping[int, AnySplit | Sequence[AnySplit]] | None = None) -> None:
        ordered: dict[int, tuple[AnySplit, ...]] = {}
        for dim, of_dim in (splits or {}).items():
            if found := tuple(of_dim) if isinstance(of_dim, Sequence) else (of_dim,):
                ordered[dim] = found
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "splits", ordered)
        if ordered:
            self._check_splits_match_shape()

    def _check_splits_match_shape(self) -> None:
        axes = [axis for splits in self.splits.values() for split in splits for axis in split.axes]
        if len(axes) > len(set(axes)):
            twice = next(axis for axis in axes if axes.count(axis) > 1)
            raise ConfigError(
                f"A tensor of shape {self.shape} cannot be sharded twice over the axis {twice!r}.",
                remedy="Use a different axis for each split, or reshape this axis into two axes.",
            )
        for dim, splits in self.splits.items():
            full = getattr(splits[0], "full", None)
            if not 0 <= dim < len(self.shape) or full not in (None, self.shape[dim]):
                raise ConfigError(
                    f"The split of dimension {dim} has {full} elements, but the tensor has the shape {self.shape}.",
                    remedy="Pass a split as long as the dimension, for example Split.even(shape[dim], ranks).",
                )
            if 0 in [count for *_, count in self._ranges_with_rank_counts_by_dim[dim]]:
                raise ConfigError(
                    f"The split {splits} does not cover all indices of dimension {dim} of a tensor of shape "
                    f"{self.shape}.",
                    remedy="Assign every index of the dimension to at least one rank.",
                )

    @property
    def is_sharded(self) -> bool:
        return bool(self.splits)

    @cached_property
    def axes(self) -> dict[str, int]:
        """Axes over which the tensor is sharded, and the sizes of these axes."""
        return {axis: size for splits in self.splits.values() for axis, size in _get_axis_sizes(splits).items()}

    def get_all_rank_coords(self) -> list[Coords]:
        """Return the grid coordinates of the ranks that store the shards. The last axis varies fastest."""
        return _list_all_coords(self.axes)

    def boxes(self, coords: Coords) -> tuple[Box, ...]:
        """Return the blocks of the full tensor that the rank at ``coords`` stores, in local order."""
        dims = [list(_iter_slices_with_offsets(self.get_local_slices(d, coords))) for d in range(len(self.shape))]
        return tuple(
            Box(tuple(a for a, _, _ in runs), tuple(at for _, at, _ in runs), tuple(n for _, _, n in runs))
            for runs in product(*dims)
        )

    def get_local_slices(self, dim: int, coords: Coords) -> tuple[Slice, ...]:
        """Return the index ranges of dimension ``dim`` that the rank at ``coords`` stores."""
        length, splits = self.shape[dim], self.splits.get(dim, ())
        local: tuple[Slice, ...] = ((0, length),) if length else ()
        for at, split in enumerate(splits):
            inner = split.slices(sum([b - a for a, b in local]), coords)
            local = _map_inner_slices_to_full(local, inner) if at else merge_adjacent_slices(inner)
        return local

    def get_local_shape(self, coords: Coords) -> Offsets:
        """Return the shape of the shard that the rank at ``coords`` stores."""
        shape = list(self.shape)
        for dim in self.splits:
            shape[dim] = sum([b - a for a, b in self.get_local_slices(dim, coords)])
        return tuple(shape)

    def slice_full_tensor(self, full_tensor: Tensor, coords: Coords) -> Tensor:
        """Return a copy of the shard of ``full_tensor`` that belongs to the rank at ``coords``.

        Raises:
            ConfigError: if ``full_tensor`` does not have the full shape.
        """
        shape = tuple(full_tensor.shape)
        if shape != self.shape:
            raise ConfigError(
                f"slice_full_tensor() requires a full tensor of shape {self.shape}, but got shape {shape}.",
                remedy="Pass the full tensor, not a shard.",
            )
        local = full_tensor
        for dim in self.splits:
            chunks = [local.narrow(dim, a, b - a) for a, b in self.get_local_slices(dim, coords) or [(0, 0)]]
            local = torch.cat(chunks, dim) if len(chunks) != 1 else chunks[0]
        return local.detach().clone(memory_format=torch.contiguous_format)

    def assemble_full_tensor(self, shards: Sequence[Tensor]) -> Tensor:
        """Assemble the full tensor from all shards, in the order of ``get_all_rank_coords``. Later copies win."""
        full = shards[0].new_zeros(self.shape)
        for coords, part in zip(self.get_all_rank_coords(), shards, strict=True):
            self.copy_shard_into_full(part, full, coords)
        return full

    def copy_shard_into_full(self, local_shard: Tensor, full_tensor: Tensor, coords: Coords) -> None:
        """Copy the shard of the rank at ``coords`` into the full tensor."""
        for box in self.boxes(coords):
            box.view_in_full(full_tensor).copy_(box.view_in_local(local_shard))

    @cached_property
    def _ranges_with_rank_counts_by_dim(self) -> dict[int, list[tuple[int, int, int]]]:
        """Index ranges of each sharded dimension, with the number of ranks that store each range."""
        holders = {}
        for dim, splits in self.splits.items():
            first = splits[0]
            if len(splits) == 1 and isinstance(first, Split):
                holders[dim] = first.ranges_with_rank_counts
            else:
                holders[dim] = count_ranks_per_range(
                    [self.get_local_slices(dim, coords) for coords in _list_all_coords(_get_axis_sizes(splits))]
                )
        return holders

    @cached_property
    def shared_axes(self) -> tuple[str, ...]:
        """Axes over which a dimension is sharded into overlapping slices."""
        if not self.splits:
            return ()
        shared = [
            dim
            for dim, runs in self._ranges_with_rank_counts_by_dim.items()
            if max([count for *_, count in runs], default=0) > 1
        ]
        return tuple(axis for dim in shared for axis in _get_axis_sizes(self.splits[dim]))

    @property
    def stores_each_element_once(self) -> bool:
        """Whether every element of the tensor is stored in exactly one shard."""
        return all(count == 1 for runs in self._ranges_with_rank_counts_by_dim.values() for *_, count in runs)

    def count_copies_per_element(self, coords: Coords | None = None) -> Tensor | int:
        """Count the ranks that store each element, as an fp64 tensor, or return 1 if all elements are stored once.

        The counts broadcast against the shard at ``coords``, or against the full tensor without ``coords``.
        """
        out: Tensor | int = 1
        for dim, runs in self._ranges_with_rank_counts_by_dim.items():
            if all(count == 1 for *_, count in runs):
                continue
            counts = torch.cat([torch.full((b - a,), float(count), dtype=torch.float64) for a, b, count in runs])
            if coords is not None:
                counts = torch.cat([counts[a:b] for a, b in self.get_local_slices(dim, coords)] or [counts[:0]])
            out = out * counts.reshape([-1 if d == dim else 1 for d in range(len(self.shape))])
        return out


def _get_axis_sizes(splits: Sequence[AnySplit]) -> dict[str, int]:
    return {axis: size for split in splits for axis, size in zip(split.axes, split.sizes, strict=True)}


def _list_all_coords(axis_sizes: Mapping[str, int]) -> list[Coords]:
    return [
        dict(zip(axis_sizes, ranks, strict=True)) for ranks in product(*(range(size) for size in axis_sizes.values()))
    ]


def _iter_slices_with_offsets(slices: Sequence[Slice]) -> Iterator[tuple[int, int, int]]:
    """Yield each index range as (start in the full dimension, start in the shard, length)."""
    at = 0
    for a, b in slices:
        yield a, at, b - a
        at += b - a


def _map_inner_slices_to_full(local_slices: Sequence[Slice], inner_slices: Sequence[Slice]) -> tuple[Slice, ...]:
    """Convert index ranges of a local shard into index ranges of the full dimension."""
    out = [
        (a + max(c, at) - at, a + min(d, at + n) - at)
        for c, d in inner_slices
        for a, at, n in _iter_slices_with_offsets(local_slices)
        if max(c, at) < min(d, at + n)
    ]
    return merge_adjacent_slices(out)


def _narrow_dims(tensor: Tensor, starts: Offsets, sizes: Offsets) -> Tensor:
    for dim, (a, n) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dim, a, n)
    return tensor


@dataclass(frozen=True)
class AttentionHeadLayout:
    """Assignment of query heads and KV heads to the tensor-parallel ranks.

    Splits query heads as evenly as possible, in full groups if there are enough KV heads. With fewer KV heads than
    ranks, each KV head is replicated on all ranks whose query heads read it. Six query heads on two KV heads over four
    ranks:

        rank      0      1      2   3
        query    0 1    2 3     4   5
        KV       0      0 1     1   1

    If the heads are stored in several consecutive ``partitions``, each partition is split this way.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_ranks: int
    partitions: int = 1

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.num_kv_heads % self.partitions:
            counts = range(self.partitions, self.num_heads + 1, self.partitions)
            fits = ", ".join(str(n) for n in counts if self.num_heads % n == 0) or f"a multiple of {self.partitions}"
            in_partitions = f" in {self.partitions} partitions" if self.partitions > 1 else ""
            raise ConfigError(
                f"num_heads={self.num_heads} cannot be divided evenly among num_kv_heads={self.num_kv_heads}"
                f"{in_partitions}.",
                remedy=f"Set num_key_value_heads in the model's config to {fits}.",
            )
        if (most := self.num_heads // self.partitions) < self.num_ranks:
            of_each_partition = " of each partition" if self.partitions > 1 else ""
            raise ConfigError(
                f"A tensor size of {self.num_ranks} exceeds the {most} attention heads{of_each_partition}.",
                remedy=f"Use a tensor size of at most {most}.",
            )

    @cached_property
    def partition(self) -> AttentionHeadLayout:
        """Layout of the heads in one of the equal ``partitions`` of the module."""
        n = self.partitions
        return replace(self, num_heads=self.num_heads // n, num_kv_heads=self.num_kv_heads // n, partitions=1)

    @cached_property
    def query_heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @cached_property
    def query_head_bounds(self) -> list[int]:
        """Boundaries between the query heads of successive ranks in one partition, as ranks + 1 head indices."""
        if (kv_heads := self.num_kv_heads // self.partitions) >= self.num_ranks:
            return [b * self.query_heads_per_kv_head for b in get_even_split_bounds(kv_heads, self.num_ranks)]
        return get_even_split_bounds(self.num_heads // self.partitions, self.num_ranks)

    def get_num_query_heads(self, rank: int) -> int:
        return self.partitions * len(self._get_query_head_range(rank))

    def _get_kv_head_per_query(self, rank: int) -> list[int]:
        """Map each of a rank's query heads to the index of the KV head that it uses."""
        return [head // self.query_heads_per_kv_head for head in self._get_query_head_range(rank)]

    def _get_query_head_range(self, rank: int) -> range:
        return range(self.query_head_bounds[rank], self.query_head_bounds[rank + 1])

    def get_stored_kv_heads(self, rank: int) -> list[int]:
        """Return the indices of the KV heads that a rank stores in one partition."""
        return sorted(set(self._get_kv_head_per_query(rank)))

    def get_local_kv_head_per_query(self, rank: int) -> list[int] | None:
        """Map each of a rank's query heads to a local KV head, or return None for standard grouped-query attention.

        None means that the same number of query heads reads each KV head, so that repeating each KV head is correct.
        """
        read, stored = self._get_kv_head_per_query(rank), self.get_stored_kv_heads(rank)
        if all(read.count(h) == read.count(stored[0]) for h in stored):
            return None
        return [partition * len(stored) + stored.index(h) for partition in range(self.partitions) for h in read]

    def get_used_kv_heads(self, rank: int) -> list[int]:
        """Return the indices of the KV heads that a rank's forward pass reads, in order."""
        own = (
            self.get_stored_kv_heads(rank)
            if self.get_local_kv_head_per_query(rank) is None
            else self._get_kv_head_per_query(rank)
        )
        each = self.num_kv_heads // self.partitions
        return [partition * each + h for partition in range(self.partitions) for h in own]

    def get_num_used_kv_heads(self, rank: int) -> int:
        return len(self.get_used_kv_heads(rank))

    def get_query_split(self, features_per_head: int | None = None) -> Split:
        """Split a dimension by query heads, with ``features_per_head`` features per head (default: the head dim)."""
        return self._make_head_split(pairwise(self.query_head_bounds), features_per_head)

    def get_kv_split(self, features_per_head: int | None = None) -> Split:
        """Split a dimension by KV heads, with ``features_per_head`` features per head (default: the head dim)."""
        stored = [self.get_stored_kv_heads(r) for r in range(self.num_ranks)]
        return self._make_head_split([(h[0], h[-1] + 1) for h in stored], features_per_head)

    def _make_head_split(self, head_ranges_by_rank: Iterable[tuple[int, int]], features_per_head: int | None) -> Split:
        d = features_per_head or self.head_dim
        partition = Split(tuple(((a * d, b * d),) for a, b in head_ranges_by_rank))
        return Split.concat([partition] * self.partitions, [partition.full] * self.partitions)

    def get_kv_grouped_projection_split(self, has_queries: bool, num_features: int) -> Split:
        """Split a fused qkv or kv projection that groups its features by KV head.

        Args:
            has_queries: whether each group contains the query heads of the KV head, before its k and v.
            num_features: number of features.
        """
        per_group = num_features // self.num_kv_heads
        if not has_queries:
            return self.get_kv_split(per_group)
        d, parts = per_group // (self.query_heads_per_kv_head + 2), []
        for rank in range(self.num_ranks):
            own: list[tuple[int, int]] = []
            for h in self.get_stored_kv_heads(rank):
                start, first = h * per_group, h * self.query_heads_per_kv_head
                local = [
                    i - first
                    for i, read in zip(self._get_query_head_range(rank), self._get_kv_head_per_query(rank), strict=True)
                    if read == h
                ]
                own += [(start + local[0] * d, start + (local[-1] + 1) * d)]
                own += [(start + self.query_heads_per_kv_head * d, start + per_group)]
            parts.append(tuple(own))
        return Split(tuple(parts))

    def get_param_splits(
        self, param_path: str, full_tensor: Tensor, attr_spec: str | tuple[str, int]
    ) -> dict[int, Split]:
        """Determine how to split a parameter that the policy lists in ``local_attrs``, by dimension."""
        kind, dim = (attr_spec, None) if isinstance(attr_spec, str) else attr_spec
        if kind == "inside":
            return {}
        split = {"heads": self.get_query_split(1), "kv_heads": self.get_kv_split(1), "width": self.get_query_split()}[
            kind
        ]
        dims = (
            [d for d, n in enumerate(full_tensor.shape) if n == split.full]
            if dim is None
            else [dim % max(full_tensor.dim(), 1)]
        )
        if len(dims) != 1 or full_tensor.shape[dims[0]] != split.full:
            shape = tuple(full_tensor.shape)
            raise PolicyError(
                f"The kind {attr_spec!r} of {param_path} in local_attrs requires exactly one dimension of size "
                f"{split.full}, but the parameter has the shape {shape}.",
                remedy=f"If several dimensions match, pass ({kind!r}, dim). If none matches, choose another kind.",
            )
        return {dims[0]: split}

    def get_local_head_and_feature_counts(self, rank: int) -> dict[str, int]:
        """Return the number of heads, KV heads, groups and features on a rank, by name."""
        heads, kv_heads = self.get_num_query_heads(rank), self.get_num_used_kv_heads(rank)
        return {"heads": heads, "kv_heads": kv_heads, "groups": heads // kv_heads, "width": heads * self.head_dim}


def get_features_per_head(
    linear_path: str, num_features: int, num_heads: int, expected_head_dim: int | None = None
) -> int:
    """Compute the number of features per head in a projection.

    Raises PolicyError if the heads do not divide the features, or the number is not ``expected_head_dim``.
    """
    if num_features % num_heads or num_features != num_heads * (expected_head_dim or num_features // num_heads):
        required = f"{num_heads * expected_head_dim}" if expected_head_dim else f"a multiple of {num_heads}"
        raise PolicyError(
            f"The layer {linear_path} has {num_features} features, but {num_heads} heads require {required}.",
            remedy="Fix num_heads, num_kv_heads or the path in the policy.",
        )
    return num_features // num_heads
