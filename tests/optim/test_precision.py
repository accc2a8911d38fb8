"""16-bit parameters under ZeRO: master weights, loss scale and non-finite gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardformer
from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.pipeline import Pipeline
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.mixed_precision import LossScale, MixedPrecision
from shardformer.zero.shard_optimizer import shard_optimizer
from shardformer.zero.zero_optimizer import ZeroOptimizer
from tests.optim.test_zero import Net, Weights, images, net

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOUD = 2  # the step in which the gradients of rank 1 overflow in fp16


def loss_of(model: Net, step: int, rank: int, dtype: torch.dtype) -> Tensor:
    loss: Tensor = model(images(step, rank, dtype)).square().mean().float()
    return loss * 1e5 if step == LOUD and rank == 1 else loss


def plainly(dtype: torch.dtype, scale: float, *, wide: bool) -> tuple[Weights, int]:
    """Train one process with master weights, which skips non-finite steps. Return its weights and the skipped steps.

    Args:
        wide: Whether gradients of ranks are summed in fp32.
    """
    model, skipped = net(torch.float32), 0
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.05)
    model.to(dtype)
    for step in range(5):
        grads = []
        for rank in (0, 1):
            model.zero_grad()
            (loss_of(model, step, rank, dtype) * scale).backward()
            grads.append([(p.grad.float() if wide else p.grad) / 2 for p in model.parameters() if p.grad is not None])
        for master, *parts in zip(masters, *grads, strict=True):
            master.grad = (parts[0] + parts[1]).float() / scale
        if all(bool(master.grad.isfinite().all()) for master in masters if master.grad is not None):
            optimizer.step()
        else:
            scale, skipped = scale / 2, skipped + 1
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return model.state_dict(), skipped


def over_ranks(
    use: Callable[[Net, ZeroOptimizer, ParallelContext], Any], dtype: torch.dtype = torch.float32, **how: Any
) -> list[Any]:
    models = [net(dtype) for _ in range(2)]

    def run(context: ParallelContext) -> Any:
        model = models[context.rank]
        optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.05), context=context, **how)
        return use(model, optimizer, context)

    return run_as_threads(run, data=2)


@pytest.mark.reduced(at_most=8)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gradients", [None, "fp32"])
@pytest.mark.parametrize("name", DTYPES)
def test_16_bit_training_with_master_weights_equals_one_process_bitwise(
    name: str, gradients: str | None, stage: int
) -> None:
    """In fp16 a step overflows on one rank. All ranks skip it and halve the scale."""
    want, skipped = plainly(DTYPES[name], 2.0**10 if name == "fp16" else 1.0, wide=gradients is not None)
    assert (skipped > 0) == (name == "fp16")
    precision = MixedPrecision(name, gradients, LossScale(2.0**10))

    def use(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> Weights:
        for step in range(5):
            optimizer.backward(loss_of(model, step, context.rank, DTYPES[name]))
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.skipped == skipped
        return full_state_dict(model)

    # each rank has its own LossScale, as in separate processes
    for weights in over_ranks_with(use, lambda: MixedPrecision(name, gradients, LossScale(2.0**10)), stage):
        assert all(torch.equal(weights[key], value) for key, value in want.items())
    assert precision.loss_scale.value == 2.0**10


def test_missing_master_weights_would_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "promote_types", lambda dtype, wider: dtype)
    with pytest.raises(AssertionError):
        test_16_bit_training_with_master_weights_equals_one_process_bitwise("bf16", None, 1)


def over_ranks_with(use: Any, precision: Callable[[], MixedPrecision], stage: int) -> list[Any]:
    models = [net(torch.float32) for _ in range(2)]

    def run(context: ParallelContext) -> Any:
        model = models[context.rank]
        own = torch.optim.AdamW(model.parameters(), lr=0.05)
        return use(model, shard_optimizer(model, own, context=context, precision=precision(), stage=stage), context)

    return run_as_threads(run, data=2)


def test_loss_scale_follows_its_options() -> None:
    scale = LossScale(8.0, growth_interval=2, hysteresis=2)
    seen = []
    for is_finite in (True, True, False, True, False, False, True, True, False):
        scale.update(is_finite)
        seen.append(scale.value)
    assert seen == [8, 16, 16, 16, 8, 4, 4, 8, 8]


def test_state_dict_contains_the_loss_scale_and_its_counters() -> None:
    def made(value: float) -> ZeroOptimizer:
        model = net(torch.float32)
        scale = LossScale(value, growth_interval=3)
        return shard_optimizer(
            model, torch.optim.AdamW(model.parameters()), stage=1, precision=MixedPrecision("fp16", None, scale)
        )

    saved, loaded = made(16.0), made(1024.0)
    for is_finite in (False, True, True):
        saved.loss_scale.update(is_finite)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.loss_scale.value == 8.0
    loaded.loss_scale.update(True)
    assert loaded.loss_scale.value == 16.0


def with_nan(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> None:
    """Run a backward pass that gives one rank a NaN gradient in b.bias only."""
    handle = model.b.bias.register_hook(lambda grad: grad * float("nan")) if context.rank == 1 else None
    model(images(0, context.rank)).square().mean().backward()
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nonfinite_gradient_is_reported_and_changes_nothing(stage: int) -> None:
    def use(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> None:
        before = full_state_dict(model)
        with_nan(model, optimizer, context)
        with pytest.raises(InputError, match=r"The gradient of b.bias on rank [01] is not finite"):
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model).items())
        optimizer.zero_grad()
        model(images(0, context.rank)).square().mean().backward()
        optimizer.step()
        after = full_state_dict(model)
        assert not torch.equal(after["a.weight"], before["a.weight"])
        assert all(bool(value.isfinite().all()) for value in after.values())

    over_ranks(use, torch.float64, stage=stage)


def test_on_nonfinite_skips_or_ignores() -> None:
    def skips(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> None:
        before = full_state_dict(model)
        with_nan(model, optimizer, context)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.skipped == 1
        assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model).items())

    def ignores(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> None:
        with_nan(model, optimizer, context)
        optimizer.step()
        optimizer.zero_grad()
        assert bool(full_state_dict(model)["b.bias"].isnan().any())

    over_ranks(skips, torch.float64, on_nonfinite="skip")
    over_ranks(ignores, torch.float64, on_nonfinite="ignore")


def test_pipeline_scales_the_loss_only_for_the_backward_pass() -> None:
    """The reported loss is unscaled. GPT-2 over two stages, compared with one process in fp32."""
    batches = RandomBatchFactory(DEFAULT_HEAD["gpt2"], batch_size=4)

    def build() -> Any:
        torch.manual_seed(0)
        return SmallModelFactory("gpt2").with_min_layers(4)()

    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = plain(**batches(step)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    models = [build() for _ in range(2)]

    def train(context: ParallelContext) -> list[float]:
        model = shard_model(models[context.rank], context=context)
        pipeline = Pipeline(model, micro_batches=2)
        ours = shard_optimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.5), precision="fp16", max_grad_norm=100.0
        )
        found = []
        for step in range(3):
            found.append(float(pipeline.step(batches(step))))
            ours.step()
            ours.zero_grad()
        assert ours.skipped == 0
        return found

    for found in run_as_threads(train, pipe=2, one_at_a_time=True):
        assert found == pytest.approx(losses, rel=5e-3)
    assert abs(losses[2] - losses[0]) > 0.02


def test_unscaled_fp16_gradients_are_rejected() -> None:
    model = net(torch.float32)
    optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters()), precision="fp16")
    with pytest.raises(ConfigError, match=r"loss.backward\(\) computed the gradient of .* from an unscaled loss"):
        loss_of(model, 0, 0, torch.float16).backward()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    optimizer.backward(scaler.scale(loss_of(model, 0, 0, torch.float16)))
    with pytest.raises(ConfigError, match="A GradScaler was used with an optimizer"):
        scaler.step(optimizer)
    with pytest.raises(ConfigError, match="on_nonfinite='stop'"):
        shard_optimizer(net(), torch.optim.AdamW(model.parameters()), on_nonfinite="stop")
    with pytest.raises(ConfigError, match="gradients='bf16'"):
        shardformer.MixedPrecision("bf16", gradients="bf16")
