"""Engines, trainers and sharded models print their layout, parameters and progress, without communication."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardformer
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.trainer import Trainer
from shardformer.verify.small_models import SmallModelFactory
from tests.trainer.hooks.runs import engine_of

ENGINE = """\
Engine of Net
  layout      data=2, zero_stage=1 (rank 0 of 2)
  parameters  49, of which 49 on this rank
  optimizer   AdamW
  data        batches of 4, epoch 0
  steps       0"""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_and_a_trainer_print_their_layout_on_one_rank(rank: int) -> None:
    def run(context: ParallelContext) -> tuple[str, str, str]:
        engine = engine_of(context, parallel={"data": 2, "zero_stage": 1})
        if context.data.rank != rank:
            return "", "", ""  # a collective of the other rank would not end
        trainer = Trainer(engine)
        return repr(engine), repr(trainer), trainer._repr_html_()

    engine, trainer, html = run_as_threads(run, data=2)[rank]
    expected = ENGINE.replace("rank 0", f"rank {rank}")
    assert engine == expected
    assert trainer == expected.replace("Engine", "Trainer") + "\n  hooks       Throughput, Progress"
    assert html.startswith("<table><caption>Trainer of Net</caption>") and "<td" in html and "zero_stage=1" in html


def test_a_trainer_prints_its_progress() -> None:
    trainer = Trainer(engine_of(), [])
    trainer.fit(steps=4)
    assert "steps       4 of 4" in repr(trainer) and "epoch 1" in repr(trainer) and "hooks       none" in repr(trainer)


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"pipe": 2}], ids=str)
def test_a_sharded_model_prints_one_more_line_on_one_rank(axes: dict[str, int]) -> None:
    plain = SmallModelFactory("llama")()
    total = sum(p.numel() for p in plain.parameters())

    def run(context: ParallelContext) -> tuple[list[str], int]:
        model = shardformer.shard_model(copy.deepcopy(plain), context=context)
        if context.rank:
            return [], 0
        return repr(model).splitlines(), sum(p.numel() for p in model.parameters())

    (lines, local), _ = run_as_threads(run, **axes)
    layout = "".join(f"{name}={size}" for name, size in axes.items())
    assert 0 < local < total
    assert lines[:2] == [
        "LlamaForCausalLM(",
        f"  # sharded over {layout}: {local:,} of {total:,} parameters on this rank",
    ]
    assert any("q_proj" in line for line in lines)


def test_the_line_follows_the_own_text_of_a_model() -> None:
    class Own(nn.Linear):
        pass

    model = shardformer.shard_model(Own(2, 3), context=ParallelContext.from_sizes({}))
    own = "in_features=2, out_features=3, bias=True"
    assert own in repr(model) and "# sharded over one process: 9 of 9 parameters" in repr(model)
    assert repr(copy.deepcopy(model)) == repr(model) and torch.is_tensor(model(torch.ones(2)))
