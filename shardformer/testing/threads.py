"""Ranks as threads of one process: a whole sharded step, on any grid, without starting a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from shardformer.mesh.context import ParallelContext
from shardformer.mesh.grid import Grid
from shardformer.mesh.threads import Left, Table, ThreadWorld
from shardformer.testing.draws import Turn

R = TypeVar("R")

TIMEOUT_S = 60.0


def run_as_threads(
    fn: Callable[[ParallelContext], R],
    *,
    tensor: int = 1,
    data: int = 1,
    pipe: int = 1,
    sequence: int = 1,
    timeout_s: float = TIMEOUT_S,
    in_turn: bool = False,
) -> list[R]:
    """Calls ``fn`` with the context of each rank of the grid, in a thread each; the results in the order of the ranks.

    The ranks compute what processes would, on the CPU. They have torch's default generator in common: where ``fn``
    draws random numbers, which of them a rank gets is a matter of chance. ``in_turn`` lets one compute until it waits
    for another, and gives each its own random numbers, of torch, numpy and Python: all begin with the same ones.

    Raises what the first rank raised that did. When one raises, the others' collectives end too; so do those that wait
    for a rank that has ended, waits for something else, or does not come within ``timeout_s`` seconds, with a
    WorkerError that says where each rank is.
    """
    sizes = {"data": data, "pipe": pipe, "sequence": sequence, "tensor": tensor}
    grid = Grid.of(sizes)
    turn = Turn() if in_turn else None
    table = Table(len(grid.ranks), timeout_s, turn)
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}

    def play(rank: int) -> None:
        try:
            with turn or nullcontext():
                results[rank] = fn(ParallelContext.of(sizes, grid.coords(rank), world=ThreadWorld(table, rank)))
        except BaseException as error:
            errors[rank] = error
        table.end(rank, failed=rank in errors)

    threads = [threading.Thread(target=play, args=(r,), name=f"rank-{r}", daemon=True) for r in grid.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not table.is_given_up():
            thread.join(1.0)
    if errors:  # what a rank raised, before what the others say of that
        ordered = [errors[rank] for rank in sorted(errors)]
        raise next((error for error in ordered if not _follows(error)), ordered[0])
    return [results[rank] for rank in grid.ranks]


def _follows(error: BaseException | None) -> bool:
    """Whether a rank raised because another had."""
    return error is not None and (isinstance(error, Left) or _follows(error.__cause__ or error.__context__))
