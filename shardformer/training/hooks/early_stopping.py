"""``EarlyStopping``: ends a run whose validation no longer gets better."""

from __future__ import annotations

import math
from typing import Any

from shardformer.errors import InputError, check_choice, check_int, check_number, did_you_mean
from shardformer.training.hook import Hook, TrainerProtocol, check_validates

MODES = ("min", "max")


class EarlyStopping(Hook):
    """Ends the run on all ranks when a value was not better than the best for some validations in a row.

    >>> trainer = shardformer.Trainer(engine, hooks=[EarlyStopping(patience=2)])                  # doctest: +SKIP
    >>> trainer.fit(epochs=100, validation=held_out)                                              # doctest: +SKIP

    What is not a number is never better. A run that goes on from a checkpoint goes on counting. Communicates nothing.

    Args:
        metric: a name in ``trainer.values``; of ``Metrics``, where that hook comes before this one.
        patience: validations in a row, from 1 on, that may bring nothing better; the last of them ends the run.
        mode: "min" where less is better, "max" where more is.
        min_delta: by how much a value has to be better to count.

    Attributes:
        best: the best value so far; None before the first validation.
        without_progress: validations since then.

    Raises:
        ConfigError: an argument cannot be, or the run has no validation data.
        InputError: ``trainer.values`` has no such name behind a validation.
    """

    def __init__(
        self, metric: str = "validation/loss", patience: int = 3, mode: str = "min", min_delta: float = 0.0
    ) -> None:
        check_choice("EarlyStopping.mode", mode, MODES)
        check_int("EarlyStopping.patience", patience, unit="validations", example=3)
        check_number("EarlyStopping.min_delta", min_delta, least=0, below=math.inf, example=0.001)
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.best: float | None = None
        self.without_progress = 0

    def setup(self, trainer: TrainerProtocol) -> None:
        check_validates(self, trainer)

    def after_validation(self, trainer: TrainerProtocol) -> None:
        if self.metric not in trainer.values:
            raise InputError(
                f"EarlyStopping looks at {self.metric!r}, which the values of this run do not have",
                rule="A value is named as loggers write it; hooks that add one come before those that read it",
                remedy=did_you_mean(self.metric, trainer.values),
            )
        value = trainer.values[self.metric]
        if self._is_better(value):
            self.best, self.without_progress = value, 0
            return
        self.without_progress += 1
        if self.without_progress >= self.patience:
            trainer.stop(f"{self.metric} was not better than {self.best} in {self.without_progress} validations")

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def state(self) -> Any:
        return {"best": self.best, "without_progress": self.without_progress}

    def load_state(self, state: Any) -> None:
        self.best, self.without_progress = state["best"], state["without_progress"]
