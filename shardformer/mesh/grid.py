"""The grid by arithmetic: who stands where, and who shares a line with whom.

With eight processes and ``tensor=2, pipe=2`` the grid is the array ``arange(8).reshape(data=2, pipe=2, sequence=1,
tensor=2)``. A line runs through all ranks that differ on one axis, or on some, alone: rank 5 = (data 1, pipe 0,
tensor 1) shares its tensor line with rank 4, and its line over data and tensor with 0, 1 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardformer.errors import ConfigError, nearest
from shardformer.mesh.transport import Lines

AXES = ("data", "pipe", "sequence", "tensor")


@dataclass(frozen=True)
class View:
    """Axes of the grid (``of``) whose ranks are also counted along other axes."""

    of: tuple[str, ...]
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Grid:
    """Ranks laid out along named axes, the last of which counts fastest.

    Args:
        sizes: of the axes, outermost first.
        ranks: the global rank at each place.
        views: axes that refold these ones.
        hosts: the name of the host of each of ``ranks``; empty where they are not known.

    >>> grid = Grid({"data": 2, "tensor": 4}, tuple(range(8))).view(["tensor"], {"row": 2, "column": 2})
    >>> grid.coords(6)
    {'data': 1, 'tensor': 2, 'row': 1, 'column': 0}
    >>> grid.lines("row")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> grid.lines("data", "row")
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """

    sizes: Mapping[str, int]
    ranks: tuple[int, ...]
    views: tuple[View, ...] = ()
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, sizes: Mapping[str, int], ranks: Sequence[int] | None = None, hosts: Sequence[str] = ()) -> Grid:
        """The four axes, of size 1 where none is given; the ranks are counted from 0 unless they are given."""
        for name, size in sizes.items():
            check_size(name, size)
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
                    remedy=nearest(name, self.names),
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
            raise ConfigError(
                f"There is no rank at {dict(coords)}",
                rule="A coordinate is a rank on an axis of the grid, counted from 0",
                remedy=f"The sizes are {dict(self.sizes)}",
            )
        return self.ranks[place]

    def lines(self, *names: str, only: Mapping[str, Sequence[int]] | None = None) -> Lines:
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

    def view(self, of: Sequence[str], sizes: Mapping[str, int]) -> Grid:
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
                rule="Each axis has a name of its own",
                remedy=f"Choose a name that is none of {', '.join(self.names)}",
            )
        for name, n in sizes.items():
            check_size(name, n)
        if prod(sizes.values()) != size or not sizes:
            raise ConfigError(
                f"{asked} is not {refolded}",
                rule="The sizes of a view multiply to what it refolds",
                remedy=f"Use sizes whose product is {size}",
            )
        return replace(self, views=(*self.views, View(tuple(of), dict(sizes))))

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
                rule="Axes that are merged have no ranks of another axis in common",
                remedy=f"Name either axes of the grid ({', '.join(self.sizes)}) or those of one view of them",
            )
        axes = [name for name in self.sizes if name not in refolded] + [name for v in views for name in v.sizes]
        return [name for name in axes if name not in named]


def check_size(name: str, size: object) -> None:
    """Raises ConfigError for what is no size of an axis."""
    if type(size) is not int or size < 1:
        raise ConfigError(
            f"{name}={size!r}",
            rule="The size of an axis is a whole number, one or more",
            remedy=f"Use {name}=1 or leave it out",
        )


def _unfold(place: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """A place in an array of these sizes -> its index in each."""
    out = {}
    for name in reversed(list(sizes)):
        place, out[name] = divmod(place, sizes[name])
    return {name: out[name] for name in sizes}
