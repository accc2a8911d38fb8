"""Process mesh with one axis per kind of parallelism, as seen by one rank."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardformer.errors import ConfigError, LaunchError
from shardformer.mesh.deadlock_detection import (
    DeadlockMonitor,
    get_deadlock_monitor,
    get_message_count_key,
    get_uncounted_messages_key,
)
from shardformer.mesh.rank_failures import MonitoredWork, PeerRanks, ReceiveWork
from shardformer.mesh.rank_grid import AXES, AxisSizes, RankGrid, RingUlyssesSize, TensorGridSize, build_rank_grid
from shardformer.mesh.transport import (
    NO_TRANSPORT,
    CollectiveAnnouncement,
    CollectiveLog,
    PeerCollectiveStatus,
    RankGroups,
    Transport,
    Work,
    World,
)
from shardformer.public_names import deprecate_renamed_arguments
from shardformer.torch_compat import (
    Store,
    get_default_store,
    get_gloo_collective_count,
    get_group_name,
    has_exact_collective_count,
)

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.25
ASK_AFTER_S = 5.0
"""Wait before the missing ranks of a call are asked whether they wait for others."""
ASK_EVERY_S = 2.0
REST_S = 5.0
"""Wait for the other ranks after two ranks reached different calls, so that all of them raise."""


@dataclass(frozen=True)
class ProcessWorld:
    """Ranks of a mesh that run as launched processes, listed by global rank."""

    ranks: tuple[int, ...]
    thread: ClassVar[None] = None

    @property
    def store(self) -> Store | None:
        """Key-value store of the launcher, or None if there is only one process."""
        return get_launcher_store()

    def create_transport(self, rank_groups: RankGroups) -> Transport:
        """Create a process group for each rank group, and return the ``Transport`` of this process's group."""
        if max(len(line) for line in rank_groups) == 1:
            return NO_TRANSPORT
        ranks = next((list(line) for line in rank_groups if dist.get_rank() in line), [])
        if len(self.ranks) == dist.get_world_size():
            group, _ = dist.new_subgroups_by_enumeration([list(line) for line in rank_groups])
        else:  # processes outside the grid do not make this call
            group = dist.new_group(ranks, use_local_synchronization=True) if ranks else None
        return ProcessGroupTransport(group) if len(ranks) > 1 else NO_TRANSPORT


def get_launcher_store() -> Store | None:
    """Return the store of torch's default process group, or None if this is the only process."""
    launched = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return get_default_store() if launched else None


