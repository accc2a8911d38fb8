"""Which positions of a sequence each rank of context parallelism has.

The ranks are a ring of P, and each of them a group of U. The sequence lies in 2P chunks, as even as can be; ring rank i
has chunks i and 2P-1-i, so that what causal attention computes is the same for all (zig-zag). The U ranks of its group
have a stretch each of these two chunks, one behind the other. P=2, U=2, and 16 positions:

    chunk            0            1            2            3
    position     0  1  2  3   4  5  6  7   8  9 10 11  12 13 14 15
    rank        (0,0) (0,0)  (1,0) (1,0)  (1,1) (1,1)   (0,1) (0,1)      (ring, in its group)

Plain data: nothing is padded, and any length from 2P on can be cut.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from shardformer.comm.collectives import all_gather_numbers
from shardformer.errors import InputError
from shardformer.layout.shard_spec import Slice, Split, even_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.torch_compat import to_list


@dataclass(frozen=True)
class SequencePositions:
    """How ``length`` positions lie over ``ring`` x ``group`` ranks.

    >>> SequencePositions(16, ring=2, group=2).split.parts
    (((0, 4),), ((12, 16),), ((4, 8),), ((8, 12),))
    >>> SequencePositions(10, ring=2).chunks
    ((0, 3), (3, 6), (6, 8), (8, 10))
    >>> SequencePositions(10, ring=2).owner(2)
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
        if self.length < self.min_length(self.ring, self.group):
            raise InputError(
                f"A sequence of {self.length} positions",
                rule=f"Over {self.ring} x {self.group} ranks of the sequence axis it has "
                f"{self.min_length(self.ring, self.group)} at the least, so that each has some",
                remedy="Give longer sequences, or take fewer ranks for the sequence axis",
            )

    @staticmethod
    def min_length(ring: int, group: int) -> int:
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

    def position_ranges(self, ring_rank: int) -> list[int]:
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


def chunk_indices(positions: SequencePositions, chunks: tuple[int, ...]) -> Tensor:
    """The positions of some chunks, one behind the other."""
    return torch.cat([torch.arange(*positions.chunks[chunk]) for chunk in chunks])


