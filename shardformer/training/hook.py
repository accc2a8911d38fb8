"""Defines ``Hook``, the base class of callbacks that the trainer calls during a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

from torch import Tensor

from shardformer.checkpoint.load import LoadedCheckpoint
from shardformer.errors import ConfigError, InputError, suggest_similar_names
from shardformer.training.engine import Engine

Mode = Literal["min", "max"]


class TrainerProtocol(Protocol):
    """Attributes and methods of ``Trainer`` that hooks may use."""

    engine: Engine
    batch: Any
    loss: Tensor | None
    values: dict[str, float]
    samples: int
    tokens: int
    last_step: int | None
    last_epoch: int | None
    problem: BaseException | None
    stopped_by: str | None
    was_interrupted: bool

    @property
    def step(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def num_steps(self) -> int | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def is_first(self) -> bool: ...
    @property
    def has_validation(self) -> bool: ...
    def stop(self, why: str = ...) -> None: ...
    def validate(self) -> None: ...
    def save(self) -> None: ...
    def on_save(self, save: Callable[..., object]) -> None: ...
    def load(self, folder: Any) -> LoadedCheckpoint: ...
    def synchronize_ranks(self) -> None: ...


RENAMED_DIRECTORY = {"folder": "directory"}
"""Earlier name of the argument and attribute of hooks that write files -> its name."""


def check_trainer_has_validation_data(hook: Hook, trainer: TrainerProtocol) -> None:
    """Raise ConfigError if a hook requires validation data, but the trainer has none."""
    if not trainer.has_validation:
        raise ConfigError(
            f"The hook {type(hook).__name__} requires validation data.",
            remedy="Call fit(validation=data), or set data.validation in a run configuration.",
        )


def get_metric_value(hook: Hook, metric_name: str, trainer: TrainerProtocol) -> float:
    """Return the value of a metric in ``trainer.values``. Raise InputError if no earlier hook computed the metric."""
    if metric_name not in trainer.values:
        name = type(hook).__name__
        raise InputError(
            f"The hook {name} cannot find the metric {metric_name!r} in trainer.values.",
            rule=f"Put the hook that computes this metric before {name} in the list of hooks.",
            remedy=suggest_similar_names(metric_name, trainer.values),
        )
    return trainer.values[metric_name]


def is_improvement(metric_value: float, best_value: float | None, mode: Mode, min_delta: float = 0.0) -> bool:
    """Return whether a metric improved on its best value by more than ``min_delta``. NaN is never an improvement."""
    if math.isnan(metric_value) or best_value is None:
        return not math.isnan(metric_value)
    return (best_value - metric_value if mode == "min" else metric_value - best_value) > min_delta


class Hook:
    """Base class of training callbacks. Subclass it and override the methods that you need.

    >>> class PrintLoss(Hook):
    ...     def after_step(self, trainer):
    ...         if trainer.is_first and trainer.step % 100 == 0:
    ...             print(trainer.step, float(trainer.loss))

    Every rank calls the hooks in the order of the trainer's list. If a hook raises, the run ends on all ranks with an
    error that names the hook. To act on all ranks, call ``trainer.save()``, ``trainer.validate()`` or
    ``trainer.stop()`` on at least one rank. Before a hook communicates, all ranks must call
    ``trainer.synchronize_ranks()``; otherwise ranks could wait for a rank on which another hook failed. Do not
    communicate from ``before_forward`` to ``after_optimizer_step``.

    The base class types ``trainer`` as Any, so that a subclass may annotate it as ``shardformer.Trainer``.
    """

    uses_first_rank_state = False
    """Whether ``state`` may differ between ranks, because only the first rank uses it. Otherwise, saving warns."""

    def setup(self, trainer: Any) -> None:
        """Called at the start of ``fit``, before all other hook methods. ``Checkpoint`` loads a checkpoint here."""

    def before_train(self, trainer: Any) -> None:
        """Called before the first step of ``fit``. After resuming, ``trainer.step`` is not 0."""

    def before_epoch(self, trainer: Any) -> None:
        """Called before the first batch of an epoch. A resumed run calls it in the middle of the epoch."""

    def before_step(self, trainer: Any) -> None:
        """Called before each training step, after ``trainer.batch`` has been set to this rank's batch."""

    def before_forward(self, trainer: Any) -> None:
        """Called before the forward pass of a training step."""

    def after_backward(self, trainer: Any) -> None:
        """Called after the gradients are computed. ZeRO stores them in its own buffers, not in ``param.grad``."""

    def before_optimizer_step(self, trainer: Any) -> None:
        """Called before gradient clipping and the weight update."""

    def after_optimizer_step(self, trainer: Any) -> None:
        """Called after the weights are updated and the gradients are cleared."""

    def after_step(self, trainer: Any) -> None:
        """Called after each training step. Read ``trainer.loss``, and add your own metrics to ``trainer.values``."""

    def before_validation(self, trainer: Any) -> None:
        """Called before the model is evaluated on the validation data."""

    def on_validation_batch(self, trainer: Any, batch: Any) -> None:
        """Called on all ranks after each validation batch, in eval mode."""

    def after_validation(self, trainer: Any) -> None:
        """Called after validation. ``trainer.values`` contains ``validation/loss`` and the metrics of earlier hooks."""

    def before_save(self, trainer: Any) -> None:
        """Called before a checkpoint is saved."""

    def after_save(self, trainer: Any) -> None:
        """Called after a checkpoint is saved, or after saving it in the background has started."""

    def after_epoch(self, trainer: Any) -> None:
        """Called after the last batch of an epoch."""

    def on_signal(self, trainer: Any) -> None:
        """Called on all ranks after any rank received SIGTERM or SIGINT. The run stops afterwards."""

    def on_exception(self, trainer: Any) -> None:
        """Called when an error (``trainer.problem``) ends the run. Do not communicate: other ranks may not call it."""

    def after_train(self, trainer: Any) -> None:
        """Called at the end of the run, unless the run failed with an error."""

    def after_fit(self, trainer: Any) -> None:
        """Called after the last checkpoint is written, unless the run failed with an error."""

    def state(self) -> Any:
        """Return the hook's state for checkpoints as plain Python values, or None. Only the first rank's is stored."""

    def load_state(self, state: Any) -> None:
        """Restore the hook from the values that ``state`` returned when the checkpoint was saved."""


_OTHERS = ("on_validation_batch", "state", "load_state", "uses_first_rank_state")
HOOK_METHODS = tuple(name for name in vars(Hook) if not name.startswith("_") and name not in _OTHERS)
"""Events in their order. A pipeline interleaves forward and backward passes, so there is no event between them."""
