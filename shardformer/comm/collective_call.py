"""Run a function on all ranks, and raise an error on every rank if it fails on one or the results differ.

If some ranks make a different collective call or none, all ranks raise before any tensor is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar, cast

from shardformer.comm.collectives import all_gather_ints, all_gather_objects, broadcast_object
from shardformer.errors import ConfigError, InputError, ShardFormerError, format_ranks
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.transport import CollectiveAnnouncement

T = TypeVar("T")


def run_and_compare_across_ranks(
    context: ParallelContext,
    fn: Callable[[], T],
    fingerprint_fn: Callable[[T], list[str]] = lambda _: [],
    action_description: str = "shard this model",
    on_mismatch: Callable[[], None] = lambda: None,
    error_class: type[ShardFormerError] = ConfigError,
) -> T:
    """Run ``fn`` on every rank, and raise an error on all ranks if it fails on one or the results differ.

    Return the result of this rank. Communicates one gather of a hash per axis.

    Args:
        fingerprint_fn: describes a result in lines of text, which must be equal on all ranks.
        action_description: the attempted action, for error messages.
        on_mismatch: called on all ranks if the fingerprints differ. It may communicate, and raise a more specific
            error.
        error_class: type of the error on the other ranks if ``fn`` fails on one.
    """
    result, problem = _call_and_catch(lambda: (value := fn(), fingerprint_fn(value)))
    lines = result[1] if result else []
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers = all_gather_over_mesh((digest, _format_error(problem)), context)
    if problem is not None:
        raise problem
    for rank, (_, message) in answers:
        if message is not None:
            raise error_class(
                f"Rank {rank} cannot {action_description}: {message}",
                remedy=f"See the full error in the output of rank {rank}.",
            )
    if len({digest for _, (digest, _) in answers}) > 1:
        on_mismatch()
        _raise_sharding_plan_mismatch(all_gather_over_mesh(lines, context))
    return cast(tuple[T, list[str]], result)[0]  # not None, as there was no error


def _call_and_catch(fn: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call ``fn`` and return its result or exception, so that a failed rank still joins the next collective."""
    try:
        return fn(), None
    except Exception as error:
        return None, error


def _format_error(exception: Exception | None) -> str | None:
    if exception is None or isinstance(exception, ShardFormerError):
        return str(exception) if exception else None
    return f"{type(exception).__name__}: {exception}"


def all_gather_over_mesh(local_value: T, context: ParallelContext) -> list[tuple[int, T]]:
    """All-gather one value per rank over the whole mesh. Returns (global rank, value) pairs."""
    found = [(context.rank, local_value)]
    for axis in reversed(list(context.base_axes)):
        found = [pair for row in all_gather_objects(found, axis) for pair in row]
    return found


def _raise_sharding_plan_mismatch(plan_lines_by_rank: list[tuple[int, list[str]]]) -> None:
    first, reference = plan_lines_by_rank[0]
    for rank, lines in plan_lines_by_rank:
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
    """Wait until all ranks of the axes have made this call.

    Raises InputError on every rank if one makes another call or none. Communicates through the launcher's store.
    """
    for axis in axes:
        if axis.size == 1:
            continue
        arrivals = axis.transport.announce_collective(call_name, wait=True)
        announced = [entry for entry in arrivals.calls if entry is not None]
        if len(announced) < axis.size:
            _raise_missing_ranks_error(call_name, axis, arrivals.calls, arrivals.missing)
        if any(entry.call_name != call_name for entry in announced):
            if any(entry.is_step for entry in announced):  # those ranks wait for the numbers
                _all_gather_ints_with_call_hash(call_name, axis, ())
            _raise_collective_call_mismatch([entry.call_name for entry in announced], axis)


def check_ranks_agree_on_call_and_data(
    call_name: str, axis: Axis, data_fingerprints: Mapping[str, int] | None = None
) -> None:
    """Check that all ranks of an axis make the same call with the same training data.

    ``data_fingerprints`` describes the data: it maps names in ``DATA_FACTS`` to numbers, which are 0 if unknown. Raises
    InputError on every rank if the calls or the facts differ. Communicates one all-gather of a few integers.
    """
    data_fingerprints = data_fingerprints or {}
    columns = zip(*all_gather_ints_and_check_same_call(call_name, axis, list(data_fingerprints.values())), strict=True)
    for name, column in zip(data_fingerprints, columns, strict=True):
        if len(set(column) - {0}) > 1:
            known = [(rank, value) for rank, value in zip(axis.ranks, column, strict=True) if value]
            (first, _), other = known[0], next(rank for rank, value in known if value != known[0][1])
            difference, rule, remedy = DATA_FACTS[name]
            raise InputError(
                f"Ranks {first} and {other} passed different training data to {call_name}: they {difference}.",
                rule=rule,
                remedy=remedy,
            )


