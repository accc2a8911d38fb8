"""Steps that all ranks make together: where one fails, all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from shardformer.comm.collectives import broadcast_object, gather_objects
from shardformer.errors import InputError, ShardFormerError
from shardformer.mesh.axis import Axis

T = TypeVar("T")


def all_do(make: Callable[[], T], world: Axis, what: str) -> T:
    """What ``make`` gives on this rank. Communicates what went wrong, on any.

    Raises, on all ranks, what the first one raised that failed; InputError, which begins with ``what``, for an OSError.
    """
    made: list[T] = []
    all_tell(lambda: made.append(make()), world, what)
    return made[0]


def all_tell(make: Callable[[], T], world: Axis, what: str) -> list[T]:
    """What ``make`` gives on each rank, which can be pickled; raises as ``all_do``. Communicates it."""
    value: T | None = None
    problem: Exception | None = None
    try:
        value = make()
    except Exception as error:
        problem = error
    said = gather_objects((_said(problem, what, world.rank), value), world)
    failed = [theirs for theirs, _ in said if theirs is not None]
    if problem is not None and not isinstance(problem, (ShardFormerError, OSError)):
        raise problem
    if failed:
        raise failed[0] from (None if isinstance(problem, ShardFormerError) else problem)
    return [cast(T, given) for _, given in said]


def first_does(make: Callable[[], T], world: Axis, what: str) -> T:
    """What the first rank's ``make`` gives, on every rank; raises as ``all_do``."""
    value = all_do(make if world.rank == 0 else lambda: None, world, what)
    answer: T = broadcast_object(value, world)
    return answer


def _said(problem: Exception | None, what: str, rank: int) -> ShardFormerError | None:
    """What the other ranks raise."""
    if problem is None or isinstance(problem, ShardFormerError):
        return problem
    if isinstance(problem, OSError):
        return InputError(
            f"{what} failed on rank {rank}: {problem}",
            rule="The folder is on a disk that all processes can read and write, with room for the checkpoint",
            remedy="Make room, or give another folder; the checkpoints that were there are as they were",
        )
    return InputError(
        f"{what} failed on rank {rank}: {type(problem).__name__}: {problem}",
        rule="All ranks save and load together",
        remedy="See what that rank says",
    )
