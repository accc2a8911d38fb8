"""``Checkpoint``: saves a run while it trains, and goes on from where it was."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from shardformer.checkpoint.directory import CheckpointRetention
from shardformer.errors import ConfigError, check_int, check_number
from shardformer.filesystem.atomic_write import path_of
from shardformer.training.engine import has_checkpoint, take_folder
from shardformer.training.hook import Hook, TrainerProtocol


class Checkpoint(Hook):
    """Saves checkpoints: every so many steps or minutes, behind each epoch, on Ctrl-C or SIGTERM and at the end.

    >>> hooks = [Checkpoint("run/checkpoints", every_minutes=10, keep=3)]                         # doctest: +SKIP

    A run that is started again goes on from the newest whole checkpoint in the folder, in the middle of an epoch too,
    with the states of all hooks.

    The run has the folder from its setup on: another job that is to save into it is refused before it trains.

    Communicates what saving does.

    Args:
        folder: where checkpoints lie, as ``folder/step-00000123``.
        every_steps: from one to the next; None: not by steps.
        every_minutes: from one to the next; None, or inf: not by time.
        every_epoch: whether one is saved behind each epoch.
        at_end: whether one is saved behind the last step, and where a hook stops the run.
        on_signal: whether one is saved behind the step in which SIGTERM or SIGINT (Ctrl-C) comes.
        keep: how many are kept, or a ``CheckpointRetention``; None: all.
        in_background: whether a thread writes while training goes on.
        resume: whether a run goes on from what the folder holds. If not, the folder holds no checkpoint yet.

    Raises ConfigError for arguments that cannot be; in the setup, on all ranks, where another process has the folder.
    """

    def __init__(
        self,
        folder: str | Path,
        every_steps: int | None = None,
        every_minutes: float | None = 10.0,
        every_epoch: bool = False,
        at_end: bool = True,
        on_signal: bool = True,
        keep: CheckpointRetention | int | None = 3,
        in_background: bool = True,
        resume: bool = True,
    ) -> None:
        if every_steps is not None:
            check_int("Checkpoint.every_steps", every_steps, unit="steps", example=10)
        if every_minutes is not None:
            check_number("Checkpoint.every_minutes", every_minutes, unit="minutes", example=10)
        self.folder = path_of(folder)
        self.every_steps, self.every_minutes, self.every_epoch = every_steps, every_minutes, every_epoch
        self.at_end, self.saves_on_signal, self.resume = at_end, on_signal, resume
        self.keep, self.in_background = keep, in_background
        self._saved_step = -1
        self._saved_at = 0.0
        self._engine: Any = None

    def setup(self, trainer: TrainerProtocol) -> None:
        self._engine = trainer.engine
        trainer.on_save(self._save)
        trainer.agree()
        take_folder(self.folder, self, trainer.engine.world)
        if not has_checkpoint(self.folder, trainer.engine.world):
            return
        if self.resume:
            trainer.load(self.folder)
            self._saved_step = trainer.step
        elif trainer.step == 0:
            raise ConfigError(
                f"Checkpoint({str(self.folder)!r}, resume=False), and the folder holds checkpoints",
                remedy="Give another folder, or resume=True to go on from them",
            )

    @property
    def saved_step(self) -> int:
        """Of the newest checkpoint of this run; -1 without."""
        return self._saved_step

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._saved_at = time.monotonic()

    def after_step(self, trainer: TrainerProtocol) -> None:
        by_steps = self.every_steps is not None and trainer.step % self.every_steps == 0
        minutes = (time.monotonic() - self._saved_at) / 60
        if by_steps or (self.every_minutes is not None and minutes >= self.every_minutes):
            trainer.save()

    def after_epoch(self, trainer: TrainerProtocol) -> None:
        if self.every_epoch:
            trainer.save()

    def on_signal(self, trainer: TrainerProtocol) -> None:
        if self.saves_on_signal:
            trainer.save()

    def after_train(self, trainer: TrainerProtocol) -> None:
        if self.at_end and not trainer.was_interrupted:
            trainer.save()

    def _save(self, *, extra: Any, position: Any) -> None:
        self._saved_at = time.monotonic()
        if self._engine.steps == self._saved_step:
            return
        self._saved_step = self._engine.steps
        self._engine.save(
            self.folder, extra=extra, retention=self.keep, in_background=self.in_background, position=position
        )
