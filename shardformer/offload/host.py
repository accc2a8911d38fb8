"""Optimizer state on the host: its memory, and copies between host and device that overlap with computation.

On a GPU they run on streams of their own, from and to pinned memory. Where the device is the CPU, host and device are
two pools of the same memory: threads copy between them, so that what overlaps, and what is where, is as on a GPU.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardformer.errors import ConfigError, check_bool, check_int, check_number
from shardformer.torch_compat import has_data

DEVICE_TO_HOST, HOST_TO_DEVICE = "to the host", "to the device"
REMEMBERED = 4096
"""Copies whose times are kept."""


@dataclass(frozen=True)
class FinishedCopy:
    """One copy that is done: which way, bytes, and when, in seconds of ``time.perf_counter``.

    On a GPU ``begin`` is 0: its clock is another one.
    """

    way: str
    size: int
    begin: float
    end: float


class AsyncCopy:
    """A copy under way. What is computed behind ``wait`` finds it done; ``finish`` returns when it is.

    Until it is known to be done it holds what is read, so that nobody writes there.
    """

    def __init__(
        self, out: Tensor, x: Tensor, wait: Callable[[], Any], finish: Callable[[], Any], is_done: Callable[[], bool]
    ) -> None:
        self._out, self._read = out, [x]
        self._wait, self._finish, self._is_done = wait, finish, is_done

    def wait(self) -> Tensor:
        self._wait()
        return self._out

    def finish(self) -> Tensor:
        self._finish()
        self._read.clear()
        return self._out

    def is_done(self) -> bool:
        done = self._is_done()
        if done:
            self._read.clear()
        return done


class HostDeviceCopier:
    """Between one device and its host. Each of the two ways has its own order.

    Args:
        bandwidth: bytes a second that it carries each way at the most, where the device is the CPU, to try what a
            slower link makes of a step; None: as fast as memory is.

    Attributes:
        log: the last copies.
    """

    def __init__(self, device: torch.device, *, bandwidth: float | None = None) -> None:
        self.device, self._bandwidth = device, bandwidth
        self.log: deque[FinishedCopy] = deque(maxlen=REMEMBERED)
        self._timed: deque[tuple[str, int, Any, Any]] = deque(maxlen=REMEMBERED)  # events of a GPU, read when asked
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._streams = {way: torch.cuda.Stream(device) for way in (DEVICE_TO_HOST, HOST_TO_DEVICE)}
        else:
            self._workers = {way: ThreadPoolExecutor(1, f"copies {way}") for way in (DEVICE_TO_HOST, HOST_TO_DEVICE)}

    def new_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies reach at full speed: pinned, beside a GPU."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._is_cuda)

    def to_host(self, out: Tensor, x: Tensor) -> AsyncCopy:
        """Starts ``out.copy_(x)`` from the device to the host. ``x`` stays as it is until that is done."""
        return self._start(DEVICE_TO_HOST, out, x)

    def to_device(self, out: Tensor, x: Tensor) -> AsyncCopy:
        """Starts ``out.copy_(x)`` from the host to the device. Both stay as they are until that is done."""
        return self._start(HOST_TO_DEVICE, out, x)

    def bandwidth(self, way: str) -> float | None:
        """Measured, in bytes a second of copying; None before the first copy."""
        while self._timed and self._timed[0][3].query():
            timed, size, begin, end = self._timed.popleft()
            self.log.append(FinishedCopy(timed, size, 0.0, begin.elapsed_time(end) / 1e3))
        done = [copied for copied in list(self.log) if copied.way == way]  # at once: the threads write on
        seconds = sum(copied.end - copied.begin for copied in done)
        return sum(copied.size for copied in done) / seconds if seconds else None

    def _start(self, way: str, out: Tensor, x: Tensor) -> AsyncCopy:
        x = x.detach()
        return self._start_on_stream(way, out, x) if self._is_cuda else self._start_on_thread(way, out, x)

    def _start_on_thread(self, way: str, out: Tensor, x: Tensor) -> AsyncCopy:
        if not has_data(x):  # threads cannot trace at the same time
            out.copy_(x)
            return AsyncCopy(out, x, bool, bool, lambda: True)
        future: Future[None] = self._workers[way].submit(self._copy, way, out, x)
        return AsyncCopy(out, x, future.result, future.result, future.done)

    def _copy(self, way: str, out: Tensor, x: Tensor) -> None:
        begin = time.perf_counter()
        out.copy_(x)
        if self._bandwidth is not None:
            time.sleep(max(0.0, begin + x.nbytes / self._bandwidth - time.perf_counter()))
        self.log.append(FinishedCopy(way, x.nbytes, begin, time.perf_counter()))

    def _start_on_stream(self, way: str, out: Tensor, x: Tensor) -> AsyncCopy:
        stream, on_device = self._streams[way], x if way == DEVICE_TO_HOST else out
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            begin.record(stream)
            out.copy_(x, non_blocking=True)
            end.record(stream)
        on_device.record_stream(stream)
        self._timed.append((way, x.nbytes, begin, end))

        def wait() -> None:
            torch.cuda.current_stream(self.device).wait_event(end)

        return AsyncCopy(out, x, end.synchronize if way == DEVICE_TO_HOST else wait, end.synchronize, end.query)


FREE_MEMORY, TO_CPU, TO_NVME = "free", "cpu", "nvme:"


@dataclass(frozen=True)
class OffloadConfig:
    """What ``shard_optimizer`` keeps elsewhere than on the device.

    Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021); for files, Rajbhandari et al.,
    "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning" (2021).

    Args:
        to: where masters, states and gradients are, and are updated: "cpu", the host's memory; "nvme:DIR", files in a
            folder, from which they are read for the update, and the gradients on the host. None: on the device.
        on_device: the share of the numbers whose masters and states stay on the device all the same, from 0 to 1; or
            "free", as many as fit into what the first step left free of a GPU.
        parameters: whether this rank's part of the parameters rests on the host too, under stage 3; then the device
            holds no more of them than the layers that are gathered.
        buffers: of files, how many buckets are in memory at a time: being read, updated and written.
        threads: with which the host updates; by default as many as it has cores for each process, beside a GPU.
        bandwidth: where the device is the CPU, bytes a second that the link carries at the most: see
        ``HostDeviceCopier``.
    """

    to: str | None = None
    on_device: float | str = 0.0
    parameters: bool = False
    buffers: int = 3
    threads: int | None = None
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        share = self.on_device
        is_share = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
        if not (
            self.to in (None, TO_CPU) or (isinstance(self.to, str) and self.to.startswith(TO_NVME) and self.folder)
        ):
            rule, remedy = "It is 'cpu', or 'nvme:' and a folder", "Write offload='cpu'"
            raise ConfigError(f"offload={self.to!r}", rule=rule, remedy=remedy)
        if share != FREE_MEMORY and not is_share:
            rule, remedy = "It is a share, from 0 to 1, or 'free'", "Write on_device=0.5"
            raise ConfigError(f"on_device={share!r}", rule=rule, remedy=remedy)
        check_int("OffloadConfig.buffers", self.buffers, 2, example=3)
        if self.threads is not None:
            check_int("OffloadConfig.threads", self.threads)
        if self.bandwidth is not None:
            check_number("OffloadConfig.bandwidth", self.bandwidth, unit="bytes a second", example=32e9)
        check_bool("OffloadConfig.parameters", self.parameters)

    @classmethod
    def of(cls, given: Any, optimizers: Sequence[Any] = ()) -> OffloadConfig:
        """The config of the argument ``offload``, with what an optimizer asks to keep on the device.

        Raises ConfigError for what is none.
        """
        shares = [optimizer.on_device for optimizer in optimizers if hasattr(optimizer, "on_device")]
        return given if isinstance(given, cls) else cls(given, *shares[:1])

    @property
    def folder(self) -> str | None:
        """Of the files; None without any."""
        return None if self.to is None or self.to == TO_CPU else os.path.expanduser(self.to[len(TO_NVME) :])


MAX_COPIES_IN_FLIGHT = 4
"""Gradients of so many buckets are on their way to the host at a time: they take memory of the device until then."""


class HostMemory:
    """The memory of the host beside one device, and the way there."""

    def __init__(self, asked: OffloadConfig, device: torch.device, *, overlaps: bool = True) -> None:
        self.link = HostDeviceCopier(device, bandwidth=asked.bandwidth)
        self._most = MAX_COPIES_IN_FLIGHT if overlaps else 0
        self._under_way: deque[AsyncCopy] = deque()
        self._threads = asked.threads
        if asked.threads is None and device.type != "cpu":
            self._threads = max(1, len(os.sched_getaffinity(0)) // _processes_here())

    def copy_to_host(self, out: Tensor, x: Tensor) -> AsyncCopy:
        """Starts to copy to the host; waits for an earlier copy where there are too many."""
        copy = self.link.to_host(out, x)
        self._under_way.append(copy)
        while self._under_way and (len(self._under_way) > self._most or self._under_way[0].is_done()):
            self._under_way.popleft().finish()
        return copy

    def part(self, length: int, dtype: torch.dtype) -> HostShard:
        """Of a new shard."""
        return HostShard(self, length, dtype)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The host computes in here, with its threads: launchers leave each process one."""
        before = torch.get_num_threads()
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            yield
        finally:
            torch.set_num_threads(before)


