"""A run that is saved under one layout and resumed under another has the losses of an uninterrupted run.

Tests all pairs of layouts for one family and some for the others. ``ALL_PAIRS=1`` in the environment tests all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.checkpoint import load as wanted
from shardformer.checkpoint import training_state as holding
from shardformer.checkpoint.load import load_checkpoint
from shardformer.checkpoint.save import save_checkpoint
from shardformer.checkpoint.training_state import get_rng_state_tensors
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.zero.shard_optimizer import shard_optimizer
from tests.checkpoint.runs import LAYOUTS, SAMPLES, Layout, Run, load, on_ranks, save

pytestmark = pytest.mark.slow

BEFORE, AFTER = 2, 2
NAMES = tuple(LAYOUTS)
FAMILIES = {"llama": 3, "bert": 1, "gpt2": 1, "t5": 1, "stablelm": 0}
"""Targets of each source."""


def cases() -> list[tuple[str, str, str]]:
    """Return (family, source layout, target layout)."""
    if os.environ.get("ALL_PAIRS"):
        return [(family, a, b) for family in FAMILIES for a in NAMES for b in NAMES]
    found = [("stablelm", "data4-zero2", "tensor2-pipe2")]
    for number, (family, count) in enumerate(FAMILIES.items()):
        for i, source in enumerate(NAMES):
            found += [(family, source, NAMES[(i + number + k) % len(NAMES)]) for k in range(count)]
    return found


def straight(family: str) -> list[float]:
    def do(run: Run) -> list[float]:
        return [run.train(step) for step in range(BEFORE + AFTER)]

    found: list[float] = on_ranks(Layout(), family, do)[0]
    return found[BEFORE:]


Saved = Callable[[str, str], tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return (family, layout) -> the checkpoint directory, and the losses of a run that continued."""
    expected = cache(straight)

    @cache
    def folder_of(family: str, layout: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{family}-{layout}")

        def do(run: Run) -> None:
            for step in range(BEFORE):
                run.train(step)
            save(run, folder, BEFORE)

        on_ranks(LAYOUTS[layout], family, do)
        return folder

    return lambda family, layout: (folder_of(family, layout), expected(family))


@pytest.mark.reduced(family=("llama", "t5"), at_most=4)
@pytest.mark.parametrize(("family", "source", "target"), cases())
def test_run_resumes_under_any_layout(family: str, source: str, target: str, saved: Saved) -> None:
    folder, expected = saved(family, source)

    def do(run: Run) -> list[float]:
        torch.manual_seed(1)
        loaded = load(run, folder)
        assert loaded.step == BEFORE
        assert loaded.extra == {"seen": BEFORE * SAMPLES}
        return [run.train(step) for step in range(BEFORE, BEFORE + AFTER)]

    for losses in on_ranks(LAYOUTS[target], family, do):
        assert losses == pytest.approx(expected, rel=1e-6)  # a loss in fp32 over other parts of the batch


def test_step_counts_of_parameters_are_restored(tmp_path: Path) -> None:
    """Each of the two ranks trains one of the two parameters."""

    def saves(context: ParallelContext) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=1, context=context)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(model, tmp_path, optimizer)

    run_as_threads(saves, data=2)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    load_checkpoint(model, tmp_path, optimizer)
    assert [float(optimizer.state[p]["step"]) for p in model.parameters()] == [3.0, 3.0]


def test_fp32_model_loads_master_weights_of_16_bit_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved, model = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = shard_optimizer(saved, torch.optim.AdamW(saved.parameters()), stage=1, precision="bf16")
    saved(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    save_checkpoint(saved, tmp_path, optimizer)
    load_checkpoint(model, tmp_path)
    for wide, narrow in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(wide.bfloat16(), narrow)
        assert not torch.equal(wide, narrow.float())


def test_data_rank_restores_its_own_random_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share random states, so each rank saves a fake one, and restoring is recorded."""
    found: dict[str, Tensor] = {}

    def of_rank(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, numbers = get_rng_state_tensors(device)
        seed = int(threading.current_thread().name.removeprefix("rank-"))
        return tensors | {"torch.0": torch.Generator().manual_seed(seed).get_state()}, numbers

    def note(tensors: dict[str, Tensor], *_: Any) -> None:
        found[threading.current_thread().name] = tensors["torch.0"]

    monkeypatch.setattr(holding, "get_rng_state_tensors", of_rank)
    monkeypatch.setattr(wanted, "set_rng_state_tensors", note)
    on_ranks(Layout(data=2), "gpt2", lambda run: save(run, tmp_path, 0))

    def do(run: Run) -> tuple[int, Tensor]:
        assert load(run, tmp_path).has_random
        return run.context.data.rank, found[threading.current_thread().name]

    loaded = on_ranks(Layout(data=2, tensor=2), "gpt2", do)
    assert [data for data, _ in loaded] == [0, 0, 1, 1]
    for data, state in loaded:
        assert torch.equal(state, torch.Generator().manual_seed(data).get_state())
