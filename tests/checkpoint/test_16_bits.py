"""Checkpoints of 16-bit runs: master weights, states and the loss scale move to other layouts bitwise."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.engine import Engine
from shardformer.training.initialize import initialize
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from shardformer.zero.mixed_precision import LossScale, MixedPrecision

SAMPLES, BEFORE = 4, 2
COPYING = threading.Lock()
Layout = dict[str, Any]
PAIRS: list[tuple[str, Layout, Layout]] = [
    ("bf16", {"data": 2, "zero_stage": 2}, {"tensor": 2, "zero_stage": 1}),
    ("fp16", {"pipe": 2, "zero_stage": 1}, {"data": 2, "zero_stage": 3}),
    ("bf16", {"data": 2, "zero_stage": 3}, {"pipe": 2, "zero_stage": 0}),
    ("fp16", {"tensor": 2, "zero_stage": 0}, {"data": 2, "zero_stage": 2, "offload": "cpu"}),
    ("bf16", {"sequence": 2, "zero_stage": 1}, {"tensor": (2, 2), "tensor_parallel_mode": "2d", "zero_stage": 1}),
    ("fp16", {"tensor": 2, "sequence_parallel": True, "zero_stage": 3}, {"pipe": 2, "data": 2, "zero_stage": 1}),
]


def engine_of(context: ParallelContext, plain: nn.Module, precision: str, layout: Layout) -> Engine:
    with COPYING:
        model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    asked = MixedPrecision(precision, loss_scale=LossScale(2.0**24 if precision == "fp16" else 1.0, growth_interval=3))
    return initialize(model, optimizer, parallel={**layout, "precision": asked}, context=context)


def train(engine: Engine, steps: range) -> list[float]:
    data, batches = engine.context.data, RandomBatchFactory(DEFAULT_HEAD["llama"], batch_size=SAMPLES)
    own = [{name: x.chunk(data.size)[data.rank] for name, x in batches(step).items()} for step in steps]
    return [float(engine.train_step(batch)) for batch in own]


def axes_of(layout: Layout) -> dict[str, int]:
    sizes = {name: layout.get(name, 1) for name in ("data", "tensor", "pipe", "sequence")}
    return {name: size if isinstance(size, int) else size[0] * size[1] for name, size in sizes.items()}


def in_one_process(folder: Path) -> dict[str, Tensor]:
    """Master weights and states in fp32, which an unsharded model loads."""
    model = SmallModelFactory("llama")().float()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = initialize(model, optimizer)
    engine.load(folder)
    names = {id(p): name for name, p in engine.model.named_parameters()}
    found = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    for p, state in engine.optimizers[0].state.items():
        found |= {f"{names[id(p)]} {key}": x.clone() for key, x in state.items()}
    return found


@pytest.mark.slow
@pytest.mark.reduced(precision=("bf16", "fp16"), one_in=3, at_most=1)
@pytest.mark.parametrize(("precision", "source", "target"), PAIRS, ids=str)
def test_16_bit_runs_reload_bitwise_under_another_layout(
    precision: str, source: Layout, target: Layout, tmp_path: Path
) -> None:
    plain, other = SmallModelFactory("llama")().float().train(), SmallModelFactory("llama")().float().train()

    def first(context: ParallelContext) -> tuple[list[float], LossScale]:
        engine = engine_of(context, plain, precision, source)
        train(engine, range(BEFORE))
        engine.save(tmp_path / "first")
        return train(engine, range(BEFORE, BEFORE + 3)), engine.optimizers[0].loss_scale

    def second(context: ParallelContext) -> tuple[list[float], LossScale]:
        engine = engine_of(context, other, precision, target)
        engine.load(tmp_path / "first")
        engine.save(tmp_path / "second")
        return train(engine, range(BEFORE, BEFORE + 3)), engine.optimizers[0].loss_scale

    expected, scale = run_as_threads(first, **axes_of(source))[0]
    for losses, own in run_as_threads(second, **axes_of(target)):
        assert losses == pytest.approx(expected, rel=0.02)
        assert own == scale
    assert precision == "bf16" or scale.value < 2.0**24  # a step was left out
    masters = in_one_process(tmp_path / "first")
    again = in_one_process(tmp_path / "second")
    assert masters.keys() == again.keys() and len(masters) > 3
    assert [name for name, x in masters.items() if not torch.equal(again[name], x)] == []
    assert any(not torch.equal(x.bfloat16().float(), x) for x in masters.values())  # they have more than 16 bits
