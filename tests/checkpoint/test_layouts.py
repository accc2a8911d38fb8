"""A run that is saved under one layout and goes on under another has the losses of one that was never stopped.

Of one family all pairs of layouts are tried, of the others some; ``ALL_PAIRS=1`` in the environment tries all of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.checkpoint.runs import LAYOUTS, SAMPLES, Layout, Run, load, on_ranks, save

pytestmark = pytest.mark.slow

BEFORE, AFTER = 2, 2
NAMES = tuple(LAYOUTS)
FAMILIES = {"llama": 3, "bert": 1, "gpt2": 1, "t5": 1, "stablelm": 0}
"""Targets of each source."""


def cases() -> list[tuple[str, str, str]]:
    """(family, source, target)."""
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
    """(family, layout) -> the folder that it saved into, and the losses of a run that went on."""
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


@pytest.mark.reduced
@pytest.mark.parametrize(("family", "source", "target"), cases())
def test_a_run_goes_on_under_any_layout(family: str, source: str, target: str, saved: Saved) -> None:
    folder, expected = saved(family, source)

    def do(run: Run) -> list[float]:
        torch.manual_seed(1)
        loaded = load(run, folder)
        assert loaded.step == BEFORE
        assert loaded.extra == {"seen": BEFORE * SAMPLES}
        return [run.train(step) for step in range(BEFORE, BEFORE + AFTER)]

    for losses in on_ranks(LAYOUTS[target], family, do):
        assert losses == pytest.approx(expected, rel=1e-6)  # a loss in fp32 over other parts of the batch
