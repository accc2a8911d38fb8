"""A hook that computes an exponential moving average (EMA) of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardformer.errors import ConfigError, InputError, check_int, check_number
from shardformer.layout.sharding_metadata import get_or_build_metadata
from shardformer.offload.host import OffloadConfig
from shardformer.training.engine import Engine
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.zero.elementwise_trial import compute_state_after_one_step
from shardformer.zero.mixed_precision import MixedPrecision
from shardformer.zero.zero_optimizer import ZeroOptimizer, unwrap_zero_optimizers

KEY = "moving_average"
"""Key of the average in optimizer states, while a checkpoint is saved or loaded and between two runs."""


class MovingAverage(Hook):
    """Keeps an exponential moving average (EMA) of each trained weight.

    >>> average = MovingAverage(0.999)                                                            # doctest: +SKIP
    >>> shardformer.Trainer(engine, [average, Checkpoint("run")]).fit(epochs=3, validation=data)  # doctest: +SKIP
    >>> with average.applied(engine):                                                             # doctest: +SKIP
    ...     engine.export("averaged")

    Each update sets ``average = decay * average + (1 - decay) * weight``, in fp32 or a wider dtype. The result is the
    same under every layout. Buffers, such as batch norm statistics, are not averaged.

    You can load the average from a checkpoint under any layout. While it is applied, a rank stores its weights twice.

    Training steps don't communicate. To apply the average under ZeRO, the ranks all-gather the parameters once.

    Attributes:
        updates: Number of updates of the average.
    """

    def __init__(
        self,
        decay: Annotated[float, "Decay factor, at least 0 and below 1."] = 0.999,
        every: Annotated[int, "Steps between updates of the average."] = 1,
        warmup: Annotated[bool, "Limit the decay to (1 + n) / (10 + n) in update n, counted from 0."] = True,
        validate: Annotated[bool, "Validate with the averaged weights."] = True,
    ) -> None:
        check_number("MovingAverage.decay", decay, minimum=0, upper_bound=1, example=0.999)
        check_int("MovingAverage.every", every, unit="steps")
        self.decay, self.every, self.warmup, self.validate = decay, every, warmup, validate
        self.updates = 0
        self._step = 0  # last step that the average includes
        self._averages: dict[Tensor, Tensor] = {}
        self._skipped = 0
        self._weights: list[tuple[Tensor, Tensor]] | None = None

    def before_train(self, trainer: TrainerProtocol) -> None:
        engine = trainer.engine
        _check_engine_supports_averaging(engine)
        self._skipped = engine.skipped
        before, is_continued = (
            {**self._averages, **self._pop_averages_from_optimizer(engine)},
            self._step == trainer.step,
        )
        self._averages = {}
        for _, param in _iter_optimizers_and_params(engine):
            dtype = torch.promote_types(param.dtype, torch.float32)
            initial = before.get(param, param.detach()) if is_continued else param.detach()
            self._averages[param] = initial.to(param.device, dtype, copy=True).view(param.shape)
        if is_continued:
            return
        self.updates, self._step = 0, trainer.step
        if before.keys() & self._averages.keys() and trainer.is_first:
            text = "MovingAverage starts a new average, because the existing average does not include the last step."
            warnings.warn(text, stacklevel=2)

    @torch.no_grad()
    def after_optimizer_step(self, trainer: TrainerProtocol) -> None:
        engine = trainer.engine
        self._step = engine.steps
        was_skipped, self._skipped = engine.skipped > self._skipped, engine.skipped
        if was_skipped or engine.steps % self.every:
            return
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        self.updates += 1
        for _, param in _iter_optimizers_and_params(engine):
            average = self._get_average(param)
            average.lerp_(param.detach().to(average.dtype), 1 - decay)

    def before_validation(self, trainer: TrainerProtocol) -> None:
        if self.validate:
            trainer.synchronize_ranks()
            self._replace_weights_by_averages(trainer.engine)

    def after_validation(self, trainer: TrainerProtocol) -> None:
        self._restore_trained_weights(trainer.engine)

    def before_save(self, trainer: TrainerProtocol) -> None:
        if self._weights is not None:
            raise InputError(
                "A checkpoint cannot be saved while MovingAverage has replaced the weights with their averages.",
                remedy="Save the checkpoint after the with block, or call engine.export inside the block.",
            )
        self._store_averages_in_optimizer(trainer.engine)

    def after_save(self, trainer: TrainerProtocol) -> None:
        self._pop_averages_from_optimizer(trainer.engine)

    def after_train(self, trainer: TrainerProtocol) -> None:
        self._store_averages_in_optimizer(trainer.engine)  # for engine.save and engine.reshard

    def on_exception(self, trainer: TrainerProtocol) -> None:
        self._restore_trained_weights(trainer.engine)
        self._pop_averages_from_optimizer(trainer.engine)

    @contextmanager
    def applied(self, engine: Engine) -> Iterator[None]:
        """Replace the weights with their averages in a ``with`` block. All ranks must call it between two steps."""
        self._replace_weights_by_averages(engine)
        try:
            yield
        finally:
            self._restore_trained_weights(engine)

    def state(self) -> dict[str, int]:
        return {"updates": self.updates, "step": self._step}

    def load_state(self, state: dict[str, int]) -> None:
        self.updates, self._step = state["updates"], state["step"]
        self._averages.clear()  # before_train takes the averages from the loaded optimizer state

    # --- averages in the optimizer states

    def _store_averages_in_optimizer(self, engine: Engine) -> None:
        """Store the averaged weights in the optimizer states, so that a checkpoint contains them.

        Parameters without a gradient so far are skipped if their optimizer creates its state with the first gradient.
        The average of such a parameter equals its value.
        """
        for optimizer, group, param in _iter_params_with_groups(engine):
            small = torch.zeros([min(n, 2) for n in param.shape])
            if optimizer.state.get(param) or not compute_state_after_one_step(optimizer, group, small):
                optimizer.state[param][KEY] = self._get_average(param)

    def _pop_averages_from_optimizer(self, engine: Engine) -> dict[Tensor, Tensor]:
        found = {}
        for optimizer, param in _iter_optimizers_and_params(engine):
            if (state := optimizer.state.get(param)) is not None:
                if KEY in state:
                    found[param] = state.pop(KEY)
                if not state:
                    del optimizer.state[param]
        return found

    def _get_average(self, param: Tensor, optimizer_state: Mapping[str, Any] | None = None) -> Tensor:
        found: Tensor | None = (optimizer_state or {}).get(KEY, self._averages.get(param))
        if found is None:
            raise InputError(
                f"MovingAverage has no average for a parameter of shape {tuple(param.shape)}.",
                remedy="Call Trainer.fit before you use the averages, and again after engine.reshard.",
            )
        if found.device != param.device:  # offloaded parameters may have moved to the device
            found = self._averages[param] = found.to(param.device)
        return found

    # --- averages in place of the weights

    @torch.no_grad()
    def _replace_weights_by_averages(self, engine: Engine) -> None:
        if self._weights is not None:
            raise InputError(
                "MovingAverage has already replaced the weights with their averages.",
                remedy="Leave the outer with block first, or pass MovingAverage(validate=False) to validate inside it.",
            )
        averages = [
            (p, self._get_average(p, optimizer.state.get(p))) for optimizer, p in _iter_optimizers_and_params(engine)
        ]
        self._weights = [(x, x.detach().clone()) for x in _iter_weights_to_overwrite(engine)]
        zero = _find_zero_optimizer(engine)
        with zero.writable_state() if zero is not None else nullcontext():
            for param, average in averages:
                param.copy_(average)

    @torch.no_grad()
    def _restore_trained_weights(self, engine: Engine) -> None:
        """Restore the trained weights after the averages have replaced them. One rank can call this method alone."""
        weights, self._weights = self._weights, None
        if weights is None:
            return
        for x, before in weights:
            x.detach().copy_(before)
        if (zero := _find_zero_optimizer(engine)) is not None:
            if (gathered := get_or_build_metadata(engine.model).parameter_owner) is not None:
                gathered.free_gathered_params()
            for shard in zero.shards:
                shard.record_param_versions()


def _check_engine_supports_averaging(engine: Engine) -> None:
    precision, offload = (
        MixedPrecision.from_value(engine.parallel.precision),
        OffloadConfig.from_argument(engine.parallel.offload),
    )
    if precision.weight_rounding_mode is not None:
        raise ConfigError(
            f"MovingAverage does not support MixedPrecision(master_weights={precision.master_weights!r}).",
            remedy="Use precision='bf16' with fp32 master weights, or remove the hook.",
        )
    if offload.folder is not None:
        raise ConfigError(
            f"MovingAverage does not support offload={offload.to!r}.", remedy="Use offload='cpu', or remove the hook."
        )


def _find_zero_optimizer(engine: Engine) -> ZeroOptimizer | None:
    return next((each for each in engine.optimizers if isinstance(each, ZeroOptimizer)), None)


def _iter_params_with_groups(engine: Engine) -> Iterator[tuple[Optimizer, dict[str, Any], Tensor]]:
    """Yield each parameter with its optimizer and parameter group. Under ZeRO, the parameters are local slices."""
    for optimizer in unwrap_zero_optimizers(engine.optimizers):
        for group in optimizer.param_groups:
            yield from ((optimizer, group, param) for param in group["params"])


def _iter_optimizers_and_params(engine: Engine) -> Iterator[tuple[Optimizer, Tensor]]:
    return ((optimizer, param) for optimizer, _, param in _iter_params_with_groups(engine))


def _iter_weights_to_overwrite(engine: Engine) -> Iterator[Tensor]:
    """Yield the tensors on this rank that the averaged weights temporarily overwrite."""
    zero = _find_zero_optimizer(engine)
    if zero is None:
        yield from (param for _, param in _iter_optimizers_and_params(engine))
        return
    for shard in zero.shards:
        if shard.has_masters:
            yield from (piece.value for piece in shard.slices)
        if shard.full is None:
            yield shard.local
        if not shard.keeps:
            yield from (gradient.param for gradient in shard.gradient_slots)
