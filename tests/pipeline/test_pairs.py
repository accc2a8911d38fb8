"""Losses that compare samples: a warning where the batch is divided, and the gather that makes them right."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.engine.build import initialize
from shardformer.engine.parallel import Parallel
from shardformer.mesh.context import ParallelContext
from shardformer.pipeline.pairs import gather_over_data
from shardformer.testing.threads import run_as_threads

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    logits = F.normalize(output, dim=-1) @ F.normalize(target, dim=-1).T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def centred(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output - output.mean(0), target)


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


def masked(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.where(target[:, 0] > 0, -100, 1))


def warned(loss_fn: Any, micro_batch_size: int | None) -> bool:
    model = model_of()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel = Parallel(micro_batch_size=micro_batch_size)
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, parallel=parallel)
        engine.train_step((INPUTS, INPUTS))
        engine.train_step((INPUTS, INPUTS))
    found = [each for each in caught if "compares the samples" in str(each.message)]
    assert len(found) < 2, "once"
    return bool(found)


@pytest.mark.parametrize("loss_fn", [contrastive, centred])
def test_a_loss_that_compares_samples_is_warned_of_where_the_batch_is_divided(loss_fn: Any) -> None:
    assert warned(loss_fn, 4) and not warned(loss_fn, None)


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), summed, nn.L1Loss()])
def test_a_mean_or_a_sum_is_not_warned_of(loss_fn: Any) -> None:
    assert not warned(loss_fn, 4)


def test_a_gathered_loss_is_that_of_one_device() -> None:
    plain = model_of()
    models = [copy.deepcopy(plain) for _ in range(2)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = contrastive(plain(INPUTS), INPUTS)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    def run(context: ParallelContext) -> None:
        model = models[context.rank]

        def gathered(output: Tensor, target: Tensor) -> Tensor:
            return contrastive(gather_over_data(output, context), gather_over_data(target, context))

        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), gathered, context=context)
        mine = INPUTS[4 * context.rank :][:4]
        losses = [engine.train_step((mine, mine)).item() for _ in expected]
        assert losses == pytest.approx(expected, abs=1e-12)
        for ours, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-12, rtol=0)

    run_as_threads(run, data=2)


def test_unequal_numbers_of_samples_are_gathered_with_gradients() -> None:
    def run(context: ParallelContext) -> None:
        x = torch.full((1 + context.rank, 2), float(context.rank), requires_grad=True)
        whole = gather_over_data(x, context)
        assert whole[:, 0].tolist() == [0.0, 1.0, 1.0]
        (whole * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
        assert x.grad is not None
        assert x.grad[:, 0].tolist() == ([2.0] if context.rank == 0 else [4.0, 6.0])  # of the losses of both ranks

    run_as_threads(run, data=2)
