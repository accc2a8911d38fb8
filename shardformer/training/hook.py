"""``Hook``: what is called at the named moments of a training run."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from shardformer.checkpoint.load import LoadedCheckpoint
from shardformer.errors import ConfigError
from shardformer.training.engine import Engine


class TrainerProtocol(Protocol):
    """What a hook is given: the trainer, see there."""

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
    def on_save(self, save: Any) -> None: ...
    def load(self, folder: Any) -> LoadedCheckpoint: ...
    def agree(self) -> None: ...


def check_validates(hook: Hook, trainer: TrainerProtocol) -> None:
    """Raises ConfigError for a hook that acts behind a validation alone, in a run without validation data."""
    if not trainer.has_validation:
        raise ConfigError(
            f"{type(hook).__name__} in a run without validation data",
            remedy="Pass fit(validation=data), or data.validation in the file of a run; or leave the hook out",
        )


class Hook:
    """What is called at the moments of a run: write a class that has the methods that it needs.

    >>> class Tell(Hook):
    ...     def after_step(self, trainer):
    ...         if trainer.is_first and trainer.step % 100 == 0:
    ...             print(trainer.step, float(trainer.loss))

    At each moment the hooks are called in the order in which the trainer was given them, on every rank. One that raises
    ends the run on all ranks, with its name. What a hook decides for all ranks it asks the trainer for: ``save()``,
    ``validate()`` and ``stop()`` happen on all of them, if one asks. A hook that communicates calls ``trainer.agree()``
    right before, on all ranks, so that none waits for one on which another hook has failed; and not at the moments from
    ``before_forward`` to ``after_optimizer_step``.
    """

    def setup(self, trainer: TrainerProtocol) -> None:
        """Before anything else; here a run that goes on loads its checkpoint."""

    def before_train(self, trainer: TrainerProtocol) -> None:
        """Before the first step of ``fit``; ``trainer.step`` is not 0 where a run goes on."""

    def before_epoch(self, trainer: TrainerProtocol) -> None:
        """Before the first batch of an epoch, or the first one of what is left of it."""

    def before_step(self, trainer: TrainerProtocol) -> None:
        """``trainer.batch`` is there: this rank's part of it."""

    def before_forward(self, trainer: TrainerProtocol) -> None:
        """Before the batch goes through the model."""

    def after_backward(self, trainer: TrainerProtocol) -> None:
        """The gradients are there; under ZeRO in its own memory."""

    def before_optimizer_step(self, trainer: TrainerProtocol) -> None:
        """Before gradients are clipped and weights updated."""

    def after_optimizer_step(self, trainer: TrainerProtocol) -> None:
        """The weights are updated, and the gradients are gone."""

    def after_step(self, trainer: TrainerProtocol) -> None:
        """``trainer.loss`` is that of the step; put numbers of your own into ``trainer.values``."""

    def before_validation(self, trainer: TrainerProtocol) -> None:
        """The model is about to be tried on the validation data."""

    def on_validation_batch(self, trainer: TrainerProtocol, batch: Any) -> None:
        """For each batch of the validation data, in eval mode, behind its loss; all ranks are here."""

    def after_validation(self, trainer: TrainerProtocol) -> None:
        """``trainer.values`` has ``validation/loss``, and what hooks add."""

    def before_save(self, trainer: TrainerProtocol) -> None:
        """Before a checkpoint is saved."""

    def after_save(self, trainer: TrainerProtocol) -> None:
        """A checkpoint was saved, or its writing was begun."""

    def after_epoch(self, trainer: TrainerProtocol) -> None:
        """Behind the last batch of an epoch."""

    def on_signal(self, trainer: TrainerProtocol) -> None:
        """A signal came that asks the program to end, to one of the ranks; the run stops behind this."""

    def on_exception(self, trainer: TrainerProtocol) -> None:
        """``trainer.problem`` ends the run. Do not communicate: other ranks may not be here."""

    def after_train(self, trainer: TrainerProtocol) -> None:
        """Behind the last step, not where an error ended the run."""

    def state(self) -> Any:
        """Plain values that a checkpoint keeps of this hook; None: nothing. The first rank's are kept."""

    def load_state(self, state: Any) -> None:
        """Takes up what ``state`` of the same hook gave."""


_OTHERS = ("on_validation_batch", "state", "load_state")
HOOK_METHODS = tuple(name for name in vars(Hook) if not name.startswith("_") and name not in _OTHERS)
"""In the order in which they come. The micro-batches of a pipeline go forward and backward in turn, so that there is no
moment between the forward and the backward of a batch."""
