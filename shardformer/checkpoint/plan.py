"""Who writes what: of numbers that several ranks hold one writes each, the one that has least to write."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from math import prod

from shardformer.checkpoint.held import Item, Stretch, overlap
from shardformer.comm.collectives import gather_objects
from shardformer.layout.spec import Place
from shardformer.mesh.axis import Axis

Cell = tuple[str, Place, Place]
"""The name of a tensor, where a piece that a rank holds begins in it, and its size."""

Holdings = tuple[list[Cell], dict[str, tuple[Place, int]]]
"""What a rank holds, and of each tensor its shape and the bytes of a number."""


def held_by(items: Sequence[Item]) -> Holdings:
    """What this rank says of what it holds."""
    cells = [(item.name, held.start, tuple(held.values.shape)) for item in items for held in item.held]
    return cells, {item.name: (item.shape, item.dtype.itemsize) for item in items}


def left(held: Holdings, gone: Container[str]) -> Holdings:
    """What a rank holds, without the tensors of some names."""
    cells, tensors = held
    return [cell for cell in cells if cell[0] not in gone], {n: x for n, x in tensors.items() if n not in gone}


def share_out(items: Sequence[Item], world: Axis) -> dict[Cell, list[Stretch]]:
    """What of the pieces that this rank holds falls to it. Communicates where the pieces of all ranks are."""
    return shares(gather_objects(held_by(items), world), world)


def shares(held: Sequence[Holdings], world: Axis) -> dict[Cell, list[Stretch]]:
    """What of the pieces that this rank holds falls to it, where ``held`` is what all ranks said.

    Ranks hold the same pieces, others, or some that overlap in any way.
    """
    holders: dict[Cell, list[int]] = {}
    shapes: dict[str, Place] = {}
    widths: dict[str, int] = {}
    for rank, (cells, tensors) in enumerate(held):
        for name, (shape, width) in tensors.items():
            shapes[name], widths[name] = shape, width
        for cell in cells:
            holders.setdefault(cell, []).append(rank)
    overlapping = _overlapping(holders, shapes)
    covered: dict[str, list[Stretch]] = {}
    load = [0] * world.size
    mine: dict[Cell, list[Stretch]] = {}
    for cell in sorted(holders, key=lambda cell: (len(holders[cell]), -prod(cell[2]), cell)):
        name, start, size = cell
        rest: list[Stretch] = [(start, size)]
        if name in overlapping:
            rest = list(without((start, size), covered.get(name, ())))
            covered.setdefault(name, []).extend(rest)
        rank = min(holders[cell], key=lambda rank: (load[rank], rank))
        load[rank] += widths[name] * sum(prod(each) for _, each in rest)
        if rank == world.rank and rest:
            mine[cell] = rest
    return mine


def _overlapping(cells: Iterable[Cell], shapes: dict[str, Place]) -> set[str]:
    """The names of the tensors whose pieces are more, together, than the tensor."""
    numel: dict[str, int] = {}
    for name, _, size in cells:
        numel[name] = numel.get(name, 0) + prod(size)
    return {name for name, count in numel.items() if count != prod(shapes[name])}


def without(piece: Stretch, others: Sequence[Stretch]) -> Iterator[Stretch]:
    """What is left of a piece where others are taken out.

    >>> list(without(((0, 0), (2, 4)), [((1, 1), (5, 2))]))
    [((0, 0), (1, 4)), ((1, 0), (1, 1)), ((1, 3), (1, 1))]
    """
    found = next((common for other in others if (common := overlap(piece, other)) is not None), None)
    if found is None:
        yield piece
        return
    start, size = list(piece[0]), list(piece[1])
    for dim, (low, n) in enumerate(zip(*found, strict=True)):
        for a, b in ((start[dim], low), (low + n, start[dim] + size[dim])):
            if a < b:
                left = (*start[:dim], a, *start[dim + 1 :]), (*size[:dim], b - a, *size[dim + 1 :])
                yield from without(left, others)
        start[dim], size[dim] = low, n
