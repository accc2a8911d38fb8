"""``Checkpoint``, a hook that saves checkpoints and resumes from the newest checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from shardformer.checkpoint.directory import CheckpointRetention
from shardformer.errors import ConfigError, check_int, check_number
from shardformer.filesystem.atomic_write import path_of
from shardformer.training.engine import has_checkpoint, lock_checkpoint_folder
from shardformer.training.hook import Hook, TrainerProtocol


class Checkpoint(Hook):
    """Saves checkpoints at intervals of steps or minutes, on Ctrl-C or SIGTERM, and at the end of the run.

    >>> hooks = [Checkpoint("run/checkpoints", every_minutes=10, keep=3)]                         # doctest: +SKIP

    A restarted run resumes from the newest complete checkpoint in the folder, also in the middle of an epoch, and
    restores the states of all hooks. The run locks the folder, so that no other job can save into it.

    Saving communicates as ``Engine.save`` does.

    Args:
        folder: Folder of the checkpoints, which are called ``folder/step-00000123``.
        every_steps: Steps between checkpoints; None disables saving by steps.
        every_minutes: Minutes between checkpoints, by the clock of the first rank; None or inf disables saving by time.
        every_epoch: Save after each epoch.
        at_end: Save after the last step, and when a hook stops the run.
        on_signal: Save after the step during which SIGTERM or SIGINT (Ctrl-C) arrives.
        keep: Number of checkpoints to keep, or a ``CheckpointRetention``. None keeps all.
        in_background: Write in a thread while training continues.
        resume: Resume from the checkpoints in the folder. If False, the folder must not contain checkpoints.
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
        lock_checkpoint_folder(self.folder, self, trainer.engine.world)
        if not has_checkpoint(self.folder, trainer.engine.world):
            return
        if self.resume:
            trainer.load(self.folder)
            self._saved_step = trainer.step
        elif trainer.step == 0:
            raise ConfigError(
                f"The folder {str(self.folder)!r} already contains checkpoints, but resume=False",
                remedy="Pass another folder, or resume=True to continue from them",
            )

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint that this run saved or loaded, or -1."""
        return self._saved_step

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._saved_at = time.monotonic()

    def after_step(self, trainer: TrainerProtocol) -> None:
        by_steps = self.every_steps is not None and trainer.step % self.every_steps == 0
        minutes = (time.monotonic() - self._saved_at) / 60
        # the clock of the first rank decides for all ranks
        by_time = self.every_minutes is not None and trainer.is_first and minutes >= self.every_minutes
        if by_steps or by_time:
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
