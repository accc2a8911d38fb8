"""Compare one backward pass in 16 bits, sharded and plain, with fp64: the sharded error must not be larger.

The bound is the error of the plain model with the same precision and weights. Ranks that sum partial results round one
more time each. Therefore the error of all gradients may be ``FACTOR`` times that of the plain model, and the error of
one parameter ``FACTOR_OF_ONE`` times. A term that is missing, counted twice or less precise exceeds this bound.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import shardformer
from shardformer.comm.collectives import all_reduce
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext, reshape_sequence_axis, reshape_tensor_axis
from shardformer.mesh.rank_grid import count_ranks_on_axis
from shardformer.pipeline.pipeline import Pipeline
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import compute_model_loss, count_samples, is_loss_averaged_over_samples
from shardformer.verify.train_both import (
    ForceFp64Mode,
    PrecomputedOutputModule,
    _gather_full_tensors_from_all_stages,
    _get_full_gradient,
)
from shardformer.zero.mixed_precision import LossScale, MixedPrecision
from shardformer.zero.shard_optimizer import shard_optimizer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 2.0**10
"""Loss scale in fp16. The default is for larger models with smaller gradients."""
FACTOR, FACTOR_OF_ONE = 1.35, 2.5
NOTHING = 1e-12
"""Fraction of the gradient norm below which a gradient is only rounding error, such as that of a key bias."""
_COPYING = threading.Lock()
R = TypeVar("R")


@dataclass(frozen=True)
class Entry:
    """An entry point to 16-bit training.

    Args:
        kind: "zero", "engine" (both keep master weights), "autocast" (in the user's loop), "converted" or "converted
            later" (parameters converted before or after sharding).
        options: Options of ``ParallelConfig``, such as the ZeRO stage and offload.
        checkpointing: Whether to use activation checkpointing.
    """

    kind: str
    precision: str
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def of_inputs(self) -> torch.dtype:
        return torch.float32 if self.kind == "autocast" else self.dtype

    @property
    def scale(self) -> float:
        return SCALE if self.precision == "fp16" else 1.0

    @property
    def asked(self) -> MixedPrecision:
        """Give each rank its own loss scale, as in separate processes."""
        return MixedPrecision(self.precision, loss_scale=LossScale(SCALE))

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=self.dtype) if self.kind == "autocast" else nullcontext()


@dataclass
class Found:
    """The loss, and all gradients in fp64, of one backward pass."""

    loss: float
    gradients: dict[str, Tensor]


@dataclass
class Reference:
    """A model and a batch, with the gradients of the plain model in fp64 and in 16 bits.

    Args:
        head: Name of the transformers class, which determines the loss.
    """

    model: nn.Module
    batch: Mapping[str, Tensor]
    head: str
    _known: dict[Any, tuple[Found, Found]] = field(default_factory=dict)

    def both(self, entry: Entry) -> tuple[Found, Found]:
        """Return the gradients in fp64 and in 16 bits for weights that are representable in 16 bits."""
        key = entry.kind == "autocast", entry.precision
        if key not in self._known:
            narrow = self._plain(copy.deepcopy(self.model).to(entry.of_inputs), entry)
            exact = copy.deepcopy(self.model).to(entry.of_inputs).double()
            if getattr(config := getattr(exact, "config", None), "_experts_implementation", None):
                config._experts_implementation = "eager"  # type: ignore[union-attr]  # the others have no fp64
            with ForceFp64Mode():
                loss = compute_model_loss(exact, floats_in(floats_in(self.batch, entry.of_inputs), torch.float64))
                loss.backward()
            self._known[key] = Found(float(loss.detach()), _gradients(exact)), narrow
        return self._known[key]

    def _plain(self, model: nn.Module, entry: Entry) -> Found:
        with entry.autocast():
            loss = compute_model_loss(model, floats_in(self.batch, entry.of_inputs))
        (loss * entry.scale).backward()
        return Found(float(loss.detach()), {n: g / entry.scale for n, g in _gradients(model).items()})

    def refused(self, layout: Mapping[str, Any]) -> None:
        """Shard the model. Raises the error of an unsupported combination."""

        def shard(model: nn.Module, parallel: ParallelConfig, context: ParallelContext) -> None:
            model = shard_model(model, config=parallel.make_shard_config(context))
            if context.pipe.size > 1:
                Pipeline(model, parallel.micro_batches or 2)

        self._on_ranks(layout, shard)

    def sharded(self, entry: Entry, layout: Mapping[str, Any]) -> Found:
        """Train on the ranks of a layout. All ranks have the same loss."""
        first, *others = self._on_ranks(
            layout, lambda model, parallel, context: _Rank(self, entry, parallel, context).train(model)
        )
        assert all(other.loss == first.loss for other in others)
        return first

    def _on_ranks(
        self, layout: Mapping[str, Any], do: Callable[[nn.Module, ParallelConfig, ParallelContext], R]
    ) -> list[R]:
        """Call ``do`` with a copy of the model on each rank of a layout. Ranks are threads."""
        parallel = ParallelConfig(**layout)
        axes = {name: size for name, size in parallel.sizes.items() if size is not None}
        axes["sequence"] = count_ranks_on_axis(parallel.sequence)

        def run(context: ParallelContext) -> R:
            with _COPYING:
                model = copy.deepcopy(self.model)
            return do(
                model, parallel, reshape_tensor_axis(reshape_sequence_axis(context, parallel.sequence), parallel.tensor)
            )

        return run_as_threads(run, **axes, one_at_a_time=True)


@dataclass
class _Rank:
    of: Reference
    entry: Entry
    parallel: ParallelConfig
    context: ParallelContext

    def train(self, model: Any) -> Found:
        entry, data = self.entry, self.context.data
        batch = {n: x.chunk(data.size)[data.rank] if x.dim() else x for n, x in self.of.batch.items()}
        batch = floats_in(batch, entry.of_inputs)
        if entry.kind == "engine":
            return self._engine(model, batch)
        if entry.kind == "converted":
            model = model.to(entry.dtype)
        model = shard_model(model, config=self.parallel.make_shard_config(self.context))
        if entry.checkpointing:
            model.gradient_checkpointing_enable()
        if entry.kind == "converted later":
            model = model.to(entry.dtype)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        keeps = entry.kind == "zero" or "zero_stage" in entry.options
        if keeps:
            asked = {"stage" if name == "zero_stage" else name: value for name, value in entry.options.items()}
            optimizer = shard_optimizer(
                model, optimizer, **asked, precision=entry.asked if entry.kind == "zero" else "fp32"
            )
        if self.context.pipe.size > 1:
            scale = 1.0 if keeps else entry.scale
            with entry.autocast():
                loss = self._pipeline(model, scale).step(batch) / scale
        else:
            with entry.autocast():
                loss = compute_model_loss(model, batch)
            scale = 1.0 if keeps else entry.scale
            optimizer.backward(loss) if keeps else (loss * scale).backward()
        return self._found(model, optimizer, loss, scale)

    def _engine(self, model: Any, batch: Mapping[str, Tensor]) -> Found:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = replace(self.parallel, **self.entry.options, precision=self.entry.asked)
        own: dict[str, Any] = {}
        if is_loss_averaged_over_samples(self.of.head):  # it gives no loss
            own["loss_fn"] = lambda out, part: compute_model_loss(PrecomputedOutputModule(model, out, part), part)
            own["loss_weight"] = count_samples
        engine = shardformer.initialize(model, optimizer, parallel=parallel, context=self.context, **own)
        if self.entry.checkpointing:
            engine.model.gradient_checkpointing_enable()
        loss = engine(batch)
        engine.backward(loss)
        return self._found(engine.model, engine.optimizers[0], loss, 1.0, is_mean=True)

    def _pipeline(self, model: nn.Module, scale: float) -> Pipeline:
        """Return a pipeline that multiplies the loss by ``scale``, for loops in which no optimizer does."""
        count = self.parallel.micro_batches or 2
        weight = count_samples if is_loss_averaged_over_samples(self.of.head) else None
        return Pipeline(
            model,
            count,
            loss_fn=lambda out, part: compute_model_loss(PrecomputedOutputModule(model, out, part), part) * scale,
            loss_weight=weight,
        )

    def _found(self, model: Any, optimizer: Any, loss: Tensor, scale: float, *, is_mean: bool = False) -> Found:
        mean = loss.detach().double().clone()
        if not is_mean:
            mean = all_reduce(mean, self.context.data) / self.context.data.size
        own = {n: _get_full_gradient(optimizer, n, p) for n, p in model.named_parameters()}
        whole = _gather_full_tensors_from_all_stages(model, self.context, own)
        return Found(float(mean), {n: g.detach().double() / scale for n, g in whole.items() if g is not None})


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def floats_in(batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: x.to(dtype) if x.is_floating_point() else x for n, x in batch.items()}


def assert_as_exact(reference: Reference, entry: Entry, layout: Mapping[str, Any]) -> None:
    """Assert that one step of the sharded model is as close to fp64 as that of the plain model.

    An unsupported layout raises in 16 bits as in fp32. If the plain model does not support 16 bits or checkpointing,
    neither does the sharded one.
    """
    entry = replace(entry, checkpointing=entry.checkpointing and _supports_checkpointing(reference.model))
    try:
        exact, plain = reference.both(entry)
    except RuntimeError:
        with pytest.raises((RuntimeError, ConfigError)):
            reference.sharded(entry, layout)
        return
    try:
        found = reference.sharded(entry, layout)
    except ConfigError as error:
        with pytest.raises(ConfigError) as caught:
            reference.refused(layout)
        assert caught.value.what == error.what
        return
    eps = torch.finfo(entry.dtype).eps
    assert abs(found.loss - exact.loss) <= FACTOR * abs(plain.loss - exact.loss) + eps * abs(exact.loss)
    assert found.gradients.keys() == exact.gradients.keys()
    wrong, errors = [], []
    whole = sum(float(g.norm()) ** 2 for g in exact.gradients.values()) ** 0.5
    for name, g in exact.gradients.items():
        ours, theirs = float((found.gradients[name] - g).norm()), float((plain.gradients[name] - g).norm())
        errors.append((ours, theirs))
        if float(g.norm()) > NOTHING * whole and not ours <= FACTOR_OF_ONE * (theirs + eps * float(g.norm())):
            wrong.append(f"{name}: {ours:.2e}, plain {theirs:.2e}, of {float(g.norm()):.2e}")
    ours, theirs = (sum(x * x for x in column) ** 0.5 for column in zip(*errors, strict=True))
    assert not wrong, wrong
    assert ours <= FACTOR * theirs, f"all: {ours:.2e}, plain {theirs:.2e}"


def _supports_checkpointing(model: nn.Module) -> bool:
    return bool(getattr(model, "supports_gradient_checkpointing", False))
