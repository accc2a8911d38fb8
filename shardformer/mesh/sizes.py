"""The sizes of the axes, of which a user gives some, and on which all processes agree."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch.distributed as dist

from shardformer.errors import ConfigError, ShardFormerError
from shardformer.mesh.grid import AXES, Grid, check_size

Sizes = Mapping[str, int | None]
"""Name of an axis -> its size; None where it is left open."""
RingOfGroups = int | tuple[int, int] | list[int]
"""The size of the sequence axis: how many ranks, or how many in a ring of groups, and how many in each group."""
GridSizes = int | Sequence[int]
"""The size of the tensor axis: how many ranks, or how many rows, columns and layers of a grid."""
MOST_RANKS = 2**20
SEVERAL = {
    "sequence": ((2,), "two: of a ring, and of the groups in it", "(2, 2)"),
    "tensor": ((2, 3), "two or three: of rows, of columns, and of a third axis", "(2, 2)"),
    "grid": ((2, 3), "two or three: of rows, of columns, and of a third axis", "(2, 2)"),
}


def total_of(sizes: GridSizes | None, axis: str = "sequence") -> int:
    """The ranks of an axis that may be given as several. Raises ConfigError for what is neither a number nor those."""
    if sizes is None:
        return 1
    every: list[Any] = list(sizes) if isinstance(sizes, tuple | list) else [sizes]
    counts, meaning, example = SEVERAL[axis]
    if len(every) not in (1, *counts):
        raise ConfigError(
            f"{axis}={sizes!r}",
            rule=f"The {axis} axis has a number of ranks, or {meaning}",
            remedy=f"Write {axis}=4, or {axis}={example}",
        )
    for size in every:
        check_size(axis, size)
    return prod(every)


def parsed(given: str, axis: str) -> int | tuple[int, ...]:
    """``"4"`` or ``"2x2"`` as a number or several. Raises ConfigError for anything else."""
    if given.lstrip("-").isdigit() and int(given) < 1:
        raise ConfigError(f"{axis}={given}", rule="An axis has one rank or more", remedy=f"Use --{axis} 1 or more")
    try:
        sizes = tuple(int(part) for part in given.split("x"))
        total = total_of(sizes, axis)
    except (ValueError, ConfigError):
        _, meaning, example = SEVERAL[axis]
        raise ConfigError(
            f"--{axis} {given}",
            rule=f"It is a number of ranks, or {meaning}",
            remedy=f"Write --{axis} 4, or --{axis} {example.strip('()').replace(', ', 'x')}",
        ) from None
    if total > MOST_RANKS:
        raise ConfigError(
            f"--{axis} {given:.40}",
            rule=f"An axis has {MOST_RANKS:,} ranks at the most, each of them a process",
            remedy=f"Use --{axis} 4, or as many as you have devices",
        )
    return sizes[0] if len(sizes) == 1 else sizes


def agreed_grid(sizes: Sizes | Callable[[], Sizes]) -> Grid:
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
                rule="All processes lay the same grid",
                remedy="Give the same sizes on every process",
            )
    return Grid.of(shape, hosts=[host for *_, host in answers])


def _resolve_sizes(sizes: dict[str, int | None], world: int) -> dict[str, int]:
    for name, size in sizes.items():
        if size is not None:
            check_size(name, size)
    given = {name: size for name in reversed(AXES) if (size := sizes.get(name)) is not None}
    tensor, data = given.get("tensor"), given.get("data")
    inner = given.get("pipe", 1) * given.get("sequence", 1)
    known = prod(given.values())
    if world % known and (tensor is None or data is None):
        asked = " times ".join(f"{name}={size}" for name, size in given.items())
        raise ConfigError(
            f"{asked} does not divide the number of processes, {world}",
            rule="The sizes of the axes multiply to the number of processes",
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
            rule="The sizes of the axes multiply to the number of processes",
            remedy=f"Leave one of them out (it takes what remains), or start {prod(found.values())} processes",
        )
    return found


def _that_divide(given: Mapping[str, int], world: int) -> str:
    if len(given) > 1:
        return f"sizes whose product is one of {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}"
    (name,) = given
    return " or ".join(f"{name}={n}" for n in range(1, world + 1) if world % n == 0)
