"""torch's gradient scaler and optimizers on sharded models: ranks skip steps together, and problems are reported."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers

import shardformer
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from shardformer.zero.zero_optimizer import ZeroOptimizer

SCALE = 2.0**10


def plain() -> Any:
    return SmallModelFactory("llama")().train()


def scaled_step(scaler: Any, model: Any, optimizer: Any, max_norm: float | None) -> float:
    """Step with a GradScaler, after clipping if ``max_norm`` is a number, and return the next scale."""
    if max_norm is not None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scale: float = scaler.get_scale()
    return scale


def scaled_run(model: Any, rank: int, odd: int, *, unscales: bool, step: Any = None) -> tuple[list[float], Any]:
    """Return the weights and the scales of three steps. In the second one rank has an infinite gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scales = []
    for i in range(3):
        scaler.scale(model(**RandomBatchFactory(DEFAULT_HEAD["llama"])(i)).loss).backward()
        if i == 1 and rank == odd:
            next(p for n, p in model.named_parameters() if "up_proj" in n).grad.view(-1)[0] = float("inf")
        scales.append(scaled_step(scaler, model, optimizer, 1.0 if unscales else None))
    return scales, model


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"sequence": 2}, {"tensor": 2, "data": 2}], ids=str)
def test_all_ranks_skip_a_step_if_one_has_to(sizes: dict[str, int], unscales: bool) -> None:
    first = plain()
    expected, alone = scaled_run(copy.deepcopy(first), 0, 0, unscales=unscales)
    whole = alone.state_dict()

    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(copy.deepcopy(first), context=context)
        scales, _ = scaled_run(model, context.rank, 1, unscales=unscales)
        assert scales == expected == [SCALE, SCALE / 2, SCALE / 2]
        for name, value in shardformer.full_state_dict(model).items():
            assert torch.allclose(value, whole[name], atol=1e-5)

    run_as_threads(do, **sizes)


def test_stage_without_gradients_skips_the_step_too() -> None:
    def do(context: ParallelContext) -> list[float]:
        model = shardformer.shard_model(plain(), context=context)
        pipeline = shardformer.Pipeline(model, micro_batches=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(torch.ones(()))
        pipeline.step(RandomBatchFactory(DEFAULT_HEAD["llama"])(0))
        for p in model.parameters():
            p.grad = None if context.pipe.rank else torch.full_like(p, float("nan"))
        scaler.step(optimizer)
        scaler.update()
        return [scaler.get_scale()]

    assert run_as_threads(do, pipe=2) == [[SCALE / 2]] * 2


def scaled_accumulation(model: Any, optimizer: Any, ranks: list[int], *, unscales: bool) -> tuple[list[float], Any]:
    """Train with a scaler on the batches of ``ranks``, with an infinite loss of data rank 1 in the second step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scales = []
    for i in range(3):
        for half in (0, 1):
            is_paused = isinstance(optimizer, ZeroOptimizer) and half == 0
            with optimizer.no_sync() if is_paused else nullcontext():
                for rank in ranks:
                    loss = model(**RandomBatchFactory(DEFAULT_HEAD["llama"])(9 * i + 3 * half + rank)).loss
                    loss = loss * float("inf") if (i, half, rank) == (1, 0, 1) else loss / len(ranks)
                    scaler.scale(loss).backward()
        scales.append(scaled_step(scaler, model, optimizer, 0.1 if unscales else None))
    return scales, model


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 1, "offload": "cpu"}, {"stage": 2}, {"stage": 3}], ids=str)
def test_scaler_unscales_the_gradients_of_a_zero_optimizer(options: dict[str, Any], unscales: bool) -> None:
    alone, *models = [plain() for _ in range(3)]
    for model in models:
        model.load_state_dict(alone.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    expected, _ = scaled_accumulation(alone, optimizer, [0, 1], unscales=unscales)
    whole = alone.state_dict()

    def do(context: ParallelContext) -> None:
        model = models[context.rank]
        sharded = shardformer.shard_optimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), context=context, **options
        )
        scales, _ = scaled_accumulation(model, sharded, [context.rank], unscales=unscales)
        assert scales == expected == [SCALE, SCALE / 2, SCALE / 2]
        for name, value in shardformer.full_state_dict(model).items():
            assert torch.allclose(value, whole[name], atol=1e-6)

    run_as_threads(do, data=2)


MAKES: dict[str, Any] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps),
    "transformers": lambda ps: transformers.optimization.Adafactor(ps, lr=0.1, relative_step=False),
    "LAMB": lambda ps: shardformer.zero.LAMB(ps),
    "LARS": lambda ps: shardformer.zero.LARS(ps, lr=0.1),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2]),
}


@pytest.mark.reduced(at_most=10)
@pytest.mark.parametrize("how", ["tensor", "data", "zero"])
@pytest.mark.parametrize("name", MAKES)
def test_optimizer_that_is_not_elementwise_warns(name: str, how: str) -> None:
    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(plain(), context=context)
        optimizer: Any = MAKES[name](model.parameters())
        if how == "zero":
            rest = [p for p in model.parameters() if p.dim() != 2] if name == "Muon" else []
            own = [optimizer, torch.optim.SGD(rest, 0.1)] if rest else optimizer
            optimizer = shardformer.shard_optimizer(model, own)
        model(**RandomBatchFactory(DEFAULT_HEAD["llama"])(0)).loss.backward()
        optimizer.step()
        optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_as_threads(do, **{"data" if how == "data" else "tensor": 2}, one_at_a_time=True)
    said = [str(w.message) for w in caught if "updates shards of parameters" in str(w.message)]
    looks = name not in ("SGD", "AdamW") and how == "tensor"
    assert bool(said) == looks, said
    assert all("shardformer.shard_optimizer(model, optimizer)" in text for text in said)
