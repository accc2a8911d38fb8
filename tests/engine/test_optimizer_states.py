"""Optimizers that have a state before ``initialize``, from their constructor or from earlier steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardformer
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.meta_init.lazy_init import LazyInit
from shardformer.training.initialize import initialize
from shardformer.verify.small_models import SmallModelFactory
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.optimizers import LARS

Make = Callable[[nn.Module], Optimizer]
EXACT = 1e-6
"""LLaMA computes its loss and rotary embeddings in fp32."""
SIZES = ("tensor", "data", "pipe")


class Anchored(Optimizer):
    """An element-wise optimizer that pulls parameters towards their initial values, with a list in its state."""

    needs_full_matrices = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        for param in self.param_groups[0]["params"]:
            self.state[param] = {"anchor": param.detach().clone(), "moments": [torch.zeros_like(param)], "steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["steps"] += 1
            (moment,) = state["moments"]
            moment.mul_(0.9).add_(param.grad)
            param.add_(moment + 0.1 * (param - state["anchor"]), alpha=-0.05 / state["steps"])


class Wrapper(Optimizer):
    """An optimizer that steps another one with a separate state."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return SmallModelFactory("llama")().double().train()


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (4, 7), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def train_alone(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        model(**batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def adagrad(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1, **options)


def used(kind: Any, **options: Any) -> Make:
    def make(model: nn.Module) -> Optimizer:
        optimizer: Optimizer = kind(model.parameters(), lr=0.01, **options)
        train_alone(model, optimizer, range(90, 92))
        return optimizer

    return make


def train_sharded(make: Make, parallel: dict[str, Any]) -> dict[str, Tensor]:
    models = [small_model() for _ in range(4)]  # before the threads start, which share torch's random state

    def train(context: ParallelContext) -> dict[str, Tensor]:
        model = models[context.rank]
        engine = initialize(model, make(model), context=context, parallel=parallel)
        for step in range(3):
            rows = batch(step)
            count = 4 // context.data.size
            engine.train_step({k: x[count * context.data.rank :][:count] for k, x in rows.items()})
        return full_state_dict(engine.model)

    sizes: dict[str, Any] = {name: parallel[name] for name in SIZES if name in parallel}
    weights: dict[str, Tensor] = run_as_threads(train, **sizes)[0]
    return weights


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor": 2},
    {"data": 2, "zero_stage": 1},
    {"data": 2, "zero_stage": 2, "offload": "cpu"},
    {"data": 2, "zero_stage": 3},
    {"pipe": 2},
    {"tensor": 2, "data": 2, "zero_stage": 1},
]
CASES: list[tuple[str, Make, dict[str, Any]]] = [
    *[("Adagrad", adagrad, layout) for layout in LAYOUTS],
    ("fused Adagrad", lambda model: adagrad(model, fused=True), {"tensor": 2}),
    ("Wrapper", lambda model: Wrapper(adagrad(model)), {"tensor": 2}),
    ("Anchored", lambda model: Anchored(model.parameters()), {"tensor": 2}),
    ("Anchored", lambda model: Anchored(model.parameters()), {"data": 2, "zero_stage": 1}),
    ("used AdamW", used(torch.optim.AdamW, eps=1e-4), {"tensor": 2}),
    ("used LARS", used(LARS, momentum=0.9), {"tensor": 2}),
]


@pytest.mark.parametrize(("name", "make", "parallel"), CASES, ids=lambda x: str(x) if not callable(x) else "")
def test_states_are_sharded_with_the_parameters(name: str, make: Make, parallel: dict[str, Any]) -> None:
    model = small_model()
    train_alone(model, make(model), range(3))
    weights = train_sharded(make, parallel)
    assert max(float((weights[n] - x).abs().max()) for n, x in model.state_dict().items()) < EXACT


def test_a_state_that_cannot_be_sharded_raises_and_remains() -> None:
    make = used(torch.optim.Adafactor)

    models = [small_model() for _ in range(2)]

    def shard(context: ParallelContext) -> None:
        model = models[context.rank]
        optimizer = make(model)
        before = {param: dict(state) for param, state in optimizer.state.items()}
        with pytest.raises(ConfigError, match=r"'row_var' of Adafactor cannot be sharded"):
            initialize(model, optimizer, context=context, parallel={"tensor": 2})
        assert list(optimizer.state) == list(model.parameters())
        assert all(optimizer.state[p][k] is x for p, state in before.items() for k, x in state.items())

    run_as_threads(shard, tensor=2)


def test_states_that_differ_between_ranks_raise() -> None:
    models = [small_model() for _ in range(2)]

    def shard(context: ParallelContext) -> None:
        model = models[context.rank]
        optimizer = adagrad(model)
        optimizer.state[next(model.parameters())]["sum"][0] += context.rank
        with pytest.raises(ConfigError, match="Adagrad state 'sum' of parameter 0"):
            initialize(model, optimizer, context=context, parallel={"data": 2})

    run_as_threads(shard, data=2)


def test_a_state_without_values_raises() -> None:
    with LazyInit():
        model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="Adagrad was created from meta parameters, so its state 'sum' has no values"):
        initialize(model, torch.optim.Adagrad(model.parameters()), nn.CrossEntropyLoss())


def test_the_state_of_a_sharded_model_is_kept() -> None:
    models = [small_model() for _ in range(2)]

    def train(context: ParallelContext) -> dict[str, Tensor]:
        model = shardformer.shard_model(models[context.rank], context=context)
        engine = initialize(model, adagrad(model), context=context)
        for step in range(3):
            engine.train_step(batch(step))
        return full_state_dict(engine.model)

    plain = small_model()
    train_alone(plain, adagrad(plain), range(3))
    for weights in run_as_threads(train, tensor=2):
        assert max(float((weights[n] - x).abs().max()) for n, x in plain.state_dict().items()) < EXACT
