"""What a rank has to write of a training run, and how the ranks' files become one checkpoint.

Ranks do not speak while they write: each leaves a note beside its file, which the first one collects. So a checkpoint
can be written by threads, beside training and its collectives.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shardformer.checkpoint import folder as folders
from shardformer.checkpoint.files import INDEX, Box, Entry, Index, box_of, file_name, name_of, sync, write_boxes
from shardformer.checkpoint.folder import Keep
from shardformer.checkpoint.held import Item, Stretch
from shardformer.checkpoint.plan import Cell
from shardformer.disk.writing import write_new
from shardformer.errors import InputError
from shardformer.layout.spec import Place

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
    index: Index
    entries: dict[str, tuple[str, Place]] = field(default_factory=dict)
    pieces: list[tuple[str, Place, Tensor]] = field(default_factory=list)

    def add(self, item: Item, mine: dict[Cell, list[Stretch]]) -> None:
        """Adds what of an item falls to this rank; of one without numbers its name."""
        if prod(item.shape) == 0:
            self.entries[item.name] = name_of(item.dtype), item.shape
        for held in item.held:
            for start, size in mine.get((item.name, held.start, tuple(held.values.shape)), ()):
                self.entries[item.name] = name_of(item.dtype), item.shape
                self.pieces.append((item.name, start, held.part(start, size)))

    def copy_into(self, memory: dict[tuple[str, Place], Tensor]) -> None:
        """From now on the values are copies, on the host. ``memory`` is used again where it fits, and added to."""
        for number, (name, start, values) in enumerate(self.pieces):
            copy = memory.get((name, start))
            if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
                memory[name, start] = copy
            self.pieces[number] = name, start, copy.copy_(values.detach(), non_blocking=True)
        if any(values.is_pinned() for *_, values in self.pieces):
            torch.cuda.synchronize()


def write(snapshot: Snapshot, hidden: Path, root: Path, keep: Keep, *, to_disk: bool) -> Path:
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
    path = folders.step_folder(root, snapshot.index.step)
    if snapshot.rank == 0:
        _collect(snapshot, hidden)
        if to_disk:
            sync(hidden)
        path = folders.finish(hidden, root, snapshot.index, to_disk=to_disk)
        if to_disk:
            sync(root)
            folders.drop_old(root, keep, path)
    return path


def settle(snapshot: Snapshot, path: Path, root: Path, keep: Keep) -> None:
    """Waits until the disk has a checkpoint that ranks of this host wrote. Then older ones go.

    Raises InputError where the disk fails: then older ones stay.
    """
    try:
        for name in (*(path / file_name(rank) for rank in range(snapshot.size)), path / INDEX, path, root):
            sync(name)
        folders.drop_old(root, keep, path)
    except FileNotFoundError:
        return  # it was removed
    except OSError as error:
        raise InputError(
            f"{path} was written, and may not be on the disk: {error}",
            rule="A checkpoint that was saved is on the disk before older ones are taken away",
            remedy="Look after the disk, or give another folder; the older checkpoints are there",
        ) from error


def _write_share(snapshot: Snapshot, hidden: Path, to_disk: bool) -> None:
    sums = write_boxes(hidden / file_name(snapshot.rank), snapshot.pieces, to_disk=to_disk)
    boxes = [
        (name, Box(start, tuple(values.shape), snapshot.rank, total))
        for (name, start, values), total in zip(snapshot.pieces, sums, strict=True)
    ]
    note = _note(hidden, snapshot.rank, "json")
    said = {"entries": snapshot.entries, "boxes": boxes}
    begun = note.with_suffix(".begun")
    write_new(begun, json.dumps(said).encode())
    begun.rename(note)


def _collect(snapshot: Snapshot, hidden: Path) -> None:
    """Puts what all ranks wrote into the index. Raises InputError where one failed or is not heard of."""
    tensors = snapshot.index.tensors
    for rank in range(snapshot.size):
        note = _wait_for(rank, hidden)
        said = json.loads(note.read_text())
        note.unlink()
        for name, (dtype, shape) in said["entries"].items():
            tensors.setdefault(name, Entry(dtype, tuple(shape)))
        for name, box in said["boxes"]:
            tensors[name].boxes.append(box_of(box))
    for name, entry in tensors.items():
        if (covered := sum(prod(box.size) for box in entry.boxes)) != prod(entry.shape):
            raise InputError(
                f"{covered} of the {prod(entry.shape)} numbers of {name} were written",
                rule="The ranks together hold every number of every tensor, and each is written once",
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
                rule="A checkpoint is there when all ranks have written their parts, into one folder that all see",
                remedy="See what that rank says; on several hosts give a folder of a file system that they share",
            )
        time.sleep(LOOK_EVERY_S)
    return note


def _note(hidden: Path, rank: int, ending: str) -> Path:
    return hidden / f".{file_name(rank)}.{ending}"
