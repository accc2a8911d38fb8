"""Collective calls that only some ranks make raise on all ranks, with the name of the call, before communication."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardformer.checkpoint.load import load_checkpoint
from shardformer.checkpoint.save import save_checkpoint
from shardformer.comm.collective_call import wait_for_all_ranks
from shardformer.errors import InputError, ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh import deadlock_detection, parallel_context
from shardformer.mesh.init_distributed import launch_from_torch
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.engine import Engine
from shardformer.training.initialize import initialize

BATCH = (torch.ones(2, 4), torch.ones(2, 4))


def made(context: ParallelContext) -> Engine:
    model = nn.Linear(4, 4)
    return initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), context=context)


CALLS: dict[str, Callable[[Engine, str], Any]] = {
    "engine.save": lambda engine, folder: engine.save(folder),
    "engine.load": lambda engine, folder: engine.load(folder),
    "engine.resume": lambda engine, folder: engine.resume(folder),
    "engine.export": lambda engine, folder: engine.export(folder),
    "engine.reshard": lambda engine, folder: engine.reshard({"data": 2}),
    "engine.evaluate": lambda engine, folder: engine.evaluate(BATCH),
    "engine.train_step": lambda engine, folder: engine.train_step(BATCH),
    "engine(batch)": lambda engine, folder: engine(BATCH),
    "save_checkpoint": lambda engine, folder: save_checkpoint(engine.model, folder),
    "load_checkpoint": lambda engine, folder: load_checkpoint(engine.model, folder),
}
ORDER = list(CALLS)


@pytest.mark.parametrize("call", CALLS)
def test_different_calls_raise_on_all_ranks(call: str, tmp_path: Path) -> None:
    other = ORDER[ORDER.index(call) - 1]

    def run(context: ParallelContext) -> str:
        engine = made(context)
        before = {name: value.clone() for name, value in engine.model.state_dict().items()}
        with pytest.raises(InputError) as error:
            CALLS[call if context.rank == 0 else other](engine, str(tmp_path / "folder"))
        assert all(torch.equal(value, before[name]) for name, value in engine.model.state_dict().items())
        return str(error.value)

    for said in run_as_threads(run, data=2):
        assert call in said and other in said
    assert not list(tmp_path.rglob("*")), "nothing is written"


@pytest.mark.parametrize("call", CALLS)
def test_call_on_one_rank_raises(call: str, tmp_path: Path) -> None:
    def run(context: ParallelContext) -> str:
        engine = made(context)
        if context.rank == 1:
            return ""
        with pytest.raises(ShardFormerError) as error:
            CALLS[call](engine, str(tmp_path / "folder"))
        return str(error.value)

    assert run_as_threads(run, data=2)[0]
    assert not list(tmp_path.rglob("*")), "nothing is written"


def test_evaluation_with_unequal_batch_counts_raises_on_all_ranks() -> None:
    def run(context: ParallelContext) -> None:
        with pytest.raises(InputError, match="without another batch"):
            made(context).evaluate([BATCH] * (2 + context.rank))

    run_as_threads(run, data=2)


def test_skipped_step_raises_on_all_ranks() -> None:
    def run(context: ParallelContext) -> None:
        engine = made(context)
        engine.backward(engine(BATCH))
        if context.rank == 1:
            engine.zero_grad()
        with pytest.raises(InputError, match=r"engine\.step"):
            engine.step() if context.rank == 0 else engine(BATCH)

    run_as_threads(run, data=2)


def test_late_rank_is_waited_for() -> None:
    def run(context: ParallelContext) -> None:
        for number in range(3):
            time.sleep(0.05 * ((context.rank + number) % 3))
            wait_for_all_ranks(f"call {number}", context.data)

    run_as_threads(run, data=3)


# ---------------------------------------------------------------------------------------------------------- processes


def of_processes(folder: str, others: str) -> str:
    (
        deadlock_detection.SURE_AFTER_S,
        deadlock_detection.LOOK_EVERY_S,
        parallel_context.ASK_AFTER_S,
        parallel_context.ASK_EVERY_S,
    ) = 0.2, 0.05, 0.1, 0.1
    context = launch_from_torch(data=2)
    engine = made(context)
    said = ""
    try:
        if context.rank == 0:
            engine.save(folder)
        elif others == "train":
            engine.train_step(BATCH)
        elif others == "are slow":
            time.sleep(0.8)
            engine.save(folder)
    except InputError as error:
        said = str(error)
    torch.distributed.barrier()
    return said


def test_call_on_one_process_raises_or_waits(pool2: WorkerPool, tmp_path: Path) -> None:
    """The other ranks train or are slow. For ranks inside a collective see ``tests/policies/test_edges.py``."""
    for said in pool2.run(of_processes, str(tmp_path / "a"), "train"):
        assert "rank 0 called engine.save and rank 1 called engine.train_step" in said.lower()
    assert not list(tmp_path.rglob("*")), "nothing is written"
    assert pool2.run(of_processes, str(tmp_path / "c"), "are slow") == ["", ""]