class ProcessGroupTransport:
    """Transport over one torch.distributed process group.

    Attributes:
        peers: ranks of the group, for errors about a lost peer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = self._ranks.index(dist.get_rank())
        self.peers = PeerRanks(self._ranks, self._rank)
        # get_backend gives "cpu:gloo,cuda:nccl" for a group of two backends; the configuration names each device's
        pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._backends = {device: backend for device, backend in pairs}
        self._is_counted = has_exact_collective_count(group)
        self._sends_uncounted = False
        self._sent, self._arrived = [0] * len(self._ranks), [0] * len(self._ranks)
        # lets the other processes ask what this process waits for
        get_deadlock_monitor(get_default_store(), dist.get_rank()).carriers.append(weakref.ref(self))

    def get_message_counts(self) -> dict[str, int]:
        """Return the numbers of sent and received messages, which deadlock detection compares."""
        name = get_group_name(self.group)
        sent = {
            get_message_count_key(name, rank): count
            for rank, count in zip(self._ranks, self._sent, strict=True)
            if count
        }
        if self._sends_uncounted:
            sent = {get_uncounted_messages_key(name): 1}
        return {**sent, f"{name}<": sum(self._arrived)}

    @property
    def world(self) -> ProcessWorld:
        return ProcessWorld(tuple(self._ranks))

    def _needs_host_staging(self, tensor: Tensor) -> bool:
        """Return whether a GPU tensor must be copied to host memory before gloo can send it.

        gloo accepts CUDA tensors in some collectives only, and not in sends and receives. Staging all of them allows
        two ranks to train on one GPU, which NCCL refuses.
        """
        return tensor.device.type != "cpu" and self._backends.get(tensor.device.type) == "gloo"

    def is_direct_exchange_faster(self, tensor: Tensor) -> bool:
        """Return whether ``exchange`` is faster than the collectives for a gather or scatter of this tensor.

        gloo's reduce-scatter sends as many bytes as an all-reduce, and its small messages take two rounds.
        """
        return tensor.device.type == "cpu" or self._backends.get(tensor.device.type) == "gloo"

    def has_serialized_sends(self, device: torch.device) -> bool:
        """Return whether two ranks can send each other only one message at a time, as with NCCL."""
        return self._backends.get(device.type) == "nccl"

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        if self._needs_host_staging(tensor):
            host = _copy_to_host(tensor)
            return HostStagedWork([self.all_reduce(host, op)], [(tensor, host)])
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        return self._monitor_work(
            dist.all_reduce(tensor, op=reduce_op, group=self.group, async_op=True), "an all-reduce"
        )

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> Work:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._start_collective(output_tensor, input_tensor, gather, "an all-gather")

    def reduce_scatter(self, output_tensor: Tensor, input_tensor: Tensor) -> Work:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self._start_collective(output_tensor, input_tensor, scatter, "a reduce-scatter")

    def _start_collective(
        self, output_tensor: Tensor, input_tensor: Tensor, collective_fn: Callable[..., Any], description: str
    ) -> Work:
        if self._needs_host_staging(input_tensor):
            host = _allocate_host_buffer(output_tensor)
            return HostStagedWork(
                [self._start_collective(host, _copy_to_host(input_tensor), collective_fn, description)],
                [(output_tensor, host)],
            )
        return self._monitor_work(
            collective_fn(output_tensor, input_tensor, group=self.group, async_op=True), description
        )

    def exchange(self, send_tensors: Mapping[int, Tensor], recv_buffers: Mapping[int, Tensor]) -> Sequence[Work]:
        """Send tensors to other ranks and receive theirs. Two ranks use a single all-to-all.

        gloo does an all-to-all with less work than a send and a receive (measured: half the time during computation).
        """
        if any(self._needs_host_staging(x) for x in (*send_tensors.values(), *recv_buffers.values())):
            sent = {id(x): _copy_to_host(x) for x in send_tensors.values()}  # a tensor for several ranks is copied once
            into = {rank: _allocate_host_buffer(x) for rank, x in recv_buffers.items()}
            works = self.exchange({rank: sent[id(x)] for rank, x in send_tensors.items()}, into)
            return [HostStagedWork(works, [(recv_buffers[rank], host) for rank, host in into.items()])]
        if len(self._ranks) == 2:
            return self._exchange_with_peer(send_tensors.get(1 - self._rank), recv_buffers.get(1 - self._rank))
        works = [self.receive(x, r, 0) for r, x in recv_buffers.items() if x.numel()]
        return works + [self.send(x, r, 0) for r, x in send_tensors.items() if x.numel()]

    def _exchange_with_peer(self, send_tensor: Tensor | None, recv_buffer: Tensor | None) -> Sequence[Work]:
        like = send_tensor if send_tensor is not None else recv_buffer
        if like is None:
            return []
        sent = like.new_empty(0) if send_tensor is None else send_tensor.view(-1)
        received = like.new_empty(0) if recv_buffer is None else recv_buffer.view(-1)
        if sent.numel() + received.numel() == 0:
            return []
        in_sizes, out_sizes = [received.numel(), 0], [sent.numel(), 0]
        if self._rank == 0:
            in_sizes, out_sizes = in_sizes[::-1], out_sizes[::-1]
        work = dist.all_to_all_single(received, sent, in_sizes, out_sizes, group=self.group, async_op=True)
        return [self._monitor_work(work, "an exchange", 1 - self._rank)]

    def send(self, tensor: Tensor, dst: int, tag: int) -> Work:
        if self._needs_host_staging(tensor):
            return HostStagedWork([self.send(_copy_to_host(tensor), dst, tag)])
        if torch.compiler.is_compiling():  # a counter would cause a recompilation at each message
            self._sends_uncounted = True
        else:
            self._sent[dst] += 1
        return MonitoredWork(dist.isend(tensor, self._ranks[dst], group=self.group, tag=tag), self.peers, "a send", dst)

    def receive(self, recv_buffer: Tensor, src: int, tag: int) -> Work:
        if self._needs_host_staging(recv_buffer):
            host = _allocate_host_buffer(recv_buffer)
            return HostStagedWork([self.receive(host, src, tag)], [(recv_buffer, host)])
        work = dist.irecv(recv_buffer, self._ranks[src], group=self.group, tag=tag)
        return ReceiveWork(work, self.peers, src, (self.group, 0, "") if self._is_counted else None, self._arrived)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        if self._needs_host_staging(tensor):
            host = _copy_to_host(tensor)
            self.broadcast(host, src)
            tensor.data.copy_(host)
            return
        with self.peers.convert_to_lost_peer_error("a broadcast"):
            dist.broadcast(tensor, src=self._ranks[src], group=self.group)

    def broadcast_object(self, local_object: Any, src: int) -> Any:
        box = [local_object]
        with self.peers.convert_to_lost_peer_error("a broadcast"):
            dist.broadcast_object_list(box, src=self._ranks[src], group=self.group)
        return box[0]

    def all_gather_objects(self, local_object: Any) -> list[Any]:
        out: list[Any] = [None] * len(self._ranks)
        with self.peers.convert_to_lost_peer_error("a gather of objects"):
            dist.all_gather_object(out, local_object, group=self.group)
        return out

    def all_gather_ints(self, local_ints: Sequence[int]) -> list[list[int]]:
        device = "cpu" if "cpu" in self._backends else next(iter(self._backends))
        local = torch.tensor([local_ints], dtype=torch.int64, device=device)
        rows = [local if rank == self._rank else torch.empty_like(local) for rank in range(len(self._ranks))]
        if self.is_direct_exchange_faster(local):
            others = [rank for rank in range(len(rows)) if rank != self._rank]
            works = self.exchange(dict.fromkeys(others, local), {rank: rows[rank] for rank in others})
        else:
            works = [self._monitor_work(dist.all_gather(rows, local, group=self.group, async_op=True), "an all-gather")]
        for work in works:
            work.wait()
        gathered: list[list[int]] = torch.cat(rows).tolist()
        return gathered

    def announce_collective(self, call_name: str, *, wait: bool) -> PeerCollectiveStatus:
        """Announce this rank's next collective call to the other ranks through the store."""
        store, rank = get_default_store(), dist.get_rank()
        reporter = get_deadlock_monitor(store, rank)
        name = f"shardformer/calls/{hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:16]}"
        number = store.add(f"{name}/{rank}/count", 1)
        store.set(f"{name}/{rank}", json.dumps([number, call_name, not wait]))
        return self._wait_for_peers(store, name, number, reporter) if wait else PeerCollectiveStatus()

    def _wait_for_peers(
        self, store: Any, group_name: str, call_number: int, deadlock_monitor: DeadlockMonitor
    ) -> PeerCollectiveStatus:
        """Wait until every rank has announced this call, or is known to be unable to reach it."""
        begin, pause_s = time.monotonic(), FIRST_PAUSE_S
        first_request, ask_at = 0, begin + ASK_AFTER_S
        differs_since: float | None = None
        while True:
            announced = self._get_announced_collectives(store, group_name, call_number)
            if None not in announced:
                return PeerCollectiveStatus(announced)
            now = time.monotonic()
            absent = [rank for rank, entry in zip(self._ranks, announced, strict=True) if entry is None]
            if store.check([f"{group_name}/failed/{call_number}"]):
                return PeerCollectiveStatus(announced, dict.fromkeys(absent, "gave up"))
            if differs_since is None and len({entry.call_name for entry in announced if entry is not None}) > 1:
                differs_since = now
            if now > ask_at:
                request, ask_at = deadlock_monitor.request_reports(), now + ASK_EVERY_S
                first_request = first_request or request
            missing = (
                deadlock_monitor.describe_blocked_ranks(absent, first_request) if ask_at > begin + ASK_AFTER_S else {}
            )
            is_late = now - begin > store.timeout.total_seconds()
            if is_late or len(missing) == len(absent) or (differs_since is not None and now - differs_since > REST_S):
                store.set(f"{group_name}/failed/{call_number}", "")
                return PeerCollectiveStatus(announced, missing)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _get_announced_collectives(
        self, store: Any, group_name: str, call_number: int
    ) -> list[CollectiveAnnouncement | None]:
        """Return each rank's announcement of this collective call, or None if it has not made the call.

        A rank with a higher number has made this call too, unless the call failed.
        """
        keys = [f"{group_name}/{rank}" for rank in self._ranks]
        if store.has_extended_api() and store.check(keys):
            found = store.multi_get(keys)
        else:
            found = [store.get(key) if store.check([key]) else b"[0, null, null]" for key in keys]
        own = CollectiveAnnouncement(*json.loads(found[self._rank])[1:])
        announced: list[CollectiveAnnouncement | None] = []
        for value in found:
            count, call, is_step = json.loads(value)
            is_past = count > call_number and not store.check([f"{group_name}/failed/{call_number}"])
            announced.append(
                own if is_past else CollectiveAnnouncement(call, is_step) if count == call_number else None
            )
        return announced

    def _monitor_work(self, work: dist.Work | None, description: str, peer_index: int | None = None) -> Work:
        joined = None
        if self._is_counted and not torch.compiler.is_compiling():
            joined = self.group, get_gloo_collective_count(self.group), description.partition(" ")[2].replace("-", "_")
        return MonitoredWork(work, self.peers, description, peer_index, joined)


