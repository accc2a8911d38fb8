"""What this process hands to collectives: noted where each starts and where it is waited for, while somebody listens.

``wire_bytes`` is what a bandwidth-optimal algorithm puts on the wire, sent by all ranks of the group together; with R
ranks and a full tensor of S bytes:

    all_reduce      2 (R-1) S        all_gather      (R-1) S        reduce_scatter  (R-1) S        send  S
    broadcast, reduce (R-1) S

A ring that does a gather or a scatter in steps counts as that one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

# what is received is counted by its sender
WIRE_FACTOR = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "broadcast": 1,
    "reduce": 1,
    "send": 1,
    "receive": 0,
}


class Where(NamedTuple):
    """The path of the module that runs, and the action of the schedule; empty where they are not known."""

    module: str = ""
    action: str = ""


NOWHERE = Where()


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, the axis, its purpose, the bytes of the full tensor, and where it starts."""

    op: str
    axis: str
    ranks: int
    payload_bytes: int
    purpose: str
    where: Where = NOWHERE

    @property
    def wire_bytes(self) -> int:
        """Bytes that all ranks of the group send together."""
        return self.payload_bytes * WIRE_FACTOR[self.op] * (self.ranks - 1)


class Event(NamedTuple):
    """``kind`` is "start" or "wait"; the two events of one collective hold the same object."""

    kind: str
    collective: Collective


@dataclass(eq=False)
class Traffic:
    """What this process handed to collectives; ``shardformer.comm.recorder`` fills and reads it.

    Args:
        calls: what was started, in order. A tensor that is sent stands there once, with its sender.
        events: starts and waits, in order, those of what is received among them.
        where: what runs just now; ``within`` sets it.
        steps: that optimizers made, as far as somebody counts them: an error says in which one it came up.
    """

    enabled: bool = False
    calls: list[Collective] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    where: Where = NOWHERE
    steps: int = 0

    def start(self, call: Collective) -> Callable[[], None]:
        """Notes that ``call`` starts. Returns what notes that it is waited for."""
        if call.op != "receive":
            self.calls.append(call)
        self.events.append(Event("start", call))
        return lambda: self.events.append(Event("wait", call)) if self.enabled else None

    @contextmanager
    def within(self, *, module: str | None = None, action: str | None = None) -> Iterator[None]:
        """Collectives that start in here carry the path of this module, or this action of the schedule."""
        before = self.where
        self.where = Where(before.module if module is None else module, before.action if action is None else action)
        try:
            yield
        finally:
            self.where = before
