"""Positions: which positions of a sequence each rank of context parallelism has.

The ranks are a ring of P, and each of them a group of U. The sequence lies in 2P chunks, as even as can be; ring rank i
has chunks i and 2P-1-i, so that what causal attention computes is the same for all (zig-zag). The U ranks of its group
have a stretch each of these two chunks, one behind the other. P=2, U=2, and 16 positions:

    chunk            0            1            2            3
    position     0  1  2  3   4  5  6  7   8  9 10 11  12 13 14 15
    rank        (0,0) (0,0)  (1,0) (1,0)  (1,1) (1,1)   (0,1) (0,1)      (ring, in its group)

Plain data: nothing is padded, and any length from 2P on can be cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import torch
from torch import Tensor

from shardformer.errors import InputError
from shardformer.layout.split import Slice, Split, even_bounds


@dataclass(frozen=True)
class Positions:
    """How ``length`` positions lie over ``ring`` x ``group`` ranks.

    >>> Positions(16, ring=2, group=2).split.parts
    (((0, 4),), ((12, 16),), ((4, 8),), ((8, 12),))
    >>> Positions(10, ring=2).chunks
    ((0, 3), (3, 6), (6, 8), (8, 10))
    >>> Positions(10, ring=2).owner(2)
    1

    Args:
        ring: ranks between which keys and values travel.
        group: ranks that hold the two chunks of a ring rank together, and exchange heads for positions.

    Raises InputError where a rank would have no position.
    """

    length: int
    ring: int = 1
    group: int = 1

    def __post_init__(self) -> None:
        if self.length < self.least(self.ring, self.group):
            raise InputError(
                f"A sequence of {self.length} positions",
                rule=f"Over {self.ring} x {self.group} ranks of the sequence axis it has "
                f"{self.least(self.ring, self.group)} at the least, so that each has some",
                remedy="Give longer sequences, or take fewer ranks for the sequence axis",
            )

    @staticmethod
    def least(ring: int, group: int) -> int:
        """The shortest sequence that can be cut over so many ranks."""
        return ring * max(2, group) if ring > 1 else group

    @cached_property
    def chunks(self) -> tuple[Slice, ...]:
        """Start and end of each of the 2P chunks: of one ring rank the halves, too."""
        bounds = even_bounds(self.length, 2 * self.ring)
        return tuple(pairwise(bounds))

    def chunks_of(self, ring_rank: int) -> tuple[int, int]:
        """The two chunks of a ring rank."""
        return ring_rank, 2 * self.ring - 1 - ring_rank

    def owner(self, chunk: int) -> int:
        """The ring rank that has a chunk."""
        return min(chunk, 2 * self.ring - 1 - chunk)

    def stretches(self, ring_rank: int) -> list[int]:
        """How many positions each rank of a ring rank's group has."""
        count = sum(b - a for a, b in self._held(ring_rank))
        bounds = even_bounds(count, self.group)
        return [b - a for a, b in pairwise(bounds)]

    @cached_property
    def split(self) -> Split:
        """What each rank of the whole axis holds, the ring's rank outermost."""
        parts = tuple(self._stretch(*ranks) for ranks in product(range(self.ring), range(self.group)))
        return Split(parts, ("sequence",))

    def indices(self, rank: int) -> Tensor:
        """The positions that a rank of the whole axis holds, in its order, which is theirs."""
        return self.split.indices(rank)

    def _held(self, ring_rank: int) -> list[Slice]:
        return [self.chunks[chunk] for chunk in self.chunks_of(ring_rank)]

    def _stretch(self, ring_rank: int, group_rank: int) -> tuple[Slice, ...]:
        bounds = even_bounds(sum(b - a for a, b in self._held(ring_rank)), self.group)
        start, end = bounds[group_rank], bounds[group_rank + 1]
        found: list[Slice] = []
        passed = 0
        for a, b in self._held(ring_rank):
            first, last = max(start - passed, 0), min(end - passed, b - a)
            if last > first:
                found.append((a + first, a + last))
            passed += b - a
        return tuple(found)


def rows_of(positions: Positions, chunks: tuple[int, ...]) -> Tensor:
    """The positions of some chunks, one behind the other."""
    return torch.cat([torch.arange(*positions.chunks[chunk]) for chunk in chunks])
