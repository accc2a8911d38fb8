"""Launched processes, one of which dies, stops, raises or swallows an error: all end in time, and it is named.

python tests/hostile/faults.py --every 4
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

HOW = ("KILL", "TERM", "STOP", "exit 0", "raise", "interrupt", "swallow")
WHEN = ("launch", "shard", "forward", "backward", "step", "save")
LAYOUTS = ("tensor", "pipe", "data")
ODD = 1
TIMEOUT_S = 10
LIMIT_S = 60
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    how: str
    when: str
    axis: str

    def __str__(self) -> str:
        return f"{self.how} in {self.when} ({self.axis} 2)"


def script(folder: Path, fault: Fault) -> Path:
    """Trains a small model; rank 1 has the fault once, at the second step where there are steps."""
    file = folder / "train.py"
    file.write_text(f"""
import os, signal, sys
import torch, transformers
import shardformer

HOW, WHEN, AXIS = {fault.how!r}, {fault.when!r}, {fault.axis!r}
RANK = int(os.environ["RANK"])
def at(when, step=1):
    if RANK != {ODD} or when != WHEN or (step != 1 and when != "launch"):
        return
    print("the fault happens now", flush=True)
    if HOW in ("KILL", "TERM", "STOP"):
        os.kill(os.getpid(), getattr(signal, "SIG" + HOW))
    if HOW == "exit 0":
        sys.exit(0)
    if HOW == "interrupt":
        raise KeyboardInterrupt
    raise RuntimeError("the fault of this rank")


def tried(when, step, do):
    try:
        at(when, step)
    except Exception:
        if HOW == "swallow":  # as a script that goes on whatever happens
            return torch.zeros(()) if when == "forward" else model if when == "shard" else None
        raise
    return do()


torch.manual_seed(0)
tried("launch", 1, lambda: None)
context = shardformer.launch_from_torch(**{{AXIS: 2}}, timeout_s={TIMEOUT_S})
config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                  vocab_size=64)
model = transformers.LlamaForCausalLM(config).train()
model = tried("shard", 1, lambda: shardformer.shard_model(model, context=context))
pipeline = shardformer.Pipeline(model, micro_batches=2) if AXIS == "pipe" else None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
for step in range(4):
    given = dict(input_ids=ids, labels=ids)
    loss = tried("forward", step, lambda: pipeline.step(given) if pipeline else model(**given).loss)
    tried("backward", step, lambda: loss.backward() if loss.requires_grad else None)
    tried("step", step, optimizer.step)
    optimizer.zero_grad()
    tried("save", step, lambda: shardformer.save_checkpoint({str(folder / "saved")!r}, model))
print("DONE", flush=True)
""")
    return file


def ended(fault: Fault) -> tuple[str, float]:
    """What came of it: "ended and named", "went on", or what is wrong; and after how many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "shardformer",
            "run",
            "--nproc_per_node",
            "2",
            str(script(Path(folder), fault)),
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        start = time.monotonic()
        child = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            said, _ = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            said = child.communicate()[0]
            return f"hang:\n{said[-1500:]}", time.monotonic() - start
        seconds = time.monotonic() - start
    if said.count("DONE") == 2 and child.returncode == 0:
        return "went on" if fault.how == "swallow" else f"nobody noticed:\n{said[-1500:]}", seconds
    if child.returncode == 0:
        return f"ended with 0:\n{said[-1500:]}", seconds
    if not re.search(rf"ranks?:? ({ODD}|\d+ and {ODD})\b", said.lower()):
        return f"nobody is named:\n{said[-2500:]}", seconds
    return "ended and named", seconds


def faults() -> list[Fault]:
    return [Fault(*each) for each in product(HOW, WHEN, LAYOUTS)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="of so many faults one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--match", default="")
    asked = parser.parse_args()
    tried = faults()
    random.Random(asked.seed).shuffle(tried)
    tried = [fault for fault in tried if asked.match in str(fault)][:: asked.every]
    counts: Counter[str] = Counter()
    slowest = 0.0
    for fault in tried:
        what, seconds = ended(fault)
        counts[what.partition(":")[0]] += 1
        slowest = max(slowest, seconds)
        print(f"{seconds:5.1f} s  {fault}: {what}", flush=True)
    print(f"{len(tried)} faults: {dict(counts)}; the slowest ended after {slowest:.0f} s")
    return int(set(counts) - {"ended and named", "went on"} != set())


if __name__ == "__main__":
    sys.exit(main())
