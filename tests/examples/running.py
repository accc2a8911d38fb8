"""Runs an example script on two ranks, and reads the losses that it prints."""

from __future__ import annotations

import re
from pathlib import Path

from tests.scripts import run_line

NUM_STEPS = 10


def losses_in(output: str) -> list[float]:
    lines = re.findall(r"^step +(\d+)  loss (\S+)$", output, re.MULTILINE)
    assert [int(step) for step, _ in lines] == list(range(1, NUM_STEPS + 1)), output  # printed once, by rank 0
    return [float(loss) for _, loss in lines]


def run_in_two(script: Path, folder: Path) -> list[float]:
    return losses_in(run_line(f"shardformer run --nproc_per_node 2 {script}", folder))
