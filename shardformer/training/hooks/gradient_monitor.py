"""A hook that records the gradient norm, and detects spikes and nonfinite gradients."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from typing import Annotated, Any

from shardformer.errors import InputError, check_argument, check_int
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.zero.mixed_precision import MixedPrecision

WINDOW = 100
MIN_STEPS = 10
"""Minimum number of steps before a gradient norm is compared with the median."""


class GradientMonitor(Hook):
    """Records the global gradient norm, warns about spikes, and ends a run whose gradients stay nonfinite.

    The hook adds ``grad_norm`` (before clipping) to ``trainer.values``. If steps are skipped, it also adds their number
    as ``skipped_steps``. To skip steps with nonfinite gradients, set ``ParallelConfig(on_nonfinite="skip")``.

    The ranks communicate the gradient norm in each step, unless gradient clipping already does this.
    """

    def __init__(
        self,
        factor: Annotated[
            float | None, "Warn if the norm exceeds its median over the last 100 steps by this factor. inf never warns."
        ] = 10.0,
        patience: Annotated[
            int, "End the run after this number of consecutive steps with a loss or norm that is not finite."
        ] = 10,
    ) -> None:
        is_factor = factor is None or (isinstance(factor, int | float) and not isinstance(factor, bool) and factor > 1)
        rule = "It must be None or a number above 1"
        check_argument("GradientMonitor.factor", factor, is_factor, rule, "Set factor=10")
        check_int("GradientMonitor.patience", patience, unit="steps", example=10)
        self.factor, self.patience = factor, patience
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._nonfinite_steps = 0

    def before_train(self, trainer: TrainerProtocol) -> None:
        trainer.engine.takes_grad_norm = True

    def after_step(self, trainer: TrainerProtocol) -> None:
        norm = trainer.values.get("grad_norm", math.nan)
        if trainer.engine.skipped:
            trainer.values["skipped_steps"] = float(trainer.engine.skipped)
        # the loss scaler of fp16 skips steps while it searches for a scale
        has_scale = MixedPrecision.from_value(trainer.engine.parallel.precision).parameters == "fp16"
        loss = trainer.values["loss"]
        is_loss_finite = math.isfinite(loss)
        if not math.isfinite(norm) or not is_loss_finite:
            self._nonfinite_steps += not (has_scale and is_loss_finite)
            if self._nonfinite_steps >= self.patience:
                raise InputError(
                    f"GradientMonitor stopped the run at step {trainer.step}, because the loss ({loss}) or gradient "
                    f"norm ({norm}) was NaN or infinite for {self._nonfinite_steps} steps in a row.",
                    remedy="Check the data, or resume from an earlier checkpoint with a lower learning rate or "
                    "max_grad_norm.",
                )
            return
        self._nonfinite_steps = 0
        if self.factor is not None and len(self._norms) >= MIN_STEPS and trainer.is_first:
            median = statistics.median(self._norms)
            if norm > self.factor * median:
                warnings.warn(
                    f"The gradient norm {norm:.3g} of step {trainer.step} is {norm / max(median, 1e-30):.0f} times the "
                    f"median {median:.3g} of the previous steps. Check the batch, or reduce max_grad_norm.",
                    stacklevel=2,
                )
        self._norms.append(norm)

    def after_train(self, trainer: TrainerProtocol) -> None:
        trainer.engine.takes_grad_norm = False

    on_exception = after_train

    def state(self) -> dict[str, Any]:
        return {"norms": list(self._norms), "bad": self._nonfinite_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self._norms = deque(state["norms"], maxlen=WINDOW)
        self._nonfinite_steps = state["bad"]
