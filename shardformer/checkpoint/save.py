"""Saves what a training run needs to go on: each rank its own pieces, each number once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardformer.checkpoint import folder as folders
from shardformer.checkpoint.files import Index
from shardformer.checkpoint.folder import Keep
from shardformer.checkpoint.holding import hold
from shardformer.checkpoint.model import ModelTensors
from shardformer.checkpoint.plan import shares
from shardformer.checkpoint.snapshot import Snapshot, write
from shardformer.checkpoint.together import all_do
from shardformer.comm.collectives import gather_objects
from shardformer.errors import ConfigError, InputError
from shardformer.layout.spec import Place
from shardformer.mesh.axis import Axis

SAVING = "_shardformer_saving"
"""Attribute of a model: the save that was begun last, and the memory that it copied into."""


@dataclass(frozen=True, eq=False)
class Job:
    """One rank's share of a checkpoint, and where it goes."""

    model: nn.Module
    snapshot: Snapshot
    hidden: Path
    root: Path
    keep: Keep
    world: Axis

    def run(self) -> Path:
        """Writes it. Communicates nothing."""
        return write(self.snapshot, self.hidden, self.root, self.keep)

    def agree(self, make: Callable[[], Path]) -> Path:
        """What ``make`` gives, if it does so on all ranks."""
        try:
            return all_do(make, self.world, f"Saving into {self.root}")
        except Exception:
            if self.world.rank == 0:
                folders.drop(self.hidden)
            raise


class Saving:
    """A checkpoint that a thread writes while training goes on. ``wait()`` gives its path."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.memory: dict[tuple[str, Place], Tensor] = {}
        self.was_waited_for = False
        self._path = job.root
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="shardformer-save")

    def start(self) -> None:
        self._thread.start()

    def _work(self) -> None:
        try:
            self._path = self._job.run()
        except Exception as error:
            self._problem = error

    @property
    def is_done(self) -> bool:
        """Whether this rank's part is written; the checkpoint is there when ``wait`` has returned."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Returns the path of the checkpoint when it is there. All ranks call it; raises as ``save_checkpoint``."""
        self._thread.join()
        self.was_waited_for = True
        return self._job.agree(self._result)

    def _result(self) -> Path:
        if self._problem is not None:
            raise self._problem
        return self._path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # of a copied model nothing is under way


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    step: int = 0,
    scheduler: Any = None,
    extra: Any = None,
    keep: Keep | int | None = None,
) -> Path:
    """Saves a training run into ``folder/step-00000123``, from which any layout of processes goes on.

    Parameters, their masters, buffers, optimizer states, random states, the scheduler and what is in ``extra``. All
    ranks call it, with the model under any layout; each writes its own pieces, and each number is written once. The
    folder holds the new checkpoint whole, or what was there before: it gets its name when all of it is on the disk.

    Communicates names and sizes, no weights.

    Args:
        optimizer: one, several in a list, or what ``zero`` returned.
        step: how many training steps were made; the name of the checkpoint.
        scheduler: anything with a ``state_dict`` of plain values, or a list of such: schedulers, a GradScaler.
        extra: plain values that ``load_checkpoint`` gives back: numbers, words, lists, dictionaries. The first rank's.
        keep: how many of the newest checkpoints stay, or a ``Keep``; None: all.

    Returns the path of the checkpoint. Raises, on all ranks, ConfigError for what cannot be saved, InputError where the
    disk fails; then what was there before is as it was.
    """
    with _begun(folder, model, optimizer, step, scheduler, extra, keep) as job:
        return job.agree(job.run)


def start_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    step: int = 0,
    scheduler: Any = None,
    extra: Any = None,
    keep: Keep | int | None = None,
) -> Saving:
    """As ``save_checkpoint``, of which it takes the arguments; returns when all is copied into memory of the host.

    A thread writes it; what it returns is waited for with ``wait()``, at the latest before the next save and before the
    program ends. The memory, as much as this rank writes, is used again by the next save.
    """
    with _begun(folder, model, optimizer, step, scheduler, extra, keep) as job:
        saving = Saving(job)
        if (before := job.model.__dict__.get(SAVING)) is not None:
            saving.memory = before.memory
        job.snapshot.copy_into(saving.memory)
    job.model.__dict__[SAVING] = saving
    saving.start()
    return saving


@contextmanager
def _begun(
    folder: Any, model: nn.Module, optimizer: Any, step: int, scheduler: Any, extra: Any, keep: Any
) -> Iterator[Job]:
    """What is to be written, while the values are where they are."""
    root, tensors = Path(folder), ModelTensors(model)
    world, hidden = tensors.world, folders.hidden_folder(root, step)

    def check() -> Keep:
        _check_step(step)
        _check_free(tensors.model.__dict__.get(SAVING))
        return Keep.of(keep)

    with tensors.zero.reading() if tensors.zero is not None else nullcontext():
        rule, holding = hold(tensors, check, optimizer, scheduler, extra)
        index = Index(step, time.time(), tensors.sizes, values=holding.values)
        snapshot = Snapshot(world.rank, world.size, index)
        mine = shares(holding.cells, world)
        for item in holding.items:
            snapshot.add(item, mine)
        _check_alike((str(root), step), world)
        all_do(lambda: folders.begin(root, hidden) if world.rank == 0 else None, world, f"Saving into {root}")
        all_do(lambda: folders.check_seen(hidden), world, f"Saving into {root}")
        yield Job(tensors.model, snapshot, hidden, root, rule, world)


def _check_alike(asked: tuple[str, int], world: Axis) -> None:
    """Raises ConfigError, on all ranks, where they were asked to save into other folders, or at other steps."""
    theirs = gather_objects(asked, world)
    other = next((rank for rank, each in enumerate(theirs) if each != theirs[0]), None)
    if other is not None:
        (path, step), (other_path, other_step) = theirs[0], theirs[other]
        raise ConfigError(
            f"Rank 0 was to save step {step} into {path}, and rank {other} step {other_step} into {other_path}",
            rule="All ranks save one checkpoint together, into one folder",
            remedy="Give all ranks the same folder, on a disk that all see, and the same step",
        )


def _check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(
            f"step={step!r}",
            rule="A checkpoint is named by how many training steps were made",
            remedy="Give an int from 0 on",
        )


def _check_free(before: Saving | None) -> None:
    if before is not None and not before.was_waited_for:
        raise InputError(
            f"A checkpoint was to be saved while one {'is written' if not before.is_done else 'was not waited for'}",
            rule="One is written at a time, and a program looks whether it came to be there",
            remedy="Call wait() on what start_checkpoint returned, before the next save",
        )
