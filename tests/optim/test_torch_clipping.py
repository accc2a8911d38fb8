"""``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`` on shards equals the plain model."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import shardformer
from shardformer.comm.collectives import gather_full_tensor
from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
from tests.policies.toy import ToyLM, ToyPolicy, toy_batch, toy_loss


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return ToyLM().double()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def backward(model: nn.Module) -> nn.Module:
    loss: Any = toy_loss(model, toy_batch(0))
    loss.backward()
    return model


def sharded_models(number: int) -> list[nn.Module]:
    plain = plain_model()
    return [copy.deepcopy(plain) for _ in range(number)]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("sequence", [False, True])
def test_norm_and_clipped_gradients_equal_the_plain_model(norm_type: float, sequence: bool) -> None:
    plain, models = backward(plain_model()), sharded_models(2)
    want = float(clip_grad_norm_(plain.parameters(), 0.01, norm_type))
    expected = gradients(plain)

    def clip(context: ParallelContext) -> tuple[float, float]:
        model = models[context.tensor.rank]
        model = shardformer.shard_model(model, ToyPolicy(), context=context, enable_sequence_parallelism=sequence)
        got = float(clip_grad_norm_(backward(model).parameters(), 0.01, norm_type))
        specs = get_shard_specs(model)
        full = {name: gather_full_tensor(g, specs[name], context.axis) for name, g in gradients(model).items()}
        return got, max(float((full[name] - expected[name]).abs().max()) for name in expected)

    for got, worst in run_as_threads(clip, tensor=2):
        assert got == pytest.approx(want, rel=1e-12) and want > 0.01
        assert worst < 1e-14


def test_parameters_of_sharded_and_plain_models_count_together() -> None:
    plain, extra, models = backward(plain_model()), nn.Linear(3, 3).double(), sharded_models(2)
    extra(torch.ones(1, 3).double()).sum().backward()
    asked = [*gradients(plain).values(), *gradients(extra).values()]
    want = float(get_total_norm(asked))

    def measure(context: ParallelContext) -> float:
        model = backward(shardformer.shard_model(models[context.tensor.rank], ToyPolicy(), context=context))
        return float(get_total_norm([*gradients(model).values(), *gradients(extra).values()]))

    assert run_as_threads(measure, tensor=2) == pytest.approx([want, want], rel=1e-12)


def test_norm_of_a_subset_of_parameters() -> None:
    plain, models = backward(plain_model()), sharded_models(2)
    want = float(clip_grad_norm_(plain.get_submodule("layers.0").parameters(), 1.0))

    def measure(context: ParallelContext) -> float:
        model = backward(shardformer.shard_model(models[context.tensor.rank], ToyPolicy(), context=context))
        return float(clip_grad_norm_(model.get_submodule("layers.0").parameters(), 1.0))

    assert run_as_threads(measure, tensor=2) == pytest.approx([want, want], rel=1e-12)


def test_error_if_nonfinite_raises() -> None:
    models = sharded_models(2)

    def clip(context: ParallelContext) -> None:
        model = backward(shardformer.shard_model(models[context.tensor.rank], ToyPolicy(), context=context))
        next(g for name, g in gradients(model).items() if "fc1" in name).fill_(math.nan)
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    with pytest.raises(RuntimeError, match="nan"):
        run_as_threads(clip, tensor=2)


@pytest.fixture
def without_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide models that failed tests or fixtures keep alive in this process."""
    monkeypatch.setattr("shardformer.gradients.clipping.get_local_metadata", list)


