"""Optimizer state and master weights in a file, read ahead and written behind.

Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning" (2021), section 6.3.
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collective_call import all_gather_from_grid
from shardformer.errors import InputError
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.host import HostMemory, HostShard, OffloadConfig

BLOCK_BYTES = 64
"""Bytes: where a tensor may begin."""
READ, WRITE = "read", "written"


class OffloadFile:
    """The file of one rank, and the buffers through which it is read. The file has no name, and ends with the process.

    Args:
        buffers: shards that are in memory at a time.

    Attributes:
        error: the first one of this step.
        moved: bytes and seconds of what was read and written.
    """

    def __init__(self, folder: str, host: HostMemory, buffers: int) -> None:
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
            total += round_up_to_block(len(view))
        size, seconds = self.moved[way]
        self.moved[way] = size + total, seconds + time.perf_counter() - begin

    def acquire_buffer(self, size: int) -> Tensor:
        """Memory of the host. Waits for something to be written where there is too much of it in use."""
        while not self._free and self._num_made >= self.buffers and self._writing:
            self._land()
        if not self._free:
            self._num_made += 1
            return self._host.link.new_host(size, torch.uint8)
        buffer = self._free.pop()
        return buffer if buffer.numel() >= size else self._host.link.new_host(size, torch.uint8)

    def release_buffer(self, buffer: Tensor) -> None:
        if len(self._free) < self.buffers:
            self._free.append(buffer)

    def _land(self) -> None:
        future, buffer = self._writing.popleft()
        try:
            future.result()
        except OSError as error:
            self.error = self.error or error
        if buffer is not None:
            self.release_buffer(buffer)

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


def round_up_to_block(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


class FileStore(HostMemory):
    """The memory of the host, and a file behind it."""

    def __init__(self, asked: OffloadConfig, device: torch.device, *, overlaps: bool = True) -> None:
        super().__init__(asked, device, overlaps=overlaps)
        assert asked.folder is not None
        self.disk = OffloadFile(asked.folder, self, asked.buffers)

    def part(self, length: int, dtype: torch.dtype) -> FileShard:
        return FileShard(self.disk, self, length, dtype)

    def end_writing(self, context: ParallelContext) -> None:
        """Raises InputError, on all ranks, where something between two steps was not written on one."""
        if said := self.end_step([], context):
            raise InputError(
                f"The optimizer's files in {self.disk.folder} failed: {said}", remedy="Make room, then load it again"
            )

    def end_step(self, parts: Sequence[HostShard], context: ParallelContext) -> str | None:
        """Lets what was written count if all ranks have written theirs; else what was before. Returns what failed.

        Communicates one line over each axis.
        """
        self.disk.flush()
        said = None if self.disk.error is None else f"{self.disk.error} (rank {context.rank})"
        said = next((theirs for _, theirs in all_gather_from_grid(said, context) if theirs is not None), None)
        for part in parts:
            if isinstance(part, FileShard):
                part.commit() if said is None else part.roll_back()
        self.disk.error = None
        return said


OptimizerStateDict = Callable[[Tensor], dict[str, Any]]
"""Gives what the optimizers keep of one of their parameters: the dictionary that is theirs."""

FIELDS = 4
"""Tensors of state of a piece for which room to align them is left."""

_AWAY = torch.empty(0)
"""In the place of a state that is in the file."""


@dataclass
class FileLayout:
    """How a shard lies in the file: its masters, then for each piece what the optimizers keep of it.

    Args:
        fields: (the number of the piece, name, dtype, shape); the masters are (-1, "").
    """

    fields: list[tuple[int, str, torch.dtype, torch.Size]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(round_up_to_block(dtype.itemsize * shape.numel()) for *_, dtype, shape in self.fields)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Of bytes that were read."""
        found, at = [], 0
        for *_, dtype, shape in self.fields:
            size = dtype.itemsize * shape.numel()
            found.append(buffer[at : at + size].view(dtype).view(shape))
            at += round_up_to_block(size)
        return found


@dataclass
class FileSlot:
    """Where in the file how many bytes may lie, and what does."""

    at: int
    capacity: int
    record: FileLayout


