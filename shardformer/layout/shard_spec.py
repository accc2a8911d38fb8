"""ShardSpec: which numbers of a full tensor each rank holds. Split: how one dim is divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import prod

import torch
from torch import Tensor

from shardformer.errors import ConfigError

Slice = tuple[int, int]
"""Start and end (exclusive) of consecutive indices."""
Coords = Mapping[str, int]
"""Name of an axis -> the rank on it. Axes of size 1 may be left out."""
Axes = tuple[str, ...]


def even_bounds(count: int, ranks: int) -> list[int]:
    """The bounds of ``ranks`` slices of ``count`` things, the longer ones first: (10, 4) -> [0, 3, 6, 8, 10]."""
    base, more = divmod(count, ranks)
    return [r * base + min(r, more) for r in range(ranks + 1)]


@dataclass(frozen=True)
class Split:
    """How a dim is cut: for every rank the ordered slices of it that the rank holds.

    >>> Split.even(10, 4).parts
    (((0, 3),), ((3, 6),), ((6, 8),), ((8, 10),))
    >>> Split.fused([4, 4, 4], 2).parts    # q, k and v behind each other, cut one by one
    (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12)))
    >>> Split((((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),))).multiplicity   # two heads of one number, four ranks
    (2, 2, 2, 2)
    >>> Split.even(8, 4, axes=("row", "column"), sizes=(2, 2)).slices(8, {"row": 1, "column": 0})
    ((4, 6),)

    Args:
        parts: the slices of each rank. Of a product of axes the ranks count row by row, the first axis outermost.
        axes: what the dim is cut over.
        sizes: of the axes; may be left out where there is one.
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
        """As even as can be: whole units, the first ranks hold one unit more when they do not divide."""
        parts = tuple(((a * unit, b * unit),) for a, b in pairwise(even_bounds(size // unit, ranks)))
        return cls(parts, axes, sizes)

    @classmethod
    def fused(cls, sizes: Sequence[int], ranks: int, unit: int = 1) -> Split:
        """Blocks of the given sizes lie behind each other in the dim; each is cut on its own."""
        return cls.stack([cls.even(size, ranks, unit) for size in sizes], sizes)

    @classmethod
    def stack(cls, splits: Sequence[Split], sizes: Sequence[int]) -> Split:
        """The split of a dim in which the dims of several splits, of the given sizes, lie behind each other."""
        offsets = [0, *accumulate(sizes)]
        parts = [
            merge_slices([(a + o, b + o) for s, o in zip(splits, offsets, strict=False) for a, b in s.parts[r]])
            for r in range(len(splits[0].parts))
        ]
        return cls(tuple(parts), splits[0].axes, splits[0].sizes)

    def with_axes(self, axis: str) -> Split:
        """The same split over another axis."""
        return Split(self.parts, (axis,))

    def rank(self, coords: Coords) -> int:
        """The rank, in the product of the axes, at these coordinates."""
        return _rank(self.axes, self.sizes, coords)

    def slices(self, length: int, coords: Coords) -> tuple[Slice, ...]:
        """What the rank at these coordinates holds of a dim of ``length``, which is that of this split."""
        assert length == self.full, (length, self.full)
        return self.parts[self.rank(coords)]

    def length(self, rank: int) -> int:
        """How many indices of the dim ``rank`` holds."""
        return sum(b - a for a, b in self.parts[rank])

    def lengths(self) -> tuple[int, ...]:
        """The same for every rank."""
        return tuple(map(self.length, range(len(self.parts))))

    @cached_property
    def full(self) -> int:
        """The length of the full dim."""
        return max([b for part in self.parts for _, b in part], default=0)

    @cached_property
    def holders(self) -> list[tuple[int, int, int]]:
        """(start, end, how many ranks hold it), as ``count_holders``."""
        return count_holders(self.parts)

    def indices(self, rank: int) -> Tensor:
        """The indices of the full dim that ``rank`` holds, in the order in which it holds them."""
        return torch.cat([torch.arange(a, b) for a, b in self.parts[rank]] or [torch.arange(0)])

    @property
    def multiplicity(self) -> tuple[int, ...]:
        """For each index of the full dim, how many ranks hold it."""
        return tuple(count for a, b, count in self.holders for _ in range(a, b))

    @property
    def is_partition(self) -> bool:
        """Whether every index is held by exactly one rank."""
        return all(count == 1 for *_, count in self.holders)


@dataclass(frozen=True)
class EvenSplit:
    """Cuts whatever another split has left of a dim, as even as can be, in whole units.

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

    def slices(self, length: int, coords: Coords) -> tuple[Slice, ...]:
        """What the rank at these coordinates holds of a dim of ``length``."""
        units = -(-length // self.unit)
        bounds = [min(b * self.unit, length) for b in even_bounds(units, self.ranks)]
        rank = _rank(self.axes, self.sizes, coords)
        return merge_slices([(bounds[rank], bounds[rank + 1])])


AnySplit = Split | EvenSplit


def count_holders(parts: Sequence[Sequence[Slice]]) -> list[tuple[int, int, int]]:
    """(start, end, how many of ``parts`` hold it), from index 0 to the last that is held, without gaps between them.

    >>> count_holders([[(0, 2)], [(1, 3)], [(4, 5)]])
    [(0, 1, 1), (1, 2, 2), (2, 3, 1), (3, 4, 0), (4, 5, 1)]
    """
    changes: dict[int, int] = {0: 0}
    for part in parts:
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


def merge_slices(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    """Without empty ones, and with those that follow each other as one."""
    out: list[Slice] = []
    for a, b in slices:
        if a == b:
            continue
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)


def _rank(axes: Axes, sizes: Sequence[int], coords: Coords) -> int:
    if len(axes) == 1 and sizes[0] > 1:
        return coords[axes[0]]
    rank = 0
    for axis, size in zip(axes, sizes, strict=True):
        rank = rank * size + (coords.get(axis, 0) if size == 1 else coords[axis])
    return rank


Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangular piece of a tensor: where it begins in the full tensor and in a rank's part, and its size."""

    full: Offsets
    local: Offsets
    size: Offsets

    def of_full(self, x: Tensor) -> Tensor:
        """The piece, as a view of the full tensor."""
        return _cut(x, self.full, self.size)

    def of_local(self, x: Tensor) -> Tensor:
        """The piece, as a view of the part that holds it."""
        return _cut(x, self.local, self.size)


@dataclass(frozen=True, init=False)
class ShardSpec:
    """The layout of one tensor over the grid: its full shape, and for each dim that is cut the splits of it.

    Several splits of a dim follow each other: the first cuts the full dim, the next what the first has left. An axis
    cuts one dim of a tensor.

    >>> spec = ShardSpec((6, 4), {0: Split.even(6, 2), 1: Split.even(4, 2, axes=("column",))})
    >>> spec.boxes({"tensor": 1, "column": 0})
    (Box(full=(3, 0), local=(0, 0), size=(3, 2)),)
    >>> ShardSpec((6,), {0: [Split.even(6, 2), EvenSplit("data", 2)]}).boxes({"tensor": 1, "data": 1})
    (Box(full=(5,), local=(0,), size=(1,)),)

    Args:
        shape: the full shape.
        splits: dim -> its split, or its splits in order.

    Raises ConfigError for a split that is not of its dim's length, leaves out a part of it, or cuts over an axis that
    cuts another dim.
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
            self._check()

    def _check(self) -> None:
        axes = [axis for splits in self.splits.values() for split in splits for axis in split.axes]
        if len(axes) > len(set(axes)):
            twice = next(axis for axis in axes if axes.count(axis) > 1)
            raise ConfigError(
                f"A tensor of shape {self.shape} is cut twice over the axis {twice!r}",
                rule="An axis cuts one dim of a tensor, once",
                remedy="Cut the other dim over another axis, or a view of this one",
            )
        for dim, splits in self.splits.items():
            full = getattr(splits[0], "full", None)
            if not 0 <= dim < len(self.shape) or full not in (None, self.shape[dim]):
                raise ConfigError(
                    f"A split of length {full} was given for dim {dim} of shape {self.shape}",
                    remedy="Build the split from the size of the dim, for example Split.even(shape[dim], ranks)",
                )
            if 0 in [count for *_, count in self._holders[dim]]:
                raise ConfigError(
                    f"A split of dim {dim} of shape {self.shape} leaves out a part of it: {splits}",
                    remedy="Give what is left out to one of the ranks",
                )

    @property
    def is_sharded(self) -> bool:
        return bool(self.splits)

    @cached_property
    def axes(self) -> dict[str, int]:
        """The axes that the tensor is cut over, and their sizes."""
        return {axis: size for splits in self.splits.values() for axis, size in _axes_of(splits).items()}

    def rank_coords(self) -> list[Coords]:
        """The coordinates of all ranks that hold different parts, the first axis outermost."""
        return _places(self.axes)

    def boxes(self, coords: Coords) -> tuple[Box, ...]:
        """The pieces of the full tensor that the rank at these coordinates holds, in its order."""
        dims = [list(_with_starts(self.slices_of(d, coords))) for d in range(len(self.shape))]
        return tuple(
            Box(tuple(a for a, _, _ in piece), tuple(at for _, at, _ in piece), tuple(n for _, _, n in piece))
            for piece in product(*dims)
        )

    def slices_of(self, dim: int, coords: Coords) -> tuple[Slice, ...]:
        """What the rank holds of one dim."""
        length, splits = self.shape[dim], self.splits.get(dim, ())
        held: tuple[Slice, ...] = ((0, length),) if length else ()
        for at, split in enumerate(splits):
            inner = split.slices(sum([b - a for a, b in held]), coords)
            held = _slices_of(held, inner) if at else merge_slices(inner)
        return held

    def local_shape(self, coords: Coords) -> Offsets:
        """The shape of the part of the rank at these coordinates."""
        shape = list(self.shape)
        for dim in self.splits:
            shape[dim] = sum([b - a for a, b in self.slices_of(dim, coords)])
        return tuple(shape)

    def slice(self, full: Tensor, coords: Coords) -> Tensor:
        """The part of ``full`` that the rank at these coordinates holds, as memory of its own.

        Raises ConfigError where ``full`` is not of the full shape.
        """
        if tuple(full.shape) != self.shape:
            raise ConfigError(
                f"A tensor of shape {tuple(full.shape)} was given to slice",
                rule=f"This layout is of a tensor of shape {self.shape}",
                remedy="Give the full tensor, not a part of it",
            )
        local = full
        for dim in self.splits:
            pieces = [local.narrow(dim, a, b - a) for a, b in self.slices_of(dim, coords) or [(0, 0)]]
            local = torch.cat(pieces, dim) if len(pieces) != 1 else pieces[0]
        return local.detach().clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The full tensor from the parts of all ranks, in the order of ``places`` (of shared ones the last one's)."""
        full = parts[0].new_zeros(self.shape)
        for coords, part in zip(self.rank_coords(), parts, strict=True):
            self.place(part, full, coords)
        return full

    def place(self, local: Tensor, full: Tensor, coords: Coords) -> None:
        """Writes the part of the rank at these coordinates into its places in ``full``."""
        for box in self.boxes(coords):
            box.of_full(full).copy_(box.of_local(local))

    @cached_property
    def _holders(self) -> dict[int, list[tuple[int, int, int]]]:
        """Dim -> (start, end, how many ranks hold it) of each dim that is cut."""
        holders = {}
        for dim, splits in self.splits.items():
            first = splits[0]
            if len(splits) == 1 and isinstance(first, Split):
                holders[dim] = first.holders
            else:
                holders[dim] = count_holders([self.slices_of(dim, coords) for coords in _places(_axes_of(splits))])
        return holders

    @cached_property
    def shared_axes(self) -> tuple[str, ...]:
        """The axes over whose ranks numbers are held more than once."""
        if not self.splits:
            return ()
        shared = [dim for dim, runs in self._holders.items() if max([count for *_, count in runs], default=0) > 1]
        return tuple(axis for dim in shared for axis in _axes_of(self.splits[dim]))

    @property
    def is_partition(self) -> bool:
        """Whether every number is held by one rank only, of those that hold different parts."""
        return all(count == 1 for runs in self._holders.values() for *_, count in runs)

    def num_copies(self, coords: Coords | None = None) -> Tensor | int:
        """How many ranks hold each number: 1, or fp64 counts that broadcast against the part at these coordinates.

        Without coordinates the counts broadcast against the full tensor.
        """
        out: Tensor | int = 1
        for dim, runs in self._holders.items():
            if all(count == 1 for *_, count in runs):
                continue
            counts = torch.cat([torch.full((b - a,), float(count), dtype=torch.float64) for a, b, count in runs])
            if coords is not None:
                counts = torch.cat([counts[a:b] for a, b in self.slices_of(dim, coords)] or [counts[:0]])
            out = out * counts.reshape([-1 if d == dim else 1 for d in range(len(self.shape))])
        return out


def _axes_of(splits: Sequence[AnySplit]) -> dict[str, int]:
    return {axis: size for split in splits for axis, size in zip(split.axes, split.sizes, strict=True)}


def _places(axes: Mapping[str, int]) -> list[Coords]:
    return [dict(zip(axes, ranks, strict=True)) for ranks in product(*(range(size) for size in axes.values()))]


def _with_starts(slices: Sequence[Slice]) -> Iterator[tuple[int, int, int]]:
    """(start in the full dim, start in the part, length) of each slice."""
    at = 0
    for a, b in slices:
        yield a, at, b - a
        at += b - a


def _slices_of(held: Sequence[Slice], inner: Sequence[Slice]) -> tuple[Slice, ...]:
    """The slices of the full dim that ``inner`` are, which count along what ``held`` lists."""
    out = [
        (a + max(c, at) - at, a + min(d, at + n) - at)
        for c, d in inner
        for a, at, n in _with_starts(held)
        if max(c, at) < min(d, at + n)
    ]
    return merge_slices(out)


def _cut(x: Tensor, start: Offsets, size: Offsets) -> Tensor:
    for dim, (a, n) in enumerate(zip(start, size, strict=True)):
        x = x.narrow(dim, a, n)
    return x
