"""The example for Ray Train: its two workers train as one process does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.process import ROOT, environment


def run(folder: Path, *arguments: str) -> list[float]:
    """Run the example, and return the losses of its steps."""
    command = [sys.executable, "examples/integrations/ray_train.py", "--folder", str(folder), *arguments]
    # without a token in the user's home, and without usage statistics
    env = {**environment(), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.above_budget("starts a local cluster of Ray")
def test_two_workers_of_ray_equal_one_process(tmp_path: Path) -> None:
    expected = run(tmp_path / "plain", "--plain", "--steps", "8")
    assert run(tmp_path / "ray") == pytest.approx(expected[:6], rel=1e-5)
    resumed = run(tmp_path / "ray", "--plain", "--steps", "8")
    assert resumed == pytest.approx(expected[6:], rel=1e-5)
