"""Copies between a device and its host, beside the computation.

On a GPU they run on streams of their own, from and to pinned memory. Where the device is the CPU, host and device are
two pools of the same memory: threads copy between them, so that what overlaps, and what is where, is as on a GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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

    def down(self, out: Tensor, x: Tensor) -> AsyncCopy:
        """Starts ``out.copy_(x)`` from the device to the host. ``x`` stays as it is until that is done."""
        return self._start(DEVICE_TO_HOST, out, x)

    def up(self, out: Tensor, x: Tensor) -> AsyncCopy:
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
