"""Throughput, FLOP/s and memory of the global batch under every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.training.hooks.throughput import Throughput
from shardformer.training.trainer import Trainer
from tests.trainer.hooks.runs import Net, engine_of, pairs


def values_of(context: ParallelContext | None = None, hooks: Any = None, steps: int = 5) -> dict[str, float]:
    return Trainer(engine_of(context), hooks or [Throughput(window=2)]).fit(steps=steps)


def test_throughput_covers_the_global_batch() -> None:
    found = values_of()
    assert found["tokens_per_s"] == pytest.approx(found["samples_per_s"])  # no tokens: samples
    assert found["memory_bytes"] > 50e6


def test_flops_equal_those_of_the_torch_counter() -> None:
    found = values_of()
    counter = FlopCounterMode(display=False)
    with counter:
        Net()(torch.stack([x for x, _ in pairs(4)])).sum().backward()
    assert found["flops_per_s"] / found["samples_per_s"] == pytest.approx(counter.get_total_flops() / 4)


def test_flops_are_summed_over_data_ranks() -> None:
    alone = values_of()
    for found in run_as_threads(values_of, data=2):
        assert found["flops_per_s"] / found["samples_per_s"] == pytest.approx(
            alone["flops_per_s"] / alone["samples_per_s"]
        )


def test_flops_false_disables_counting() -> None:
    assert "flops_per_s" not in values_of(hooks=[Throughput(flops=False)])


class FailsOn(Hook):
    """Hook that fails on the second rank."""

    def after_step(self, trainer: TrainerProtocol) -> None:
        if trainer.engine.world.rank == 1:
            raise ValueError("broken on purpose")


def test_no_rank_waits_for_a_rank_with_a_failed_hook() -> None:
    def run(context: ParallelContext) -> str:
        with pytest.raises(Exception, match="FailsOn") as caught:
            values_of(context, [FailsOn(), Throughput(window=1)])
        return str(caught.value)

    assert all("broken on purpose" in message for message in run_as_threads(run, data=2))


@pytest.mark.parametrize("window", [0, 1.5, True])
def test_an_invalid_window_raises(window: Any) -> None:
    with pytest.raises(ConfigError, match="window"):
        Throughput(window=window)
