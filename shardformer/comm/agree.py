"""All ranks make the same, or none goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar, cast

from shardformer.comm.collectives import gather_objects
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.mesh.context import ParallelContext

T = TypeVar("T")


def agree(
    context: ParallelContext,
    make: Callable[[], T],
    lines_of: Callable[[T], list[str]] = lambda _: [],
    doing: str = "shard this model",
    explain: Callable[[], None] = lambda: None,
) -> T:
    """What ``make`` gives on this rank, once it is known that no rank failed to make it and that all made the same.

    Args:
        lines_of: what was made, as lines that are equal on ranks that agree.
        doing: what a rank cannot do where it fails, in words.
        explain: called on all ranks where they differ. It may communicate, and raises what says more than two lines.

    Every rank raises when one of them cannot make it, or when they differ. Communicates one gather of a hash an axis.
    """
    made: T | None = None
    problem: Exception | None = None
    lines: list[str] = []
    try:
        made = make()
        lines = lines_of(made)
    except Exception as error:  # any failure of one rank must reach the others, which would wait for it
        problem = error
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers = gather_all((digest, _said(problem)), context)
    if problem is not None:
        raise problem
    for rank, (_, said) in answers:
        if said is not None:
            raise ConfigError(
                f"Rank {rank} cannot {doing}: {said}",
                rule="All ranks do the same with the same model, or none does",
                remedy="See what that rank says",
            )
    if len({digest for _, (digest, _) in answers}) > 1:
        explain()
        _raise_difference(gather_all(lines, context))
    return cast(T, made)  # without a problem it was made


def _said(problem: Exception | None) -> str | None:
    if problem is None or isinstance(problem, ShardFormerError):
        return str(problem) if problem else None
    return f"{type(problem).__name__}: {problem}"


def gather_all(value: T, context: ParallelContext) -> list[tuple[int, T]]:
    """(global rank, value) of every rank of the grid."""
    found = [(context.rank, value)]
    for axis in reversed(list(context.own_axes)):
        found = [pair for row in gather_objects(found, axis) for pair in row]
    return found


def _raise_difference(all_lines: list[tuple[int, list[str]]]) -> None:
    first, reference = all_lines[0]
    for rank, lines in all_lines:
        if lines != reference:
            pairs = zip(reference + [""] * len(lines), lines + [""] * len(reference), strict=False)
            ours, theirs = next((a, b) for a, b in pairs if a != b)
            raise ConfigError(
                f"Ranks disagree on what to do: rank {first} has {ours or 'nothing more'!r}, "
                f"rank {rank} has {theirs or 'nothing more'!r}",
                rule="All ranks shard the same model in the same way",
                remedy="Build the model and the config from the same settings on every rank",
            )
