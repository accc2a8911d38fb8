"""examples/pipeline.py trains over two stages as over one, with dropout, and saves the full model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import assert_same_weights, run_in_one, run_in_two

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pipeline.py"


def test_two_stages_train_and_save_the_same_model_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    losses = run_in_two(SCRIPT, cut)
    assert losses == pytest.approx(run_in_one(SCRIPT, whole, monkeypatch, capsys), rel=1e-3)
    assert losses[-1] < 0.75 * losses[0]
    assert_same_weights(whole / "runs" / "pipeline", cut / "runs" / "pipeline")
