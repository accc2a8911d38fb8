"""Stages train different parameters, so differences between their optimizers are not errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import SGD

import shardformer
from shardformer.errors import InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import SmallModelFactory

STEPS = 3
Optimizers = list[torch.optim.Optimizer]


def llama() -> Any:
    torch.manual_seed(0)
    return SmallModelFactory("llama")().double().train()


def ids(step: int) -> torch.Tensor:
    return torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(step))


def frozen_but(model: Any, name: str) -> list[Any]:
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(name in path)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def head_alone(model: Any) -> Optimizers:
    return [torch.optim.AdamW(frozen_but(model, "lm_head"), lr=0.01)]


def embedding_alone(model: Any) -> Optimizers:
    return [torch.optim.SGD(frozen_but(model, "embed_tokens"), lr=0.1)]


def head_in_the_optimizer_alone(model: Any) -> Optimizers:
    """Other parameters receive gradients that no optimizer uses."""
    return [torch.optim.SGD(model.lm_head.parameters(), lr=0.1)]


def rates(model: Any) -> Optimizers:
    embedding = model.model.embed_tokens.weight
    others = [parameter for parameter in model.parameters() if parameter is not embedding]
    return [torch.optim.SGD([embedding], lr=0.1), torch.optim.SGD(others, lr=0.01)]


def reversed_rates(model: Any) -> Optimizers:
    return rates(model)[::-1]


def of_each_end(model: Any) -> Optimizers:
    """One optimizer trains on the first stage only, and one on the last."""
    frozen_but(model, "nothing")
    ends = model.model.embed_tokens.requires_grad_(True), model.lm_head.requires_grad_(True)
    return [torch.optim.SGD(end.parameters(), lr=rate) for end, rate in zip(ends, (0.1, 0.01), strict=True)]


def of_each_parameter(model: Any) -> Optimizers:
    return [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]


def groups(model: Any) -> Optimizers:
    first, *others = model.parameters()
    return [torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": others}], lr=0.1)]


MAKES = (
    head_alone, embedding_alone, head_in_the_optimizer_alone, rates, reversed_rates, of_each_end, of_each_parameter,
    groups,
)  # fmt: skip


def alone(make: Callable[[Any], Optimizers]) -> list[float]:
    model, losses = llama(), []
    optimizers = make(model)
    for step in range(STEPS):
        loss = model(input_ids=ids(step), labels=ids(step)).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_losses_equal_one_process(make: Callable[[Any], Optimizers]) -> None:
    def do(context: ParallelContext) -> list[float]:
        model = llama()
        engine = shardformer.initialize(model, make(model), parallel={"pipe": 2}, context=context)
        return [float(engine.train_step({"input_ids": ids(step), "labels": ids(step)})) for step in range(STEPS)]

    expected = alone(make)
    for found in run_as_threads(do, pipe=2, one_at_a_time=True):
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("zero", [0, 1])
def test_zero_optimizers_are_monitored(zero: int) -> None:
    def do(context: ParallelContext) -> list[float]:
        model = llama()
        parallel = {"pipe": 2, "zero_stage": zero}
        engine = shardformer.initialize(model, head_alone(model), parallel=parallel, context=context)
        return [float(engine.train_step({"input_ids": ids(step), "labels": ids(step)})) for step in range(STEPS)]

    expected = alone(head_alone)
    for found in run_as_threads(do, pipe=2, one_at_a_time=True):
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_stage_may_be_frozen_and_trained_again() -> None:
    """First the head alone, then the whole model, then the head again, each with an optimizer of its own."""

    def train(model: Any, step: Callable[[Any, int], float]) -> list[float]:
        losses = []
        for phase in range(3):
            for parameter in model.parameters():
                parameter.requires_grad_(phase == 1)
            model.lm_head.requires_grad_(True)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizers = [torch.optim.SGD(trained, lr=0.1)] if trained else []  # a frozen stage has none
            for number in range(STEPS):
                losses.append(step(model, 10 * phase + number))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return losses

    def step_alone(model: Any, number: int) -> float:
        loss = model(input_ids=ids(number), labels=ids(number)).loss
        loss.backward()
        return loss.item()

    def do(context: ParallelContext) -> list[float]:
        model = shardformer.shard_model(llama(), context=context)
        pipeline = shardformer.Pipeline(model, micro_batches=2)
        return train(model, lambda _, number: float(pipeline.step({"input_ids": ids(number), "labels": ids(number)})))

    expected = train(llama(), step_alone)
    for found in run_as_threads(do, pipe=2, one_at_a_time=True):
        assert found == pytest.approx(expected, abs=1e-6)


class Own:
    """A custom loop in which each stage creates optimizers of its own parameters."""

    def __init__(self, context: ParallelContext, kinds: Sequence[type[torch.optim.Optimizer]] = (SGD, SGD)) -> None:
        self.stage = context.pipe.rank
        model = shardformer.shard_model(llama(), context=context)
        self.pipeline = shardformer.Pipeline(model, micro_batches=2)
        self.optimizer: Any = kinds[self.stage](model.parameters(), lr=0.1)  # type: ignore[call-arg]

    def step(self, step: int, *, steps: bool = True) -> float:
        loss = float(self.pipeline.step({"input_ids": ids(step), "labels": ids(step)}))
        if steps:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def test_stages_may_use_optimizer_classes_that_step_rarely() -> None:
    def do(context: ParallelContext) -> int:
        own = Own(context, (SGD, torch.optim.Adagrad))
        for step in range(4):
            own.step(step, steps=own.stage == 0 or step % 2 == 0)
        return own.stage

    assert run_as_threads(do, pipe=2, one_at_a_time=True) == [0, 1]


def test_skipped_step_of_one_stage_is_detected() -> None:
    def do(context: ParallelContext) -> str:
        own = Own(context)
        try:
            for step in range(4):
                own.step(step, steps=own.stage == 0 or step != 1)
        except InputError as error:
            return str(error)
        return ""

    assert all(
        "different numbers of optimizer steps" in said for said in run_as_threads(do, pipe=2, one_at_a_time=True)
    )


def test_evaluation_between_two_steps_is_not_counted() -> None:
    def do(context: ParallelContext) -> list[float]:
        own, found = Own(context), []
        for step in range(STEPS):
            found.append(own.step(step))
            for _ in range(1 + step):
                own.pipeline.evaluate({"input_ids": ids(step), "labels": ids(step)})
        return found

    first, second = run_as_threads(do, pipe=2, one_at_a_time=True)
    assert first == second == pytest.approx(copy.copy(first))