class HostStagedWork:
    """Work handle of a transfer through host memory. ``wait`` copies the received values to the device.

    Args:
        works: transfers of the host copies.
        pending_copies: pairs of a device tensor and the host buffer that receives its values.
    """

    def __init__(self, works: Sequence[Work], pending_copies: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self._works, self._arriving = works, list(pending_copies)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        while self._arriving:  # empties the list, so that a second wait copies nothing
            x, host = self._arriving.pop()
            x.data.copy_(host)  # invisible to autograd, like torch's collectives

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _copy_to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _allocate_host_buffer(device_tensor: Tensor) -> Tensor:
    return torch.empty_like(device_tensor, device="cpu")


_LOGS: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveLog] = weakref.WeakKeyDictionary()
"""Process group -> the log of the newest context with this group, for axes that are built from the group."""


_AXES: weakref.WeakValueDictionary[str, Axis] = weakref.WeakValueDictionary()
_AXIS_NUMBERS = itertools.count()


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the process mesh, with its size and the rank of this process on it.

    Args:
        ranks: global ranks along the axis.
        crosses_hosts: whether the ranks are on more than one host, or None if unknown.

    Attributes:
        key: unique name of this object in the process, with which a compiled graph refers to it.
    """

    name: str
    size: int = 1
    rank: int = 0
    transport: Transport = NO_TRANSPORT
    ranks: tuple[int, ...] = (0,)
    traffic: CollectiveLog = field(default_factory=CollectiveLog)
    crosses_hosts: bool | None = None
    key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        key = f"{self.name} of {self.ranks}, {next(_AXIS_NUMBERS)}"
        object.__setattr__(self, "key", key)
        _AXES[key] = self

    @staticmethod
    def get_by_key(key: str) -> Axis:
        """Look up an axis by the key that compiled graphs contain."""
        return _AXES[key]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """torch.distributed process group of the axis, or None if its size is 1 or its ranks are threads."""
        return self.transport.group

    @classmethod
    def of(cls, group: Axis | dist.ProcessGroup | None, name: str = "tensor") -> Axis:
        """Build an axis from a process group, by default from all launched processes.

        Collectives over a group of a ``ParallelContext`` appear in the log of this context. Without launched processes,
        the axis has size 1. Raises LaunchError if this process is not in the group, ConfigError if ``group`` is not a
        process group.
        """
        if isinstance(group, Axis):
            return group
        if group is None:
            if not dist.is_available() or not dist.is_initialized():
                return cls(name)
            group = dist.group.WORLD
        non_member: Any = dist.GroupMember.NON_GROUP_MEMBER
        is_member = group is not non_member
        if is_member and not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"The group of the {name} axis must be a torch.distributed process group, but got {group!r:.80}.",
                remedy="Create the group with torch.distributed.new_group(ranks) on all processes, or omit it.",
            )
        if not is_member or dist.get_rank(group) < 0:
            raise LaunchError(
                f"The process group of the {name} axis does not contain this process (global rank {dist.get_rank()}).",
                remedy="Pass a process group that contains this process, or use launch_from_torch(tensor=...).",
            )
        assert isinstance(group, dist.ProcessGroup)
        ranks = tuple(dist.get_process_group_ranks(group))
        transport = ProcessGroupTransport(group) if len(ranks) > 1 else NO_TRANSPORT
        return cls(name, len(ranks), dist.get_rank(group), transport, ranks, _LOGS.get(group) or CollectiveLog())

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # a copied model communicates over the same process group

    def __str__(self) -> str:
        return f"{self.name} {self.rank}/{self.size}"


@deprecate_renamed_arguments(
    {},
    renamed_attributes={
        "alike": "same_batch_axis",
        "own_axes": "base_axes",
        "finest": "expand_views",
        "merged": "flatten",
        "view": "reshape_axis",
    },
)
@dataclass(frozen=True, eq=False)
class ParallelContext:
    """Process mesh with named axes, and this process's position in it.

    Args:
        rank: global rank of this process.
        axes: axes of the mesh, followed by those of its views.
        world: creates the transports of new axes, or None for a context that cannot communicate.
        mesh: the same mesh for FSDP2 and torch's checkpoints, or None if it does not contain all processes.
        traffic: log of the collectives of this process.
    """

    grid: RankGrid
    rank: int
    axes: Mapping[str, Axis]
    device: torch.device
    world: World | None = None
    mesh: DeviceMesh | None = None
    traffic: CollectiveLog = field(default_factory=CollectiveLog)
    _by_rank_group: dict[RankGroups, Axis] = field(default_factory=dict)

    def axis(self, name: str) -> Axis:
        """Return the mesh axis called ``name``. Raises ConfigError if the mesh has no such axis."""
        if name not in self.axes:
            self.grid.check_axis_names(name)
        return self.axes[name]

    @property
    def tensor(self) -> Axis:
        return self.axes["tensor"]

    @property
    def pipe(self) -> Axis:
        return self.axes["pipe"]

    @property
    def data(self) -> Axis:
        return self.axes["data"]

    @property
    def sequence(self) -> Axis:
        return self.axes["sequence"]

    @property
    def same_batch_axis(self) -> Axis:
        """Combined sequence and tensor axis, whose ranks all process the same batch.

        All processes must access it for the first time together, because it may create a process group.
        """
        return self.flatten("sequence", "tensor")

    @property
    def base_axes(self) -> list[Axis]:
        """Data, pipe, sequence and tensor axes of the mesh, excluding axes added by ``reshape_axis``."""
        return [self.axes[name] for name in self.grid.sizes]

    @property
    def runs_in_current_thread(self) -> bool:
        """Whether this rank runs in the calling thread, which is always true for a process."""
        thread = None if self.world is None else self.world.thread
        return thread is None or thread is threading.current_thread()

    def expand_views(self, axis_names: Iterable[str]) -> set[str]:
        """Replace axes that were reshaped, such as tensor, by their new axes, such as row and column."""
        views = {view.source_axes[0]: tuple(view.sizes) for view in self.grid.views if len(view.source_axes) == 1}
        return {finer for name in axis_names for finer in views.get(name, (name,))}

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis, by axis name."""
        return {name: axis.size for name, axis in self.axes.items()}

    @property
    def coords(self) -> dict[str, int]:
        """Rank of this process on each mesh axis, by axis name."""
        return {name: axis.rank for name, axis in self.axes.items()}

    @classmethod
    def from_sizes(
        cls,
        sizes: Mapping[str, int],
        coords: Mapping[str, int] | None = None,
        *,
        world: World | None = None,
        device: torch.device | None = None,
    ) -> ParallelContext:
        """Build the context of one rank without starting the other processes.

        Missing coordinates are 0. Without a ``world``, collectives raise LaunchError. The default device is the CPU.

        >>> str(ParallelContext.from_sizes({"data": 2, "tensor": 4}, {"tensor": 3}).tensor)
        'tensor 3/4'
        """
        grid = RankGrid.from_sizes(sizes)
        return cls(grid, grid.get_rank_at(coords or {}), {}, device or torch.device("cpu"), world)._add_axes(AXES)

    @classmethod
    def from_group(cls, group: Axis | dist.ProcessGroup | None, device: torch.device | None = None) -> ParallelContext:
        """Build a context with tensor parallelism only, over one process group or all processes."""
        tensor = group if isinstance(group, Axis) else replace(Axis.of(group), traffic=CollectiveLog())
        if tensor.group is not None:
            _LOGS[tensor.group] = tensor.traffic
        grid, rank = RankGrid.from_sizes({"tensor": tensor.size}, tensor.ranks), tensor.ranks[tensor.rank]
        axes = {name: Axis(name, ranks=(rank,), traffic=tensor.traffic) for name in AXES[:-1]}
        world = tensor.transport.world or ProcessWorld(tensor.ranks)
        by_lines = {grid.get_rank_groups("tensor"): tensor}
        axes["tensor"] = tensor
        return cls(grid, rank, axes, device or get_local_device(), world, None, tensor.traffic, by_lines)

    @classmethod
    def from_default_process_group(
        cls, sizes: AxisSizes | Callable[[], AxisSizes], device: torch.device | None = None
    ) -> ParallelContext:
        """Build the context of this process, with all processes of torch's default process group as ranks.

        ``sizes`` has the sizes of some axes, or is a function that returns them. Without any size, all processes form
        the tensor axis. Otherwise, the missing size of data or tensor is inferred, data first.

        Raises ConfigError on every process if the sizes differ between processes or do not fit their number.
        Communicates one gather of the sizes and host names.
        """
        grid, device = build_rank_grid(sizes), device or get_local_device()
        if device.type == "cuda" and not torch.cuda.is_initialized():  # DeviceMesh would select the LOCAL_RANK device
            torch.cuda.set_device(device)
            torch.cuda.init()
        ranks = torch.tensor(grid.ranks).reshape(list(grid.sizes.values()))
        mesh = DeviceMesh("cuda" if device.type == "cuda" else "cpu", ranks, mesh_dim_names=AXES)
        context = cls(grid, dist.get_rank(), {}, device, ProcessWorld(grid.ranks), mesh)
        for name in AXES:
            if grid.sizes[name] > 1:
                group = mesh.get_group(name)
                # with a GPU, some versions of torch create NCCL groups for a mesh although the user chose gloo
                is_chosen = dist.get_backend_config(group) == dist.get_backend_config()
                transport = ProcessGroupTransport(group) if is_chosen else None
                context._create_axis(name, grid.get_rank_groups(name), transport)
        return context._add_axes(AXES)

    def flatten(self, *names: str, only_coords: Mapping[str, Sequence[int]] | None = None) -> Axis:
        """Return a single axis that combines several mesh axes. Axes of size 1 are ignored.

        The ranks are in mesh order. All processes must call this method in the same order, because it may create
        process groups.

        Args:
            only_coords: axis -> coordinates that take part. On other processes, the axis has size 1.

        Raises:
            ConfigError: the axes overlap, such as a mesh axis and part of its view.
        """
        wide = [name for name in names if self.axis(name).size > 1]
        if only_coords is None and len(wide) <= 1:
            return self.axes[wide[0] if wide else names[0]]
        rank_groups = self.grid.get_rank_groups(*wide, only_coords=only_coords)
        return self._by_rank_group.get(rank_groups) or self._create_axis("_".join(wide), rank_groups)

    def reshape_axis(self, of: str | Sequence[str], **sizes: int) -> ParallelContext:
        """Add new axes to the mesh by reshaping one or several of its axes.

        ``context.reshape_axis("tensor", row=2, column=2).axis("row")`` contains this process and the one two tensor
        ranks away. All processes must call it, in the same order, because it creates process groups. Raises ConfigError
        if the product of the sizes is wrong.
        """
        grid = self.grid.with_reshaped_axes([of] if isinstance(of, str) else of, sizes)
        return replace(self, grid=grid)._add_axes(sizes)

    def _add_axes(self, axis_names: Sequence[str] | Mapping[str, int]) -> ParallelContext:
        axes = dict(self.axes)
        for name in axis_names:
            rank_groups = self.grid.get_rank_groups(name)
            axis = self._by_rank_group.get(rank_groups) or self._create_axis(name, rank_groups)
            axes[name] = axis if axis.name == name else replace(axis, name=name)
        return replace(self, axes=axes)

    def _create_axis(self, axis_name: str, rank_groups: RankGroups, transport: Transport | None = None) -> Axis:
        line = next((line for line in rank_groups if self.rank in line), (self.rank,))
        if transport is None:
            transport = NO_TRANSPORT if self.world is None else self.world.create_transport(rank_groups)
        place = line.index(self.rank)
        if isinstance(transport, ProcessGroupTransport):
            hosts = [self.grid.hosts[self.grid.ranks.index(rank)] for rank in line] if self.grid.hosts else ()
            transport.peers = PeerRanks(line, place, axis_name, hosts, self.traffic)
            _LOGS[transport.group] = self.traffic
        crosses = self.grid.crosses_hosts(line)
        axis = Axis(axis_name, len(line), place, transport, line, self.traffic, crosses)
        return self._by_rank_group.setdefault(rank_groups, axis)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelContext:
        return self

    def __str__(self) -> str:
        base = (self.axes[name] for name in AXES)
        return ", ".join(f"{a.name}={a.size}" for a in base if a.size > 1) or "one process"


def reshape_sequence_axis(context: ParallelContext, ring_ulysses_size: RingUlyssesSize | None) -> ParallelContext:
    """Split the sequence axis into ring and Ulysses axes if a pair of sizes is passed."""
    if ring_ulysses_size is None or isinstance(ring_ulysses_size, int):
        return context
    ring, group = ring_ulysses_size
    return context.reshape_axis("sequence", ring=ring, ulysses=group)


def reshape_tensor_axis(context: ParallelContext, grid_size: TensorGridSize | None) -> ParallelContext:
    """Split the tensor axis into row, column and depth axes if a tuple of sizes is passed."""
    if not isinstance(grid_size, tuple | list) or len(grid_size) == 1:
        return context
    row, column, *depth = grid_size
    return context.reshape_axis("tensor", row=row, column=column, depth=depth[0] if depth else 1)


def get_local_device() -> torch.device:
    """Return the GPU selected by LOCAL_RANK, or the CPU if there is no GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")
