"""examples/train.py trains over two processes as in one, and saves a regular checkpoint."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import shardformer
from shardformer.mesh.parallel_context import ParallelContext
from tests.examples.running import assert_same_weights, losses_in, run_in_two

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train.py"


def _run_plain(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """Run the script without the line that shards the model, in this process."""

    def launch(seed: int) -> ParallelContext:
        torch.manual_seed(seed)
        return ParallelContext.from_group(None)

    monkeypatch.setattr(shardformer, "launch_from_torch", launch)
    monkeypatch.setattr(shardformer, "shard_model", lambda model, context: model)
    monkeypatch.chdir(folder)
    runpy.run_path(str(SCRIPT))
    return losses_in(capsys.readouterr().out)


def test_two_processes_train_and_save_the_same_model_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, cut = tmp_path / "plain", tmp_path / "cut"
    plain.mkdir()
    cut.mkdir()
    losses = run_in_two(SCRIPT, cut)
    assert losses == pytest.approx(_run_plain(plain, monkeypatch, capsys), rel=1e-3)
    assert losses[-1] < 0.5 * losses[0]
    assert_same_weights(plain / "runs" / "train", cut / "runs" / "train")
