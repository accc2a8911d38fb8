"""An example script, run in two processes, and the losses that a training script prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

NUM_STEPS = 10


def losses_in(output: str) -> list[float]:
    lines = re.findall(r"^step +(\d+)  loss (\S+)$", output, re.MULTILINE)
    assert [int(step) for step, _ in lines] == list(range(1, NUM_STEPS + 1)), output  # each once: on rank 0 alone
    return [float(loss) for _, loss in lines]


def run_in_two(script: Path, folder: Path) -> list[float]:
    command = ["run", "--nproc_per_node", "2", str(script)]
    main = [sys.executable, "-c", "from shardformer.cli import main; main()", *command]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
    done = subprocess.run(main, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return losses_in(done.stdout)
