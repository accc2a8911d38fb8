"""Saves what a training run needs to resume: each rank writes its own pieces, each number once.

Ranks do not speak while they write: each leaves a note beside its file, which the first one collects. So a checkpoint
can be written by threads, beside training and its collectives.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardformer.checkpoint import directory as checkpoint_directory
from shardformer.checkpoint.chunks import ChunkBounds, ChunkOwners, TensorItem, assigned_chunks
from shardformer.checkpoint.directory import SAVE, CheckpointRetention
from shardformer.checkpoint.file_format import (
    INDEX_FILE,
    CheckpointIndex,
    IndexEntry,
    SavedChunk,
    chunk_from_json,
    dtype_name,
    file_name,
    sync,
    write_boxes,
)
from shardformer.checkpoint.training_state import ModelTensors, collect_state
from shardformer.comm.collective_call import come, run_on_all_ranks
from shardformer.errors import ConfigError, InputError, check_int
from shardformer.filesystem.atomic_write import path_of, remove, write_new
from shardformer.filesystem.lock import release
from shardformer.layout.shard_spec import Offsets
from shardformer.mesh.parallel_context import Axis
from shardformer.public_names import renamed_parameters

LOOK_EVERY_S, PATIENCE_S = 0.005, 1800.0
"""How often the first rank looks for the others' notes, and how long it waits for one after the other."""


@dataclass(eq=False)
class Snapshot:
    """One rank's share of a checkpoint.

    Args:
        rank: among the ``size`` ranks that save.
        index: without tensors; of the first rank.
        entries: name -> (dtype, full shape) of what this rank writes pieces of.
        pieces: name, where it begins, values.
    """

    rank: int
    size: int
    index: CheckpointIndex
    entries: dict[str, tuple[str, Offsets]] = field(default_factory=dict)
    pieces: list[tuple[str, Offsets, Tensor]] = field(default_factory=list)

    def add(self, item: TensorItem, mine: dict[ChunkOwners, list[ChunkBounds]]) -> None:
        """Adds what of an item falls to this rank; of one without numbers its name."""
        if prod(item.shape) == 0:
            self.entries[item.name] = dtype_name(item.dtype), item.shape
        for held in item.held:
            for start, size in mine.get((item.name, held.start, tuple(held.values.shape)), ()):
                self.entries[item.name] = dtype_name(item.dtype), item.shape
                self.pieces.append((item.name, start, held.part(start, size)))

    def copy_into(self, memory: dict[tuple[str, Offsets], Tensor]) -> None:
        """From now on the values are copies, on the host. ``memory`` is used again where it fits, and added to."""
        for number, (name, start, values) in enumerate(self.pieces):
            copy = memory.get((name, start))
            if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
                memory[name, start] = copy
            self.pieces[number] = name, start, copy.copy_(values.detach(), non_blocking=True)
        if any(values.is_pinned() for *_, values in self.pieces):
            torch.cuda.synchronize()


def write_snapshot(snapshot: Snapshot, hidden: Path, root: Path, keep: CheckpointRetention, *, to_disk: bool) -> Path:
    """Writes this rank's share into the hidden folder; the first rank then makes a checkpoint of it.

    Args:
        to_disk: whether it waits until the disk has all; else ``settle`` does, and takes older ones away.

    Returns the path of the checkpoint. Raises OSError or InputError; other ranks may raise or not.
    """
    try:
        _write_share(snapshot, hidden, to_disk)
    except BaseException:
        with suppress(OSError):
            write_new(_note(hidden, snapshot.rank, "failed"), b"")  # takes no room
        raise
    finally:
        snapshot.pieces.clear()
    path = checkpoint_directory.step_folder(root, snapshot.index.step)
    if snapshot.rank == 0:
        _merge_rank_notes(snapshot, hidden)
        if to_disk:
            sync(hidden)
        path = checkpoint_directory.publish_directory(hidden, root, snapshot.index, to_disk=to_disk)
        if to_disk:
            sync(root)
            checkpoint_directory.delete_old(root, keep, path)
    return path