def all_gather_ints_and_check_same_call(call_name: str, axis: Axis, local_ints: Sequence[int]) -> list[list[int]]:
    """All-gather integers over an axis, and check that all ranks make the same call."""
    if axis.size == 1:
        return [list(local_ints)]
    axis.transport.announce_collective(call_name, wait=False)
    return _all_gather_ints_with_call_hash(call_name, axis, local_ints)


def _all_gather_ints_with_call_hash(call_name: str, axis: Axis, local_ints: Sequence[int]) -> list[list[int]]:
    assert len(local_ints) <= NUM_FACTS
    padded = [hash_to_int(call_name), *local_ints, *[0] * (NUM_FACTS - len(local_ints))]
    rows = all_gather_ints(padded, axis)
    if any(row[0] != rows[0][0] for row in rows):
        _raise_collective_call_mismatch(all_gather_objects(call_name, axis), axis)
    return [row[1 : 1 + len(local_ints)] for row in rows]


def hash_to_int(value: Any) -> int:
    """Hash the ``repr`` of a value to a nonzero integer that all processes agree on."""
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


def _raise_collective_call_mismatch(call_names: Sequence[str], axis: Axis) -> NoReturn:
    ranks: dict[str, list[int]] = {}
    for rank, call in zip(axis.ranks, call_names, strict=True):
        ranks.setdefault(call, []).append(rank)
    calls_by_rank = " and ".join(f"{format_ranks(callers)} called {call}" for call, callers in ranks.items())
    raise InputError(
        f"The ranks made different collective calls: {calls_by_rank}.",
        rule="Make the same collective calls in the same order on all ranks.",
        remedy=_suggest_call_on_every_rank(*ranks),
    )


def _raise_missing_ranks_error(
    call_name: str,
    axis: Axis,
    announced_calls: Sequence[CollectiveAnnouncement | None],
    status_by_missing_rank: Mapping[int, str],
) -> NoReturn:
    others = []
    for rank, entry in zip(axis.ranks, announced_calls, strict=True):
        if entry is None:
            others.append(f"rank {rank} {status_by_missing_rank.get(rank, 'did not arrive')}")
        elif entry.call_name != call_name:
            others.append(f"rank {rank} called {entry.call_name}")
    rank, problems, group = axis.ranks[axis.rank], "; ".join(others[:4]), axis.name.replace("_", " and ")
    raise InputError(
        f"Rank {rank} called {call_name}, but {problems}.",
        rule=f"All {axis.size} {group} ranks must call {call_name}.",
        remedy=_suggest_call_on_every_rank(call_name),
    )


def _suggest_call_on_every_rank(*call_names: str) -> str:
    return (
        f"Call {' and '.join(call_names)} on every rank, not under `if rank == 0:` or `if engine.is_first:`. A call "
        "that "
        "writes files ensures that only the first rank writes"
    )


def run_on_all_ranks(fn: Callable[[], T], world_axis: Axis, action_description: str) -> T:
    """Call ``fn`` on all ranks, and raise the first failed rank's error on all of them.

    Return the result of this rank. All ranks raise the error of the first failed rank. An OSError becomes an InputError
    that starts with ``action_description``. Communicates one gather of the errors.
    """
    result: list[T] = []
    run_and_all_gather(lambda: result.append(fn()), world_axis, action_description)
    return result[0]


def run_and_all_gather(fn: Callable[[], T], world_axis: Axis, action: str) -> list[T]:
    """Call ``fn`` on all ranks, and return a list with every rank's result."""
    value, problem = _call_and_catch(fn)
    answers = all_gather_objects((_make_failed_rank_error(problem, action, world_axis.rank), value), world_axis)
    if problem is not None and not isinstance(problem, (ShardFormerError, OSError)):
        raise problem
    for error, _ in answers:
        if error is not None:
            raise error from (None if isinstance(problem, ShardFormerError) else problem)
    return [cast(T, result) for _, result in answers]


def run_on_first_rank(fn: Callable[[], T], world_axis: Axis, action_description: str) -> T:
    """Call ``fn`` on the first rank only, and return its result or raise its error on every rank."""
    value = run_on_all_ranks(fn if world_axis.rank == 0 else lambda: None, world_axis, action_description)
    return cast(T, broadcast_object(value, world_axis))


def _make_failed_rank_error(exception: Exception | None, action_description: str, rank: int) -> ShardFormerError | None:
    if exception is None or isinstance(exception, ShardFormerError):
        return exception
    if isinstance(exception, OSError):
        return InputError(
            f"{action_description} failed on rank {rank}: {exception}.",
            remedy="Use a directory with enough space that all processes can read and write. Earlier checkpoints "
            "were kept.",
        )
    return InputError(
        f"{action_description} failed on rank {rank} with {type(exception).__name__}: {exception}.",
        remedy=f"See the full error in the output of rank {rank}.",
    )
