"""Save a checkpoint of a training run, with each rank writing only its own shards.

Each tensor element is written once. Ranks do not communicate while they write. Instead, each rank writes a small JSON
file with the list of its chunks, and the first rank merges these lists. Background threads can therefore write a
checkpoint while training runs its own collectives.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardformer.checkpoint import directory as checkpoint_directory
from shardformer.checkpoint import file_format
from shardformer.checkpoint.chunks import CheckpointTensor, ChunkBounds, NamedChunk, select_chunks_to_write
from shardformer.checkpoint.directory import SAVE
from shardformer.checkpoint.file_format import CheckpointIndex, fsync_path, get_rank_file_name, write_chunks
from shardformer.checkpoint.retention import CheckpointRetention, delete_old_checkpoints
from shardformer.checkpoint.training_state import ModelCheckpointTensors, Optimizers, Schedulers, collect_training_state
from shardformer.comm.collective_call import run_on_all_ranks, wait_for_all_ranks
from shardformer.errors import ConfigError, InputError, check_int
from shardformer.filesystem import release_folder_lock, remove_file_or_folder, to_absolute_path, write_new_file
from shardformer.layout.shard_spec import Offsets
from shardformer.mesh.parallel_context import Axis
from shardformer.public_names import deprecate_renamed_function_arguments

LOOK_EVERY_S, PATIENCE_S = 0.005, 1800.0
"""How often the first rank looks for the chunk lists of other ranks, and how long it waits for each of them."""


@dataclass(eq=False)
class RankSnapshot:
    """Tensor chunks and index entries that one rank writes into a checkpoint.

    Args:
        rank: this rank, out of the ``size`` ranks that save.
        index: index without entries; only the first rank writes it.
        entries: name -> (dtype, full shape) of the tensors of which this rank writes chunks.
        chunks: (name, start, values) of the chunks.
    """

    rank: int
    size: int
    index: CheckpointIndex
    entries: dict[str, tuple[str, Offsets]] = field(default_factory=dict)
    chunks: list[tuple[str, Offsets, Tensor]] = field(default_factory=list)

    def add_chunks_to_write(
        self, tensor_item: CheckpointTensor, chunks_to_write: dict[NamedChunk, list[ChunkBounds]]
    ) -> None:
        """Add the chunks of a tensor that this rank must write. An empty tensor gets only an index entry."""
        boxes = [
            (chunk, box)
            for chunk in tensor_item.chunks
            for box in chunks_to_write.get((tensor_item.name, *chunk.bounds), ())
        ]
        if boxes or prod(tensor_item.shape) == 0:
            self.entries[tensor_item.name] = file_format.get_dtype_name(tensor_item.dtype), tensor_item.shape
        self.chunks += [(tensor_item.name, box[0], chunk.get_subview(*box)) for chunk, box in boxes]

    def copy_chunks_to_host_buffers(self, reusable_buffers: dict[tuple[str, Offsets], Tensor]) -> None:
        """Copy the chunks to host memory, and reuse the buffers of earlier saves if they fit."""
        for number, (name, start, values) in enumerate(self.chunks):
            copy = reusable_buffers.get((name, start))
            if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
                reusable_buffers[name, start] = copy
            self.chunks[number] = name, start, copy.copy_(values.detach(), non_blocking=True)
        if any(values.is_pinned() for *_, values in self.chunks):
            torch.cuda.synchronize()


def write_rank_checkpoint(
    rank_data: RankSnapshot,
    temporary_folder: Path,
    checkpoint_root: Path,
    retention: CheckpointRetention,
    *,
    sync_to_disk: bool,
) -> Path:
    """Write this rank's chunks into a hidden folder, which the first rank renames once all ranks are done.

    Args:
        sync_to_disk: whether to sync the files to the disk. If False, call ``flush_checkpoint_to_disk`` later, which
            also deletes older checkpoints.

    Returns:
        The path of the checkpoint.

    Raises:
        OSError: writing to the disk failed.
        InputError: another rank failed. Only the first rank waits for the others.
    """
    try:
        _write_local_chunks(rank_data, temporary_folder, sync_to_disk)
    except BaseException:
        with suppress(OSError):
            write_new_file(
                _get_rank_status_path(temporary_folder, rank_data.rank, "failed"), b""
            )  # empty: succeeds on a full disk
        raise
    finally:
        rank_data.chunks.clear()
    path = checkpoint_directory.get_checkpoint_folder(checkpoint_root, rank_data.index.step)
    if rank_data.rank == 0:
        _merge_rank_chunk_lists(rank_data, temporary_folder)
        if sync_to_disk:
            fsync_path(temporary_folder)
        path = checkpoint_directory.move_checkpoint_into_place(
            temporary_folder, checkpoint_root, rank_data.index, sync_to_disk=sync_to_disk
        )
        if sync_to_disk:
            fsync_path(checkpoint_root)
            delete_old_checkpoints(checkpoint_root, retention, path)
    return path


def flush_checkpoint_to_disk(snapshot: RankSnapshot, path: Path, root: Path, retention: CheckpointRetention) -> None:
    """Sync the files of a complete checkpoint to the disk, and then delete older checkpoints.

    If syncing fails, the older checkpoints are kept and InputError is raised.
    """
    try:
        files = [*map(get_rank_file_name, range(snapshot.size)), file_format.INDEX_FILE]
        for name in (*(path / file for file in files), path, root):
            fsync_path(name)
        delete_old_checkpoints(root, retention, path)
    except FileNotFoundError:
        return  # the checkpoint was removed
    except OSError as error:
        raise InputError(
            f"The checkpoint {path} could not be synced to the disk, so older checkpoints were kept: {error}.",
            remedy="Check the disk, or save to another directory.",
        ) from error


def _write_local_chunks(rank_data: RankSnapshot, temporary_folder: Path, sync_to_disk: bool) -> None:
    sums = write_chunks(
        temporary_folder / get_rank_file_name(rank_data.rank), rank_data.chunks, sync_to_disk=sync_to_disk
    )
    boxes = [
        (name, file_format.SavedChunk(start, tuple(values.shape), rank_data.rank, total))
        for (name, start, values), total in zip(rank_data.chunks, sums, strict=True)
    ]
    note = _get_rank_status_path(temporary_folder, rank_data.rank, "json")
    unfinished = note.with_suffix(".begun")
    write_new_file(unfinished, json.dumps({"entries": rank_data.entries, "boxes": boxes}).encode())
    unfinished.rename(note)


def _merge_rank_chunk_lists(rank_data: RankSnapshot, temporary_folder: Path) -> None:
    tensors = rank_data.index.tensors
    for rank in range(rank_data.size):
        note = _wait_for_chunk_list_of_rank(rank, temporary_folder)
        share = json.loads(note.read_text())
        note.unlink()
        for name, (dtype, shape) in share["entries"].items():
            tensors.setdefault(name, file_format.TensorIndexEntry(dtype, tuple(shape)))
        for name, box in share["boxes"]:
            tensors[name].chunks.append(file_format.decode_saved_chunk(box))
    for name, entry in tensors.items():
        if (covered := sum(prod(box.size) for box in entry.chunks)) != prod(entry.shape):
            expected = prod(entry.shape)
            raise InputError(
                f"All ranks together saved {covered} elements of {name}, but this tensor has {expected} elements.",
                remedy="Call save_checkpoint with the full model and its optimizer on all ranks that train the model.",
            )


def _wait_for_chunk_list_of_rank(rank: int, temporary_folder: Path) -> Path:
    note, failed = (
        _get_rank_status_path(temporary_folder, rank, "json"),
        _get_rank_status_path(temporary_folder, rank, "failed"),
    )
    end = time.monotonic() + PATIENCE_S
    while not note.exists():
        has_failed = failed.exists() or not temporary_folder.is_dir()
        if has_failed or time.monotonic() > end or not threading.main_thread().is_alive():
            problem = "failed to write" if has_failed else "did not finish writing"
            raise InputError(
                f"The checkpoint {temporary_folder} is incomplete, because rank {rank} {problem} its shards.",
                remedy=f"Check the log of rank {rank}. With several hosts, save to a shared file system.",
            )
        time.sleep(LOOK_EVERY_S)
    return note


def _get_rank_status_path(temporary_folder: Path, rank: int, suffix: str) -> Path:
    return temporary_folder / f".{get_rank_file_name(rank)}.{suffix}"


@dataclass(frozen=True, eq=False)
class CheckpointSaveJob:
    """A checkpoint that is ready to be written: this rank's chunks and their destination.

    ``is_first_save`` is true for the model's first save into the directory. If that save fails, the lock is released.
    """

    model: nn.Module
    rank_data: RankSnapshot
    temporary_folder: Path
    checkpoint_root: Path
    retention: CheckpointRetention
    world: Axis
    num_hosts: int
    is_first_save: bool = False

    def write_checkpoint(self, *, sync_to_disk: bool = True) -> Path:
        """Write this rank's chunks, and sync the file to the disk if ``sync_to_disk`` is True. Communicates nothing."""
        return write_rank_checkpoint(
            self.rank_data, self.temporary_folder, self.checkpoint_root, self.retention, sync_to_disk=sync_to_disk
        )

    def flush_to_disk(self, path: Path) -> Path:
        """Sync the files of the checkpoint to the disk. Communicates nothing."""
        flush_checkpoint_to_disk(self.rank_data, path, self.checkpoint_root, self.retention)
        return path

    def write_or_clean_up(self, write_fn: Callable[[], Path]) -> Path:
        """Write the checkpoint by calling ``write_fn`` on all ranks, and delete its files if any rank fails."""
        try:
            return run_on_all_ranks(write_fn, self.world, f"Saving into {self.checkpoint_root}")
        except Exception:
            if self.world.rank == 0:
                remove_file_or_folder(self.temporary_folder)
                if self.is_first_save:
                    release_folder_lock(self.checkpoint_root, self.model)
            raise


