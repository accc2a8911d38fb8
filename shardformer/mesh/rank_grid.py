"""Rank arithmetic for an n-dimensional grid, and the sizes of its axes that all processes agree on.

With eight processes and ``tensor=2, pipe=2`` the grid is the array ``arange(8).reshape(data=2, pipe=2, sequence=1,
tensor=2)``. A line runs through all ranks that differ on one axis, or on some, alone: rank 5 = (data 1, pipe 0,
tensor 1) shares its tensor line with rank 4, and its line over data and tensor with 0, 1 and 4.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch.distributed as dist

from shardformer.errors import ConfigError, ShardFormerError, check_int, did_you_mean
from shardformer.mesh.transport import RankGroups

AXES = ("data", "pipe", "sequence", "tensor")


@dataclass(frozen=True)
class AxisView:
    """Axes of the grid (``of``) whose ranks are also counted along other axes."""

    of: tuple[str, ...]
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class RankGrid:
    """Ranks laid out along named axes, the last of which counts fastest.

    Args:
        sizes: of the axes, outermost first.
        ranks: the global rank at each place.
        views: axes that refold these ones.
        hosts: the name of the host of each of ``ranks``; empty where they are not known.

    >>> grid = RankGrid({"data": 2, "tensor": 4}, tuple(range(8))).view(["tensor"], {"row": 2, "column": 2})
    >>> grid.coords(6)
    {'data': 1, 'tensor': 2, 'row': 1, 'column': 0}
    >>> grid.lines("row")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> grid.lines("data", "row")
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """

    sizes: Mapping[str, int]
    ranks: tuple[int, ...]
    views: tuple[AxisView, ...] = ()
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, sizes: Mapping[str, int], ranks: Sequence[int] | None = None, hosts: Sequence[str] = ()) -> RankGrid:
        """The four axes, of size 1 where none is given; the ranks are counted from 0 unless they are given."""
        for name, size in sizes.items():
            check_axis_size(name, size)
        places = range(prod(sizes.values())) if ranks is None else ranks
        grid = cls({name: sizes.get(name, 1) for name in AXES}, tuple(places), (), tuple(hosts))
        grid.check(*sizes)
        return grid

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, those of views behind."""
        return (*self.sizes, *(name for view in self.views for name in view.sizes))

    def check(self, *names: str) -> None:
        """Raises ConfigError for a name that no axis has."""
        for name in names:
            if name not in self.names:
                raise ConfigError(
                    f"There is no axis {name!r}",
                    rule=f"The axes are {', '.join(self.names)}",
                    remedy=did_you_mean(name, self.names),
                )

    def coords(self, rank: int) -> dict[str, int]:
        """Global rank -> its rank on each axis, those of views too."""
        return self._coords_at(self.ranks.index(rank))

    def rank_at(self, coords: Mapping[str, int]) -> int:
        """The global rank at these coordinates on axes of the grid; 0 on those that are not named."""
        place = 0
        for name, size in self.sizes.items():
            place = place * size + coords.get(name, 0)
        if not all(name in self.sizes and 0 <= rank < self.sizes[name] for name, rank in coords.items()):
            raise ConfigError(f"There is no rank at {dict(coords)}", remedy=f"The sizes are {dict(self.sizes)}")
        return self.ranks[place]

    def rank_groups(self, *names: str, only: Mapping[str, Sequence[int]] | None = None) -> RankGroups:
        """All lines along the product of some axes, each in the order of the grid.

        Args:
            only: axis -> the ranks on it that take part; the others stand on no line.

        Raises ConfigError for names that overlap: an axis with a part of a view of it, or two views of one axis.
        """
        fixed = self._fixed(names)
        found: dict[tuple[int, ...], list[int]] = {}
        for place, rank in enumerate(self.ranks):
            at = self._coords_at(place)
            if all(at[name] in allowed for name, allowed in (only or {}).items()):
                found.setdefault(tuple(at[name] for name in fixed), []).append(rank)
        return tuple(tuple(line) for line in found.values())

    def view(self, of: Sequence[str], sizes: Mapping[str, int]) -> RankGrid:
        """The grid with new axes that refold the product of others; it has as many ranks as before.

        Raises ConfigError where that cannot be.
        """
        self.check(*of)
        size = prod(self.sizes.get(name, 1) for name in of)
        asked = " times ".join(f"{name}={n}" for name, n in sizes.items()) or "nothing"
        refolded = " times ".join(f"{name}={self.sizes.get(name)}" for name in of) or "nothing"
        if not of or list(of) != [name for name in self.sizes if name in of]:
            raise ConfigError(
                f"A view of {', '.join(of) or 'no axis'}",
                rule=f"A view refolds axes of the grid, in their order: {', '.join(self.sizes)}",
                remedy="Name them so, and no axis of another view",
            )
        if taken := [name for name in sizes if name in self.names]:
            raise ConfigError(
                f"A view calls an axis {taken[0]!r}, as another is called",
                remedy=f"Choose a name that is none of {', '.join(self.names)}",
            )
        for name, n in sizes.items():
            check_axis_size(name, n)
        if prod(sizes.values()) != size or not sizes:
            raise ConfigError(f"{asked} is not {refolded}", remedy=f"Use sizes whose product is {size}")
        return replace(self, views=(*self.views, AxisView(tuple(of), dict(sizes))))

    def crosses_hosts(self, line: Sequence[int]) -> bool | None:
        """Whether these ranks sit on more than one host; None where that is not known."""
        return len({self.hosts[self.ranks.index(rank)] for rank in line}) > 1 if self.hosts else None

    def _coords_at(self, place: int) -> dict[str, int]:
        out = _unfold(place, self.sizes)
        for view in self.views:
            at = 0
            for name in view.of:
                at = at * self.sizes[name] + out[name]
            out |= _unfold(at, view.sizes)
        return out

    def _fixed(self, names: Sequence[str]) -> list[str]:
        """The axes on which a line along ``names`` has one coordinate."""
        self.check(*names)
        named = set(names)
        views = [v for v in self.views if named & v.sizes.keys() and not named.issuperset(v.of)]
        refolded = [name for view in views for name in view.of]
        if len(set(refolded)) < len(refolded) or named.intersection(refolded):
            raise ConfigError(
                f"{', '.join(names)} overlap",
                remedy=f"Name either axes of the grid ({', '.join(self.sizes)}) or those of one view of them",
            )
        axes = [name for name in self.sizes if name not in refolded] + [name for v in views for name in v.sizes]
        return [name for name in axes if name not in named]


