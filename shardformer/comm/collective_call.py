"""Run a function on all ranks, and raise an error on every rank if one fails or if the results differ.

If some ranks make a different collective call or none, all ranks raise before any tensor is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar, cast

from shardformer.comm.collectives import all_gather_numbers, all_gather_objects, broadcast_object
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.transport import AnnouncedCollective

T = TypeVar("T")


def run_and_compare_across_ranks(
    context: ParallelContext,
    function: Callable[[], T],
    fingerprint: Callable[[T], list[str]] = lambda _: [],
    action: str = "shard this model",
    explain: Callable[[], None] = lambda: None,
    error: type[ShardFormerError] = ConfigError,
) -> T:
    """Run ``function`` on every rank, and raise an error on all ranks if one fails or if their results differ.

    Return the result of this rank. Communicates one gather of a hash per axis.

    Args:
        fingerprint: describes a result in lines of text, which must be equal on all ranks.
        action: the attempted action, for error messages.
        explain: called on all ranks if the fingerprints differ. It may communicate, and raise a more specific error.
        error: type of the error on the other ranks if ``function`` fails on one.
    """
    result, problem = _run_and_catch(lambda: (value := function(), fingerprint(value)))
    lines = result[1] if result else []
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers = all_gather_from_mesh((digest, _format_error(problem)), context)
    if problem is not None:
        raise problem
    for rank, (_, message) in answers:
        if message is not None:
            raise error(
                f"Rank {rank} cannot {action}: {message}",
                remedy=f"See the full error in the output of rank {rank}.",
            )
    if len({digest for _, (digest, _) in answers}) > 1:
        explain()
        _raise_different_plans(all_gather_from_mesh(lines, context))
    return cast(tuple[T, list[str]], result)[0]  # not None, as there was no error


def _run_and_catch(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of ``function`` or its exception, so that this rank still joins the next collective."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _format_error(problem: Exception | None) -> str | None:
    if problem is None or isinstance(problem, ShardFormerError):
        return str(problem) if problem else None
    return f"{type(problem).__name__}: {problem}"


def all_gather_from_mesh(value: T, context: ParallelContext) -> list[tuple[int, T]]:
    """Gather ``value`` from every rank of the mesh, and return a list of (global rank, value) pairs."""
    found = [(context.rank, value)]
    for axis in reversed(list(context.base_axes)):
        found = [pair for row in all_gather_objects(found, axis) for pair in row]
    return found


def _raise_different_plans(lines_by_rank: list[tuple[int, list[str]]]) -> None:
    first, reference = lines_by_rank[0]
    for rank, lines in lines_by_rank:
        if lines != reference:
            pairs = zip_longest(reference, lines, fillvalue="nothing more")
            line, other = next((a, b) for a, b in pairs if a != b)
            raise ConfigError(
                f"The sharding plan differs between ranks: rank {first} has {line!r}, but rank {rank} has {other!r}.",
                remedy="Build the model and the config from the same settings on all ranks.",
            )


NUM_FACTS = 5
"""Maximum number of integers that a call compares. All calls send this many, so that their collectives match."""


def wait_for_all_ranks(call_name: str, *axes: Axis) -> None:
    """Wait until all ranks of each axis have made the call named ``call_name``.

    Raises InputError on every rank if one makes another call or none. Communicates through the launcher's store.
    """
    for axis in axes:
        if axis.size == 1:
            continue
        arrivals = axis.transport.announce_collective(call_name, waits=True)
        announced = [entry for entry in arrivals.calls if entry is not None]
        if len(announced) < axis.size:
            _raise_missing_ranks(call_name, axis, arrivals.calls, arrivals.missing)
        if any(entry.call != call_name for entry in announced):
            if any(entry.is_step for entry in announced):  # those ranks wait for the numbers
                _gather_call_numbers(call_name, axis, ())
            _raise_different_calls([entry.call for entry in announced], axis)


def check_same_call_and_data(call_name: str, axis: Axis, data_facts: Mapping[str, int] | None = None) -> None:
    """Check that all ranks of an axis make the same call with the same training data.

    ``data_facts`` describes the data: it maps names in ``DATA_FACTS`` to numbers, which are 0 if unknown. Raises
    InputError on every rank if the calls or the facts differ. Communicates one all-gather of a few integers.
    """
    data_facts = data_facts or {}
    columns = zip(*gather_numbers_and_check_call(call_name, axis, list(data_facts.values())), strict=True)
    for name, column in zip(data_facts, columns, strict=True):
        if len(set(column) - {0}) > 1:
            known = [(rank, value) for rank, value in zip(axis.ranks, column, strict=True) if value]
            (first, _), other = known[0], next(rank for rank, value in known if value != known[0][1])
            difference, rule, remedy = DATA_FACTS[name]
            raise InputError(
                f"Ranks {first} and {other} have different training data in {call_name}: they {difference}.",
                rule=rule,
                remedy=remedy,
            )


def gather_numbers_and_check_call(call_name: str, axis: Axis, numbers: Sequence[int]) -> list[list[int]]:
    """All-gather integers over an axis, and check that all its ranks make the call named ``call_name``."""
    if axis.size == 1:
        return [list(numbers)]
    axis.transport.announce_collective(call_name, waits=False)
    return _gather_call_numbers(call_name, axis, numbers)


def _gather_call_numbers(call: str, axis: Axis, numbers: Sequence[int]) -> list[list[int]]:
    assert len(numbers) <= NUM_FACTS
    padded = [hash_to_int(call), *numbers, *[0] * (NUM_FACTS - len(numbers))]
    rows = all_gather_numbers(padded, axis)
    if any(row[0] != rows[0][0] for row in rows):
        _raise_different_calls(all_gather_objects(call, axis), axis)
    return [row[1 : 1 + len(numbers)] for row in rows]


def hash_to_int(value: Any) -> int:
    """Hash the ``repr`` of a value to a nonzero integer that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big") or 1


