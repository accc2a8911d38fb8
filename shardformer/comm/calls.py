"""Calls that all ranks make together: one that only some make is an error on all of them, before anything is sent.

Collectives pair by their order alone: one rank that saves while another trains would hang, or mix the numbers of both.
So every public call that communicates begins here.

- ``come`` is for calls between steps, such as a save. Each rank writes into the launcher's store to which call it
  comes, and waits for the others. A rank that comes to another call ends the wait at once. One that comes to none is
  waited for as long as it computes. When all that are missing wait for other ranks, or have ended, the wait ends.
- ``come_to_step`` is for what every step does. It writes the same word, and compares the calls, and facts about them,
  by one message of a few numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from shardformer.comm.collectives import gather_numbers, gather_objects
from shardformer.errors import InputError
from shardformer.mesh.axis import Axis
from shardformer.mesh.transport import Word

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
    every = gather_numbers(padded, axis)
    if any(theirs[0] != every[0][0] for theirs in every):
        _raise_others(gather_objects(call, axis), axis)
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
