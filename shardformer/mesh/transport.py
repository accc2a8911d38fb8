"""Interface for communication between ranks, and the log of collectives.

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
from shardformer.torch_compat import Store

# the sender of a message counts it
WIRE_FACTOR = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 1, "reduce": 1, "send": 1,
    "receive": 0,
}  # fmt: skip


class CollectiveCallSite(NamedTuple):
    """Module and pipeline action that started a collective. Unknown parts are empty."""

    module: str = ""
    action: str = ""


NO_CALL_SITE = CollectiveCallSite()


@dataclass(frozen=True)
class CollectiveRecord:
    """Record of one collective, with its axis, purpose, size in bytes and call site."""

    op: str
    axis: str
    ranks: int
    payload_bytes: int
    purpose: str
    where: CollectiveCallSite = NO_CALL_SITE

    @property
    def wire_bytes(self) -> int:
        """Number of bytes that all ranks of the group send in total."""
        return self.payload_bytes * WIRE_FACTOR[self.op] * (self.ranks - 1)


class CollectiveEvent(NamedTuple):
    """Log entry for the start of a collective, or for the wait for its result.

    ``kind`` is "start" or "wait". Both events have the same ``collective`` object.
    """

    kind: str
    collective: CollectiveRecord


@dataclass(eq=False)
class CollectiveLog:
    """Log of the collectives that this process has started, read by ``CollectiveRecorder``.

    Args:
        calls: collectives in the order of their start. Only the sender logs a message.
        events: starts and waits in order, including those of receives.
        where: current call site, set by ``temporarily_set_call_site``.
        steps: number of optimizer steps, for error messages.
    """

    enabled: bool = False
    calls: list[CollectiveRecord] = field(default_factory=list)
    events: list[CollectiveEvent] = field(default_factory=list)
    where: CollectiveCallSite = NO_CALL_SITE
    steps: int = 0

    def record_start(self, record: CollectiveRecord) -> Callable[[], None]:
        """Log the start of a collective, and return a function that logs the wait for its result."""
        if record.op != "receive":
            self.calls.append(record)
        self.events.append(CollectiveEvent("start", record))
        return lambda: self.events.append(CollectiveEvent("wait", record)) if self.enabled else None

    @contextmanager
    def temporarily_set_call_site(
        self, *, module_path: str | None = None, pipeline_action: str | None = None
    ) -> Iterator[None]:
        """Set the module path or pipeline action of all collectives started in the ``with`` block."""
        before = self.where
        self.where = CollectiveCallSite(
            before.module if module_path is None else module_path,
            before.action if pipeline_action is None else pipeline_action,
        )
        try:
            yield
        finally:
            self.where = before


RankGroups = tuple[tuple[int, ...], ...]
"""Global ranks of disjoint groups, one tuple per group, in group order."""


class Work(Protocol):
    """Handle of an asynchronous transfer."""

    def wait(self) -> Any:
        """Wait until the transfer is complete."""

    def is_completed(self) -> bool: ...


class CollectiveAnnouncement(NamedTuple):
    """Announcement by a rank that it has reached a collective call."""

    call_name: str
    is_step: bool  # whether the ranks compare numbers at this call


class PeerCollectiveStatus(NamedTuple):
    """Collective calls announced by the ranks, and the status of missing ranks.

    Args:
        calls: the call of each rank in order, or None for a rank that did not arrive.
        missing: global rank -> status of a rank that did not arrive.
    """

    calls: Sequence[CollectiveAnnouncement | None] = ()
    missing: Mapping[int, str] = MappingProxyType({})


class World(Protocol):
    """Interface of the processes or threads that run the ranks of a mesh."""

    @property
    def store(self) -> Store | None:
        """Key-value store of the launcher, or None without a launcher."""

    @property
    def thread(self) -> threading.Thread | None:
        """Thread that runs this rank, or None if the rank is a process."""

    def create_transport(self, rank_groups: RankGroups) -> Transport:
        """Create a ``Transport`` for each rank group, and return this rank's."""


class Transport(Protocol):
    """Interface for communication between the ranks of one axis.

    ``to`` and ``source`` are ranks on that axis.

    Asynchronous operations return a ``Work``; do not modify their tensors before waiting for it. Tensors must be
    contiguous.
    """

    @property
    def world(self) -> World | None: ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """torch.distributed process group, or None if the ranks communicate without one."""

    def is_direct_exchange_faster(self, tensor: Tensor) -> bool:
        """Return whether ``exchange`` is faster than the collectives for a gather or scatter of this tensor."""

    def has_serialized_sends(self, device: torch.device) -> bool:
        """Return whether messages between two ranks are sent one at a time, as with NCCL."""

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        """All-reduce ``tensor`` in place with the operation "sum" or "max"."""

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> Work:
        """All-gather equally shaped tensors along dim 0 into ``output_tensor``."""

    def reduce_scatter(self, output_tensor: Tensor, input_tensor: Tensor) -> Work:
        """Sum ``input_tensor`` over all ranks, and write one equal chunk per rank to ``output_tensor``."""

    def exchange(self, send_tensors: Mapping[int, Tensor], recv_buffers: Mapping[int, Tensor]) -> Sequence[Work]:
        """Send and receive one tensor per rank. Empty tensors are not sent."""

    def send(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Send a tensor to a rank. Messages to the same rank with the same tag arrive in order."""

    def receive(self, recv_buffer: Tensor, src: int, tag: int) -> Work: ...

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Broadcast ``tensor`` from rank ``src`` to all other ranks, in place."""

    def broadcast_object(self, local_object: Any, src: int) -> Any:
        """Broadcast a picklable object from rank ``src``, and return it on every rank."""

    def all_gather_objects(self, local_object: Any) -> list[Any]:
        """All-gather one picklable object per rank, and return the objects in rank order."""

    def all_gather_ints(self, local_ints: Sequence[int]) -> list[list[int]]:
        """All-gather one list of integers per rank. All lists must have the same length.

        This is much faster than ``all_gather_objects``, and does not synchronize a device if host memory can be sent.
        """

    def announce_collective(self, call_name: str, *, wait: bool) -> PeerCollectiveStatus:
        """Announce to the other ranks that this rank has reached a collective call.

        Args:
            wait: whether to wait until all ranks have announced a call or cannot reach it; otherwise the result is
                empty.
        """


class _UnavailableTransport:
    """Transport of an axis without communication, because it has size 1 or no process group."""

    world = group = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise LaunchError(
            f"{name} was called on a mesh axis that has no process group, so the ranks cannot communicate.",
            remedy="Create the context with launch_from_torch or shardformer.local_ranks.threads.run_as_threads.",
        )


NO_TRANSPORT = cast(Transport, _UnavailableTransport())