def _processes_here() -> int:
    """Processes that share this machine's cores."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


class HostShard:
    """What of one shard is on the host: its masters, and the sum of its gradients.

    Args:
        length: numbers.
        dtype: of the masters and of the sum.
    """

    def __init__(self, host: HostMemory, length: int, dtype: torch.dtype) -> None:
        self.host, self.length, self.dtype = host, length, dtype
        self.values = host.link.new_host(length, dtype).zero_()
        self._sum: Tensor | None = None
        self._has_sum = False
        self._staging: Tensor | None = None
        self._arriving: tuple[AsyncCopy, float] | None = None
        self._leaving: AsyncCopy | None = None

    def tensors(self) -> list[Tensor]:
        """All memory of the host that it has now, but for buffers that others use too."""
        return [x for x in (self.values, self._sum, self._staging) if x is not None]

    def fetch(self) -> None:
        """Before ``take``, where that would have to wait."""

    def load(self) -> bool:
        """Returns whether the masters may be read and written to."""
        return True

    def evict(self) -> None:
        """The masters are not needed before the next step."""

    def discard(self, *, keeps_memory: bool = False) -> None:
        """As ``evict``, where nothing was changed.

        Args:
            keeps_memory: somebody still looks at the tensors that are here.
        """

    def save(self) -> None:
        """Between two steps, something was changed."""

    def receive(self, part: Tensor, scale: float) -> None:
        """Starts to bring gradients down, which are added over ``scale``."""
        self._land()
        self._arriving = self.host.copy_to_host(self._stage(part.dtype), part), scale

    def _stage(self, dtype: torch.dtype) -> Tensor:
        if self._staging is None or self._staging.dtype != dtype:
            self._staging = self.host.link.new_host(self.length, dtype)
        return self._staging

    def _land(self) -> None:
        if self._arriving is None:
            return
        (copy, scale), self._arriving = self._arriving, None
        part = copy.finish()
        if self._sum is None:
            self._sum = self.host.link.new_host(part.numel(), self.dtype)
        if scale != 1:
            part = part.to(self.dtype) / scale
        self._sum = self._sum.add_(part) if self._has_sum else self._sum.copy_(part)
        self._has_sum = True

    @property
    def sum(self) -> Tensor | None:
        """Waits for what is on its way."""
        self._land()
        return self._sum if self._has_sum else None

    def clear_gradients(self) -> None:
        """The gradients are used, or thrown away."""
        self._land()
        self._has_sum = False

    def copy_to_device(self, own: Tensor) -> AsyncCopy:
        """Starts to copy the masters to the device, in the dtype there. Until it is done they stay as they are."""
        self.wait()
        values = self.values if own.dtype == self.dtype else self._stage(own.dtype).copy_(self.values)
        self._leaving = self.host.link.to_device(own, values)
        return self._leaving

    def wait(self) -> None:
        """Returns when the masters may be written to."""
        if self._leaving is not None:
            self._leaving.finish()
            self._leaving = None
