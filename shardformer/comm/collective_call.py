"""Runs a function on every rank, and raises on every rank if it fails on one or results differ.

A call that only some ranks make is an error on all of them, before anything is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from shardformer.comm.collectives import all_gather_numbers, all_gather_objects, broadcast_object
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.transport import Word

T = TypeVar("T")


def collective_call(
    context: ParallelContext,
    function: Callable[[], T],
    fingerprint: Callable[[T], list[str]] = lambda _: [],
    action: str = "shard this model",
    explain: Callable[[], None] = lambda: None,
    error: type[ShardFormerError] = ConfigError,
) -> T:
    """What ``function`` gives on this rank, once it is known that no rank failed to make it and that all made the same.

    Args:
        fingerprint: what was made, as lines that are equal on ranks that agree.
        action: what a rank cannot do where it fails, in words.
        explain: called on all ranks where they differ. It may communicate, and raises what says more than two lines.
        error: what the other ranks raise if ``function`` fails on one.

    Every rank raises when one of them cannot make it, or when they differ. Communicates one gather of a hash an axis.
    """

    result, problem = _attempt(lambda: (made := function(), fingerprint(made)))
    lines = result[1] if result else []
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers = all_gather_from_grid((digest, _error_text(problem)), context)
    if problem is not None:
        raise problem
    for rank, (_, said) in answers:
        if said is not None:
            raise error(
                f"Rank {rank} cannot {action}: {said}",
                rule="All ranks do the same with the same model, or none does",
                remedy="See what that rank says",
            )
    if len({digest for _, (digest, _) in answers}) > 1:
        explain()
        _raise_difference(all_gather_from_grid(lines, context))
    return cast(tuple[T, list[str]], result)[0]  # without a problem it was made


def _attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What ``make`` returns or raises: any failure of one rank must reach the others, which would wait for it."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def _error_text(problem: Exception | None) -> str | None:
    if problem is None or isinstance(problem, ShardFormerError):
        return str(problem) if problem else None
    return f"{type(problem).__name__}: {problem}"


def all_gather_from_grid(value: T, context: ParallelContext) -> list[tuple[int, T]]:
    """(global rank, value) of every rank of the grid."""
    found = [(context.rank, value)]
    for axis in reversed(list(context.base_axes)):
        found = [pair for row in all_gather_objects(found, axis) for pair in row]
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


NUM_FACTS = 5
"""Numbers that go along with a call at the most: the messages of all calls have one form, so that any two pair."""


def come(call: str, *axes: Axis) -> None:
    """Returns when all ranks of the axes have come to ``call``. Communicates words through the launcher's store.

    Raises InputError, on every rank, where one makes another call or does not come.
    """
    for axis in axes:
        if axis.size == 1:
            continue
        meeting = axis.transport.meet(call, waits=True)
        words = [word for word in meeting.words if word is not None]
        if len(words) < axis.size:
            _raise_absent(call, axis, meeting.words, meeting.missing)
        if any(word.call != call for word in words):
            if any(word.is_step for word in words):  # they wait for numbers
                _gather(call, axis, ())
            _raise_others([word.call for word in words], axis)


def come_to_step(call: str, axis: Axis, facts: Mapping[str, int] | None = None) -> None:
    """Compares which call the ranks of an axis make, and ``facts`` about it: name -> number, 0 where it is not known.

    Raises InputError, on every rank, where one differs. Communicates a few numbers from each rank to each other.
    """
    facts = facts or {}
    columns = zip(*tell_at_step(call, axis, list(facts.values())), strict=True)
    for name, column in zip(facts, columns, strict=True):
        if len(set(column) - {0}) > 1:
            raise _of_facts(name, column, call, axis)


def tell_at_step(call: str, axis: Axis, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of every rank, in rank order, as ``come_to_step`` without a comparison of them."""
    if axis.size == 1:
        return [list(numbers)]
    axis.transport.meet(call, waits=False)
    return _gather(call, axis, numbers)


def _gather(call: str, axis: Axis, numbers: Sequence[int]) -> list[list[int]]:
    assert len(numbers) <= NUM_FACTS
    padded = [number_of(call), *numbers, *[0] * (NUM_FACTS - len(numbers))]
    every = all_gather_numbers(padded, axis)
    if any(theirs[0] != every[0][0] for theirs in every):
        _raise_others(all_gather_objects(call, axis), axis)
    return [theirs[1 : 1 + len(numbers)] for theirs in every]


