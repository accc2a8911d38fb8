"""examples/pipeline.py trains over two stages as over one, with dropout, and saves the full model."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import shardformer
from shardformer.mesh.parallel_context import ParallelContext
from tests.examples.running import assert_same_weights, losses_in, run_in_two

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pipeline.py"


def _run_in_one(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """Run the script with a single stage in this process."""

    def launch(seed: int, **_: Any) -> ParallelContext:
        torch.manual_seed(seed)
        return ParallelContext.from_group(None)

    monkeypatch.setattr(shardformer, "launch_from_torch", launch)
    monkeypatch.chdir(folder)
    runpy.run_path(str(SCRIPT))
    return losses_in(capsys.readouterr().out)


def test_two_stages_train_and_save_the_same_model_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    losses = run_in_two(SCRIPT, cut)
    assert losses == pytest.approx(_run_in_one(whole, monkeypatch, capsys), rel=1e-3)
    assert losses[-1] < 0.75 * losses[0]
    assert_same_weights(whole / "runs" / "pipeline", cut / "runs" / "pipeline")
