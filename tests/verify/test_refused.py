"""Unsupported arguments of ``verify`` raise, before any process starts where possible."""

from __future__ import annotations

import os
import subprocess
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, PolicyError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.verify.train_both import PrecomputedOutputModule
from shardformer.verify.verification import check_policy_can_shard, verify
from tests.policies.toy import ScaledToyLM
from tests.scripts import PYTHON
from tests.verify.tower import Tower, TowerPolicy, numbers


def without_labels(step: int) -> dict[str, Tensor]:
    batch = RandomBatchFactory("GPT2LMHeadModel")(step)
    del batch["labels"]
    return batch


def only_x(step: int) -> dict[str, Tensor]:
    return {"x": numbers(step)["x"]}


def without_tensors(step: int) -> dict[str, int]:
    return {"labels": 1}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"batch_fn": RandomBatchFactory("GPT2LMHeadModel", batch_size=3), "tensor": 1, "data": 2},
            "The batch size 3 is not divisible by the number of data-parallel ranks .2.",
        ),
        (
            {"batch_fn": RandomBatchFactory("GPT2LMHeadModel", batch_size=4), "tensor": 1, "data": 3},
            "The batch size 4 is not divisible by the number of data-parallel ranks .3.",
        ),
        ({"batch_fn": without_labels}, "GPT2LMHeadModel returned no loss.*Add labels"),
        (
            {"model_fn": SmallModelFactory("gpt2", "GPT2Model"), "batch_fn": without_labels},
            "has no field 'loss'.*Pass a function loss_fn",
        ),
        (
            {"model_fn": Tower, "batch_fn": only_x, "policy": TowerPolicy},
            "its output of type Tensor has no field 'loss'",
        ),
        (
            {"model_fn": Tower, "batch_fn": only_x, "policy": TowerPolicy, "loss_fn": compute_model_loss},
            "its output of type Tensor has no field 'loss'",
        ),
        ({"tensor": 7}, "exceeds the 6 attention heads"),
        ({"batch_fn": without_tensors}, "no tensor"),
        ({"dtype": torch.bfloat16}, "does not support dtype"),
        ({"tensor": 0}, "tensor=0"),
        ({"data": -1}, "data=-1"),
        ({"steps": 0}, "steps=0"),
        ({"tensor": 4}, "tensor=4 times data=1 require 4 processes, but the world size is 2"),
        ({"config": {"enable_sequence_overlap": True}}, "requires enable_sequence_parallelism=True"),
        ({"config": {"enable_sequence_paralelism": True}}, "Did you mean 'enable_sequence_parallelism'"),
        ({"model_fn": lambda: Tower()}, "Cannot pickle"),
    ],
)
def test_unsupported_comparisons_raise_once_for_all_ranks(pool2: WorkerPool, asked: dict[str, Any], words: str) -> None:
    pool2.run(torch.add, 1, 1)
    pids = pool2.pids
    call = {
        "model_fn": SmallModelFactory("gpt2"),
        "batch_fn": RandomBatchFactory("GPT2LMHeadModel"),
        "tensor": 2,
        **asked,
    }
    with pytest.raises(ConfigError, match=words) as caught:
        verify(**call, pool=pool2)
    assert "".join(traceback.format_exception(caught.value)).count(str(caught.value)) == 1, "it is written once"
    assert pool2.pids == pids, "no worker was killed"


def test_a_config_with_a_process_group_raises(pool2: WorkerPool) -> None:
    config = ShardConfig(context=ParallelContext.from_sizes({}))
    with pytest.raises(ConfigError, match="does not support context or tensor_parallel_process_group"):
        verify(SmallModelFactory("gpt2"), RandomBatchFactory("GPT2LMHeadModel"), config=config, pool=pool2)


@pytest.mark.full
@pytest.mark.slow
def test_a_call_without_main_guard_reports_its_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory\n"
        "from shardformer.verify.verification import verify\n"
        "verify(SmallModelFactory('gpt2'), RandomBatchFactory('GPT2LMHeadModel'), steps=1)\n"
    )
    done = subprocess.run([PYTHON, str(script)], capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    where = f"line 3 of {script}."
    assert f'ConfigError: verify() was called outside `if __name__ == "__main__":`, at {where}' in last
    assert last.endswith('if __name__ == "__main__":') and done.stderr.count("Traceback") == 1
    assert "freeze_support" not in done.stderr and "WorkerError" not in done.stderr


def test_checking_the_plan_has_no_side_effects() -> None:
    policy = TowerPolicy()
    before = torch.random.get_rng_state()
    check_policy_can_shard(Tower, 2, policy)
    assert policy.model is None and torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(PolicyError, match="No policy for ScaledToyLM"):
        check_policy_can_shard(ScaledToyLM, 2)


def test_a_loss_that_calls_the_model_on_other_tensors_raises_in_a_pipeline() -> None:
    batch = {"input_ids": torch.ones(2, 5), "labels": torch.ones(2, 5)}
    replay = PrecomputedOutputModule(nn.Linear(2, 2), "output", batch)
    assert replay(**batch) == replay(batch["input_ids"]) == "output"
    assert replay.in_features == 2
    with pytest.raises(ConfigError, match="passes argument 0 to the model, but this tensor is not in the batch"):
        replay(batch["input_ids"][:, :-1])
