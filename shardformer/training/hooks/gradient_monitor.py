"""``GradientMonitor``: the norm of the gradients, and what is wrong with it."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from typing import Any

from shardformer.errors import ConfigError, InputError
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.zero.mixed_precision import MixedPrecision

REMEMBERED = 100
LEAST = 10
"""Steps that are needed to say what is usual."""


class GradientMonitor(Hook):
    """Records the norm of all gradients, of all ranks, warns of jumps, and ends a run whose gradients stay not finite.

    Puts ``grad_norm`` (before it is clipped) and, once there are some, ``skipped_steps`` into ``trainer.values``. To
    what a single step with gradients that are not finite leads says ``ParallelConfig(on_nonfinite=)``: to an error
    that names
    their parameters, to a step that is left out, or to nothing.

    Communicates what ``grad_norm`` does, in each step, where it is not clipped anyway.

    Args:
        factor: from how many times its median over the last 100 steps on a norm is warned of; None: never.
        patience: the run ends behind so many steps in a row whose loss or norm is not finite.

    Raises ConfigError for arguments that cannot be; InputError, on all ranks, to end the run.
    """

    def __init__(self, factor: float | None = 10.0, patience: int = 10) -> None:
        if factor is not None and (isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 1):
            raise ConfigError(
                f"GradientMonitor(factor={factor!r})",
                rule="It is how many times its median a norm is when it is warned of: a number above 1",
                remedy="Write factor=10, or None",
            )
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError(
                f"GradientMonitor(patience={patience!r})",
                rule="It is a number of steps in a row, from 1 on",
                remedy="Write patience=10, or leave it out",
            )
        self.factor, self.patience = factor, patience
        self._norms: deque[float] = deque(maxlen=REMEMBERED)
        self._bad = 0

    def before_train(self, trainer: TrainerProtocol) -> None:
        trainer.engine.takes_grad_norm = True

    def after_step(self, trainer: TrainerProtocol) -> None:
        norm = trainer.values.get("grad_norm", math.nan)
        if trainer.engine.skipped:
            trainer.values["skipped_steps"] = float(trainer.engine.skipped)
        has_scale = (
            MixedPrecision.of(trainer.engine.parallel.precision).parameters == "fp16"
        )  # which looks for its size
        if not math.isfinite(norm) or not math.isfinite(trainer.values["loss"]):
            self._bad += not (has_scale and math.isfinite(trainer.values["loss"]))
            if self._bad >= self.patience:
                raise InputError(
                    f"The loss is {trainer.values['loss']} and the norm of the gradients {norm}: not finite in "
                    f"{self._bad} steps in a row, up to step {trainer.step}",
                    rule=f"GradientMonitor ends a run behind {self.patience} such steps",
                    remedy="Go on from a checkpoint before them, with a lower learning rate or max_grad_norm; or look "
                    "at the data",
                )
            return
        self._bad = 0
        if self.factor is not None and len(self._norms) >= LEAST and trainer.is_first:
            usual = statistics.median(self._norms)
            if norm > self.factor * usual:
                warnings.warn(
                    f"The norm of the gradients of step {trainer.step} is {norm:.3g}, {norm / max(usual, 1e-30):.0f} "
                    f"times what is usual ({usual:.3g})",
                    stacklevel=2,
                )
        self._norms.append(norm)

    def after_train(self, trainer: TrainerProtocol) -> None:
        trainer.engine.takes_grad_norm = False

    def on_exception(self, trainer: TrainerProtocol) -> None:
        trainer.engine.takes_grad_norm = False

    def state(self) -> Any:
        return {"norms": list(self._norms), "bad": self._bad}

    def load_state(self, state: Any) -> None:
        self._norms = deque(state["norms"], maxlen=REMEMBERED)
        self._bad = state["bad"]