@dataclass(frozen=True, eq=False)
class IndexShards:
    """Which indices of a dim each rank of an axis has.

    Args:
        parts: of each rank, the indices in its order.
        full: length of the whole dim.
    """

    axis: Axis
    parts: tuple[Tensor, ...]
    full: int

    @classmethod
    def of(cls, positions: SequencePositions, axis: Axis) -> IndexShards:
        return cls(axis, tuple(positions.indices(rank) for rank in range(axis.size)), positions.length)

    @property
    def own(self) -> Tensor:
        return self.parts[self.axis.rank]

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a full tensor."""
        return x.index_select(dim, self.own.to(x.device))

    def within(self, lead: int) -> IndexShards:
        """Of a dim that is ``lead`` times as long: the rows of several samples behind each other."""
        if lead == 1:
            return self
        offsets = torch.arange(lead)[:, None] * self.full
        return IndexShards(self.axis, tuple((offsets + part).flatten() for part in self.parts), lead * self.full)

    def sliced(self, taken: slice) -> tuple[IndexShards, Tensor]:
        """Of a slice of the dim: its rows, and which of this rank's own they are."""
        start, stop, step = taken.indices(self.full)
        full = len(range(start, stop, step))
        kept = [(part >= start) & (part < stop) & ((part - start) % step == 0) for part in self.parts]
        parts = tuple((part[keep] - start) // step for part, keep in zip(self.parts, kept, strict=True))
        return IndexShards(self.axis, parts, full), kept[self.axis.rank].nonzero()[:, 0]

    def is_like(self, other: IndexShards) -> bool:
        if self is other:
            return True
        alike = zip(self.parts, other.parts, strict=True)
        return self.axis is other.axis and self.full == other.full and all(torch.equal(a, b) for a, b in alike)


Dims = dict[Hashable, int | None]
"""Which dim of an argument of a layer is the sequence's, by where it stands; None: none is."""

_NOW = threading.local()


@dataclass(eq=False)
class ContextParallelState:
    """The context parallelism of one model.

    Args:
        axis: all ranks over which the sequence is cut.
        ring: between whose ranks keys and values travel.
        group: whose ranks exchange heads for positions.
        gathers: whether keys are gathered before attention, instead of sent under it.
        is_whole: whether attentions stay as they are and are given all positions, and masks of all pairs of them.

    Attributes:
        is_open: whether the forward that is under way, or was last, cuts its sequence.
        now: how the sequence of the layer that runs lies; None where it is whole.
        seed: of the dropout of weights in this forward.
        known: how the sequences so far lie, by their lengths.
        met: those of the forward that is under way, or was last.
        dims: what was learnt of the arguments of layers.
    """

    axis: Axis
    ring: Axis
    group: Axis
    gathers: bool = False
    is_whole: bool = False
    is_open: bool = False
    now: SequencePositions | None = None
    seed: int = 0
    known: dict[int, SequencePositions] = field(default_factory=dict)
    met: dict[int, SequencePositions] = field(default_factory=dict)
    dims: Dims = field(default_factory=dict)
    _rows: dict[int, IndexShards] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)

    def positions(self, length: int) -> SequencePositions:
        """How a sequence lies over the ranks. Raises InputError where it is too short."""
        if length not in self.known:
            self.known[length] = SequencePositions(length, self.ring.size, self.group.size)
        return self.known[length]

    def rows(self, length: int) -> IndexShards:
        """The same, for each rank of the axis."""
        if length not in self._rows:
            self._rows[length] = IndexShards.of(self.positions(length), self.axis)
        return self._rows[length]

    def part(self, length: int) -> int:
        """How many positions of a sequence this rank has."""
        return self.positions(length).split.length(self.axis.rank)

    def positions_in_forward(self, length: int) -> SequencePositions:
        """As ``positions``, of a sequence of this forward."""
        self.met[length] = found = self.positions(length)
        return found

    def of_part(self, count: int, among: Mapping[int, SequencePositions] | None = None) -> SequencePositions | None:
        """The sequence of which this rank has so many positions, of those that were seen, or ``among`` these.

        Communicates one number where some rank has as many of two sequences.
        """
        known = list((self.known if among is None else among).values())
        parts = [p.split.lengths() for p in known]
        if all(len(set(of_rank)) == len(of_rank) for of_rank in zip(*parts, strict=True)):
            return next((p for p in known if p.split.length(self.axis.rank) == count), None)
        full = sum(numbers[0] for numbers in all_gather_numbers([count], self.axis))
        return self.known.get(full)

    def dim_of(self, path: Hashable, x: Tensor, lengths: Collection[int], samples: int = -1) -> int | None:
        """Which dim of an argument is the sequence's: as it was proven, or the one of its length.

        Args:
            samples: how many there are; the first dim counts them where it is as long.
        """
        at = [d for d, size in enumerate(x.shape) if size in lengths]
        if path in self.dims:
            dim = self.dims[path]
            return dim if dim is None or dim in at else None
        return self._learnt(path, x, [d for d in at if d > 0 or x.shape[0] != samples])

    def learn_parts(self, given: Mapping[Any, Tensor], lengths: Collection[int], samples: int) -> None:
        """Learns which dim of arguments of which ranks have parts is the sequence's: on every rank as long as its part.

        Communicates a number for each that was not seen before.
        """
        new = {path: x for path, x in given.items() if path not in self.dims}
        if not new:
            return
        parts = {self.part(length) for length in lengths}
        at = [[d for d, n in enumerate(x.shape) if n in parts and (d > 0 or n != samples)] for x in new.values()]
        everywhere = all_gather_numbers([sum(1 << d for d in dims) for dims in at], self.axis)
        for (path, x), dims, bits in zip(new.items(), at, zip(*everywhere, strict=True), strict=True):
            self._learnt(path, x, [d for d in dims if all(theirs >> d & 1 for theirs in bits)])

    def _learnt(self, path: Hashable, x: Tensor, at: Sequence[int]) -> int | None:
        if len(at) > 1 and not self.is_whole:
            raise InputError(
                f"A layer is given a tensor of shape {tuple(x.shape)} (its argument {_format_path(path)})",
                rule=f"One dim of it is the sequence's, and {len(at)} have its length: what is said of all pairs of "
                "positions, as by a mask that was made before, is on no rank",
                remedy="Give attention_mask (batch, sequence), or position_ids that start again with each document; "
                "where it is by chance, sequences of another length",
            )
        self.dims[path] = at[0] if len(at) == 1 else None
        return self.dims[path]

    def number(self, module: object) -> int:
        """Tells the attentions of the model apart, alike on all ranks."""
        return self._numbers.setdefault(id(module), len(self._numbers))

    @contextmanager
    def running(self) -> Iterator[None]:
        """In here a forward of this model is under way."""
        before, _NOW.run = current_state(), self
        try:
            yield
        finally:
            _NOW.run = before


def _format_path(path: Hashable) -> str:
    return "".join(map(str, path[1:])) if isinstance(path, tuple) else str(path)


def current_state() -> ContextParallelState | None:
    """The run of the model whose forward is under way on this thread."""
    run: ContextParallelState | None = getattr(_NOW, "run", None)
    return run


def set_current_state(run: ContextParallelState | None) -> None:
    """The same as ``running``, where no context manager can stand."""
    _NOW.run = run


def new_seed() -> int:
    """A number of the stream of random numbers that all ranks have alike."""
    return int(to_list(torch.randint(2**31, (), device="cpu")))
