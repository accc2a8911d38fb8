"""Batch items of the model and of the loss function, and packed documents."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.config import ParallelConfig
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.initialize import initialize
from shardformer.verify.small_models import SmallModelFactory
from shardformer.weights.state_dict import full_state_dict

IDS = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).repeat(4, 1)
GRIDS = {"tensor": {"tensor": 2}, "sequence": {"sequence": 2}, "data": {"data": 2}, "pipe": {"pipe": 2}}


def model_of(**config: Any) -> Any:
    model = SmallModelFactory("llama")().double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)  # so that attention matters
    for name, value in config.items():
        setattr(model.config, name, value)
    return model


def check(plain: Any, batch: dict[str, Any], loss: Tensor, grid: dict[str, int], loss_fn: Any = None) -> None:
    """Compare loss and weights of a step over ranks with those of the unsharded model."""
    models = [copy.deepcopy(plain) for _ in range(2)]
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    expected = plain.state_dict()

    def run(context: ParallelContext) -> None:
        model = models[context.rank]
        rows = slice(2 * context.data.rank, 2 * context.data.rank + 2) if context.data.size > 1 else slice(None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = initialize(model, optimizer, loss_fn, context=context, parallel=ParallelConfig(**grid))
        found = engine.train_step({name: value[rows] for name, value in batch.items()})
        # transformers computes it in fp32, from logits that may differ in their last bit
        assert found.item() == pytest.approx(loss.item(), rel=4 * torch.finfo(torch.float32).eps)
        for name, value in full_state_dict(engine.model).items():
            assert torch.allclose(value, expected[name], atol=1e-7, rtol=0), name

    run_as_threads(run, **grid)


def distance(output: Any, batch: dict[str, Any]) -> Tensor:
    return F.mse_loss(output.logits, batch["teacher"])


@pytest.mark.parametrize("grid", GRIDS)
def test_a_key_that_only_the_loss_function_reads(grid: str) -> None:
    plain = model_of()
    generator = torch.Generator().manual_seed(2)
    teacher = torch.randn(4, 8, plain.config.vocab_size, generator=generator, dtype=torch.float64)
    batch = {"input_ids": IDS, "teacher": teacher}
    check(plain, batch, distance(plain(input_ids=IDS), batch), GRIDS[grid], distance)


@pytest.mark.reduced(at_most=4)
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("grid", GRIDS)
def test_packed_documents_are_masked_as_in_the_unsharded_model(grid: str, use_cache: bool) -> None:
    plain = model_of(use_cache=use_cache)
    batch = {"input_ids": IDS, "position_ids": POSITIONS, "labels": IDS}
    loss = plain(**batch).loss
    assert (loss.item() == pytest.approx(plain(**batch, use_cache=False).loss.item(), abs=1e-9)) is not use_cache
    check(plain, batch, loss, GRIDS[grid])


def test_packed_documents_are_masked_with_activation_checkpointing() -> None:
    plain = model_of(use_cache=True)
    plain.gradient_checkpointing_enable()
    batch = {"input_ids": IDS, "position_ids": POSITIONS, "labels": IDS}
    check(plain, batch, plain(**batch).loss, GRIDS["data"])
