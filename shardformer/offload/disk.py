"""Offload optimizer states and master weights to a file, which is read before each update and written after it.

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

from shardformer.comm.collective_call import all_gather_over_mesh
from shardformer.errors import InputError
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.host import HostOffloadedShard, HostOffloadManager, OffloadConfig

BLOCK_BYTES = 64
"""Alignment of tensors in the file, in bytes."""
READ, WRITE = "read", "written"


class OffloadFile:
    """A temporary file for the offloaded optimizer states of one rank, with host buffers for its contents.

    The operating system deletes the file when the process ends.

    Args:
        num_buffers: Maximum number of shards in memory at the same time.

    Attributes:
        error: The first OSError of the current step.
        moved: Bytes and seconds of all reads and writes.
    """

    def __init__(self, directory: str, host_manager: HostOffloadManager, num_buffers: int) -> None:
        self._host, self.buffers, self.folder = host_manager, num_buffers, directory
        self.error: OSError | None = None
        self._file: Any = None
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  # closed by the finalizer
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

    def reserve_bytes(self, num_bytes: int) -> int:
        """Reserve ``num_bytes`` bytes in the file and return their offset. Raise OSError if the disk is full."""
        at = self._end
        os.posix_fallocate(self._file.fileno(), at, max(num_bytes, 1))
        self._end += num_bytes
        return at

    def start_read(self, offset: int, out: Tensor) -> Future[None]:
        return self._workers[READ].submit(self._read_or_write, READ, offset, [out])

    def start_write(self, offset: int, tensors: Sequence[Tensor], buffer: Tensor | None) -> None:
        """Start writing tensors to the file, and release their buffer when the write is complete."""
        self._writing.append((self._workers[WRITE].submit(self._read_or_write, WRITE, offset, tensors), buffer))

    def _read_or_write(self, direction: str, offset: int, tensors: Sequence[Tensor]) -> None:
        begin, total, call = time.perf_counter(), 0, os.preadv if direction == READ else self.write_call
        for tensor in tensors:
            numbers: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
            view, done = memoryview(numbers), 0
            while done < len(view):
                step = call(self._file.fileno(), [view[done:]], offset + total + done)
                if step == 0:
                    raise OSError(f"The offload file is truncated: {len(view) - done} bytes are missing at its end")
                done += step
            total += round_up_to_block_size(len(view))
        size, seconds = self.moved[direction]
        self.moved[direction] = size + total, seconds + time.perf_counter() - begin

    def acquire_host_buffer(self, num_bytes: int) -> Tensor:
        """Return a free buffer in host memory. If all buffers are in use, wait until a write is complete."""
        while not self._free and self._num_made >= self.buffers and self._writing:
            self._wait_for_oldest_write()
        if not self._free:
            self._num_made += 1
            return self._host.link.allocate_on_host(num_bytes, torch.uint8)
        buffer = self._free.pop()
        return buffer if buffer.numel() >= num_bytes else self._host.link.allocate_on_host(num_bytes, torch.uint8)

    def release_buffer(self, buffer: Tensor) -> None:
        if len(self._free) < self.buffers:
            self._free.append(buffer)

    def _wait_for_oldest_write(self) -> None:
        future, buffer = self._writing.popleft()
        try:
            future.result()
        except OSError as error:
            self.error = self.error or error
        if buffer is not None:
            self.release_buffer(buffer)

    def get_measured_bandwidth(self, direction: str) -> float | None:
        """Return the measured bytes per second of reads or writes, or None before the first one."""
        size, seconds = self.moved[direction]
        return size / seconds if seconds else None

    def wait_for_all_writes(self) -> None:
        """Wait until all writes to the file are complete. ``error`` is then the first failure, if any."""
        while self._writing:
            self._wait_for_oldest_write()


def check_disk_space(directory: str, num_bytes: int) -> None:
    """Raise OSError if a directory does not exist, or if its disk has no space for a file of ``num_bytes`` bytes."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, max(num_bytes, 1))


