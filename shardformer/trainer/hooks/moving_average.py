"""``MovingAverage``: an exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardformer.errors import ConfigError, InputError
from shardformer.optim.optimizer import ZeroOptimizer
from shardformer.trainer.hook import Hook, Run

KEY = "moving_average"
"""Under which it stands in the state of an optimizer while a checkpoint is saved or loaded."""


class MovingAverage(Hook):
    """Keeps ``average = decay * average + (1 - decay) * weight`` of each weight that is trained, in fp32.

    >>> average = MovingAverage(0.999)                                                            # doctest: +SKIP
    >>> shardformer.Trainer(engine, [average, Checkpoint("run")]).fit(epochs=3, validation=data)  # doctest: +SKIP
    >>> with average.applied(engine):                                                             # doctest: +SKIP
    ...     engine.export("averaged")

    Each rank keeps the average of what its optimizer updates, so that it is that of one process under every layout,
    and a checkpoint has it as a state of the optimizer, which any layout loads. Buffers, such as the statistics of
    batch norms, are not averaged.

    Communicates nothing in a step; to apply it under ZeRO, one all-gather of the parameters each way.

    Args:
        decay: from 0 to below 1.
        every: steps from one update of the average to the next.
        warmup: whether the decay is less at first: at most (1 + n) / (10 + n) in the update number n from 0.
        validate: whether the validation tries the averaged weights.

    Raises ConfigError for arguments that cannot be, and beside stochastic rounding, which would round the weights
    otherwise when they are put back.
    """

    def __init__(self, decay: float = 0.999, every: int = 1, warmup: bool = True, validate: bool = True) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ConfigError(
                f"MovingAverage(decay={decay!r})",
                rule="It is what is kept of the average in an update: a number from 0 to below 1",
                remedy="Write decay=0.999",
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(
                f"MovingAverage(every={every!r})", rule="It is a number of steps, from 1 on", remedy="Write every=1"
            )
        self.decay, self.every, self.warmup, self.validate = decay, every, warmup, validate
        self.updates = 0
        self._averages: dict[int, Tensor] = {}
        self._skipped = 0
        self._weights: list[Tensor] | None = None

    def before_train(self, trainer: Run) -> None:
        engine = trainer.engine
        zero = _zero_of(engine)
        if zero is not None and zero.rounds:
            raise ConfigError(
                "MovingAverage beside precision with stochastic rounding",
                rule="Weights that are put back would be rounded by other chances",
                remedy="Use precision='bf16' with masters, or leave the hook out",
            )
        self._skipped = engine.skipped
        for optimizer, param in _slots(engine):
            state = optimizer.state.get(param, {})
            found = state.pop(KEY, None)
            if not state:
                optimizer.state.pop(param, None)
            if found is not None:
                self._averages[id(param)] = found.float().view(param.shape).to(param.device)
            elif id(param) not in self._averages:
                self._averages[id(param)] = param.detach().float().clone()

    @torch.no_grad()
    def after_optimizer_step(self, trainer: Run) -> None:
        engine = trainer.engine
        was_skipped, self._skipped = engine.skipped > self._skipped, engine.skipped
        if was_skipped or engine.steps % self.every:
            return
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        self.updates += 1
        with _reading(engine):
            for _, param in _slots(engine):
                self._average_of(param).lerp_(param.detach().float(), 1 - decay)

    def before_validation(self, trainer: Run) -> None:
        if self.validate:
            trainer.agree()
            self._apply(trainer.engine)

    def after_validation(self, trainer: Run) -> None:
        if self._weights is not None:
            trainer.agree()
            self._put_back(trainer.engine)

    def before_save(self, trainer: Run) -> None:
        for optimizer, param in _slots(trainer.engine):
            optimizer.state[param][KEY] = self._average_of(param)

    def after_save(self, trainer: Run) -> None:
        for optimizer, param in _slots(trainer.engine):
            optimizer.state[param].pop(KEY, None)
            if not optimizer.state[param]:
                del optimizer.state[param]

    @contextmanager
    def applied(self, engine: Any) -> Iterator[None]:
        """The model has the averaged weights in here, and its own behind it. All ranks call it, between steps."""
        self._apply(engine)
        try:
            yield
        finally:
            self._put_back(engine)

    def state(self) -> Any:
        return {"updates": self.updates}

    def load_state(self, state: Any) -> None:
        self.updates = state["updates"]
        self._averages.clear()  # before_train takes those that the optimizer has loaded

    def _average_of(self, param: Tensor) -> Tensor:
        if id(param) not in self._averages:
            raise InputError(
                f"MovingAverage knows nothing of a parameter of the shape {tuple(param.shape)}",
                rule="It averages what the optimizer had when fit was called; reshape gives it other tensors",
                remedy="Save a checkpoint, and load it under the other layout: it keeps the average",
            )
        return self._averages[id(param)]

    @torch.no_grad()
    def _apply(self, engine: Any) -> None:
        params = [param for _, param in _slots(engine)]
        averages = [self._average_of(param) for param in params]
        with _writing(engine):
            self._weights = [param.detach().clone() for param in params]
            for param, average in zip(params, averages):
                param.copy_(average)

    @torch.no_grad()
    def _put_back(self, engine: Any) -> None:
        weights, self._weights = self._weights, None
        assert weights is not None
        with _writing(engine):
            for (_, param), weight in zip(_slots(engine), weights, strict=True):
                param.copy_(weight)


def _zero_of(engine: Any) -> ZeroOptimizer | None:
    return next((each for each in engine.optimizers if isinstance(each, ZeroOptimizer)), None)


def _slots(engine: Any) -> Iterator[tuple[Optimizer, Tensor]]:
    """(optimizer, what it updates) of all that trains; under ZeRO pieces of this rank's shards."""
    for each in engine.optimizers:
        for optimizer in each.inner if isinstance(each, ZeroOptimizer) else [each]:
            for group in optimizer.param_groups:
                yield from ((optimizer, param) for param in group["params"])


def _reading(engine: Any) -> Any:
    zero = _zero_of(engine)
    return zero.reading() if zero is not None else nullcontext()


def _writing(engine: Any) -> Any:
    zero = _zero_of(engine)
    return zero.loading() if zero is not None else nullcontext()