DATA_FACTS = {
    "position": (
        "are at different positions",
        "A rank that skips a batch is one batch ahead of the others",
        "Skip a batch on all ranks or on none: share a flag before the step with torch.distributed.all_reduce, or "
        "filter the data before training",
    ),
    "order": (
        "read it in different orders",
        "Each data rank takes its shard of every batch, so all ranks must use the same order of samples",
        "Seed the sampler identically on all ranks, or omit it and set the order with data_options={'seed': 7}",
    ),
    "samples": (
        "read different samples",
        "Every rank reads the same stream, and the engine keeps each rank's shard of every batch",
        "Pass the full stream in one order on each rank, without split_dataset_by_node, sharding by rank or "
        "rows[rank::world_size]",
    ),
}
"""Error texts for ranks whose training data differs: fact -> (description of the ranks, rule, remedy)."""


def _raise_different_calls(calls: Sequence[str], axis: Axis) -> NoReturn:
    ranks: dict[str, list[int]] = {}
    for rank, call in zip(axis.ranks, calls, strict=True):
        ranks.setdefault(call, []).append(rank)
    calls_by_rank = " and ".join(f"{_format_ranks(callers)} called {call}" for call, callers in ranks.items())
    raise InputError(
        f"The ranks made different collective calls: {calls_by_rank}.",
        rule="Make the same collective calls in the same order on all ranks.",
        remedy=_format_call_remedy(*ranks),
    )


def _raise_missing_ranks(
    call: str, axis: Axis, announced: Sequence[AnnouncedCollective | None], missing: Mapping[int, str]
) -> NoReturn:
    others = []
    for rank, entry in zip(axis.ranks, announced, strict=True):
        if entry is None:
            others.append(f"rank {rank} {missing.get(rank, 'did not arrive')}")
        elif entry.call != call:
            others.append(f"rank {rank} called {entry.call}")
    rank, problems, group = axis.ranks[axis.rank], "; ".join(others[:4]), axis.name.replace("_", " and ")
    raise InputError(
        f"Rank {rank} called {call}, but {problems}.",
        rule=f"All {axis.size} {group} ranks must call {call}.",
        remedy=_format_call_remedy(call),
    )


def _format_call_remedy(*calls: str) -> str:
    return (
        f"Call {' and '.join(calls)} on every rank, not under `if rank == 0:` or `if engine.is_first:`. A call that "
        "writes files ensures that only the first rank writes"
    )


def _format_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def run_on_all_ranks(function: Callable[[], T], world: Axis, action: str) -> T:
    """Call ``function`` on all ranks, and raise the same error on all ranks if one of them fails.

    Return the result of this rank. All ranks raise the error of the first failed rank. An OSError becomes an InputError
    that starts with ``action``. Communicates one gather of the errors.
    """
    result: list[T] = []
    gather_from_all_ranks(lambda: result.append(function()), world, action)
    return result[0]


def gather_from_all_ranks(function: Callable[[], T], world: Axis, action: str) -> list[T]:
    """Call ``function`` on all ranks, and return a list of the results of all ranks."""
    value, problem = _run_and_catch(function)
    answers = all_gather_objects((_make_failed_rank_error(problem, action, world.rank), value), world)
    if problem is not None and not isinstance(problem, (ShardFormerError, OSError)):
        raise problem
    for error, _ in answers:
        if error is not None:
            raise error from (None if isinstance(problem, ShardFormerError) else problem)
    return [cast(T, result) for _, result in answers]


def run_on_first_rank(function: Callable[[], T], world: Axis, action: str) -> T:
    """Call ``function`` on the first rank only, and return its result or raise its error on all ranks."""
    value = run_on_all_ranks(function if world.rank == 0 else lambda: None, world, action)
    return cast(T, broadcast_object(value, world))


def _make_failed_rank_error(problem: Exception | None, action: str, rank: int) -> ShardFormerError | None:
    if problem is None or isinstance(problem, ShardFormerError):
        return problem
    if isinstance(problem, OSError):
        return InputError(
            f"{action} failed on rank {rank}: {problem}.",
            remedy="Use a directory with enough space that all processes can read and write. Earlier checkpoints "
            "were kept.",
        )
    return InputError(
        f"{action} failed on rank {rank} with {type(problem).__name__}: {problem}.",
        remedy=f"See the full error in the output of rank {rank}.",
    )