class AsyncSave:
    """A checkpoint that a background thread writes while training continues. ``wait()`` returns its path.

    Args:
        save_fn: function that the thread runs.
        is_complete: True if the checkpoint is already complete and the thread only syncs it to the disk.
    """

    def __init__(self, save_job: CheckpointSaveJob, save_fn: Callable[[], Path], *, is_complete: bool = False) -> None:
        self._job = save_job
        self.memory: dict[tuple[str, Offsets], Tensor] = {}
        self.was_waited_for = is_complete
        self._path = save_job.checkpoint_root
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run_in_thread, args=(save_fn,), name="shardformer-save", daemon=False
        )
        self.start, self.join = self._thread.start, self._thread.join

    def _run_in_thread(self, save_fn: Callable[[], Path]) -> None:
        try:
            self._path = save_fn()
        except Exception as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether this rank has written its file. The checkpoint is complete only when ``wait`` has returned."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and return its path.

        All ranks must call it. Raises the errors of ``save_checkpoint``.
        """
        wait_for_all_ranks("AsyncSave.wait", self._job.world)
        self.was_waited_for = True
        return self._job.write_or_clean_up(self.result)

    def result(self) -> Path:
        """Wait for the background thread of this rank, and return the checkpoint's path or raise the thread's error."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model has no save in progress