def check_axis_size(name: str, size: object) -> None:
    """Raises ConfigError for what is no size of an axis."""
    check_int(name, size, unit="ranks")


def _unfold(place: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """A place in an array of these sizes -> its index in each."""
    out = {}
    for name in reversed(list(sizes)):
        place, out[name] = divmod(place, sizes[name])
    return {name: out[name] for name in sizes}


AxisSizes = Mapping[str, int | None]
"""Name of an axis -> its size; None where it is left open."""
RingUlyssesSize = int | tuple[int, int] | list[int]
"""The size of the sequence axis: how many ranks, or how many in a ring of groups, and how many in each group."""
TensorGridSize = int | Sequence[int]
"""The size of the tensor axis: how many ranks, or how many rows, columns and layers of a grid."""
MAX_GRID_RANKS = 2**20
COMPOSITE_AXES = {
    "sequence": ((2,), "two: of a ring, and of the groups in it", "(2, 2)"),
    "tensor": ((2, 3), "two or three: of rows, of columns, and of a third axis", "(2, 2)"),
    "grid": ((2, 3), "two or three: of rows, of columns, and of a third axis", "(2, 2)"),
}


def num_ranks(sizes: TensorGridSize | None, axis: str = "sequence") -> int:
    """The ranks of an axis that may be given as several. Raises ConfigError for what is neither a number nor those."""
    if sizes is None:
        return 1
    every: list[Any] = list(sizes) if isinstance(sizes, tuple | list) else [sizes]
    counts, meaning, example = COMPOSITE_AXES[axis]
    if len(every) not in (1, *counts):
        raise ConfigError(
            f"{axis}={sizes!r}",
            rule=f"The {axis} axis has a number of ranks, or {meaning}",
            remedy=f"Write {axis}=4, or {axis}={example}",
        )
    for size in every:
        check_axis_size(axis, size)
    return prod(every)


def parse_axis_size(given: str, axis: str) -> int | tuple[int, ...]:
    """``"4"`` or ``"2x2"`` as a number or several. Raises ConfigError for anything else."""
    if given.lstrip("-").isdigit() and int(given) < 1:
        raise ConfigError(f"{axis}={given}", rule="An axis has one rank or more", remedy=f"Use --{axis} 1 or more")
    try:
        sizes = tuple(int(part) for part in given.split("x"))
        total = num_ranks(sizes, axis)
    except (ValueError, ConfigError):
        _, meaning, example = COMPOSITE_AXES[axis]
        raise ConfigError(
            f"--{axis} {given}",
            rule=f"It is a number of ranks, or {meaning}",
            remedy=f"Write --{axis} 4, or --{axis} {example.strip('()').replace(', ', 'x')}",
        ) from None
    if total > MAX_GRID_RANKS:
        raise ConfigError(
            f"--{axis} {given:.40}",
            rule=f"An axis has {MAX_GRID_RANKS:,} ranks at the most, each of them a process",
            remedy=f"Use --{axis} 4, or as many as you have devices",
        )
    return sizes[0] if len(sizes) == 1 else sizes


def build_rank_grid(sizes: AxisSizes | Callable[[], AxisSizes]) -> RankGrid:
    """The grid over all processes, and who sits on which host.

    Every process raises ConfigError when one of them asks for what cannot be, or for something else, or cannot say what
    it asks for. Communicates one gather of the sizes and of the hosts' names.

    Args:
        sizes: of the axes, or what gives them.
    """
    world = dist.get_world_size()
    shape: dict[str, int] = {}
    problem: Exception | None = None
    try:
        shape = _resolve_sizes(dict(sizes() if callable(sizes) else sizes), world)
    except Exception as error:  # any failure of one process must reach the others, which would wait for it
        problem = error
    said = "" if problem is None else str(problem)
    if problem is not None and not isinstance(problem, ShardFormerError):
        said = f"{type(problem).__name__}: {said}"
    answers: list[Any] = [None] * world
    dist.all_gather_object(answers, (shape, said, socket.gethostname()))
    if problem is not None:
        raise problem
    for rank, (theirs, trouble, _) in enumerate(answers):
        if trouble or theirs != shape:
            asked = trouble or ", ".join(f"{name}={size}" for name, size in theirs.items())
            raise ConfigError(
                f"Process {dist.get_rank()} lays the grid {', '.join(f'{n}={s}' for n, s in shape.items())}, "
                f"and process {rank} says: {asked}",
                remedy="Give the same sizes on every process",
            )
    return RankGrid.of(shape, hosts=[host for *_, host in answers])


def _resolve_sizes(sizes: dict[str, int | None], world: int) -> dict[str, int]:
    for name, size in sizes.items():
        if size is not None:
            check_axis_size(name, size)
    given = {name: size for name in reversed(AXES) if (size := sizes.get(name)) is not None}
    tensor, data = given.get("tensor"), given.get("data")
    inner = given.get("pipe", 1) * given.get("sequence", 1)
    known = prod(given.values())
    if world % known and (tensor is None or data is None):
        asked = " times ".join(f"{name}={size}" for name, size in given.items())
        raise ConfigError(
            f"{asked} does not divide the number of processes, {world}",
            remedy=f"Use {_that_divide(given, world)}, or start {known} processes or a multiple",
        )
    if tensor is None:
        tensor = world // known if data is not None or not given else 1
    if data is None:
        data = world // (tensor * inner)
    found = {"data": data, "pipe": given.get("pipe", 1), "sequence": given.get("sequence", 1), "tensor": tensor}
    if prod(found.values()) != world:
        shown = [f"{n}={s}" for n, s in reversed(found.items()) if s > 1 or n in ("tensor", "data")]
        raise ConfigError(
            f"{' times '.join(shown)} is not the number of processes, {world}",
            remedy=f"Leave one of them out (it takes what remains), or start {prod(found.values())} processes",
        )
    return found


def _that_divide(given: Mapping[str, int], world: int) -> str:
    if len(given) > 1:
        return f"sizes whose product is one of {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}"
    (name,) = given
    return " or ".join(f"{name}={n}" for n in range(1, world + 1) if world % n == 0)
