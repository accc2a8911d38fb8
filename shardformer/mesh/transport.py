"""Interface for communication between the ranks of a mesh axis, and the log of collectives.

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
    """Location of a collective: the module and the pipeline action that started it. Unknown parts are empty."""

    module: str = ""
    action: str = ""


NO_CALL_SITE = CollectiveCallSite()


@dataclass(frozen=True)
class CollectiveRecord:
    """Record of one collective, such as an all-reduce, with its axis, purpose, size in bytes and call site."""

    op: str
    axis: str
    ranks: int
    payload_bytes: int
    purpose: str
    where: CollectiveCallSite = NO_CALL_SITE

    @property
    def wire_bytes(self) -> int:
        """Total number of bytes that all ranks of the group send."""
        return self.payload_bytes * WIRE_FACTOR[self.op] * (self.ranks - 1)


class CollectiveEvent(NamedTuple):
    """Log entry for the start of a collective or for the wait for its result.

    ``kind`` is "start" or "wait". Both events have the same ``collective`` object.
    """

    kind: str
    collective: CollectiveRecord


@dataclass(eq=False)
class CollectiveLog:
    """Log of the collectives that this process has started. ``CollectiveRecorder`` reads the log.

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
        """Record the module path or pipeline action for all collectives that start in the ``with`` block."""
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
    """Announcement of one rank to the others that it has reached a collective call."""

    call_name: str
    is_step: bool  # whether the ranks compare numbers at this call


class PeerCollectiveStatus(NamedTuple):
    """Collective calls that the ranks have announced, and the status of the ranks that are missing.

    Args:
        calls: the call of each rank in order, or None for a rank that did not arrive.
        missing: global rank -> status of a rank that did not arrive.
    """

    calls: Sequence[CollectiveAnnouncement | None] = ()
    missing: Mapping[int, str] = MappingProxyType({})


class World(Protocol):
    """Interface of the processes or threads that are the ranks of a mesh. It connects them by transports."""

    @property
    def store(self) -> Store | None:
        """Key-value store of the launcher, or None. Processes use it before their first collective."""

    @property
    def thread(self) -> threading.Thread | None:
        """Thread that runs this rank, or None if the rank is a process."""

    def create_transport(self, rank_groups: RankGroups) -> Transport:
        """Create a ``Transport`` for each group of ranks, and return the one for this rank's group."""


class Transport(Protocol):
    """Interface for sending tensors and objects between the ranks of one axis.

    ``to`` and ``source`` are ranks on that axis.

    Asynchronous operations return a ``Work``; do not modify their tensors before waiting for it. Tensors must be
    contiguous.
    """

    @property
    def world(self) -> World | None: ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of torch.distributed that sends the messages, or None without process groups."""

    def is_direct_exchange_faster(self, tensor: Tensor) -> bool:
        """Return whether ``exchange`` gathers and scatters tensors like ``tensor`` faster than the collectives do."""

    def has_serialized_sends(self, device: torch.device) -> bool:
        """Return whether two ranks can send each other only one message at a time, as with NCCL."""

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        """Reduce ``tensor`` in place over all ranks, with the operation "sum" or "max"."""

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> Work:
        """Concatenate the input tensors of all ranks along dim 0 into ``output_tensor``. Their shapes must be equal."""

    def reduce_scatter(self, output_tensor: Tensor, input_tensor: Tensor) -> Work:
        """Sum ``input_tensor`` over all ranks, and write this rank's equal chunk along dim 0 to ``output_tensor``."""

    def exchange(self, send_tensors: Mapping[int, Tensor], recv_buffers: Mapping[int, Tensor]) -> Sequence[Work]:
        """Send and receive tensors, which are passed as dicts from rank to tensor. Empty tensors are not sent."""

    def send(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Send a tensor to a rank. Messages to the same rank with the same tag arrive in order."""

    def receive(self, recv_buffer: Tensor, src: int, tag: int) -> Work: ...

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy the values of ``tensor`` on rank ``src`` to all other ranks."""

    def broadcast_object(self, local_object: Any, src: int) -> Any:
        """Send ``local_object`` of rank ``src`` to all ranks, and return it. The object must be picklable."""

    def all_gather_objects(self, local_object: Any) -> list[Any]:
        """Gather one picklable object from each rank, and return the objects in rank order."""

    def all_gather_ints(self, local_ints: Sequence[int]) -> list[list[int]]:
        """Gather a list of integers from each rank, and return the lists in rank order. Their lengths must be equal.

        This is much faster than ``all_gather_objects``, and does not synchronize a device if host memory can be sent.
        """

    def announce_collective(self, call_name: str, *, wait: bool) -> PeerCollectiveStatus:
        """Announce to the other ranks that this rank has reached a collective call.

        Args:
            wait: whether to wait until all ranks have announced a call or cannot reach it; otherwise the result is
                empty.
        """


class _UnavailableTransport:
    """Transport of an axis that cannot communicate, because it has size 1 or no process groups."""

    world = group = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise LaunchError(
            f"{name} was called on a mesh axis that has no process group.",
            remedy="Use the ParallelContext of launch_from_torch or shardformer.local_ranks.threads.run_as_threads.",
        )


NO_TRANSPORT = cast(Transport, _UnavailableTransport())
