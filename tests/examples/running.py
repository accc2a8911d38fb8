"""Runs an example script on one rank and on two, and compares the printed losses and the saved models."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import shardformer
from shardformer.mesh.parallel_context import ParallelContext
from tests.scripts import run_line

NUM_STEPS = 10
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def losses_in(output: str) -> list[float]:
    lines = re.findall(r"^step +(\d+)  loss (\S+)$", output, re.MULTILINE)
    assert [int(step) for step, _ in lines] == list(range(1, NUM_STEPS + 1)), output  # printed once, by rank 0
    return [float(loss) for _, loss in lines]


def run_in_two(script: Path, folder: Path) -> list[float]:
    return losses_in(run_line(f"shardformer run --nproc_per_node 2 {script}", folder))


def run_in_one(
    script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[float]:
    """Run a script in this process, as its only rank."""

    def launch(seed: int, **_: Any) -> ParallelContext:
        torch.manual_seed(seed)
        return ParallelContext.from_group(None)

    monkeypatch.setattr(shardformer, "launch_from_torch", launch)
    monkeypatch.chdir(folder)
    runpy.run_path(str(script))
    return losses_in(capsys.readouterr().out)


def assert_same_weights(expected: Path, saved: Path) -> None:
    """Assert that two exported models have the same parameters, up to rounding."""
    plain, sharded = (dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()) for path in (expected, saved))
    assert sharded.keys() == plain.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(sharded[name], weight, rtol=0, atol=1e-3, msg=name)
