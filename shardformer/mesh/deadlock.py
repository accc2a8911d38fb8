"""Finds a deadlock from the reports of all ranks: ranks that wait for each other in collectives.

Rank a is blocked by rank b if b has not started the collective in which a waits, if b has started another kind of
collective in its place (an all-reduce instead of a barrier), or if a waits for a message that b has not sent. A rank
that computes is not blocked, nor is one that waits where this cannot be known (in a send, in the launcher's store), nor
one in a transfer that all of its ranks have started, however long that takes. A rank that waits for such a rank may go
on, too. The ranks that remain are blocked by each other, and wait forever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Report:
    """What a rank reports of itself.

    Args:
        seconds: how long its main thread has waited in one call; -1 where it does not wait.
        place: the line of the script in which it waits.
        group: the name of the process group whose collective that is; ``to`` of it where the rank waits for something
            that was sent to it; empty where this is not known.
        ranks: those that have to begin it, too.
        number: of that collective among all that the rank has begun on the group; or of what was sent.
        what: the kind of that collective.
        begun: name of a group -> how many collectives the rank has begun on it; ``to`` of it -> how often it sent
            something to a rank, where it did.
    """

    seconds: float = -1.0
    place: str = ""
    group: str = ""
    ranks: Sequence[int] = ()
    number: int = 0
    what: str = ""
    begun: Mapping[str, int] = field(default_factory=dict)

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Report:
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)


def deadlocked(reports: Mapping[int, Report], after_s: float) -> dict[int, int]:
    """Rank -> one that blocks it, of the ranks that wait for each other and have waited for ``after_s``.

    Empty where all of them wait at one line of the script, as in any call that takes long.
    """
    waiting = {rank: each for rank, each in reports.items() if each.seconds >= after_s and each.group}
    found = {
        rank: [other for other in each.ranks if other in waiting and _blocks(waiting[other], each)]
        for rank, each in waiting.items()
    }
    while lost := [rank for rank, others in found.items() if not any(other in found for other in others)]:
        for rank in lost:
            del found[rank]
    if len({reports[rank].place for rank in found}) < 2:
        return {}
    return {rank: next(other for other in others if other in found) for rank, others in found.items()}


def to(group: str, rank: int) -> str:
    """The key in ``Report.begun`` of what is sent to a rank over a group."""
    return f"{group}>{rank}"


def uncounted(group: str) -> str:
    """The key in ``Report.begun`` that says that a rank sent messages over the group without counting them."""
    return f"{group}>?"


def _blocks(other: Report, rank: Report) -> bool:
    if (other.group, other.number) == (rank.group, rank.number):
        return other.what != rank.what
    name, is_sent, _ = rank.group.partition(">")
    if name not in other.begun or (is_sent and uncounted(name) in other.begun):
        return False
    return other.begun.get(rank.group, 0 if is_sent else rank.number) < rank.number


def in_words(found: Mapping[int, int], reports: Mapping[int, Report]) -> str:
    """The message for the user."""
    shown = [f"rank {r} waits in {reports[r].place} for rank {other}" for r, other in sorted(found.items())[:8]]
    return (
        f"Ranks wait for each other, and none can go on: {'; '.join(shown)}. A call that communicates is collective: "
        "all ranks make it, in the same order. Make these calls on every rank, not under `if rank == 0:`, and leave a "
        "loop early on all ranks or on none. This process ends with status 1; see docs/reliability.md"
    )
