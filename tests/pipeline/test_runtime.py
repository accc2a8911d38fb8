"""The runtime: a stage that ends early, and the trace of a step."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.errors import PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.layer_sequence import LayerStackDescription
from shardformer.pipeline.pipeline import Pipeline
from shardformer.pipeline.schedules import ActionKind, PipelineAction, make_schedule, simulate_schedule
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.policies import Policy
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
from tests.scripts import SHARDFORMER

pytestmark = pytest.mark.slow

DYING = """
import os, signal, sys
import shardformer
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory

context = shardformer.launch_from_torch(pipe=2, seed=0)
model = shardformer.shard_model(SmallModelFactory("gpt2")(), context=context)
seen = []

def die(*_):
    seen.append(0)
    if context.pipe.rank == 1 and len(seen) == 7:  # micro-batch 2 of the second step
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("out of luck")

model.transformer.h[1].register_forward_pre_hook(die)
pipeline = shardformer.Pipeline(model, micro_batches=4)
for step in range(3):
    try:
        pipeline.step(RandomBatchFactory("GPT2LMHeadModel", batch_size=4)(step))
    except Exception as error:
        if sys.argv[1] != "caught":
            raise
        print(error, flush=True)
"""


@pytest.mark.reduced(one_in=3)
@pytest.mark.parametrize("how", ["killed", "raised", "caught"])
def test_lost_stage_ends_others_with_waiting_action(tmp_path: Path, how: str) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING, encoding="utf-8")
    command = [*SHARDFORMER, "run", "--nproc-per-node", "2", str(script), how]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode == 0) == (how == "caught")
    assert time.monotonic() - start < 60
    said = done.stdout + done.stderr
    assert "stage 1 ended while stage 0, action B2@0 (backward of micro-batch 2 in virtual stage 0) was waiting" in said
    if how == "raised":
        assert "In stage 1, action F2@1 (forward of micro-batch 2 in virtual stage 1)." in said
    if how == "caught":  # no step after it waits for what will not come
        assert said.count("an earlier step failed in stage 1, action F2@1 (forward of micro-batch 2") == 1


def _trace(schedule: str, micro_batches: int) -> tuple[list[PipelineAction], int, bool]:
    manager = PipelineStageManager(ParallelContext.from_default_process_group({"pipe": 2}), schedule)
    torch.manual_seed(0)
    model = SmallModelFactory("gpt2", changes={"n_layer": 4})()
    model = shard_model(model, config=ShardConfig(pipeline_stage_manager=manager))
    pipeline = Pipeline(model, micro_batches=micro_batches)
    batch: Any = RandomBatchFactory("GPT2LMHeadModel", batch_size=8)(0)
    with pipeline.trace() as trace:
        pipeline.step(batch)
    in_order = all(a[2] <= b[1] for a, b in zip(trace.spans, trace.spans[1:], strict=False))
    return [action for action, _, _ in trace.spans], trace.in_flight, in_order


@pytest.mark.reduced(at_most=3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv"])
def test_trace_matches_schedule_and_its_memory(pool2: WorkerPool, schedule: str) -> None:
    said = make_schedule(schedule, 2, 8)
    for rank, (actions, in_flight, in_order) in enumerate(pool2.run(_trace, schedule, 8)):
        assert tuple(actions) == said.actions[rank]
        assert in_order
        assert in_flight == simulate_schedule(said).in_flight[rank]
        assert any(action.kind in (ActionKind.BACKWARD, ActionKind.INPUT) for action in actions)


class HeadFirst(nn.Module):
    """Registers its head before the layers that it follows."""

    def __init__(self, is_linear: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11) if is_linear else nn.LayerNorm(6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class OnlyLayers(Policy):
    def module_policy(self) -> Any:
        return {}

    def stacks(self) -> list[LayerStackDescription]:
        return [LayerStackDescription("layers")]


@pytest.mark.parametrize(("is_linear", "trains"), [(True, True), (True, False), (False, True), (False, False)])
def test_policy_that_places_the_head_before_the_layers_raises(is_linear: bool, trains: bool) -> None:
    def run(context: ParallelContext) -> None:
        model = shard_model(HeadFirst(is_linear), policy=OnlyLayers, context=context)
        pipeline = Pipeline(model, micro_batches=2, loss_fn=lambda output, _: output.float().square().mean())
        (pipeline.step if trains else pipeline.forward)({"ids": torch.arange(8).reshape(2, 4)})

    message = r"is NaN, because head runs after the last layer.*\n?.*Add \"head\" to with_last_layer"
    with pytest.raises(PolicyError, match=message):
        run_as_threads(run, pipe=2)