def test_other_gradients_use_the_function_of_torch(without_other_models: None) -> None:
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    want = math.sqrt(sum(float((g**2).sum()) for g in gradients(model).values()))
    assert float(clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(want)
    assert float(clip_grad_norm_([], 1.0)) == 0.0


def _clip_stages() -> tuple[float, float]:
    """Measure the norm of all gradients, then that of the last norm layer, which the first stage does not have."""
    torch.manual_seed(0)
    plain = SmallModelFactory("llama")().double().train()
    model = shardformer.shard_model(
        copy.deepcopy(plain), context=ParallelContext.from_default_process_group({"pipe": 2})
    )
    batch = RandomBatchFactory(SmallModelFactory("llama").head_class)(0)
    plain(**batch).loss.backward()
    shardformer.Pipeline(model, micro_batches=1).step(batch)
    found = []
    for ending in ("", "model.norm.weight"):
        norms = [
            float(clip_grad_norm_([p for n, p in m.named_parameters() if n.endswith(ending)], 1e9))
            for m in (plain, model)
        ]
        found.append(abs(norms[1] / norms[0] - 1))
    return found[0], found[1]


def test_all_stages_get_the_same_norm(pool2: WorkerPool) -> None:
    for everything, last_norm in pool2.run(_clip_stages):
        assert everything < 1e-6 and last_norm < 1e-6


def test_stage_without_parameters_joins_the_norm() -> None:
    """Models of another rank, which is a thread of the same process, are ignored."""

    def clip(context: ParallelContext) -> float:
        model = shardformer.shard_model(SmallModelFactory("llama")().train(), context=context)
        shardformer.Pipeline(model, micro_batches=1).step(RandomBatchFactory(SmallModelFactory("llama").head_class)(0))
        params = [p for name, p in model.named_parameters() if name == "model.norm.weight"]
        assert len(params) == context.pipe.rank
        return float(clip_grad_norm_(params, 1e9))

    first, last = run_as_threads(clip, pipe=2)
    assert first == last > 0.0


def test_stage_without_gradients_of_two_models_raises() -> None:
    models = sharded_models(4)

    def clip(context: ParallelContext) -> None:
        for _ in range(2):
            shardformer.shard_model(models.pop(), ToyPolicy(), context=context)
        clip_grad_norm_([], 1.0)

    kept = list(models)
    with pytest.raises(ConfigError, match="which of the 2 pipeline models"):
        run_as_threads(clip, pipe=2)
    assert len(kept) == 4  # keep the models alive


@pytest.mark.parametrize("layout", [{"data": 2}, {"tensor": 2}])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_of_zero_are_clipped_as_in_the_plain_model(stage: int, layout: dict[str, int]) -> None:
    """Clip the model and a part of it. Parameters of the ZeroOptimizer are rejected."""
    plain = backward(plain_model())
    part = [p for p in plain.get_submodule("layers.0").parameters()]
    wants = [float(get_total_norm([p.grad for p in ps if p.grad is not None])) for ps in (part, [*plain.parameters()])]
    models = sharded_models(2)

    def clip(context: ParallelContext) -> list[float]:
        model = shardformer.shard_model(models[context.rank], ToyPolicy(), context=context)
        optimizer = shardformer.shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=stage)
        backward(model)
        pieces = [p for group in optimizer.param_groups for p in group["params"]]
        with pytest.raises(ConfigError, match="received the parameter shards of a ZeroOptimizer"):
            clip_grad_norm_(pieces, 1.0)
        with pytest.raises(ConfigError, match="received the parameter shards of a ZeroOptimizer"):
            get_total_norm([p.grad for p in pieces if p.grad is not None])
        other = nn.Linear(3, 3)
        assert float(clip_grad_norm_(other.parameters(), 1.0)) == 0.0  # not a model of ZeRO
        norms = [clip_grad_norm_(model.get_submodule("layers.0").parameters(), 1e9)]
        norms += [get_total_norm([p.grad for p in model.parameters() if p.grad is not None])]
        norms += [clip_grad_norm_(model.parameters(), 0.01), clip_grad_norm_(model.parameters(), 1e9)]
        return [float(norm) for norm in norms]

    for found in run_as_threads(clip, **layout):
        assert found == pytest.approx([*wants, wants[1], 0.01], rel=1e-5)


def test_torch_warns_about_an_empty_generator(without_other_models: None) -> None:
    shardformer.shard_model(plain_model(), ToyPolicy(), context=ParallelContext.from_sizes({}))
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in ()), 1.0)
