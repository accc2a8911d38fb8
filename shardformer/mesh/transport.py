"""The protocol of transports, which carry tensors and objects between the ranks of one axis, and their listeners.

``wire_bytes`` is what a bandwidth-optimal algorithm puts on the wire, sent by all ranks of the group together; with R
ranks and a full tensor of S bytes:

    all_reduce      2 (R-1) S        all_gather      (R-1) S        reduce_scatter  (R-1) S        send  S
    broadcast, reduce (R-1) S

A ring that does a gather or a scatter in steps counts as that one collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardformer.errors import LaunchError

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


class CallSite(NamedTuple):
    """The path of the module that runs, and the action of the schedule; empty where they are not known."""

    module: str = ""
    action: str = ""


NO_CALL_SITE = CallSite()


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective: its kind, the axis, its purpose, the bytes of the full tensor, and where it starts."""

    op: str
    axis: str
    ranks: int
    payload_bytes: int
    purpose: str
    where: CallSite = NO_CALL_SITE

    @property
    def wire_bytes(self) -> int:
        """Bytes that all ranks of the group send together."""
        return self.payload_bytes * WIRE_FACTOR[self.op] * (self.ranks - 1)


class CollectiveEvent(NamedTuple):
    """``kind`` is "start" or "wait"; the two events of one collective hold the same object."""

    kind: str
    collective: CollectiveRecord


@dataclass(eq=False)
class CollectiveLog:
    """What this process handed to collectives; ``shardformer.comm.recorder`` fills and reads it.

    Args:
        calls: what was started, in order. A tensor that is sent stands there once, with its sender.
        events: starts and waits, in order, those of what is received among them.
        where: what runs just now; ``within`` sets it.
        steps: that optimizers made, as far as somebody counts them: an error says in which one it came up.
    """

    enabled: bool = False
    calls: list[CollectiveRecord] = field(default_factory=list)
    events: list[CollectiveEvent] = field(default_factory=list)
    where: CallSite = NO_CALL_SITE
    steps: int = 0

    def start(self, call: CollectiveRecord) -> Callable[[], None]:
        """Notes that ``call`` starts. Returns what notes that it is waited for."""
        if call.op != "receive":
            self.calls.append(call)
        self.events.append(CollectiveEvent("start", call))
        return lambda: self.events.append(CollectiveEvent("wait", call)) if self.enabled else None

    @contextmanager
    def within(self, *, module: str | None = None, action: str | None = None) -> Iterator[None]:
        """Collectives that start in here carry the path of this module, or this action of the schedule."""
        before = self.where
        self.where = CallSite(before.module if module is None else module, before.action if action is None else action)
        try:
            yield
        finally:
            self.where = before


RankGroups = tuple[tuple[int, ...], ...]
"""Global ranks of all groups of one kind, which are disjoint; the ranks of a group in its order."""


class Work(Protocol):
    """Something under way."""

    def wait(self) -> Any:
        """Returns when it is done."""

    def is_completed(self) -> bool: ...


class Word(NamedTuple):
    """To which call a rank has come, and whether that compares numbers next."""

    call: str
    is_step: bool


class Meeting(NamedTuple):
    """What a rank learned where it waited for others.

    Args:
        words: of each rank in order; None of one that has not come.
        missing: global rank -> what is known of it, of those that have not come.
    """

    words: Sequence[Word | None] = ()
    missing: Mapping[int, str] = MappingProxyType({})


class World(Protocol):
    """All ranks that a grid is laid over."""

    @property
    def store(self) -> Any:
        """The launcher's store, through which processes speak before their first collective; None without one."""

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that is this rank; None where a process is."""

    def connect(self, lines: RankGroups) -> Transport:
        """Makes a transport for each line, and gives this rank's. All ranks call it, in one order."""


class Transport(Protocol):
    """Carries tensors and objects between the ranks of one axis; ``to`` and ``source`` are ranks on that axis.

    What starts something returns the work to wait for; until then its tensors stay as they are. Tensors are contiguous.
    """

    @property
    def world(self) -> World | None: ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group under it, if it is one."""

    def exchanges_directly(self, x: Tensor) -> bool:
        """Whether an ``exchange`` is the best way to gather and scatter such tensors (gloo)."""

    def sends_in_turn(self, device: torch.device) -> bool:
        """Whether what two ranks send each other runs in one order, both ways together (NCCL)."""

    def all_reduce(self, x: Tensor, op: str) -> Work:
        """Sums (or "max") every rank's ``x``, in place."""

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """Joins every rank's ``x``, of one shape, along dim 0 of ``out``."""

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        """Sums every rank's ``x``, and puts this rank's part of dim 0, as large as the others', into ``out``."""

    def exchange(self, outgoing: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> Sequence[Work]:
        """Sends tensors to some ranks and receives tensors from some; empty ones are not sent."""

    def send(self, x: Tensor, to: int, tag: int) -> Work:
        """What is sent to one rank with one tag arrives in the order in which it was sent."""

    def receive(self, x: Tensor, source: int, tag: int) -> Work: ...

    def broadcast(self, x: Tensor, source: int) -> None:
        """Puts rank ``source``'s values into ``x``."""

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Rank ``source``'s picklable value."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order."""

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, as many from each, in rank order. Much faster than objects; waits for no device where
        the host's memory can be sent from."""

    def meet(self, call: str, *, waits: bool) -> Meeting:
        """Announces that this rank comes to ``call``, as its next one. No collective.

        Args:
            waits: whether to wait until all ranks have come, or those that have not never will; else the result is
                empty.
        """


class _NoTransport:
    """What an axis of size 1 has, or one of a context that was made by arithmetic."""

    world = group = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise LaunchError(
            f"{name} on an axis without a transport",
            rule="A context of sizes and coordinates alone says who is where, and reaches nobody",
            remedy="Take the context of launch_from_torch, or of shardformer.local_ranks.threads.run_as_threads",
        )


NO_TRANSPORT = cast(Transport, _NoTransport())
