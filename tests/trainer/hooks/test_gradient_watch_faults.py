"""Further properties of GradientMonitor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from shardformer.config import ParallelConfig
from shardformer.errors import InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.engine import Engine
from shardformer.training.hooks.gradient_monitor import GradientMonitor
from shardformer.training.initialize import initialize
from shardformer.training.trainer import Trainer
from shardformer.weights.state_dict import full_state_dict
from tests.trainer.hooks.runs import engine_of


def small() -> Any:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=23, n_positions=9, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number)) * 0.3)
    return model


def data() -> list[dict[str, Tensor]]:
    ids = torch.randint(23, (8, 9), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def gpt2(context: ParallelContext | None, **parallel: Any) -> Engine:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"shuffle": False}
    return initialize(
        model,
        optimizer,
        None,
        data(),
        context=context,
        parallel=ParallelConfig(**parallel),
        batch_size=8,
        data_options=options,
    )


def test_the_gradient_norm_is_equal_under_every_layout() -> None:
    model = small()
    batch = torch.stack([row["input_ids"] for row in data()])
    model(input_ids=batch, labels=batch).loss.backward()
    want = float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))
    for sizes, how in [
        ({}, {}), ({"data": 2}, {}), ({"tensor": 2}, {}), ({"pipe": 2}, {}), ({"data": 2}, {"zero_stage": 3}),
        ({"tensor": 2}, {"zero_stage": 1, "on_nonfinite": "ignore"}),
        ({"pipe": 2}, {"zero_stage": 1, "on_nonfinite": "ignore"}),
    ]:  # fmt: skip

        def run(context: ParallelContext, how: Any = how, sizes: Any = sizes) -> float:
            engine = gpt2(context, **how, **sizes)
            return Trainer(engine, [GradientMonitor()]).fit(steps=1)["grad_norm"]

        assert run_as_threads(run, **sizes) == pytest.approx([want] * max([1, *sizes.values()]), rel=1e-5), (sizes, how)


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipe": 2}, {"data": 2}], ids=str)
@pytest.mark.parametrize("zero", [None, 1])
def test_nonfinite_parameters_have_the_names_of_the_unsharded_model(sizes: dict[str, int], zero: int | None) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"

    def run(context: ParallelContext) -> str:
        engine = gpt2(context, zero_stage=zero, **sizes)
        for n, p in engine.model.named_parameters():
            if n == name:
                p.register_hook(lambda g: g * math.inf)
        with pytest.raises(InputError) as caught:
            Trainer(engine, [GradientMonitor()]).fit(steps=3)
        return str(caught.value)

    for message in run_as_threads(run, **sizes):
        assert name in message


@pytest.mark.parametrize("zero", [None, 1])
def test_on_nonfinite_ignore_trains_as_without_the_hook(zero: int | None) -> None:
    def run(hooks: list[Any]) -> dict[str, Tensor]:
        engine = engine_of(parallel=ParallelConfig(on_nonfinite="ignore", zero_stage=zero))
        torch.manual_seed(3)
        next(engine.model.parameters()).register_hook(lambda g: g.masked_fill(torch.arange(4) == 0, math.inf))
        Trainer(engine, hooks).fit(steps=1)
        return full_state_dict(engine.model)

    torch.testing.assert_close(run([GradientMonitor()]), run([]), rtol=0, atol=0, equal_nan=True)


def test_the_norm_of_an_earlier_run_is_not_reported_again() -> None:
    engine = engine_of()
    Trainer(engine, [GradientMonitor()]).fit(steps=2)
    torch.manual_seed(0)
    assert "grad_norm" not in Trainer(engine, []).fit(steps=4)


def test_a_resumed_run_counts_each_norm_once() -> None:
    hook = GradientMonitor()
    Trainer(engine_of(), [hook]).fit(steps=4)
    hook.load_state(hook.state())
    assert len(hook.state()["norms"]) == 4
