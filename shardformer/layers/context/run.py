"""What a forward under context parallelism knows: whether its sequence is cut, and how it lies over the ranks."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardformer.comm.collectives import gather_numbers
from shardformer.comm.values import numbers_in
from shardformer.errors import InputError
from shardformer.layers.context.cut_tensor import Rows
from shardformer.layout.positions import Positions
from shardformer.mesh.axis import Axis

Dims = dict[Hashable, int | None]
"""Which dim of an argument of a layer is the sequence's, by where it stands; None: none is."""

_NOW = threading.local()


@dataclass(eq=False)
class ContextRun:
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
    now: Positions | None = None
    seed: int = 0
    known: dict[int, Positions] = field(default_factory=dict)
    met: dict[int, Positions] = field(default_factory=dict)
    dims: Dims = field(default_factory=dict)
    _rows: dict[int, Rows] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)

    def positions(self, length: int) -> Positions:
        """How a sequence lies over the ranks. Raises InputError where it is too short."""
        if length not in self.known:
            self.known[length] = Positions(length, self.ring.size, self.group.size)
        return self.known[length]

    def rows(self, length: int) -> Rows:
        """The same, for each rank of the axis."""
        if length not in self._rows:
            self._rows[length] = Rows.of(self.positions(length), self.axis)
        return self._rows[length]

    def part(self, length: int) -> int:
        """How many positions of a sequence this rank has."""
        return self.positions(length).split.length(self.axis.rank)

    def meet(self, length: int) -> Positions:
        """As ``positions``, of a sequence of this forward."""
        self.met[length] = found = self.positions(length)
        return found

    def of_part(self, count: int, among: Mapping[int, Positions] | None = None) -> Positions | None:
        """The sequence of which this rank has so many positions, of those that were seen, or ``among`` these.

        Communicates one number where some rank has as many of two sequences.
        """
        known = list((self.known if among is None else among).values())
        parts = [p.split.lengths() for p in known]
        if all(len(set(of_rank)) == len(of_rank) for of_rank in zip(*parts, strict=True)):
            return next((p for p in known if p.split.length(self.axis.rank) == count), None)
        full = sum(numbers[0] for numbers in gather_numbers([count], self.axis))
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
        everywhere = gather_numbers([sum(1 << d for d in dims) for dims in at], self.axis)
        for (path, x), dims, bits in zip(new.items(), at, zip(*everywhere, strict=True), strict=True):
            self._learnt(path, x, [d for d in dims if all(theirs >> d & 1 for theirs in bits)])

    def _learnt(self, path: Hashable, x: Tensor, at: Sequence[int]) -> int | None:
        if len(at) > 1 and not self.is_whole:
            raise InputError(
                f"A layer is given a tensor of shape {tuple(x.shape)} (its argument {_shown(path)})",
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
        before, _NOW.run = current(), self
        try:
            yield
        finally:
            _NOW.run = before


def _shown(path: Hashable) -> str:
    return "".join(map(str, path[1:])) if isinstance(path, tuple) else str(path)


def current() -> ContextRun | None:
    """The run of the model whose forward is under way on this thread."""
    run: ContextRun | None = getattr(_NOW, "run", None)
    return run


def set_current(run: ContextRun | None) -> None:
    """The same as ``running``, where no context manager can stand."""
    _NOW.run = run


def new_seed() -> int:
    """A number of the stream of random numbers that all ranks have alike."""
    return int(numbers_in(torch.randint(2**31, (), device="cpu")))
