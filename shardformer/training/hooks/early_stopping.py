"""A hook that ends a run when its validation metric no longer improves."""

from __future__ import annotations

import math
from typing import Annotated, Any, get_args

from shardformer.errors import check_choice, check_int, check_number
from shardformer.training.hook import (
    Hook,
    Mode,
    TrainerProtocol,
    check_trainer_has_validation_data,
    get_metric_value,
    is_improvement,
)


class EarlyStopping(Hook):
    """Ends the run on all ranks if a metric does not improve for several consecutive validations.

    >>> trainer = shardformer.Trainer(engine, hooks=[EarlyStopping(patience=2)])                  # doctest: +SKIP
    >>> trainer.fit(epochs=100, validation=held_out)                                              # doctest: +SKIP

    NaN never counts as an improvement. A resumed run continues to count the validations. This hook doesn't communicate.

    Attributes:
        best: Best value so far, or None before the first validation.
        without_progress: Number of validations since the best value.
    """

    def __init__(
        self,
        metric: Annotated[
            str, "Name in `trainer.values`. The hook that computes it, such as `Metrics`, must come before this hook."
        ] = "validation/loss",
        patience: Annotated[int, "End the run after this number of consecutive validations without improvement."] = 3,
        mode: Annotated[Mode, "Whether a lower or a higher value is better."] = "min",
        min_delta: Annotated[
            float, "A change of the metric must be larger than this to count as an improvement."
        ] = 0.0,
    ) -> None:
        check_choice("EarlyStopping.mode", mode, get_args(Mode))
        check_int("EarlyStopping.patience", patience, unit="validations", example=3)
        check_number("EarlyStopping.min_delta", min_delta, minimum=0, upper_bound=math.inf, example=0.001)
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.best: float | None = None
        self.without_progress = 0

    def setup(self, trainer: TrainerProtocol) -> None:
        check_trainer_has_validation_data(self, trainer)

    def after_validation(self, trainer: TrainerProtocol) -> None:
        value = get_metric_value(self, self.metric, trainer)
        if is_improvement(value, self.best, self.mode, self.min_delta):
            self.best, self.without_progress = value, 0
            return
        self.without_progress += 1
        if self.without_progress >= self.patience:
            trainer.stop(f"{self.metric} did not improve on {self.best} for {self.without_progress} validations")

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "without_progress": self.without_progress}

    def load_state(self, state: dict[str, Any]) -> None:
        self.best, self.without_progress = state["best"], state["without_progress"]