@deprecate_renamed_function_arguments({"folder": "directory", "keep": "retention"}, ("directory", "model", "optimizer"))
def save_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int = 0,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    extra: Any = None,
    retention: CheckpointRetention | int | None = None,
) -> Path:
    """Save a checkpoint, from which the training run can be resumed under any parallel layout.

    The checkpoint is a folder such as ``directory/step-00000123``. It contains parameters, master weights, buffers,
    optimizer states, random states, the scheduler and ``extra``. All ranks must call this function. Each rank writes
    its own shards, and each tensor element is written once. The checkpoint gets its name only when it is complete. A
    failed save leaves the previous checkpoints as they were.

    On one host, the call returns before the data is synced to the disk. A thread of the first rank waits for the disk
    and then deletes older checkpoints. The next save and the end of the program wait for that thread. On several hosts,
    every rank waits for the disk.

    Communicates the names and sizes of the tensors, but no weights.

    Args:
        optimizer: an optimizer, a list of optimizers, or the result of ``shard_optimizer``.
        step: number of completed training steps, which becomes part of the folder's name.
        scheduler: an object whose ``state_dict`` has plain values, such as a scheduler or GradScaler, or a list of
            such objects.
        extra: numbers, strings, lists and dictionaries that ``load_checkpoint`` returns. Those of rank 0 are saved.
        retention: number of newest checkpoints to keep, a ``CheckpointRetention``, or None to keep all.

    Returns:
        The path of the checkpoint.

    Raises:
        ConfigError: the training run cannot be saved.
        InputError: writing to the disk failed.

    If one rank fails, all ranks raise, and earlier checkpoints are kept.
    """
    wait_for_all_ranks("save_checkpoint", ModelCheckpointTensors(model).world)
    with prepare_save(directory, model, optimizer, step, scheduler, extra, retention) as job:
        path = job.write_or_clean_up(partial(job.write_checkpoint, sync_to_disk=job.num_hosts > 1))
    if job.num_hosts == 1 and job.world.rank == 0:
        _start_async_save(AsyncSave(job, partial(job.flush_to_disk, path), is_complete=True), job.model)
    return path