def number_of(thing: Any) -> int:
    """A number other than 0 of what a thing looks like in print, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(thing).encode(), digest_size=7).digest(), "big") or 1


DATA_FACTS = {
    "position": (
        "are at different places in the training data",
        "All ranks train on the parts of one batch at a time: a rank that leaves a batch out is one batch ahead",
        "Leave a batch out on all ranks, or on none: tell the other ranks of a bad one before the step "
        "(torch.distributed.all_reduce of a flag), or filter the data before training",
    ),
    "order": (
        "go through the training data in different orders",
        "Each data rank takes its part of every batch, so the samples come in one order on all ranks; a sampler that "
        "draws from a generator of its own, or that takes a part by itself, gives each rank another one",
        "Seed the sampler identically on all ranks, or leave it out: data_options={'seed': 7} sets the order",
    ),
    "samples": (
        "read different samples from the training data",
        "Every rank reads the same stream, and the engine keeps each rank's part of every batch",
        "Give each rank the whole stream, in one order: without split_dataset_by_node, sharding by rank or "
        "rows[rank::world_size]",
    ),
}
"""Of data: what ranks do that differ in a fact, the rule and the remedy."""


def _of_facts(name: str, column: Sequence[int], call: str, axis: Axis) -> InputError:
    known = [(rank, value) for rank, value in zip(axis.ranks, column, strict=True) if value]
    other = next(rank for rank, value in known if value != known[0][1])
    what, rule, remedy = DATA_FACTS[name]
    return InputError(f"At {call}, ranks {known[0][0]} and {other} {what}", rule=rule, remedy=remedy)


def _raise_others(calls: Sequence[str], axis: Axis) -> NoReturn:
    shown = " and ".join(
        f"{_ranks([rank for rank, theirs in zip(axis.ranks, calls, strict=True) if theirs == call])} called {call}"
        for call in dict.fromkeys(calls)
    )
    raise InputError(
        shown[:1].upper() + shown[1:],
        rule="These calls are collective: all ranks make the same ones, in the same order",
        remedy=_outside(*dict.fromkeys(calls)),
    )


def _raise_absent(call: str, axis: Axis, words: Sequence[Word | None], missing: Mapping[int, str]) -> NoReturn:
    found = []
    for rank, word in zip(axis.ranks, words, strict=True):
        if word is None:
            found.append(f"rank {rank} {missing.get(rank, 'did not come')}")
        elif word.call != call:
            found.append(f"rank {rank} called {word.call}")
    raise InputError(
        f"Rank {axis.ranks[axis.rank]} called {call}, and {'; '.join(found[:4])}",
        rule=f"{call} is collective: all {axis.size} {axis.name.replace('_', ' and ')} ranks call it together",
        remedy=_outside(call),
    )


def _outside(*calls: str) -> str:
    return (
        f"Call {' and '.join(calls)} on every rank, not under `if rank == 0:` or `if engine.is_first:`; where the "
        "first rank alone writes files, the call sees to it"
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def run_on_all_ranks(make: Callable[[], T], world: Axis, what: str) -> T:
    """What ``make`` gives on this rank. Communicates what went wrong, on any.

    Raises, on all ranks, what the first one raised that failed; InputError, which begins with ``what``, for an OSError.
    """
    made: list[T] = []
    gather_from_all_ranks(lambda: made.append(make()), world, what)
    return made[0]


def gather_from_all_ranks(make: Callable[[], T], world: Axis, what: str) -> list[T]:
    """What ``make`` gives on each rank, which can be pickled; raises as ``run_on_all_ranks``. Communicates it."""
    value, problem = _attempt(make)
    said = all_gather_objects((_failed_ranks_error(problem, what, world.rank), value), world)
    failed = [theirs for theirs, _ in said if theirs is not None]
    if problem is not None and not isinstance(problem, (ShardFormerError, OSError)):
        raise problem
    if failed:
        raise failed[0] from (None if isinstance(problem, ShardFormerError) else problem)
    return [cast(T, given) for _, given in said]


def run_on_first_rank(make: Callable[[], T], world: Axis, what: str) -> T:
    """What the first rank's ``make`` gives, on every rank; raises as ``run_on_all_ranks``."""
    value = run_on_all_ranks(make if world.rank == 0 else lambda: None, world, what)
    answer: T = broadcast_object(value, world)
    return answer


def _failed_ranks_error(problem: Exception | None, what: str, rank: int) -> ShardFormerError | None:
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