def round_up_to_block_size(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


class FileOffloadManager(HostOffloadManager):
    """Manages the host memory for offloaded shards, and a file with their master weights and optimizer states."""

    def __init__(self, config: OffloadConfig, device: torch.device, *, overlap: bool = True) -> None:
        super().__init__(config, device, overlap=overlap)
        assert config.folder is not None
        self.disk = OffloadFile(config.folder, self, config.buffers)

    def create_shard(self, numel: int, dtype: torch.dtype) -> DiskShard:
        return DiskShard(self.disk, self, numel, dtype)

    def wait_for_writes(self, context: ParallelContext) -> None:
        """Wait until all ranks have written their files, and raise InputError on all ranks if one of them failed."""
        if failure := self.commit_or_roll_back([], context):
            raise InputError(
                f"The optimizer state could not be written to files in {self.disk.folder}: {failure}.",
                remedy="Free some disk space, and then load the optimizer state again.",
            )

    def commit_or_roll_back(self, shards: Sequence[HostOffloadedShard], context: ParallelContext) -> str | None:
        """Commit the written shards if all ranks succeeded, or else roll them back to the previous step.

        Return a description of the first error on any rank, or None. Communicates one object over each axis.
        """
        self.disk.wait_for_all_writes()
        failure = None if self.disk.error is None else f"{self.disk.error} (rank {context.rank})"
        failure = next((other for _, other in all_gather_over_mesh(failure, context) if other is not None), None)
        for part in shards:
            if isinstance(part, DiskShard):
                part.commit() if failure is None else part.roll_back()
        self.disk.error = None
        return failure


OptimizerStateDict = Callable[[Tensor], dict[str, Any]]
"""A function that returns the state dictionary of an optimizer parameter."""

EXTRA_STATE_TENSORS = 4
"""Number of state tensors per parameter slice for which alignment padding is reserved."""

_IN_FILE = torch.empty(0)
"""Placeholder for a state tensor whose values are in the file."""


@dataclass
class OffloadFileLayout:
    """The layout of one shard in the offload file: master weights, followed by the optimizer states of each slice.

    Args:
        fields: (index of the slice, name, dtype, shape) of each tensor. The master weights have index -1.
    """

    fields: list[tuple[int, str, torch.dtype, torch.Size]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(round_up_to_block_size(dtype.itemsize * shape.numel()) for *_, dtype, shape in self.fields)

    def split_buffer(self, buffer: Tensor) -> list[Tensor]:
        """Split the bytes of a shard that were read from the file into tensors."""
        found, at = [], 0
        for *_, dtype, shape in self.fields:
            size = dtype.itemsize * shape.numel()
            found.append(buffer[at : at + size].view(dtype).view(shape))
            at += round_up_to_block_size(size)
        return found


@dataclass
class OffloadFileRange:
    """A reserved range of bytes in the offload file, and the layout of its contents."""

    offset: int
    capacity: int
    layout: OffloadFileLayout


class DiskShard(HostOffloadedShard):
    """A shard whose master weights and optimizer states are in a file, and whose gradients are in host memory.

    An OSError is stored in ``offload_file.error``, so that all ranks continue until they agree on how to proceed.
    """

    def __init__(
        self, offload_file: OffloadFile, host_manager: HostOffloadManager, numel: int, dtype: torch.dtype
    ) -> None:
        super().__init__(host_manager, numel, dtype)
        self._disk = offload_file
        self._states: OptimizerStateDict = lambda _: {}
        self._slices: list[tuple[nn.Parameter, slice]] = []
        self._committed: OffloadFileRange | None = None
        self._other: OffloadFileRange | None = None  # target of the next write
        self._is_written = False
        self._small: list[dict[str, Any]] = []  # copy of the states at the last read, without the tensors in the file
        self._buffer: Tensor | None = None
        self._reading: Future[None] | None = None
        self.is_loaded = True

    def assign_param_slices_and_write(
        self,
        param_slices: Sequence[tuple[nn.Parameter, slice]],
        optimizer_states: OptimizerStateDict,
        expected_state_bytes: int,
    ) -> None:
        """Assign parameter slices to this shard, and write their master weights and optimizer states to the file.

        Args:
            expected_state_bytes: Expected size of the optimizer states in bytes.
        """
        self._slices, self._states = list(param_slices), optimizer_states
        if self._disk.error is not None:
            return
        try:
            size = (
                round_up_to_block_size(self.values.nbytes)
                + expected_state_bytes
                + EXTRA_STATE_TENSORS * BLOCK_BYTES * len(self._slices)
            )
            self._committed, self._other = (
                OffloadFileRange(self._disk.reserve_bytes(size), size, OffloadFileLayout()) for _ in range(2)
            )
        except OSError as error:
            self._disk.error = self._disk.error or error
            return
        self.write_back()

    @property
    def num_reserved_bytes(self) -> int:
        return sum(place.capacity for place in (self._committed, self._other) if place is not None)

    def start_loading(self) -> None:
        """Start reading the master weights and optimizer states of this shard from the file."""
        if self.is_loaded or self._reading is not None or self._disk.error is not None or self._committed is None:
            return
        size = self._committed.layout.num_bytes
        self._buffer = self._disk.acquire_host_buffer(size)
        self._reading = self._disk.start_read(self._committed.offset, self._buffer[:size])

    def load(self) -> bool:
        """Read the master weights and optimizer states from the file, and return whether this succeeded.

        ``disk.error`` is the first failure.
        """
        if self.is_loaded:
            return True
        self.start_loading()
        reading, self._reading = self._reading, None
        if reading is None or self._committed is None or self._buffer is None:
            return False
        try:
            reading.result()
        except OSError as error:
            self._disk.error = self._disk.error or error
            return False
        self._small = [deepcopy(self._states(value)) for value, _ in self._slices]
        for (index, name, *_), view in zip(
            self._committed.layout.fields, self._committed.layout.split_buffer(self._buffer), strict=True
        ):
            if index < 0:
                self.values = view
            else:
                self._states(self._slices[index][0])[name] = view
        for value, at in self._slices:
            value.data = self.values[at].view(value.shape)
        self.is_loaded = True
        return True

    def evict(self) -> None:
        """Write the updated tensors to the file in the background without overwriting the previous version."""
        self.wait_for_copies()
        record, tensors = self._get_layout_and_tensors()
        try:
            if self._other is None or self._other.capacity < record.num_bytes:
                self._other = OffloadFileRange(self._disk.reserve_bytes(record.num_bytes), record.num_bytes, record)
        except OSError as error:
            self._disk.error = self._disk.error or error
        if self._disk.error is None and self._other is not None:
            self._other.layout, self._is_written = record, True
            buffer, self._buffer = self._buffer, None
            self._disk.start_write(self._other.offset, tensors, buffer)
        self.release()

    def _get_layout_and_tensors(self) -> tuple[OffloadFileLayout, list[Tensor]]:
        record, tensors = OffloadFileLayout([(-1, "", self.dtype, self.values.shape)]), [self.values]
        for number, (value, _) in enumerate(self._slices):
            for name, x in self._states(value).items():
                if _is_stored_in_file(x):
                    record.fields.append((number, name, x.dtype, x.shape))
                    tensors.append(x.contiguous())
        return record, tensors

    def release(self, *, keep_memory: bool = False) -> None:
        self.wait_for_copies()
        if self._buffer is not None and not keep_memory:
            self._disk.release_buffer(self._buffer)
        self._buffer, self.is_loaded = None, False
        self.values = _IN_FILE.to(self.dtype)
        for value, _ in self._slices:
            state = self._states(value)
            state.update({name: _IN_FILE.to(x.dtype) for name, x in state.items() if _is_stored_in_file(x)})
            value.data = torch.full((), torch.nan, dtype=self.dtype).expand(value.shape)

    def commit(self) -> None:
        """Make the most recently written tensors the current version of the shard."""
        if self._is_written:
            self._committed, self._other, self._is_written = self._other, self._committed, False
        self._small = []

    def roll_back(self) -> None:
        """Restore the previous version of the shard, including the optimizer states that are not in the file."""
        if self.is_loaded:
            self.release()
        for (value, _), small in zip(self._slices, self._small, strict=False):
            state = self._states(value)
            state.clear()
            state.update(small)
        self._is_written, self._small = False, []

    def write_back(self) -> None:
        """Write the loaded tensors to the file and wait for completion. Must be called between two optimizer steps."""
        self.evict()
        self._disk.wait_for_all_writes()
        if self._disk.error is None:
            self.commit()


def _is_stored_in_file(state_value: Any) -> bool:
    return isinstance(state_value, Tensor) and state_value.dim() > 0 and state_value.device.type == "cpu"
