"""The optimizer state of a sharded model equals that of the plain model, and is loaded from it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import shardformer
from shardformer.checkpoint.plain_state import gather_full_optimizer_state_dict, load_full_optimizer_state_dict
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory

LAYOUTS = [
    ({"tensor": 2}, None),
    ({"data": 2}, 1),
    ({"data": 2}, 3),
    ({"tensor": 2, "data": 2}, 2),
    ({"pipe": 2}, None),
    ({"pipe": 2, "data": 2}, 1),
]


def batch() -> dict[str, Any]:
    return RandomBatchFactory(DEFAULT_HEAD["gpt2"])(0)


def plain() -> Any:
    torch.manual_seed(0)
    return SmallModelFactory("gpt2")().eval()


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    params = list(model.named_parameters())
    groups = [[p for name, p in params if ("bias" in name) is is_bias] for is_bias in (True, False)]
    options = ({"weight_decay": 0.0}, {"weight_decay": 0.1})
    return torch.optim.AdamW([{"params": g, **o} for g, o in zip(groups, options, strict=True)], lr=1e-2, eps=1e-3)


def step(model: Any, optimizer: torch.optim.Optimizer, pipeline: Any = None) -> None:
    if pipeline is not None:
        pipeline.step(batch())
    else:
        model(**batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.reduced(at_most=3)
@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "stage"), LAYOUTS, ids=str)
def test_the_state_is_written_and_read_as_that_of_the_plain_optimizer(
    sizes: dict[str, int], stage: int | None, tmp_path: Path
) -> None:
    model = plain()
    optimizer = make_optimizer(model)
    step(model, optimizer)
    weights, expected = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(model, optimizer)
    after = model.state_dict()

    def do(context: ParallelContext) -> Any:
        ours = shardformer.shard_model(plain(), context=context)
        theirs: Any = make_optimizer(ours)
        if stage is not None:
            theirs = shardformer.shard_optimizer(ours, theirs, stage=stage)
        pipeline = shardformer.Pipeline(ours, micro_batches=1) if "pipe" in sizes else None
        ours.load_state_dict(weights)
        load_full_optimizer_state_dict(ours, theirs, expected)
        found = gather_full_optimizer_state_dict(ours, theirs, tmp_path)
        step(ours, theirs, pipeline)
        full = shardformer.full_state_dict(ours)
        assert all(torch.allclose(full[name], after[name], atol=1e-5) for name in after)
        with pytest.raises(ConfigError, match="groups of"):
            load_full_optimizer_state_dict(ours, theirs, {**expected, "param_groups": expected["param_groups"][:1]})
        return found

    found, *others = run_as_threads(do, **sizes)
    assert others == [None] * len(others)
    assert not list(tmp_path.iterdir())  # the temporary folder is removed
    assert [group["params"] for group in found["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert [group["weight_decay"] for group in found["param_groups"]] == [0.0, 0.1]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert all(torch.equal(found["state"][number][key], value) for key, value in state.items())
    optimizer.load_state_dict(found)
