"""``Checkpoint``, a hook that saves checkpoints and resumes from the newest checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from shardformer.checkpoint.retention import CheckpointRetention
from shardformer.errors import ConfigError, check_int, check_number
from shardformer.filesystem.atomic_write import path_of
from shardformer.public_names import renamed_arguments
from shardformer.training.engine import has_checkpoint, lock_checkpoint_folder
from shardformer.training.hook import RENAMED_DIRECTORY, Hook, TrainerProtocol

RENAMED_ARGUMENTS = {**RENAMED_DIRECTORY, "keep": "retention"}


@renamed_arguments(RENAMED_ARGUMENTS, attributes=RENAMED_ARGUMENTS)
class Checkpoint(Hook):
    """Saves checkpoints at intervals of steps or minutes, on Ctrl-C or SIGTERM, and at the end of the run.

    >>> hooks = [Checkpoint("run/checkpoints", every_minutes=10, retention=3)]                    # doctest: +SKIP

    A restarted run resumes from the newest complete checkpoint in the directory, even in the middle of an epoch, and
    restores the states of all hooks. The run locks the directory, so that no other job can save into it.

    Saving communicates as ``Engine.save`` does.
    """

    def __init__(
        self,
        directory: Annotated[str | Path, "Directory of the checkpoints, which are called `directory/step-00000123`."],
        every_steps: Annotated[int | None, "Steps between checkpoints. None: no checkpoints by steps."] = None,
        every_minutes: Annotated[float | None, "Minutes between checkpoints. inf or None disables them."] = 10.0,
        every_epoch: Annotated[bool, "Save after each epoch."] = False,
        at_end: Annotated[bool, "Save after the last step, and when a hook stops the run."] = True,
        on_signal: Annotated[bool, "Save after the step during which SIGTERM or SIGINT (Ctrl-C) arrives."] = True,
        retention: Annotated[
            CheckpointRetention | int | None,
            "Number of checkpoints to keep, or a table of the fields of `CheckpointRetention`. {} keeps all.",
        ] = 3,
        in_background: Annotated[bool, "Write in a thread while training continues."] = True,
        resume: Annotated[
            bool, "Resume from the checkpoints in the directory. If false, it must not contain checkpoints."
        ] = True,
    ) -> None:
        if every_steps is not None:
            check_int("Checkpoint.every_steps", every_steps, unit="steps", example=10)
        if every_minutes is not None:
            check_number("Checkpoint.every_minutes", every_minutes, unit="minutes", example=10)
        self.directory = path_of(directory)
        self.every_steps, self.every_minutes, self.every_epoch = every_steps, every_minutes, every_epoch
        self.at_end, self.saves_on_signal, self.resume = at_end, on_signal, resume
        self.retention, self.in_background = CheckpointRetention.of(retention), in_background
        self._saved_step = -1
        self._saved_at = 0.0
        self._engine: Any = None

    def setup(self, trainer: TrainerProtocol) -> None:
        self._engine = trainer.engine
        trainer.on_save(self._save)
        trainer.agree()
        lock_checkpoint_folder(self.directory, self, trainer.engine.world)
        if not has_checkpoint(self.directory, trainer.engine.world):
            return
        if self.resume:
            trainer.load(self.directory)
            self._saved_step = trainer.step
        elif trainer.step == 0:
            raise ConfigError(
                f"The directory {str(self.directory)!r} already contains checkpoints, but resume=False",
                remedy="Pass another directory, or resume=True to continue from them",
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
            self.directory,
            extra=extra,
            retention=self.retention,
            in_background=self.in_background,
            position=position,
        )