class FileShard(HostShard):
    """What of one shard is in a file: its masters and states. Its gradients are in the memory of the host.

    An OSError is kept in ``disk.error``, so that all ranks go on together until they have agreed on what to do.
    """

    def __init__(self, disk: OffloadFile, host: HostMemory, length: int, dtype: torch.dtype) -> None:
        super().__init__(host, length, dtype)
        self._disk = disk
        self._states: OptimizerStateDict = lambda _: {}
        self._pieces: list[tuple[nn.Parameter, slice]] = []
        self._counts: FileSlot | None = None
        self._other: FileSlot | None = None  # to which the next step writes
        self._is_written = False
        self._small: list[dict[str, Any]] = []  # what of the states was not in the file, when it was read
        self._buffer: Tensor | None = None
        self._reading: Future[None] | None = None
        self.is_here = True

    def hold(self, pieces: Sequence[tuple[nn.Parameter, slice]], states: OptimizerStateDict, expected: int) -> None:
        """These lie in the masters. Writes them, with what optimizers keep of them.

        Args:
            expected: bytes that optimizers will keep.
        """
        self._pieces, self._states = list(pieces), states
        if self._disk.error is not None:
            return
        try:
            size = round_up_to_block(self.values.nbytes) + expected + FIELDS * BLOCK_BYTES * len(self._pieces)
            self._counts, self._other = (FileSlot(self._disk.reserve(size), size, FileLayout()) for _ in range(2))
        except OSError as error:
            self._disk.error = self._disk.error or error
            return
        self.save()

    @property
    def bytes_in_file(self) -> int:
        return sum(place.capacity for place in (self._counts, self._other) if place is not None)

    def fetch(self) -> None:
        """Starts to read."""
        if self.is_here or self._reading is not None or self._disk.error is not None or self._counts is None:
            return
        size = self._counts.record.size
        self._buffer = self._disk.acquire_buffer(size)
        self._reading = self._disk.read(self._counts.at, self._buffer[:size])

    def load(self) -> bool:
        """Returns whether masters and states are in memory now; an error says why they are not."""
        if self.is_here:
            return True
        self.fetch()
        reading, self._reading = self._reading, None
        if reading is None or self._counts is None or self._buffer is None:
            return False
        try:
            reading.result()
        except OSError as error:
            self._disk.error = self._disk.error or error
            return False
        self._small = [deepcopy(self._states(value)) for value, _ in self._pieces]
        for (piece, name, *_), view in zip(
            self._counts.record.fields, self._counts.record.views(self._buffer), strict=True
        ):
            if piece < 0:
                self.values = view
            else:
                self._states(self._pieces[piece][0])[name] = view
        for value, at in self._pieces:
            value.data = self.values[at].view(value.shape)
        self.is_here = True
        return True

    def evict(self) -> None:
        """Starts to write what is here to the place that does not count yet, and drops it."""
        self.wait()
        record, tensors = self._look()
        try:
            if self._other is None or self._other.capacity < record.size:
                self._other = FileSlot(self._disk.reserve(record.size), record.size, record)
        except OSError as error:
            self._disk.error = self._disk.error or error
        if self._disk.error is None and self._other is not None:
            self._other.record, self._is_written = record, True
            buffer, self._buffer = self._buffer, None
            self._disk.write(self._other.at, tensors, buffer)
        self.discard()

    def _look(self) -> tuple[FileLayout, list[Tensor]]:
        record, tensors = FileLayout([(-1, "", self.dtype, self.values.shape)]), [self.values]
        for number, (value, _) in enumerate(self._pieces):
            for name, x in self._states(value).items():
                if _is_large(x):
                    record.fields.append((number, name, x.dtype, x.shape))
                    tensors.append(x.contiguous())
        return record, tensors

    def discard(self, *, keeps_memory: bool = False) -> None:
        self.wait()
        if self._buffer is not None and not keeps_memory:
            self._disk.release_buffer(self._buffer)
        self._buffer, self.is_here = None, False
        self.values = _AWAY.to(self.dtype)
        for value, _ in self._pieces:
            state = self._states(value)
            state.update({name: _AWAY.to(x.dtype) for name, x in state.items() if _is_large(x)})
            value.data = torch.full((), torch.nan, dtype=self.dtype).expand(value.shape)

    def commit(self) -> None:
        """What was written counts."""
        if self._is_written:
            self._counts, self._other, self._is_written = self._other, self._counts, False
        self._small = []

    def roll_back(self) -> None:
        """What counted still does, and so do the states that are not in the file."""
        if self.is_here:
            self.discard()
        for (value, _), small in zip(self._pieces, self._small, strict=False):
            state = self._states(value)
            state.clear()
            state.update(small)
        self._is_written, self._small = False, []

    def save(self) -> None:
        """Writes what is here, and lets it count. Between two steps."""
        self.evict()
        self._disk.flush()
        if self._disk.error is None:
            self.commit()


def _is_large(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.device.type == "cpu"