def wait_for_disk(snapshot: Snapshot, path: Path, root: Path, keep: CheckpointRetention) -> None:
    """Waits until the disk has a checkpoint that ranks of this host wrote. Then older ones go.

    Raises InputError where the disk fails: then older ones stay.
    """
    try:
        for name in (*(path / file_name(rank) for rank in range(snapshot.size)), path / INDEX_FILE, path, root):
            sync(name)
        checkpoint_directory.delete_old(root, keep, path)
    except FileNotFoundError:
        return  # it was removed
    except OSError as error:
        raise InputError(
            f"{path} was written, and may not be on the disk: {error}",
            remedy="Look after the disk, or give another folder; the older checkpoints are there",
        ) from error


def _write_share(snapshot: Snapshot, hidden: Path, to_disk: bool) -> None:
    sums = write_boxes(hidden / file_name(snapshot.rank), snapshot.pieces, to_disk=to_disk)
    boxes = [
        (name, SavedChunk(start, tuple(values.shape), snapshot.rank, total))
        for (name, start, values), total in zip(snapshot.pieces, sums, strict=True)
    ]
    note = _note(hidden, snapshot.rank, "json")
    said = {"entries": snapshot.entries, "boxes": boxes}
    begun = note.with_suffix(".begun")
    write_new(begun, json.dumps(said).encode())
    begun.rename(note)


def _merge_rank_notes(snapshot: Snapshot, hidden: Path) -> None:
    """Puts what all ranks wrote into the index. Raises InputError where one failed or is not heard of."""
    tensors = snapshot.index.tensors
    for rank in range(snapshot.size):
        note = _wait_for(rank, hidden)
        said = json.loads(note.read_text())
        note.unlink()
        for name, (dtype, shape) in said["entries"].items():
            tensors.setdefault(name, IndexEntry(dtype, tuple(shape)))
        for name, box in said["boxes"]:
            tensors[name].boxes.append(chunk_from_json(box))
    for name, entry in tensors.items():
        if (covered := sum(prod(box.size) for box in entry.boxes)) != prod(entry.shape):
            raise InputError(
                f"{covered} of the {prod(entry.shape)} numbers of {name} were written",
                remedy="Save the whole model, on all ranks that train it, with the optimizer of every rank",
            )


def _wait_for(rank: int, hidden: Path) -> Path:
    """The note of a rank."""
    note, failed = _note(hidden, rank, "json"), _note(hidden, rank, "failed")
    end = time.monotonic() + PATIENCE_S
    while not note.exists():
        is_ending, is_there = not threading.main_thread().is_alive(), hidden.is_dir()
        if failed.exists() or time.monotonic() > end or is_ending or not is_there:
            why = "failed" if failed.exists() or not is_there else "did not come"
            raise InputError(
                f"Rank {rank} {why} while it wrote its part of a checkpoint into {hidden}",
                remedy="See what that rank says; on several hosts give a folder of a file system that they share",
            )
        time.sleep(LOOK_EVERY_S)
    return note


def _note(hidden: Path, rank: int, ending: str) -> Path:
    return hidden / f".{file_name(rank)}.{ending}"


@dataclass(frozen=True, eq=False)
class SaveJob:
    """One rank's share of a checkpoint, where it goes, and on how many hosts the ranks are.

    ``is_first``: whether the model had not saved into the folder before, which is free again if this save fails.
    """

    model: nn.Module
    snapshot: Snapshot
    hidden: Path
    root: Path
    keep: CheckpointRetention
    world: Axis
    hosts: int
    is_first: bool = False

    def write(self, *, to_disk: bool = True) -> Path:
        """Writes it, and waits until the disk has it, or not. Communicates nothing."""
        return write_snapshot(self.snapshot, self.hidden, self.root, self.keep, to_disk=to_disk)

    def settle(self, path: Path) -> Path:
        """Waits until the disk has what was written. Communicates nothing."""
        wait_for_disk(self.snapshot, path, self.root, self.keep)
        return path

    def agree(self, make: Callable[[], Path]) -> Path:
        """What ``make`` gives, if it does so on all ranks."""
        try:
            return run_on_all_ranks(make, self.world, f"Saving into {self.root}")
        except Exception:
            if self.world.rank == 0:
                remove(self.hidden)
                if self.is_first:
                    release(self.root, self.model)
            raise


