"""examples/train.py trains over two processes as in one, and saves a regular checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardformer
from tests.examples.running import assert_same_weights, run_in_one, run_in_two

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train.py"


def test_two_processes_train_and_save_the_same_model_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, cut = tmp_path / "plain", tmp_path / "cut"
    plain.mkdir()
    cut.mkdir()
    losses = run_in_two(SCRIPT, cut)
    monkeypatch.setattr(shardformer, "shard_model", lambda model, context: model)
    assert losses == pytest.approx(run_in_one(SCRIPT, plain, monkeypatch, capsys), rel=1e-3)
    assert losses[-1] < 0.5 * losses[0]
    assert_same_weights(plain / "runs" / "train", cut / "runs" / "train")
