"""Offload optimizer states to host memory, with asynchronous copies between host and device.

On a GPU, copies run on their own streams and use pinned memory. If the device is the CPU, host and device are two pools
of the same memory, and threads copy between them. Overlap and memory use can then be tested without a GPU.
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
from shardformer.torch_compat import has_real_data

DEVICE_TO_HOST, HOST_TO_DEVICE = "to the host", "to the device"
MAX_LOGGED_COPIES = 4096
"""Maximum number of copies whose times are kept."""


@dataclass(frozen=True)
class CompletedHostDeviceCopy:
    """Record of a completed copy between host and device, with its direction, size and times.

    Times are in seconds of ``time.perf_counter``. On a GPU, ``start_time`` is 0, because GPU events have no common
    clock with the host.
    """

    direction: str
    num_bytes: int
    start_time: float
    end_time: float


class AsyncHostDeviceCopy:
    """An asynchronous copy between host and device.

    After ``wait_fn``, later operations on the device wait for the copy. ``block_fn`` blocks until the copy is complete.
    The copy keeps a reference to its source until it is complete, so that the memory is not reused.
    """

    def __init__(
        self,
        target: Tensor,
        source: Tensor,
        wait_fn: Callable[[], Any],
        block_fn: Callable[[], Any],
        is_done_fn: Callable[[], bool],
    ) -> None:
        self._out, self._read = target, [source]
        self._wait, self._finish, self._is_done = wait_fn, block_fn, is_done_fn

    def wait(self) -> Tensor:
        self._wait()
        return self._out

    def synchronize(self) -> Tensor:
        self._finish()
        self._read.clear()
        return self._out

    def is_done(self) -> bool:
        done = self._is_done()
        if done:
            self._read.clear()
        return done


class HostDeviceCopier:
    """Copies tensors asynchronously between a device and host memory, in order within each direction.

    Args:
        bandwidth: Bytes per second in each direction, to simulate a slower link on the CPU. None is unlimited.

    Attributes:
        log: The most recent copies.
    """

    def __init__(self, device: torch.device, *, bandwidth: float | None = None) -> None:
        self.device, self._bandwidth = device, bandwidth
        self.log: deque[CompletedHostDeviceCopy] = deque(maxlen=MAX_LOGGED_COPIES)
        self._timed: deque[tuple[str, int, Any, Any]] = deque(maxlen=MAX_LOGGED_COPIES)  # GPU events, read on demand
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._streams = {way: torch.cuda.Stream(device) for way in (DEVICE_TO_HOST, HOST_TO_DEVICE)}
        else:
            self._workers = {way: ThreadPoolExecutor(1, f"copies {way}") for way in (DEVICE_TO_HOST, HOST_TO_DEVICE)}

    def allocate_on_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor in host memory, pinned if the device is a GPU."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._is_cuda)

    def start_copy_to_host(self, target: Tensor, source: Tensor) -> AsyncHostDeviceCopy:
        """Start copying a tensor to the host. The tensor must not change until the copy is complete."""
        return self._start_copy(DEVICE_TO_HOST, target, source)

    def start_copy_to_device(self, target: Tensor, source: Tensor) -> AsyncHostDeviceCopy:
        """Start copying a tensor to the device. The tensor must not change until the copy is complete."""
        return self._start_copy(HOST_TO_DEVICE, target, source)

    def get_measured_bandwidth(self, direction: str) -> float | None:
        """Return the measured bytes per second in one direction, or None before the first copy."""
        while self._timed and self._timed[0][3].query():
            timed, size, begin, end = self._timed.popleft()
            self.log.append(CompletedHostDeviceCopy(timed, size, 0.0, begin.elapsed_time(end) / 1e3))
        done = [
            copied for copied in list(self.log) if copied.direction == direction
        ]  # copy of the log: threads append to it
        seconds = sum(copied.end_time - copied.start_time for copied in done)
        return sum(copied.num_bytes for copied in done) / seconds if seconds else None

    def _start_copy(self, direction: str, target: Tensor, source: Tensor) -> AsyncHostDeviceCopy:
        source = source.detach()
        return (
            self._start_copy_on_stream(direction, target, source)
            if self._is_cuda
            else self._start_copy_on_thread(direction, target, source)
        )

    def _start_copy_on_thread(self, direction: str, target: Tensor, source: Tensor) -> AsyncHostDeviceCopy:
        if not has_real_data(source):  # fake tensors; threads cannot trace concurrently
            target.copy_(source)
            return AsyncHostDeviceCopy(target, source, bool, bool, lambda: True)
        future: Future[None] = self._workers[direction].submit(self._copy_tensor, direction, target, source)
        return AsyncHostDeviceCopy(target, source, future.result, future.result, future.done)

    def _copy_tensor(self, direction: str, target: Tensor, source: Tensor) -> None:
        begin = time.perf_counter()
        target.copy_(source)
        if self._bandwidth is not None:
            time.sleep(max(0.0, begin + source.nbytes / self._bandwidth - time.perf_counter()))
        self.log.append(CompletedHostDeviceCopy(direction, source.nbytes, begin, time.perf_counter()))

    def _start_copy_on_stream(self, direction: str, target: Tensor, source: Tensor) -> AsyncHostDeviceCopy:
        stream, on_device = self._streams[direction], source if direction == DEVICE_TO_HOST else target
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        on_device.record_stream(stream)
        self._timed.append((direction, source.nbytes, begin, end))

        def wait_on_current_stream() -> None:
            torch.cuda.current_stream(self.device).wait_event(end)

        return AsyncHostDeviceCopy(
            target,
            source,
            end.synchronize if direction == DEVICE_TO_HOST else wait_on_current_stream,
            end.synchronize,
            end.query,
        )


FREE_MEMORY, TO_CPU, TO_NVME = "free", "cpu", "nvme:"


@dataclass(frozen=True)
class OffloadConfig:
    """Options for offloading optimizer states, gradients and parameters with ``shard_optimizer``.

    Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021). For files, Rajbhandari et al.,
    "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning" (2021).

    Args:
        to: "cpu" keeps master weights, optimizer states and gradients in host memory, and updates them there.
            "nvme:DIR" keeps master weights and optimizer states in files in a directory, and reads them for the update.
            None disables offload.
        on_device: Fraction of the master weights and optimizer states that stays on the device, from 0 to 1. "free"
            keeps as many as fit into the GPU memory that was free in the first step.
        parameters: Whether to also keep this rank's shard of the parameters in host memory (stage 3). The device then
            stores only the gathered layers.
        buffers: With offload to files, number of buckets in memory that are read, updated or written at once.
        threads: Number of CPU threads for the update. With a GPU, the default is the number of cores per process.
        bandwidth: If the device is the CPU, simulated bytes per second of the link. See ``HostDeviceCopier``.
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
            raise ConfigError(
                f"offload={self.to!r} is neither 'cpu' nor 'nvme:' followed by a directory.",
                remedy="Use offload='cpu', or a directory for files, such as offload='nvme:/scratch'.",
            )
        if share != FREE_MEMORY and not is_share:
            raise ConfigError(
                f"on_device={share!r} is neither a number from 0 to 1 nor 'free'.",
                remedy="Use a fraction such as on_device=0.5, or on_device='free'.",
            )
        check_int("OffloadConfig.buffers", self.buffers, 2, example=3)
        if self.threads is not None:
            check_int("OffloadConfig.threads", self.threads)
        if self.bandwidth is not None:
            check_number("OffloadConfig.bandwidth", self.bandwidth, unit="bytes per second", example=32e9)
        check_bool("OffloadConfig.parameters", self.parameters)

    @classmethod
    def from_argument(cls, offload: Any, optimizers: Sequence[Any] = ()) -> OffloadConfig:
        """Convert the ``offload`` argument of ``shard_optimizer`` to an ``OffloadConfig``.

        An optimizer with an attribute ``on_device`` sets that option.

        Raises:
            ConfigError: The argument is invalid.
        """
        shares = [optimizer.on_device for optimizer in optimizers if hasattr(optimizer, "on_device")]
        return offload if isinstance(offload, cls) else cls(offload, *shares[:1])

    @property
    def folder(self) -> str | None:
        """Directory of the offload files, or None if nothing is offloaded to files."""
        return None if self.to is None or self.to == TO_CPU else os.path.expanduser(self.to[len(TO_NVME) :])


