"""The file of one rank, which is read ahead and written behind.

Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning" (2021), section 6.3.
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from shardformer.optim.offload.host import Host

ALIGNED = 64
"""Bytes: where a tensor may begin."""
READ, WRITE = "read", "written"


class Disk:
    """The file of one rank, and the buffers through which it is read. The file has no name, and ends with the process.

    Args:
        buffers: shards that are in memory at a time.

    Attributes:
        error: the first one of this step.
        moved: bytes and seconds of what was read and written.
    """

    def __init__(self, folder: str, host: Host, buffers: int) -> None:
        self._host, self.buffers, self.folder = host, buffers, folder
        self.error: OSError | None = None
        self._file: Any = None
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # until nobody holds this
            weakref.finalize(self, self._file.close)
        except OSError as error:
            self.error = error
        self.moved = {READ: (0, 0.0), WRITE: (0, 0.0)}
        self._end = 0
        self._workers = {way: ThreadPoolExecutor(1, f"files {way}") for way in (READ, WRITE)}
        self._free: list[Tensor] = []
        self._writing: deque[tuple[Future[None], Tensor | None]] = deque()
        self._num_made = 0
        self.write_call: Any = os.pwritev

    def reserve(self, size: int) -> int:
        """A place in the file. Raises OSError where there is no room."""
        at = self._end
        os.posix_fallocate(self._file.fileno(), at, max(size, 1))
        self._end += size
        return at

    def read(self, at: int, out: Tensor) -> Future[None]:
        return self._workers[READ].submit(self._move, READ, at, [out])

    def write(self, at: int, tensors: Sequence[Tensor], buffer: Tensor | None) -> None:
        """Starts to write tensors behind each other; the buffer is free when that is done."""
        self._writing.append((self._workers[WRITE].submit(self._move, WRITE, at, tensors), buffer))

    def _move(self, way: str, at: int, tensors: Sequence[Tensor]) -> None:
        begin, total, call = time.perf_counter(), 0, os.preadv if way == READ else self.write_call
        for tensor in tensors:
            numbers: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
            view, done = memoryview(numbers), 0
            while done < len(view):
                step = call(self._file.fileno(), [view[done:]], at + total + done)
                if step == 0:
                    raise OSError(f"{len(view) - done} bytes are missing in the file")
                done += step
            total += aligned(len(view))
        size, seconds = self.moved[way]
        self.moved[way] = size + total, seconds + time.perf_counter() - begin

    def borrow(self, size: int) -> Tensor:
        """Memory of the host. Waits for something to be written where there is too much of it in use."""
        while not self._free and self._num_made >= self.buffers and self._writing:
            self._land()
        if not self._free:
            self._num_made += 1
            return self._host.link.new_host(size, torch.uint8)
        buffer = self._free.pop()
        return buffer if buffer.numel() >= size else self._host.link.new_host(size, torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        if len(self._free) < self.buffers:
            self._free.append(buffer)

    def _land(self) -> None:
        future, buffer = self._writing.popleft()
        try:
            future.result()
        except OSError as error:
            self.error = self.error or error
        if buffer is not None:
            self.give_back(buffer)

    def bandwidth(self, way: str) -> float | None:
        """Measured, in bytes a second; None where nothing was moved yet."""
        size, seconds = self.moved[way]
        return size / seconds if seconds else None

    def flush(self) -> None:
        """All is written, or an error says what is not, when this returns."""
        while self._writing:
            self._land()


def check_room(folder: str, size: int) -> None:
    """Raises OSError where no file of so many bytes can be in a folder."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