class AsyncSave:
    """A checkpoint that a thread writes while training goes on. ``wait()`` gives its path.

    Args:
        work: what the thread does.
        is_there: whether the checkpoint has its name already, and the thread only sees it onto the disk.
    """

    def __init__(self, job: SaveJob, work: Callable[[], Path], *, is_there: bool = False) -> None:
        self._job = job
        self.memory: dict[tuple[str, Offsets], Tensor] = {}
        self.was_waited_for = is_there
        self._path = job.root
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._work, args=(work,), name="shardformer-save", daemon=False)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Waits for the thread."""
        self._thread.join()

    def _work(self, work: Callable[[], Path]) -> None:
        try:
            self._path = work()
        except Exception as error:
            self._problem = error

    @property
    def is_done(self) -> bool:
        """Whether this rank's part is written; the checkpoint is there when ``wait`` has returned."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Returns the path of the checkpoint when it is there. All ranks call it; raises as ``save_checkpoint``."""
        come("Saving.wait", self._job.world)
        self.was_waited_for = True
        return self._job.agree(self.result)

    def result(self) -> Path:
        """On this rank. Communicates nothing."""
        self.join()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return self._path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # of a copied model nothing is under way


@renamed_parameters({"folder": "directory", "keep": "retention"}, ("directory", "model", "optimizer"))
def save_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    step: int = 0,
    scheduler: Any = None,
    extra: Any = None,
    retention: CheckpointRetention | int | None = None,
) -> Path:
    """Saves a training run into ``directory/step-00000123``, from which any layout of processes goes on.

    Parameters, their masters, buffers, optimizer states, random states, the scheduler and what is in ``extra``. All
    ranks call it, with the model under any layout; each writes its own pieces, and each number is written once. The
    folder holds the new checkpoint whole, or what was there before: it gets its name when all of it is written.

    On one host it returns then, before the disk has all of it: a thread of the first rank waits for the disk, and takes
    older checkpoints away when it has the new one. The next save waits for that thread, and so does the end of the
    program. On several hosts every rank waits for the disk itself.

    Communicates names and sizes, no weights.

    Args:
        optimizer: one, several in a list, or what ``shard_optimizer`` returned.
        step: how many training steps were made; the name of the checkpoint.
        scheduler: anything with a ``state_dict`` of plain values, or a list of such: schedulers, a GradScaler.
        extra: plain values that ``load_checkpoint`` gives back: numbers, words, lists, dictionaries. The first rank's.
        retention: how many of the newest checkpoints stay, or a ``CheckpointRetention``; None: all.

    Returns the path of the checkpoint. Raises, on all ranks, ConfigError for what cannot be saved, InputError where the
    disk fails; then what was there before is as it was.
    """
    come("save_checkpoint", ModelTensors(model).world)
    with prepare_save(directory, model, optimizer, step, scheduler, extra, retention) as job:
        path = job.agree(partial(job.write, to_disk=job.hosts > 1))
    if job.hosts == 1 and job.world.rank == 0:
        _follow(AsyncSave(job, partial(job.settle, path), is_there=True), job.model)
    return path


@renamed_parameters({"folder": "directory", "keep": "retention"}, ("directory", "model", "optimizer"))
def async_save_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    step: int = 0,
    scheduler: Any = None,
    extra: Any = None,
    retention: CheckpointRetention | int | None = None,
) -> AsyncSave:
    """As ``save_checkpoint``, of which it takes the arguments; returns when all is copied into memory of the host.

    A thread writes it; what it returns is waited for with ``wait()``, at the latest before the next save and before the
    program ends: then the disk has it. The memory, as much as this rank writes, is used again by the next save.
    """
    come("start_checkpoint", ModelTensors(model).world)
    with prepare_save(directory, model, optimizer, step, scheduler, extra, retention) as job:
        saving = AsyncSave(job, job.write)
        before: AsyncSave | None = job.model.__dict__.get(SAVE)
        job.snapshot.copy_into(saving.memory if before is None else before.memory)
    _follow(saving, job.model)
    return saving


