"""16 bits over pipeline stages: one micro-batch is bitwise equal to the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.errors import InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.pipeline import Pipeline
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from shardformer.verify.train_both import _gather_full_tensors_from_all_stages
from tests.precision.crossing import floats_in
from tests.verify.deep import deep
from tests.verify.variants import VARIANTS

# Rotary positions of several kinds, ALiBi, learned positions, and relative position biases.
UNTIED = ("llama", "chatglm", "gptj", "qwen3", "mistral")
FAMILIES = (*UNTIED, "bloom", "falcon with ALiBi", "gpt2", "bert", "t5", "whisper")
SUMS_OVER_LAYERS = ("t5", "whisper")
"""Gradients of tensors that several layers read, such as encoder states, are summed in another order."""
Convert = Callable[[Any], Any]


def halved(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def by_hand(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.data = p.data.half()
    return model


def tables_alone(model: nn.Module) -> nn.Module:
    """Embeddings in 16 bits under autocast: positions get the dtype of the embedding of another stage."""
    for path, module in model.named_modules():
        if "embed" in path.rpartition(".")[2] and getattr(module, "weight", None) is not None:
            module.to(torch.bfloat16)
    return model


CONVERSIONS: Mapping[str, tuple[Convert, torch.dtype | None]] = {
    "to": (halved, None),
    "by hand": (by_hand, None),
    "autocast": (lambda model: model, torch.bfloat16),
    "autocast of tables in 16 bits": (tables_alone, torch.bfloat16),
}


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def sample_of(family: str) -> SmallModelFactory:
    if family == "falcon with ALiBi":
        return deep("falcon", **VARIANTS["falcon of groups with ALiBi"].changes)
    return deep(family)


def cut(model: nn.Module, context: ParallelContext, schedule: str = "1f1b") -> Any:
    manager = PipelineStageManager(context, schedule)
    return shard_model(copy.deepcopy(model), context=context, pipeline_stage_manager=manager)


@pytest.mark.reduced(at_most=5)
@pytest.mark.parametrize(
    ("family", "conversion"),
    [(f, c) for f in FAMILIES for c in CONVERSIONS if f in UNTIED or c != "autocast of tables in 16 bits"],
)
def test_conversion_after_sharding_is_bitwise_exact(family: str, conversion: str) -> None:
    convert, dtype = CONVERSIONS[conversion]
    sample = sample_of(family)
    torch.manual_seed(0)
    model = sample().float().train()
    plain = convert(copy.deepcopy(model))
    batch = floats_in(
        RandomBatchFactory(DEFAULT_HEAD[sample.family])(0),
        torch.float32 if dtype is not None else next(plain.parameters()).dtype,
    )
    with autocast(dtype):
        loss = plain(**batch).loss
    loss.backward()
    want = {n: p.grad for n, p in plain.named_parameters()}

    def train(context: ParallelContext) -> None:
        ours = convert(cut(model, context))
        with autocast(dtype):
            found = Pipeline(ours, 1).step(batch)
        assert found == loss.detach().float()
        grads = _gather_full_tensors_from_all_stages(ours, context, {n: p.grad for n, p in ours.named_parameters()})
        assert grads.keys() == want.keys()
        wrong = [n for n, g in want.items() if not _same(grads[n], g)]
        assert family in SUMS_OVER_LAYERS or not wrong

    run_as_threads(train, pipe=2, one_at_a_time=True)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))


def test_model_may_change_between_steps() -> None:
    """Stages remember the shapes of the tensors that they exchange, separately for each dtype."""
    torch.manual_seed(0)
    model = deep("llama")().float().train()
    batch = RandomBatchFactory(DEFAULT_HEAD["llama"])(0)
    changes: list[tuple[Convert, torch.dtype | None]] = [
        (nn.Module.float, None),
        (nn.Module.float, torch.bfloat16),
        (halved, None),
        (nn.Module.half, None),
        (nn.Module.float, torch.float16),
        (nn.Module.float, None),
    ]

    def losses(model: Any, loss_of: Callable[[], Tensor]) -> list[float]:
        found = []
        for convert, dtype in changes:
            convert(model)
            model.zero_grad()
            with autocast(dtype):
                found.append(float(loss_of().detach()))
        return found

    plain = copy.deepcopy(model)
    want = [losses(plain, lambda: plain(**batch).loss) for _ in range(2)]  # a conversion rounds the weights for good

    def train(context: ParallelContext) -> None:
        ours = cut(model, context)
        pipeline = Pipeline(ours, 1)
        assert losses(ours, lambda: pipeline.step(batch)) == want[0]
        assert losses(ours, lambda: pipeline.evaluate(batch)) == want[1]

    run_as_threads(train, pipe=2, one_at_a_time=True)


def test_tied_weights_with_different_dtypes_raise_on_all_stages() -> None:
    """Converting the embedding also converts the tied head on one device, but not the head on the last stage."""
    torch.manual_seed(0)
    model = deep("bloom")().float().train()
    batch = RandomBatchFactory(DEFAULT_HEAD["bloom"])(0)

    def train(context: ParallelContext) -> None:
        ours = cut(model, context)
        if context.pipe.rank == 0:
            ours.transformer.word_embeddings.to(torch.bfloat16)
        with pytest.raises(
            InputError, match=r"word_embeddings.weight has dtype torch.bfloat16 on pipeline stage 0, but"
        ):
            Pipeline(ours, 2).step(batch)

    run_as_threads(train, pipe=2, one_at_a_time=True)


def test_different_autocast_settings_raise_on_all_stages() -> None:
    torch.manual_seed(0)
    model = deep("llama")().float().train()
    batch = RandomBatchFactory(DEFAULT_HEAD["llama"])(0)

    def train(context: ParallelContext) -> None:
        pipeline = Pipeline(cut(model, context), 2)
        with (
            autocast(torch.bfloat16 if context.rank else None),
            pytest.raises(InputError, match="autocast settings"),
        ):
            pipeline.step(batch)

    run_as_threads(train, pipe=2, one_at_a_time=True)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_backward_pass_runs_outside_autocast(schedule: str) -> None:
    """Tensors that a forward pass computes in fp32 without autocast are returned in fp32."""
    torch.manual_seed(0)
    model = deep("llama")().float().train()
    batch = RandomBatchFactory(DEFAULT_HEAD["llama"])(0)

    def widen(model: Any) -> Any:
        for layer in model.model.layers:
            layer.mlp.forward = in_fp32(layer.mlp.forward)
        return model

    def train(context: ParallelContext) -> None:
        ours = widen(cut(model, context, schedule))
        with autocast(torch.bfloat16):
            Pipeline(ours, 1).step(batch)
        for name, p in ours.named_parameters():
            assert p.grad is not None
            in_16_bits = torch.equal(p.grad, p.grad.bfloat16().float())
            assert not (".mlp." in name and in_16_bits), name

    run_as_threads(train, pipe=2, one_at_a_time=True)


def in_fp32(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def wide(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    return wide