MAX_COPIES_IN_FLIGHT = 4
"""Maximum number of gradient buckets that are being copied to the host, which use device memory until then."""


class HostOffloadManager:
    """Manages host memory for offloaded shards, and copies tensors between the device and the host."""

    def __init__(self, config: OffloadConfig, device: torch.device, *, overlap: bool = True) -> None:
        self.link = HostDeviceCopier(device, bandwidth=config.bandwidth)
        self._most = MAX_COPIES_IN_FLIGHT if overlap else 0
        self._under_way: deque[AsyncHostDeviceCopy] = deque()
        self._threads = config.threads
        if config.threads is None and device.type != "cpu":
            self._threads = max(1, len(os.sched_getaffinity(0)) // _get_local_world_size())

    def start_grad_copy_to_host(self, target: Tensor, source: Tensor) -> AsyncHostDeviceCopy:
        """Start copying a gradient to the host. If too many copies are in progress, wait for an earlier one."""
        copy = self.link.start_copy_to_host(target, source)
        self._under_way.append(copy)
        while self._under_way and (len(self._under_way) > self._most or self._under_way[0].is_done()):
            self._under_way.popleft().synchronize()
        return copy

    def create_shard(self, numel: int, dtype: torch.dtype) -> HostOffloadedShard:
        """Allocate host memory for a shard's master weights and gradients."""
        return HostOffloadedShard(self, numel, dtype)

    @contextmanager
    def use_optimizer_threads(self) -> Iterator[None]:
        """Set the number of CPU threads for the optimizer step, and restore it after the ``with`` block."""
        before = torch.get_num_threads()
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            yield
        finally:
            torch.set_num_threads(before)


def _get_local_world_size() -> int:
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


class MasterWeightStore:
    """Base class for loading master weights before the optimizer step and releasing them afterward.

    This class keeps the master weights on the device.
    """

    def start_loading(self) -> None:
        """Start reading the master weights in advance. ``load`` waits for them."""

    def load(self) -> bool:
        """Load the master weights for the optimizer step, and return whether they were loaded."""
        return True

    def wait_for_copies(self) -> None:
        """Wait until no copy of the master weights is in progress, so that they can be overwritten."""

    def evict(self) -> None:
        """Save the updated master weights, and free their memory until the next optimizer step."""

    def release(self, *, keep_memory: bool = False) -> None:
        """Free the memory of the master weights without saving them, because they did not change.

        Args:
            keep_memory: Whether the released tensors are still referenced, so that their memory must not be reused.
        """

    def write_back(self) -> None:
        """Save master weights that were changed between two optimizer steps."""


class HostOffloadedShard(MasterWeightStore):
    """The master weights and reduced gradients of one shard in host memory.

    Args:
        numel: Number of elements.
        dtype: Dtype of the master weights and the gradients.
    """

    def __init__(self, host_manager: HostOffloadManager, numel: int, dtype: torch.dtype) -> None:
        self.host, self.length, self.dtype = host_manager, numel, dtype
        self.values = host_manager.link.allocate_on_host(numel, dtype).zero_()
        self._sum: Tensor | None = None
        self._has_sum = False
        self._staging: Tensor | None = None
        self._arriving: tuple[AsyncHostDeviceCopy, float] | None = None
        self._leaving: AsyncHostDeviceCopy | None = None

    def get_host_tensors(self) -> list[Tensor]:
        """Return the tensors in host memory that only this shard uses."""
        return [x for x in (self.values, self._sum, self._staging) if x is not None]

    def accumulate_reduced_grads(self, reduced_grads: Tensor, loss_scale: float) -> None:
        """Start copying reduced gradients to the host, to unscale and accumulate them there."""
        self._accumulate_copied_grads()
        self._arriving = (
            self.host.start_grad_copy_to_host(self._get_staging_buffer(reduced_grads.dtype), reduced_grads),
            loss_scale,
        )

    def _get_staging_buffer(self, dtype: torch.dtype) -> Tensor:
        if self._staging is None or self._staging.dtype != dtype:
            self._staging = self.host.link.allocate_on_host(self.length, dtype)
        return self._staging

    def _accumulate_copied_grads(self) -> None:
        if self._arriving is None:
            return
        (copy, scale), self._arriving = self._arriving, None
        part = copy.synchronize()
        if self._sum is None:
            self._sum = self.host.link.allocate_on_host(part.numel(), self.dtype)
        if scale != 1:
            part = part.to(self.dtype) / scale
        self._sum = self._sum.add_(part) if self._has_sum else self._sum.copy_(part)
        self._has_sum = True

    @property
    def reduced_grads(self) -> Tensor | None:
        """The reduced gradients in host memory, or None if there are none. Reading it waits for running copies."""
        self._accumulate_copied_grads()
        return self._sum if self._has_sum else None

    def clear_grads(self) -> None:
        self._accumulate_copied_grads()
        self._has_sum = False

    def start_copy_to_device(self, local_params: Tensor) -> AsyncHostDeviceCopy:
        """Start copying the master weights into ``local_params``, this rank's parameter shard on the device.

        The master weights must not change until ``wait`` returns.
        """
        self.wait_for_copies()
        values = (
            self.values
            if local_params.dtype == self.dtype
            else self._get_staging_buffer(local_params.dtype).copy_(self.values)
        )
        self._leaving = self.host.link.start_copy_to_device(local_params, values)
        return self._leaving

    def wait_for_copies(self) -> None:
        """Wait until the master weights are copied to the device, so that they can be overwritten."""
        if self._leaving is not None:
            self._leaving.synchronize()
            self._leaving = None