def check_savable(model: nn.Module, optimizer: Any = None, *, scheduler: Any = None, extra: Any = None) -> None:
    """Raises, on all ranks, the error that ``save_checkpoint`` would raise for a training run. Writes nothing.

    All ranks call it. Communicates names and sizes, as a save does.
    """
    tensors = ModelTensors(model)
    come("check_savable", tensors.world)
    with tensors.zero.readable_state() if tensors.zero is not None else nullcontext():
        collect_state(tensors, lambda: None, optimizer, scheduler, extra)


def _follow(saving: AsyncSave, model: nn.Module) -> None:
    """Starts what a save leaves to a thread."""
    if (before := model.__dict__.get(SAVE)) is not None:
        saving.memory = before.memory
    model.__dict__[SAVE] = saving
    saving.start()


@contextmanager
def prepare_save(
    folder: Any,
    model: nn.Module,
    optimizer: Any = None,
    step: int = 0,
    scheduler: Any = None,
    extra: Any = None,
    keep: Any = None,
) -> Iterator[SaveJob]:
    """What is to be written, while the values are where they are. The first rank's process has the folder then."""
    root, tensors = Path(), ModelTensors(model)
    world, is_new = tensors.world, False

    def check() -> SaveRequest:
        """What this rank was asked for, where that can be."""
        nonlocal root
        root = path_of(folder)
        check_int("step", step, 0, unit="training steps")
        CheckpointRetention.of(keep)
        _check_free(tensors.model.__dict__.get(SAVE))
        return SaveRequest(
            str(Path(folder)), step, platform.node(), checkpoint_directory.hidden_folder(root, step).name
        )

    def claim() -> None:
        nonlocal is_new
        if world.rank == 0:
            is_new = checkpoint_directory.claim(root, step, tensors.model)
            hidden.mkdir()  # of a name that is used once: ranks that see it see the same folder

    def see() -> None:
        if world.rank > 0:
            checkpoint_directory.check_visible(hidden)

    with tensors.zero.readable_state() if tensors.zero is not None else nullcontext():
        asked, holding = collect_state(tensors, check, optimizer, scheduler, extra)
        _check_same_request(asked)
        hidden = root / asked[0].hidden
        try:
            run_on_all_ranks(claim, world, f"Saving into {root}")
            run_on_all_ranks(see, world, f"Saving into {root}")
            index = CheckpointIndex(step, time.time(), tensors.sizes, values=holding.values)
            snapshot = Snapshot(world.rank, world.size, index)
            mine = assigned_chunks(holding.cells, world)
            for item in holding.items:
                snapshot.add(item, mine)
            hosts = len({each.host for each in asked})
            yield SaveJob(tensors.model, snapshot, hidden, root, CheckpointRetention.of(keep), world, hosts, is_new)
        except BaseException:
            if world.rank == 0:
                remove(hidden)
            if is_new:
                release(root, tensors.model)
            raise


class SaveRequest(NamedTuple):
    """What a rank was asked to save, and under which name it would write it: that of the first rank counts."""

    folder: str
    step: int
    host: str
    hidden: str


def _check_same_request(asked: Sequence[SaveRequest]) -> None:
    """Raises ConfigError, on all ranks, where they were asked to save into other folders, or at other steps."""
    first = asked[0]
    for rank, each in enumerate(asked):
        if each[:2] == first[:2]:
            continue
        raise ConfigError(
            f"Rank 0 was to save step {first.step} into {first.folder}, and rank {rank} step {each.step} into "
            f"{each.folder}",
            remedy="Give all ranks the same folder, on a disk that all see, and the same step",
        )


def _check_free(before: AsyncSave | None) -> None:
    """Waits for what the save before left to its thread. Raises InputError where it is still written, or failed."""
    if before is None:
        return
    if not before.was_waited_for:
        raise InputError(
            f"A checkpoint was to be saved while one {'is written' if not before.is_done else 'was not waited for'}",
            remedy="Call wait() on what start_checkpoint returned, before the next save",
        )
    before.result()
