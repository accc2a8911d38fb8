"""ShardSpec: which slices of the full tensor each rank holds. Nothing else in the project guesses that from shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from shardformer.errors import ConfigError

Slice = tuple[int, int]
"""Start and end (exclusive) of a stretch of indices of the full tensor."""


@dataclass(frozen=True)
class Split:
    """How one dim is cut over the ranks of one axis: for every rank the ordered slices of the full dim that it holds.

    >>> Split.even(10, 4).parts
    (((0, 3),), ((3, 6),), ((6, 8),), ((8, 10),))
    >>> Split.fused([4, 4, 4], 2).parts    # q, k and v behind each other, cut one by one
    (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12)))
    >>> Split((((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),))).multiplicity   # two heads of one number, four ranks
    (2, 2, 2, 2)
    """

    parts: tuple[tuple[Slice, ...], ...]
    axis: str = "tensor"

    @classmethod
    def even(cls, size: int, ranks: int, unit: int = 1) -> Split:
        """As even as can be: whole units, the first ranks hold one unit more when they do not divide."""
        return cls(tuple(((a * unit, b * unit),) for a, b in pairwise(even_bounds(size // unit, ranks))))

    @classmethod
    def fused(cls, sizes: Sequence[int], ranks: int, unit: int = 1) -> Split:
        """Blocks of the given sizes lie behind each other in the dim; each is cut on its own."""
        return cls.stack([cls.even(size, ranks, unit) for size in sizes], sizes)

    @classmethod
    def stack(cls, splits: Sequence[Split], sizes: Sequence[int]) -> Split:
        """The split of a dim in which the dims of several splits, of the given sizes, lie behind each other."""
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        ranks = range(len(splits[0].parts))
        return cls(
            tuple(
                _joined([(a + o, b + o) for s, o in zip(splits, offsets, strict=True) for a, b in s.parts[r]])
                for r in ranks
            )
        )

    def length(self, rank: int) -> int:
        """How many indices of the dim ``rank`` holds."""
        return sum(b - a for a, b in self.parts[rank])

    @cached_property
    def full(self) -> int:
        """The length of the full dim."""
        return max((b for part in self.parts for _, b in part), default=0)

    def indices(self, rank: int) -> Tensor:
        """The indices of the full dim that ``rank`` holds, in the order in which it holds them."""
        return torch.cat([torch.arange(a, b) for a, b in self.parts[rank]] or [torch.arange(0)])

    @cached_property
    def multiplicity(self) -> tuple[int, ...]:
        """For each index of the full dim, how many ranks hold it."""
        count = [0] * self.full
        for part in self.parts:
            for a, b in part:
                for i in range(a, b):
                    count[i] += 1
        return tuple(count)

    @property
    def has_gap(self) -> bool:
        """Whether some index is held by no rank."""
        end = 0
        for a, b in sorted(stretch for part in self.parts for stretch in part):
            if a > end:
                return True
            end = max(end, b)
        return False

    @property
    def is_partition(self) -> bool:
        """Whether every index is held by exactly one rank."""
        return all(c == 1 for c in self.multiplicity)


def even_bounds(count: int, ranks: int) -> list[int]:
    """The bounds of ``ranks`` stretches of ``count`` things, the longer ones first: (10, 4) -> [0, 3, 6, 8, 10]."""
    base, more = divmod(count, ranks)
    return [r * base + min(r, more) for r in range(ranks + 1)]


def _joined(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    out: list[Slice] = []
    for a, b in slices:
        if a == b:
            continue
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)


@dataclass(frozen=True)
class ShardSpec:
    """The layout of one parameter: its full shape, and a ``Split`` for each dim that is sharded.

    Args:
        shape: the full shape.
        splits: sharded dim -> how it is cut.
        partial: names of the axes over whose ranks the gradient that backward computes here is one summand only,
            although the values are replicated (a norm that sees a part of the sequence, a late bias).
    """

    shape: tuple[int, ...]
    splits: Mapping[int, Split] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for dim, split in self.splits.items():
            if not 0 <= dim < len(self.shape) or split.full != self.shape[dim]:
                raise ConfigError(
                    f"A split of length {split.full} was given for dim {dim} of shape {tuple(self.shape)}",
                    rule="The slices of all ranks together cover the dim",
                    remedy="Build the split from the size of the dim, for example Split.even(shape[dim], ranks)",
                )
            if split.has_gap:
                raise ConfigError(
                    f"A split of dim {dim} of shape {tuple(self.shape)} leaves out a part of it: {split.parts}",
                    rule="The slices of all ranks together cover the dim",
                    remedy="Give what is left out to one of the ranks",
                )

    @property
    def is_sharded(self) -> bool:
        return bool(self.splits)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the part of ``rank``."""
        return tuple(self.splits[d].length(rank) if d in self.splits else n for d, n in enumerate(self.shape))

    def slice(self, full: Tensor, rank: int) -> Tensor:
        """The part of ``full`` that ``rank`` holds, as memory of its own."""
        if tuple(full.shape) != tuple(self.shape):
            raise ConfigError(
                f"A tensor of shape {tuple(full.shape)} was given to slice",
                rule=f"This layout is of a tensor of shape {tuple(self.shape)}",
                remedy="Give the full tensor, not a part of it",
            )
        local = full
        for dim, split in self.splits.items():
            stretches = [local.narrow(dim, a, b - a) for a, b in split.parts[rank]]
            local = torch.cat(stretches, dim) if len(stretches) != 1 else stretches[0]
        return local.detach().clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The full tensor from the parts of all ranks, in rank order (where several hold a slice, the last one's)."""
        full = parts[0].new_zeros(self.shape)
        if not self.splits:
            return full.copy_(parts[0])
        (dim, split) = next(iter(self.splits.items()))
        for rank, part in enumerate(parts):
            full.index_copy_(dim, split.indices(rank).to(part.device), part)
        return full

    def multiplicity(self, rank: int) -> Tensor | int:
        """How many ranks hold each index of this rank's part: 1, or a tensor that broadcasts against the part."""
        for dim, split in self.splits.items():
            if not split.is_partition:
                held = torch.tensor(split.multiplicity)[split.indices(rank)]
                return held.reshape([-1 if d == dim else 1 for d in range(len(self.shape))])
        return 1