@deprecate_renamed_function_arguments({"folder": "directory", "keep": "retention"}, ("directory", "model", "optimizer"))
def async_save_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int = 0,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    extra: Any = None,
    retention: CheckpointRetention | int | None = None,
) -> AsyncSave:
    """Save a checkpoint in the background, and return as soon as its data is copied to host memory.

    Takes the same arguments as ``save_checkpoint``. A thread writes and syncs the checkpoint. Call ``wait()`` on the
    result before the next save and before the program ends. The host buffers are as large as this rank's shards and are
    reused.
    """
    wait_for_all_ranks("async_save_checkpoint", ModelCheckpointTensors(model).world)
    with prepare_save(directory, model, optimizer, step, scheduler, extra, retention) as job:
        saving = AsyncSave(job, job.write_checkpoint)
        before: AsyncSave | None = job.model.__dict__.get(SAVE)
        job.rank_data.copy_chunks_to_host_buffers(saving.memory if before is None else before.memory)
    _start_async_save(saving, job.model)
    return saving


def check_can_save(
    model: nn.Module, optimizer: Optimizers = None, *, scheduler: Schedulers = None, extra: Any = None
) -> None:
    """Check that ``save_checkpoint`` can save this training run, without writing any files.

    Raises the errors of ``save_checkpoint``. All ranks must call this function. Communicates names and sizes.
    """
    tensors = ModelCheckpointTensors(model)
    wait_for_all_ranks("check_can_save", tensors.world)
    with tensors.readable_zero_shards():
        collect_training_state(tensors, lambda: None, optimizer, scheduler, extra)


def _start_async_save(async_save: AsyncSave, model: nn.Module) -> None:
    if (before := model.__dict__.get(SAVE)) is not None:
        async_save.memory = before.memory
    model.__dict__[SAVE] = async_save
    async_save.start()


@contextmanager
def prepare_save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    step: int = 0,
    scheduler: Schedulers = None,
    extra: Any = None,
    retention_policy: CheckpointRetention | int | None = None,
) -> Iterator[CheckpointSaveJob]:
    """Lock the checkpoint directory, and yield a ``CheckpointSaveJob`` that can write the training state."""
    root, tensors = Path(), ModelCheckpointTensors(model)
    world, is_new = tensors.world, False

    def check_arguments() -> tuple[str, int, str, str]:
        nonlocal root
        root = to_absolute_path(directory)
        check_int("step", step, 0, unit="training steps")
        CheckpointRetention.from_value(retention_policy)
        _check_no_pending_save(tensors.model.__dict__.get(SAVE))
        hidden_name = checkpoint_directory.make_temporary_checkpoint_path(root, step).name
        return str(Path(directory)), step, platform.node(), hidden_name

    def lock_directory() -> None:
        nonlocal is_new
        if world.rank == 0:
            is_new = checkpoint_directory.lock_checkpoint_directory(root, step, tensors.model)
            hidden.mkdir()  # the name is unique: a rank that sees it shares the file system

    def check_directory() -> None:
        if world.rank > 0:
            checkpoint_directory.wait_until_folder_exists(hidden)

    with tensors.readable_zero_shards():
        requests, state = collect_training_state(tensors, check_arguments, optimizer, scheduler, extra)
        folders, steps, hosts, names = zip(*requests, strict=True)
        for rank, (other_step, other_folder) in enumerate(zip(steps, folders, strict=True)):
            if (other_step, other_folder) != (steps[0], folders[0]):
                raise ConfigError(
                    f"Rank 0 saves step {steps[0]} to {folders[0]}, but rank {rank} saves step {other_step} to "
                    f"{other_folder}.",
                    remedy="Pass the same step and the same shared directory on all ranks.",
                )
        hidden = root / names[0]
        try:
            run_on_all_ranks(lock_directory, world, f"Saving into {root}")
            run_on_all_ranks(check_directory, world, f"Saving into {root}")
            index = CheckpointIndex(step, time.time(), tensors.mesh_axis_sizes, values=state.values)
            snapshot = RankSnapshot(world.rank, world.size, index)
            assigned = select_chunks_to_write(state.chunks_by_rank, world)
            for item in state.items:
                snapshot.add_chunks_to_write(item, assigned)
            retention, num_hosts = CheckpointRetention.from_value(retention_policy), len(set(hosts))
            yield CheckpointSaveJob(tensors.model, snapshot, hidden, root, retention, world, num_hosts, is_new)
        except BaseException:
            if world.rank == 0:
                remove_file_or_folder(hidden)
            if is_new:
                release_folder_lock(root, tensors.model)
            raise


def _check_no_pending_save(previous_save: AsyncSave | None) -> None:
    """Raise an error if ``wait()`` was not called on the previous asynchronous save, or if that save failed.

    Waits until the previous checkpoint is on the disk.
    """
    if previous_save is None:
        return
    if not previous_save.was_waited_for:
        state = "is finished" if previous_save.is_done else "is still in progress"
        raise InputError(
            f"wait() was not called on the previous asynchronous save, which {state}.",
            remedy="Call wait() on the result of async_save_checkpoint before you save again.",
        )
    previous_save.result()
