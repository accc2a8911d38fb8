"""Optimizers of torch step with reduced gradients, or raise on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardformer
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from tests.optim.test_live import inputs, net

Pause = Callable[[], Any]


def loss(model: nn.Module, step: int, ranks: list[int]) -> Tensor:
    """Return the mean loss over these ranks."""
    total: Tensor = sum(model(inputs(step, rank)).square().mean() for rank in ranks) / len(ranks)  # type: ignore[assignment]
    return total


def both_in_no_sync(model: nn.Module, optimizer: Any, ranks: list[int], pause: Pause) -> None:
    for step in range(3):
        with pause():
            loss(model, step, ranks).backward()
            loss(model, step + 5, ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


def last_in_no_sync(model: nn.Module, optimizer: Any, ranks: list[int], pause: Pause) -> None:
    for step in range(3):
        loss(model, step, ranks).backward()
        with pause():
            loss(model, step + 5, ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


def put_back(model: nn.Module, optimizer: Any, ranks: list[int], pause: Pause) -> None:
    """Sum the gradients of several backward passes by hand, and assign the sum after zero_grad."""
    params = list(model.parameters())
    for step in range(3):
        total: list[Any] = [0.0] * len(params)
        for micro in range(2):
            loss(model, step + 5 * micro, ranks).backward()
            total = [p.grad.clone() + x for p, x in zip(params, total, strict=True) if p.grad is not None]
            optimizer.zero_grad()
        for p, x in zip(params, total, strict=True):
            p.grad = x / 2
        if step == 1:
            loss(model, 9, ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS = {f.__name__: f for f in (both_in_no_sync, last_in_no_sync, put_back)}


@pytest.mark.reduced
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_step_uses_the_gradients_of_one_process(name: str, stage: int | None) -> None:
    def trained(model: nn.Module, optimizer: Any, ranks: list[int], pause: Pause) -> None:
        LOOPS[name](model, optimizer, ranks, pause)

    plain, models = net(), [net(), net()]
    trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), [0, 1], contextlib.nullcontext)

    def over(context: ParallelContext) -> dict[str, Tensor]:
        model: nn.Module = shardformer.shard_model(models[context.rank], context=context)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if stage is not None:
            optimizer = shardformer.shard_optimizer(model, optimizer, stage=stage)
        trained(model, optimizer, [context.rank], lambda: shardformer.no_sync(model))
        return shardformer.full_state_dict(model)

    for found in run_as_threads(over, data=2):
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=1e-12)


def of_autograd(model: nn.Module, optimizer: Any, rank: int) -> None:
    params = list(model.parameters())
    for p, grad in zip(params, torch.autograd.grad(loss(model, 0, [rank]), params), strict=True):
        p.grad = grad


def on_one_rank(model: nn.Module, optimizer: Any, rank: int) -> None:
    if rank == 1:
        for p in model.parameters():
            p.grad = torch.ones_like(p)


def in_a_hook(model: nn.Module, optimizer: Any, rank: int) -> None:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    loss(model, 0, [rank]).backward()


OWN = {
    "autograd": (of_autograd, "cannot update 0.weight, because ranks have different gradients"),
    "one rank": (on_one_rank, "cannot update 0.weight, because only some ranks have a gradient"),
    "hook": (in_a_hook, "was called during a backward pass"),
}


@pytest.mark.parametrize("first", [False, True], ids=["first", "after a step"])
@pytest.mark.parametrize("name", OWN)
def test_gradients_of_one_rank_raise_on_all_ranks_and_change_no_weight(name: str, first: bool) -> None:
    change, said = OWN[name]
    models = [net(), net()]

    def over(context: ParallelContext) -> None:
        model = shardformer.shard_model(models[context.rank], context=context)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if first:
            loss(model, 7, [context.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ConfigError, match=said):
            change(model, optimizer, context.rank)
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    run_as_threads(over, data=2)


def test_extra_step_on_one_rank_raises_on_all_ranks() -> None:
    models = [net(), net()]

    def over(context: ParallelContext) -> str:
        model = shardformer.shard_model(models[context.rank], context=context)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss(model, 0, [context.rank]).backward()
        optimizer.step()
        with pytest.raises(ShardFormerError) as caught:
            if context.rank == 0:
                optimizer.step()
            loss(model, 1, [context.rank]).backward()
        return str(caught.value)

    first, _ = run_as_threads(over, data=2)
    assert "Rank 0 called SGD.step, without a backward pass since its last step" in first


def test_equal_gradients_assigned_on_all_ranks_are_used() -> None:
    models = [net(), net()]

    def over(context: ParallelContext) -> Tensor:
        model: Any = shardformer.shard_model(models[context.rank], context=context)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        found: Tensor = model[0].weight.detach()
        return found

    for found in run_as_threads(over, data=2):
        assert torch.allclose(found, net()[0].weight - 0.2)  # type: ignore[operator]  # a Tensor
