"""``MovingAverage``: an exponential moving average of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardformer.errors import ConfigError, InputError, check_int, check_number
from shardformer.layout.sharding_metadata import find_metadata
from shardformer.offload.host import OffloadConfig
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.zero.matrix_optimizers import state_after_step
from shardformer.zero.mixed_precision import MixedPrecision
from shardformer.zero.zero_optimizer import ZeroOptimizer

KEY = "moving_average"
"""Under which it stands in the state of an optimizer while a checkpoint is saved or loaded, and between two runs."""


class MovingAverage(Hook):
    """Keeps ``average = decay * average + (1 - decay) * weight`` of each weight that is trained, in fp32.

    >>> average = MovingAverage(0.999)                                                            # doctest: +SKIP
    >>> shardformer.Trainer(engine, [average, Checkpoint("run")]).fit(epochs=3, validation=data)  # doctest: +SKIP
    >>> with average.applied(engine):                                                             # doctest: +SKIP
    ...     engine.export("averaged")

    Each rank keeps the average of what its optimizer updates, masters where there are some, so that it is that of one
    process under every layout, and a checkpoint has it as a state of the optimizer, which any layout loads. Buffers,
    such as the statistics of batch norms, are not averaged. While it is applied a rank has its weights twice.

    Communicates nothing in a step; to apply it under ZeRO one all-gather of the parameters, and nothing to put the
    weights back.

    Args:
        decay: from 0 to below 1.
        every: steps from one update of the average to the next.
        warmup: whether the decay is less at first: at most (1 + n) / (10 + n) in the update number n from 0.
        validate: whether the validation tries the averaged weights.

    Attributes:
        updates: that were made of the average.

    Raises:
        ConfigError: an argument cannot be; masters that are in files, or that are rounded instead of kept.
        InputError: a checkpoint is saved while the averaged weights are applied.
    """

    def __init__(self, decay: float = 0.999, every: int = 1, warmup: bool = True, validate: bool = True) -> None:
        check_number("MovingAverage.decay", decay, least=0, below=1, example=0.999)
        check_int("MovingAverage.every", every, unit="steps")
        self.decay, self.every, self.warmup, self.validate = decay, every, warmup, validate
        self.updates = 0
        self._step = 0  # up to which the average is kept
        self._averages: dict[Tensor, Tensor] = {}
        self._skipped = 0
        self._weights: list[tuple[Tensor, Tensor]] | None = None
        self._engine: Any = None

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._engine = engine = trainer.engine
        _check(engine)
        self._skipped = engine.skipped
        before, goes_on = self._averages, self._step == trainer.step
        self._averages = {}
        is_stale = False
        for optimizer, param in _slots(engine):
            found = before.get(param)
            if (state := optimizer.state.get(param)) is not None:
                found = state.pop(KEY, found)
                if not state:
                    del optimizer.state[param]
            is_stale |= found is not None and not goes_on
            wide = torch.promote_types(param.dtype, torch.float32)
            begin = found if goes_on and found is not None else param.detach()
            self._averages[param] = begin.to(param.device, wide, copy=True).view(param.shape)
        if not goes_on:
            self.updates, self._step = 0, trainer.step
        if is_stale and trainer.is_first:
            warnings.warn(
                "MovingAverage begins anew: the average that is there was not kept up to this step", stacklevel=2
            )

    @torch.no_grad()
    def after_optimizer_step(self, trainer: TrainerProtocol) -> None:
        engine = trainer.engine
        self._step = engine.steps
        was_skipped, self._skipped = engine.skipped > self._skipped, engine.skipped
        if was_skipped or engine.steps % self.every:
            return
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        self.updates += 1
        for _, param in _slots(engine):
            average = self._average_of(param)
            average.lerp_(param.detach().to(average.dtype), 1 - decay)

    def before_validation(self, trainer: TrainerProtocol) -> None:
        if self.validate:
            trainer.agree()
            self._apply(trainer.engine)

    def after_validation(self, trainer: TrainerProtocol) -> None:
        self._put_back(trainer.engine)

    def before_save(self, trainer: TrainerProtocol) -> None:
        if self._weights is not None:
            raise InputError(
                "A checkpoint was to be saved while the averaged weights are applied",
                remedy="Save behind the with, or use engine.export in it",
            )
        self._hand_in(trainer.engine)

    def after_save(self, trainer: TrainerProtocol) -> None:
        self._take_out(trainer.engine)

    def after_train(self, trainer: TrainerProtocol) -> None:
        self._hand_in(trainer.engine)  # for engine.save and engine.reshape

    def on_exception(self, trainer: TrainerProtocol) -> None:
        self._put_back(trainer.engine)
        self._take_out(trainer.engine)

    @contextmanager
    def applied(self, engine: Any) -> Iterator[None]:
        """The model has the averaged weights in here, and its own behind it. All ranks call it, between steps."""
        self._apply(engine)
        try:
            yield
        finally:
            self._put_back(engine)

    def state(self) -> Any:
        return {"updates": self.updates, "step": self._step}

    def load_state(self, state: Any) -> None:
        self.updates, self._step = state["updates"], state["step"]
        self._averages.clear()  # before_train takes those that the optimizer has loaded

    # --- where it is kept

    def _hand_in(self, engine: Any) -> None:
        """Into the states of the optimizers, but for parameters that had no gradient yet: some make their state then.

        The average of such a one is what it is.
        """
        for optimizer, group, param in _grouped(engine):
            if optimizer.state.get(param) or not _keeps_state(optimizer, group, param):
                optimizer.state[param][KEY] = self._average_of(param)

    def _take_out(self, engine: Any) -> None:
        for optimizer, param in _slots(engine):
            if (state := optimizer.state.get(param)) is not None:
                state.pop(KEY, None)
                if not state:
                    del optimizer.state[param]

    def _average_of(self, param: Tensor, state: Any = None) -> Tensor:
        found: Tensor | None = (state or {}).get(KEY, self._averages.get(param))
        if found is None:
            raise InputError(
                f"MovingAverage knows nothing of a parameter of the shape {tuple(param.shape)}",
                remedy="Call fit first, and engine.reshape between two calls of fit",
            )
        if found.device != param.device:  # what rests on the host may have moved to the device
            found = self._averages[param] = found.to(param.device)
        return found

    # --- in the place of the weights

    @torch.no_grad()
    def _apply(self, engine: Any) -> None:
        if self._weights is not None:
            raise InputError(
                "The averaged weights were to be applied, and they are",
                remedy="Leave the other with first; a validation applies them itself, unless validate=False",
            )
        averages = [(p, self._average_of(p, optimizer.state.get(p))) for optimizer, p in _slots(engine)]
        self._weights = [(x, x.detach().clone()) for x in _written(engine)]
        zero = _zero_of(engine)
        with zero.writable_state() if zero is not None else nullcontext():
            for param, average in averages:
                param.copy_(average)

    @torch.no_grad()
    def _put_back(self, engine: Any) -> None:
        """Communicates nothing, so that it can be done when an error ends the run on this rank."""
        weights, self._weights = self._weights, None
        if weights is None:
            return
        for x, before in weights:
            x.detach().copy_(before)
        if (zero := _zero_of(engine)) is not None:
            if (gathered := find_metadata(engine.model).parameter_owner) is not None:
                gathered.release()
            for shard in zero.shards:
                shard.sync_versions()


def _check(engine: Any) -> None:
    precision, offload = MixedPrecision.of(engine.parallel.precision), OffloadConfig.of(engine.parallel.offload)
    if precision.rounding is not None:
        raise ConfigError(
            f"MovingAverage beside MixedPrecision(masters={precision.master_weights!r})",
            rule="Weights that are put back would be rounded once more, to others than they were",
            remedy="Use precision='bf16' with its masters, or leave the hook out",
        )
    if offload.folder is not None:
        raise ConfigError(
            f"MovingAverage beside offload={offload.to!r}", remedy="Use offload='cpu', or leave the hook out"
        )


def _zero_of(engine: Any) -> ZeroOptimizer | None:
    return next((each for each in engine.optimizers if isinstance(each, ZeroOptimizer)), None)


def _grouped(engine: Any) -> Iterator[tuple[Optimizer, dict[str, Any], Tensor]]:
    """(optimizer, its group, what it updates) of all that trains; under ZeRO pieces of this rank's shards."""
    for each in engine.optimizers:
        for optimizer in each.inner if isinstance(each, ZeroOptimizer) else [each]:
            for group in optimizer.param_groups:
                yield from ((optimizer, group, param) for param in group["params"])


def _slots(engine: Any) -> Iterator[tuple[Optimizer, Tensor]]:
    return ((optimizer, param) for optimizer, _, param in _grouped(engine))


def _written(engine: Any) -> Iterator[Tensor]:
    """What has to be put back, on this rank alone."""
    zero = _zero_of(engine)
    if zero is None:
        yield from (param for _, param in _slots(engine))
        return
    for shard in zero.shards:
        if shard.has_masters:
            yield from (piece.value for piece in shard.slices)
        if shard.full is None:
            yield shard.local
        if not shard.keeps:
            yield from (gradient.param for gradient in shard.gradients)


def _keeps_state(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> bool:
    """Whether the optimizer has a state of a parameter once that had a gradient: alike on all ranks."""
    small = torch.zeros([min(n, 2) for n in param.shape])
    return bool(state_after_step(optimizer, group, small))
