"""Runs of an example script in two processes and in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardformer
from tests.examples.running import EXAMPLES, assert_same_weights, run_in_one, run_in_two


@pytest.fixture
def train_in_two_and_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[float]]:
    """``train_in_two_and_one(name, **replaced)`` asserts the same losses and saved models, and returns the losses.

    ``replaced`` are functions of ``shardformer`` that the script calls in one process.
    """

    def train(name: str, **replaced: Any) -> list[float]:
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        whole.mkdir()
        cut.mkdir()
        script = EXAMPLES / f"{name}.py"
        losses = run_in_two(script, cut)
        for function, replacement in replaced.items():
            monkeypatch.setattr(shardformer, function, replacement)
        assert losses == pytest.approx(run_in_one(script, whole, monkeypatch, capsys), rel=1e-3)
        assert_same_weights(whole / "runs" / name, cut / "runs" / name)
        return losses

    return train
