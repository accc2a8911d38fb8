"""A hook that saves checkpoints, and resumes a run from the newest checkpoint."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from shardformer.checkpoint.directory import get_checkpoint_folder
from shardformer.checkpoint.retention import CheckpointRetention
from shardformer.comm.collective_call import run_on_first_rank
from shardformer.errors import ConfigError, check_choice, check_int, check_number
from shardformer.filesystem import to_absolute_path
from shardformer.public_names import deprecate_renamed_arguments
from shardformer.training.engine import acquire_checkpoint_lock, has_checkpoint
from shardformer.training.hook import (
    RENAMED_DIRECTORY,
    Hook,
    Mode,
    TrainerProtocol,
    check_trainer_has_validation_data,
    get_metric_value,
    is_improvement,
)

Best = Literal["keep", "load"]
DEFAULT_METRIC = "validation/loss"
LOSSES = (DEFAULT_METRIC, "validation/perplexity")
"""Metrics that are better if they are lower."""
RENAMED_ARGUMENTS = {**RENAMED_DIRECTORY, "keep": "retention"}


@deprecate_renamed_arguments(RENAMED_ARGUMENTS, renamed_attributes=RENAMED_ARGUMENTS)
class Checkpoint(Hook):
    """Saves checkpoints every few steps or minutes, on Ctrl-C or SIGTERM, and at the end of the run.

    >>> hooks = [Checkpoint("run/checkpoints", every_minutes=10, retention=3)]                    # doctest: +SKIP

    If you start a run again, it resumes from the newest complete checkpoint in the directory, even in the middle of an
    epoch, and restores the state of every hook. While the run saves into the directory, no other job can do so.

    With ``best``, the hook also saves a checkpoint whenever a validation has the best ``metric`` so far. It keeps this
    checkpoint in addition to the ones that ``retention`` keeps. A resumed run remembers the best value.

    To save and to load the best checkpoint, the ranks communicate as in ``Engine.save`` and ``Engine.load``. With
    ``best``, they also exchange one number per validation.

    Attributes:
        best_value: Best value of ``metric`` so far, or None.
        best_step: Step of the best checkpoint, or None.
    """

    def __init__(
        self,
        directory: Annotated[str | Path, "Directory of the checkpoints, which are called `directory/step-00000123`."],
        every_steps: Annotated[int | None, "Number of steps between checkpoints. None disables them."] = None,
        every_minutes: Annotated[
            float | None, "Number of minutes between checkpoints. inf or None disables them."
        ] = 10.0,
        every_epoch: Annotated[bool, "Save after each epoch."] = False,
        at_end: Annotated[bool, "Save after the last step, and when a hook stops the run."] = True,
        on_signal: Annotated[bool, "Save after the step during which SIGTERM or SIGINT (Ctrl-C) arrives."] = True,
        retention: Annotated[
            CheckpointRetention | int | None,
            "Number of checkpoints to keep, or a table of the fields of `CheckpointRetention`. {} keeps all.",
        ] = 3,
        in_background: Annotated[bool, "Write checkpoints in a background thread while training continues."] = True,
        resume: Annotated[
            bool, "Resume from the checkpoints in the directory. If false, it must not contain checkpoints."
        ] = True,
        best: Annotated[
            Best | None,
            '"keep": keep the checkpoint with the best value of `metric`. "load": also load it at the end of the run, '
            "to export it. Both require validation data.",
        ] = None,
        metric: Annotated[
            str,
            "Name in `trainer.values` of the metric that determines the best checkpoint. The hook that computes the "
            "metric, such as `Metrics`, must come before this hook.",
        ] = DEFAULT_METRIC,
        mode: Annotated[
            Mode | None,
            "Whether a lower or a higher `metric` is better. Required unless it is the loss or the perplexity.",
        ] = None,
    ) -> None:
        if every_steps is not None:
            check_int("Checkpoint.every_steps", every_steps, unit="steps", example=10)
        if every_minutes is not None:
            check_number("Checkpoint.every_minutes", every_minutes, unit="minutes", example=10)
        self.directory = to_absolute_path(directory)
        self.every_steps, self.every_minutes, self.every_epoch = every_steps, every_minutes, every_epoch
        self.at_end, self.saves_on_signal, self.resume = at_end, on_signal, resume
        self.retention, self.in_background = CheckpointRetention.from_value(retention), in_background
        self.keeps_best, self.loads_best = best is not None, best == "load"
        self.metric, self.mode = metric, _resolve_metric_mode(best, metric, mode)
        self.best_value: float | None = None
        self.best_step: int | None = None
        self.trained_steps = 0
        self._saved: tuple[int, int | None] = (-1, None)  # step, and the best step in the state of this hook
        self._saved_at = 0.0
        self._engine: Any = None

    def setup(self, trainer: TrainerProtocol) -> None:
        if self.keeps_best:
            check_trainer_has_validation_data(self, trainer)
        self._engine = trainer.engine
        trainer.on_save(self._save_unless_already_saved)
        trainer.synchronize_ranks()
        acquire_checkpoint_lock(self.directory, self, trainer.engine.world)
        if not has_checkpoint(self.directory, trainer.engine.world):
            return
        if self.resume:
            trainer.load(self.directory)
            self._reset_best_if_checkpoint_missing(trainer)
            self._saved = trainer.step, self.best_step
        elif trainer.step == 0:
            raise ConfigError(
                f"The directory '{self.directory}' already contains checkpoints, but Checkpoint has resume=False.",
                remedy="Pass another directory, or pass resume=True to continue from these checkpoints.",
            )

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

    def after_validation(self, trainer: TrainerProtocol) -> None:
        if not self.keeps_best or self._engine is None:  # None: Trainer.evaluate, not Trainer.fit
            return
        value = get_metric_value(self, self.metric, trainer)
        trainer.synchronize_ranks()
        value = run_on_first_rank(lambda: value, trainer.engine.world, "Comparing with the best checkpoint")
        if is_improvement(value, self.best_value, self.mode):
            self.best_value, self.best_step = value, trainer.step
            trainer.save()

    def after_fit(self, trainer: TrainerProtocol) -> None:
        self.trained_steps, self._engine = trainer.step, None
        if not self.loads_best or trainer.was_interrupted:
            return
        if self.best_step is not None and self.best_step != trainer.step:
            trainer.synchronize_ranks()
            trainer.engine.load(get_checkpoint_folder(self.directory, self.best_step))
        elif self.best_step is None and trainer.is_first:
            text = f"No best checkpoint was loaded, because the metric {self.metric!r} never had a numeric value."
            warnings.warn(text, stacklevel=2)

    def on_exception(self, trainer: TrainerProtocol) -> None:
        self._engine = None

    def state(self) -> dict[str, Any] | None:
        if not self.keeps_best:
            return None
        return {"metric": self.metric, "mode": self.mode, "best_value": self.best_value, "best_step": self.best_step}

    def load_state(self, state: dict[str, Any]) -> None:
        is_same = self.keeps_best and (state["metric"], state["mode"]) == (self.metric, self.mode)
        self.best_value, self.best_step = (state["best_value"], state["best_step"]) if is_same else (None, None)

    def _reset_best_if_checkpoint_missing(self, trainer: TrainerProtocol) -> None:
        """Forget the best metric value, with a warning, if the best checkpoint was deleted before the run resumed."""
        if self.best_step is None:
            return
        folder = get_checkpoint_folder(self.directory, self.best_step)
        if run_on_first_rank(folder.is_dir, trainer.engine.world, f"Looking into {self.directory}"):
            return
        self.best_value = self.best_step = None
        if trainer.is_first:
            text = f"The best checkpoint {folder} no longer exists. The next validation sets a new best value."
            warnings.warn(text, stacklevel=2)

    def _save_unless_already_saved(self, *, extra: Any, position: dict[str, Any]) -> None:
        self._saved_at = time.monotonic()
        if self._saved == (self._engine.steps, self.best_step):
            return
        self._saved = self._engine.steps, self.best_step
        best = () if self.best_step is None else (self.best_step,)
        self._engine.save(
            self.directory,
            extra=extra,
            retention=replace(self.retention, steps=(*self.retention.steps, *best)),
            in_background=self.in_background,
            position=position,
        )


def _resolve_metric_mode(best: Best | None, metric_name: str, mode: Mode | None) -> Mode:
    """Validate the options for the best checkpoint, and return ``mode`` or its default."""
    if best is not None:
        check_choice("Checkpoint.best", best, get_args(Best))
    if mode is not None:
        check_choice("Checkpoint.mode", mode, get_args(Mode))
    if best is None and (metric_name != DEFAULT_METRIC or mode is not None):
        raise ConfigError(
            f"Checkpoint(metric={metric_name!r}, mode={mode!r}) also requires best='keep' or best='load'.",
            remedy="Add best='keep' to keep the best checkpoint, or best='load' to also load it at the end.",
        )
    if mode is None and metric_name not in LOSSES:
        raise ConfigError(
            f"Checkpoint(metric={metric_name!r}) requires mode='min' or mode='max'.",
            remedy="Pass mode='min' if lower values are better, as for a loss, and mode='max' otherwise.",
        )
    return mode or "min"
