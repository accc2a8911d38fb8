"""Ranks as threads: they compute what processes do, and none waits for ever."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from shardformer.comm.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    broadcast_object,
    gather_objects,
    reduce_scatter,
)
from shardformer.comm.params import param_specs
from shardformer.comm.threads import ThreadGroup
from shardformer.errors import ConfigError
from shardformer.mesh.context import ParallelContext
from shardformer.sharder import shard_model
from shardformer.testing.zoo import Batches, Sample, sample_loss

OVERLAP = {"enable_sequence_parallelism": True, "enable_sequence_overlap": True}


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size: int) -> None:
    rows = torch.arange(7.0 * size).view(size, 7)

    def collect(context: ParallelContext) -> list[Any]:
        axis = context.tensor
        mine = rows[axis.rank]
        return [
            all_reduce(mine.clone(), axis),
            all_reduce(mine.clone(), axis, op="max"),
            all_gather(mine[None], axis, 0),
            broadcast(mine.clone(), axis, 1),
            gather_objects(axis.rank, axis),
            broadcast_object(axis.rank, axis, 1),
            reduce_scatter(rows.T.contiguous(), axis, 0),
        ]

    found = ThreadGroup(size).run(collect)
    whole = [rows.sum(0), rows.amax(0), rows, rows[1], list(range(size)), 1]
    for *alike, _ in found:
        for value, expected in zip(alike, whole, strict=True):
            assert torch.equal(value, expected) if isinstance(expected, Tensor) else value == expected
    assert torch.equal(torch.cat([stretch for *_, stretch in found]), size * rows.T)


@pytest.mark.parametrize("options", [{}, OVERLAP], ids=["plain", "overlap"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_a_sharded_model_has_the_plain_gradients(family: str, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    sample = Sample(family)
    plain, batch = sample().double(), Batches(sample.head_class)(0)
    sample_loss(plain, batch).backward()

    def train(context: ParallelContext) -> None:
        model = copy.deepcopy(plain)
        model.zero_grad()
        shard_model(model, context=context, **options)
        sample_loss(model, batch).backward()
        specs = param_specs(model)
        for name, param in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert (param.grad is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(
                    param.grad, specs[name].slice(expected, context.tensor.rank), rtol=1e-5, atol=1e-6
                )

    ThreadGroup(4).run(train)


def raise_on_one(context: ParallelContext) -> None:
    if context.tensor.rank == 1:
        raise ConfigError("only here", rule="None", remedy="None")
    all_reduce(torch.ones(1), context.tensor)


def test_what_one_rank_raises_ends_all() -> None:
    with pytest.raises(ConfigError, match="only here"):
        ThreadGroup(3).run(raise_on_one)
