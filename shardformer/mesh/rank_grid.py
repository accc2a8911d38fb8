"""Arrange ranks in a multidimensional grid, and check that all processes use the same axis sizes.

With eight processes and ``tensor=2, pipe=2`` the grid is ``arange(8).reshape(data=2, pipe=2, sequence=1, tensor=2)``.
The ranks of one group differ only in their coordinates on the axes of the group. Rank 5 = (data 1, pipe 0, tensor 1)
shares its tensor group with rank 4, and its group over data and tensor with ranks 0, 1 and 4.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch.distributed as dist

from shardformer.errors import ConfigError, ShardFormerError, check_int, suggest_similar_names
from shardformer.mesh.transport import RankGroups

AXES = ("data", "pipe", "sequence", "tensor")


@dataclass(frozen=True)
class ReshapedAxesView:
    """Additional axes that reshape axes of a rank grid, like ``Tensor.view``."""

    source_axes: tuple[str, ...]
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class RankGrid:
    """Grid of ranks with named axes. The last axis varies fastest.

    Args:
        sizes: sizes of the axes, outermost first.
        ranks: global ranks in row-major order.
        views: additional axes that reshape these axes.
        hosts: host name of each of ``ranks``; empty if unknown.

    >>> grid = RankGrid({"data": 2, "tensor": 4}, tuple(range(8)))
    >>> grid = grid.with_reshaped_axes(["tensor"], {"row": 2, "column": 2})
    >>> grid.get_coords(6)
    {'data': 1, 'tensor': 2, 'row': 1, 'column': 0}
    >>> grid.get_rank_groups("row")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> grid.get_rank_groups("data", "row")
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """

    sizes: Mapping[str, int]
    ranks: tuple[int, ...]
    views: tuple[ReshapedAxesView, ...] = ()
    hosts: tuple[str, ...] = ()

    @classmethod
    def from_sizes(
        cls, sizes: Mapping[str, int], ranks: Sequence[int] | None = None, hosts: Sequence[str] = ()
    ) -> RankGrid:
        """Build a grid with the data, pipe, sequence and tensor axes. Axes that are not in ``sizes`` have size 1.

        The ranks count from 0 unless ``ranks`` is passed.
        """
        for name, size in sizes.items():
            check_axis_size(name, size)
        places = range(prod(sizes.values())) if ranks is None else ranks
        grid = cls({name: sizes.get(name, 1) for name in AXES}, tuple(places), (), tuple(hosts))
        grid.check_axis_names(*sizes)
        return grid

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the original axes, followed by those of reshaped axes."""
        return (*self.sizes, *(name for view in self.views for name in view.sizes))

    def check_axis_names(self, *axis_names: str) -> None:
        """Raise ConfigError if the grid has no axis with one of these names."""
        for name in axis_names:
            if name not in self.axis_names:
                raise ConfigError(
                    f"The mesh has no axis {name!r}. Its axes are {', '.join(self.axis_names)}.",
                    remedy=suggest_similar_names(name, self.axis_names),
                )

    def get_coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a global rank, by axis name."""
        return self._index_to_coords(self.ranks.index(rank))

    def get_rank_at(self, coords: Mapping[str, int]) -> int:
        """Return the global rank at these coordinates. Missing coordinates are 0."""
        place = 0
        for name, size in self.sizes.items():
            place = place * size + coords.get(name, 0)
        if not all(name in self.sizes and 0 <= rank < self.sizes[name] for name, rank in coords.items()):
            raise ConfigError(
                f"The coordinates {dict(coords)} are outside the mesh, whose axis sizes are {dict(self.sizes)}.",
                remedy="Use coordinates from 0 to the size of the axis minus 1.",
            )
        return self.ranks[place]

    def get_rank_groups(self, *axis_names: str, only_coords: Mapping[str, Sequence[int]] | None = None) -> RankGroups:
        """Return the rank groups that communicate along one or several axes.

        Args:
            only_coords: axis -> coordinates that take part; ranks at other coordinates are in no group.

        Raises:
            ConfigError: the names overlap, such as an axis with part of its view, or two views of one axis.
        """
        fixed = self._find_fixed_axes(axis_names)
        found: dict[tuple[int, ...], list[int]] = {}
        for place, rank in enumerate(self.ranks):
            at = self._index_to_coords(place)
            if all(at[name] in allowed for name, allowed in (only_coords or {}).items()):
                found.setdefault(tuple(at[name] for name in fixed), []).append(rank)
        return tuple(tuple(line) for line in found.values())

    def with_reshaped_axes(self, source_axes: Sequence[str], new_axis_sizes: Mapping[str, int]) -> RankGrid:
        """Return a copy of the grid with additional axes that reshape ``source_axes``.

        Raises ConfigError if names or sizes do not fit.
        """
        self.check_axis_names(*source_axes)
        size = prod(self.sizes.get(name, 1) for name in source_axes)
        if not source_axes or list(source_axes) != [name for name in self.sizes if name in source_axes]:
            raise ConfigError(
                f"The axes {list(source_axes)} cannot be reshaped, because they are not original axes in mesh order.",
                remedy=f"Use one or more of {', '.join(self.sizes)} in this order.",
            )
        if used := [name for name in new_axis_sizes if name in self.axis_names]:
            raise ConfigError(
                f"The new axis {used[0]!r} has the same name as an existing axis of the mesh.",
                remedy=f"Use a name other than {', '.join(self.axis_names)}.",
            )
        for name, n in new_axis_sizes.items():
            check_axis_size(name, n)
        if prod(new_axis_sizes.values()) != size or not new_axis_sizes:
            reshaped = _format_size_product({name: self.sizes[name] for name in source_axes})
            new = _format_size_product(new_axis_sizes) or dict(new_axis_sizes)
            raise ConfigError(
                f"The new axes {new} must have as many ranks in total as {reshaped}.",
                remedy=f"Use sizes whose product is {size}.",
            )
        return replace(self, views=(*self.views, ReshapedAxesView(tuple(source_axes), dict(new_axis_sizes))))

    def crosses_hosts(self, ranks: Sequence[int]) -> bool | None:
        """Return whether these ranks are on more than one host, or None if their hosts are unknown."""
        return len({self.hosts[self.ranks.index(rank)] for rank in ranks}) > 1 if self.hosts else None

    def _index_to_coords(self, flat_index: int) -> dict[str, int]:
        coords = _unravel_rank_index(flat_index, self.sizes)
        for view in self.views:
            index = 0
            for name in view.source_axes:
                index = index * self.sizes[name] + coords[name]
            coords |= _unravel_rank_index(index, view.sizes)
        return coords

    def _find_fixed_axes(self, axis_names: Sequence[str]) -> list[str]:
        """Find the axes on which all ranks of a group have the same coordinate."""
        self.check_axis_names(*axis_names)
        named = set(axis_names)
        views = [v for v in self.views if named & v.sizes.keys() and not named.issuperset(v.source_axes)]
        refolded = [name for view in views for name in view.source_axes]
        if len(set(refolded)) < len(refolded) or named.intersection(refolded):
            raise ConfigError(
                f"The axes {', '.join(axis_names)} cannot be combined, because they overlap.",
                remedy="Do not combine an axis with an axis that reshapes it, such as tensor with row.",
            )
        axes = [name for name in self.sizes if name not in refolded] + [name for v in views for name in v.sizes]
        return [name for name in axes if name not in named]


def check_axis_size(axis_name: str, size: object) -> None:
    check_int(axis_name, size, unit="ranks")


def _unravel_rank_index(flat_index: int, axis_sizes: Mapping[str, int]) -> dict[str, int]:
    out = {}
    for name in reversed(list(axis_sizes)):
        flat_index, out[name] = divmod(flat_index, axis_sizes[name])
    return {name: out[name] for name in axis_sizes}


AxisSizes = Mapping[str, int | None]
"""Name of an axis -> its size, or None to infer it."""
RingUlyssesSize = int | tuple[int, int] | list[int]
"""Size of the sequence axis: the number of ranks, or (ring size, Ulysses group size)."""
TensorGridSize = int | Sequence[int]
"""Size of the tensor axis: the number of ranks, or (rows, columns) or (rows, columns, depth) of a grid."""
MAX_GRID_RANKS = 2**20
COMPOSITE_AXES = {
    "sequence": ((2,), "two sizes (ring, group)", "(2, 2)"),
    "tensor": ((2, 3), "two or three sizes (rows, columns, depth)", "(2, 2)"),
    "grid": ((2, 3), "two or three sizes (rows, columns, depth)", "(2, 2)"),
}


def count_ranks_on_axis(axis_size: TensorGridSize | None, axis_name: str = "sequence") -> int:
    """Return the number of ranks on an axis of size 4 or (2, 2), for example.

    Raises ConfigError if the size is invalid.
    """
    if axis_size is None:
        return 1
    every: list[Any] = list(axis_size) if isinstance(axis_size, tuple | list) else [axis_size]
    counts, meaning, example = COMPOSITE_AXES[axis_name]
    if len(every) not in (1, *counts):
        raise ConfigError(
            f"{axis_name} must be a number of ranks or a tuple of {meaning}, but got {axis_size!r}.",
            remedy=f"Use a value such as {axis_name}=4 or {axis_name}={example}.",
        )
    for size in every:
        check_axis_size(axis_name, size)
    return prod(every)


def parse_axis_size(size_text: str, axis_name: str) -> int | tuple[int, ...]:
    """Parse ``"4"`` or ``"2x2"`` into an axis size. Raises ConfigError for any other text."""
    if size_text.lstrip("-").isdigit() and int(size_text) < 1:
        raise ConfigError(
            f"--{axis_name} {size_text} is not a positive number.", remedy=f"Use --{axis_name} 1 or more."
        )
    try:
        sizes = tuple(int(part) for part in size_text.split("x"))
        total = count_ranks_on_axis(sizes, axis_name)
    except (ValueError, ConfigError):
        _, meaning, example = COMPOSITE_AXES[axis_name]
        example = example.strip("()").replace(", ", "x")
        raise ConfigError(
            f"--{axis_name} must be a number of ranks or {meaning} joined by 'x', but got {size_text}.",
            remedy=f"Use a value such as --{axis_name} 4 or --{axis_name} {example}.",
        ) from None
    if total > MAX_GRID_RANKS:
        raise ConfigError(
            f"--{axis_name} {size_text:.40} exceeds the maximum of {MAX_GRID_RANKS:,} ranks per axis.",
            remedy=f"Use at most the number of your devices, such as --{axis_name} 4.",
        )
    return sizes[0] if len(sizes) == 1 else sizes


def build_rank_grid(axis_sizes: AxisSizes | Callable[[], AxisSizes]) -> RankGrid:
    """Build the grid of all launched processes, and check that they agree on the axis sizes.

    Communicates one gather of the sizes and host names.

    Args:
        axis_sizes: sizes of the axes, or a function that returns them.

    Raises:
        ConfigError: on every process, if one process passes sizes that do not fit or differ, or its function fails.
    """
    world = dist.get_world_size()
    shape: dict[str, int] = {}
    problem: Exception | None = None
    try:
        shape = _infer_missing_axis_sizes(dict(axis_sizes() if callable(axis_sizes) else axis_sizes), world)
    except Exception as error:  # the other processes wait for this one, so they must learn of any failure
        problem = error
    message = "" if problem is None else str(problem)
    if problem is not None and not isinstance(problem, ShardFormerError):
        message = f"{type(problem).__name__}: {message}"
    answers: list[Any] = [None] * world
    dist.all_gather_object(answers, (shape, message, socket.gethostname()))
    if problem is not None:
        raise problem
    for rank, (other_shape, other_message, _) in enumerate(answers):
        if other_message or other_shape != shape:
            own, other = (", ".join(f"{name}={size}" for name, size in sizes.items()) for sizes in (shape, other_shape))
            raise ConfigError(
                f"Rank {dist.get_rank()} has the axis sizes {own}, but rank {rank} reports: {other_message or other}.",
                remedy="Pass the same axis sizes on every process.",
            )
    return RankGrid.from_sizes(shape, hosts=[host for *_, host in answers])


def _infer_missing_axis_sizes(axis_sizes: dict[str, int | None], world_size: int) -> dict[str, int]:
    for name, size in axis_sizes.items():
        if size is not None:
            check_axis_size(name, size)
    passed = {name: size for name in reversed(AXES) if (size := axis_sizes.get(name)) is not None}
    tensor, data = passed.get("tensor"), passed.get("data")
    pipe, sequence = passed.get("pipe", 1), passed.get("sequence", 1)
    known = prod(passed.values())
    if world_size % known and (tensor is None or data is None):
        product, divisors = _format_size_product(passed), [n for n in range(1, world_size + 1) if world_size % n == 0]
        if len(passed) > 1:
            alternatives = f"sizes whose product is one of {', '.join(map(str, divisors))}"
        else:
            alternatives = " or ".join(f"{name}={n}" for n in divisors for name in passed)
        raise ConfigError(
            f"The number of processes, {world_size}, is not divisible by {product}.",
            remedy=f"Use {alternatives}, or start a multiple of {known} processes.",
        )
    if tensor is None:
        tensor = world_size // known if data is not None or not passed else 1
    if data is None:
        data = world_size // (tensor * pipe * sequence)
    resolved = {"data": data, "pipe": pipe, "sequence": sequence, "tensor": tensor}
    if (needed := prod(resolved.values())) != world_size:
        shown = {n: s for n, s in reversed(resolved.items()) if s > 1 or n in ("tensor", "data")}
        product = _format_size_product(shown)
        raise ConfigError(
            f"The axis sizes {product} require {needed} processes, but the world size is {world_size}.",
            remedy=f"Omit one of the sizes to infer it, or start {needed} processes.",
        )
    return resolved


def _format_size_product(axis_sizes: Mapping[str, int | None]) -> str:
    return " times ".join(f"{name}={size}" for name, size in axis_sizes.items())
