"""Protocols of transports, which communicate between the ranks of one axis, and the log of collectives.

``wire_bytes`` is the number of bytes that all R ranks of a group send together under a bandwidth-optimal algorithm,
for a full tensor of S bytes:

    all_reduce      2 (R-1) S        all_gather      (R-1) S        reduce_scatter  (R-1) S        send  S
    broadcast, reduce (R-1) S

A ring that implements a gather or scatter in steps counts as one collective.
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

# the sender of a message counts it
WIRE_FACTOR = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 1, "reduce": 1, "send": 1,
    "receive": 0,
}  # fmt: skip


class CallSite(NamedTuple):
    """Path of the running module, and action of the pipeline schedule; empty if unknown."""

    module: str = ""
    action: str = ""


NO_CALL_SITE = CallSite()


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective: its kind, axis, purpose, full tensor size in bytes, and call site."""

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
    """Start or wait of a collective. ``kind`` is "start" or "wait"; both events share the ``collective`` object."""

    kind: str
    collective: CollectiveRecord


@dataclass(eq=False)
class CollectiveLog:
    """Log of the collectives of this process, read by ``shardformer.comm.recorder``.

    Args:
        calls: collectives in the order of their start. Only the sender logs a message.
        events: starts and waits in order, including those of receives.
        where: current call site, set by ``within``.
        steps: number of optimizer steps, for error messages.
    """

    enabled: bool = False
    calls: list[CollectiveRecord] = field(default_factory=list)
    events: list[CollectiveEvent] = field(default_factory=list)
    where: CallSite = NO_CALL_SITE
    steps: int = 0

    def start(self, call: CollectiveRecord) -> Callable[[], None]:
        """Log the start of ``call``, and return a function that logs its wait."""
        if call.op != "receive":
            self.calls.append(call)
        self.events.append(CollectiveEvent("start", call))
        return lambda: self.events.append(CollectiveEvent("wait", call)) if self.enabled else None

    @contextmanager
    def within(self, *, module: str | None = None, action: str | None = None) -> Iterator[None]:
        """Set the module or the schedule action of the collectives that start in the body."""
        before = self.where
        self.where = CallSite(before.module if module is None else module, before.action if action is None else action)
        try:
            yield
        finally:
            self.where = before


RankGroups = tuple[tuple[int, ...], ...]
"""Global ranks of disjoint groups, one tuple per group, in group order."""


class Work(Protocol):
    """A pending transfer."""

    def wait(self) -> Any:
        """Wait until the transfer is complete."""

    def is_completed(self) -> bool: ...


class AnnouncedCall(NamedTuple):
    """The collective call a rank has reached, and whether the ranks compare numbers next."""

    call: str
    is_step: bool


class AnnouncedCalls(NamedTuple):
    """Result of waiting for the other ranks at a collective call.

    Args:
        calls: the call of each rank in order; None for a rank that did not arrive.
        missing: global rank -> status of a rank that did not arrive.
    """

    calls: Sequence[AnnouncedCall | None] = ()
    missing: Mapping[int, str] = MappingProxyType({})


class World(Protocol):
    """All ranks that a grid covers."""

    @property
    def store(self) -> Any:
        """The launcher's store, which processes use before their first collective, or None."""

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that runs this rank, or None if the rank is a process."""

    def connect(self, lines: RankGroups) -> Transport:
        """Create a transport for each group, and return this rank's. All ranks must call it, in the same order."""


class Transport(Protocol):
    """Communication of tensors and objects between the ranks of one axis. ``to`` and ``source`` are ranks on that axis.

    Asynchronous operations return a ``Work``; do not modify their tensors before waiting for it. Tensors must be
    contiguous.
    """

    @property
    def world(self) -> World | None: ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The underlying process group, or None."""

    def exchanges_directly(self, x: Tensor) -> bool:
        """Return whether gathers and scatters of such tensors are fastest as an ``exchange`` (gloo)."""

    def sends_in_turn(self, device: torch.device) -> bool:
        """Return whether the messages between two ranks run in one order for both directions (NCCL)."""

    def all_reduce(self, x: Tensor, op: str) -> Work:
        """Reduce ``x`` over all ranks by "sum" or "max", in place."""

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """Concatenate every rank's ``x`` along dimension 0 of ``out``. All ``x`` have the same shape."""

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        """Sum every rank's ``x``, and write this rank's chunk of dimension 0 into ``out``. All chunks have one size."""

    def exchange(self, outgoing: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> Sequence[Work]:
        """Send tensors to some ranks and receive tensors from some. Empty tensors are not sent."""

    def send(self, x: Tensor, to: int, tag: int) -> Work:
        """Send a tensor. Messages to one rank with one tag arrive in order."""

    def receive(self, x: Tensor, source: int, tag: int) -> Work: ...

    def broadcast(self, x: Tensor, source: int) -> None:
        """Overwrite ``x`` with the values of rank ``source``."""

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Return the picklable object of rank ``source``."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable object, in rank order."""

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's integers, in rank order. Each rank passes the same count.

        Much faster than ``gather_objects``, and does not synchronize a device if host memory can be sent.
        """

    def announce_call(self, call: str, *, waits: bool) -> AnnouncedCalls:
        """Announce that this rank has reached ``call``, its next collective call. Not a collective itself.

        Args:
            waits: whether to wait until all ranks have arrived or cannot arrive any more; otherwise the result is
                empty.
        """


class _NoTransport:
    """Transport of an axis of size 1, or of a context without process groups."""

    world = group = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise LaunchError(
            f"{name} was called on an axis that has no process group, so it cannot communicate",
            remedy="Use the context of launch_from_torch or of shardformer.local_ranks.threads.run_as_threads",
        )


NO_TRANSPORT = cast(Transport, _NoTransport())
