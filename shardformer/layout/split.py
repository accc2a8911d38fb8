"""Split: how one dim is cut over the ranks of an axis, or of a product of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

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
            joined([(a + o, b + o) for s, o in zip(splits, offsets, strict=False) for a, b in s.parts[r]])
            for r in range(len(splits[0].parts))
        ]
        return cls(tuple(parts), splits[0].axes, splits[0].sizes)

    def over(self, axis: str) -> Split:
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
        return max((b for part in self.parts for _, b in part), default=0)

    def indices(self, rank: int) -> Tensor:
        """The indices of the full dim that ``rank`` holds, in the order in which it holds them."""
        return torch.cat([torch.arange(a, b) for a, b in self.parts[rank]] or [torch.arange(0)])

    @property
    def multiplicity(self) -> tuple[int, ...]:
        """For each index of the full dim, how many ranks hold it."""
        return tuple(count for a, b, count in holders_of(self.parts) for _ in range(a, b))

    @property
    def is_partition(self) -> bool:
        """Whether every index is held by exactly one rank."""
        return all(count == 1 for *_, count in holders_of(self.parts))


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
        return joined([(bounds[rank], bounds[rank + 1])])


AnySplit = Split | EvenSplit


def holders_of(parts: Sequence[Sequence[Slice]]) -> list[tuple[int, int, int]]:
    """(start, end, how many of ``parts`` hold it), from index 0 to the last that is held, without gaps between them.

    >>> holders_of([[(0, 2)], [(1, 3)], [(4, 5)]])
    [(0, 1, 1), (1, 2, 2), (2, 3, 1), (3, 4, 0), (4, 5, 1)]
    """
    changes: dict[int, int] = {0: 0}
    for a, b in (stretch for part in parts for stretch in part if stretch[0] < stretch[1]):
        changes[a], changes[b] = changes.get(a, 0) + 1, changes.get(b, 0) - 1
    places = sorted(changes)
    counts = accumulate(changes[place] for place in places)
    runs: list[tuple[int, int, int]] = []
    for (a, b), count in zip(pairwise(places), counts, strict=False):
        if runs and runs[-1][2] == count:
            runs[-1] = (runs[-1][0], b, count)
        else:
            runs.append((a, b, count))
    return runs


def joined(slices: Sequence[Slice]) -> tuple[Slice, ...]:
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
    rank = 0
    for axis, size in zip(axes, sizes, strict=True):
        rank = rank * size + (coords.get(axis, 0) if size == 1 else coords[axis])
    return rank
