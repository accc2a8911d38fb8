"""A run with killed processes restarts from its last checkpoint, with the same result as an uninterrupted run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.scripts import PYTHON, SHARDFORMER

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("elastic.py")


def run(folder: Path, *options: str, processes: int, restarts: int = 0) -> tuple[int, int, str]:
    """Return the exit status, the number of restarts and a checksum of the weights."""
    launcher = [*SHARDFORMER, "run", "--nproc_per_node", str(processes)]
    command = [*launcher, "--max-restarts", str(restarts), str(SCRIPT), str(folder), *options]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC"))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    match = re.search(r"restarts (\d+) processes \d+ weights (\w+)", done.stdout)
    assert match or done.returncode, done.stderr
    return done.returncode, int(match[1]) if match else -1, match[2] if match else ""


def test_killed_processes_change_no_bit_of_the_weights(tmp_path: Path) -> None:
    _, none, weights = run(tmp_path / "whole", "--steps", "7", processes=2)
    assert none == 0
    assert run(tmp_path / "killed", "--steps", "7", "--kills", "1", processes=2, restarts=2) == (0, 1, weights)


def test_a_run_resumes_with_fewer_processes(tmp_path: Path) -> None:
    options = ("--steps", "7", "--dropout", "0")  # which draws other numbers under another layout
    status, _, _ = run(tmp_path / "killed", *options, "--kills", "1", processes=2)
    assert status != 0
    assert (tmp_path / "killed" / "latest").exists()
    for name in ("killed", "whole"):
        subprocess.run([PYTHON, str(SCRIPT), str(tmp_path / name), *options], check=True, timeout=100)
    found, expected = (torch.load(tmp_path / name / "weights.pt") for name in ("killed", "whole"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
