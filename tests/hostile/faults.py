"""Launched processes where one dies, stops, raises or swallows an error. All end in time, and the rank is reported.

python tests/hostile/faults.py --every 4
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from tests.hostile.net import EQUAL, HANGS, NOTICED, RAW, WRONG, Case, Outcome
from tests.scripts import SHARDFORMER

HOW = ("KILL", "TERM", "STOP", "exit 0", "raise", "interrupt", "swallow")
WHEN = ("launch", "shard", "forward", "backward", "step", "save")
LAYOUTS = ("tensor", "pipe", "data")
OUTCOMES = {
    "ended and named": NOTICED,
    "went on": EQUAL,
    "no rank noticed": WRONG,
    "ended with 0": WRONG,
    "no rank is named": RAW,
    "hang": HANGS,
}
"""Result of ``ended`` -> outcome of the case."""
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
    """Write a script that trains a small model. Rank 1 has the fault once, in the second step if there are steps."""
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
    tried("save", step, lambda: shardformer.save_checkpoint(model, {str(folder / "saved")!r}))
print("DONE", flush=True)
""")
    return file


def ended(fault: Fault) -> tuple[str, float]:
    """Return "ended and named", "went on" or an error, and the time in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [*SHARDFORMER, "run", "--nproc_per_node", "2"]
        command = [*launcher, str(script(Path(folder), fault))]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        start = time.monotonic()
        child = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            said, _ = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            for pid in [child.pid, *_below(child.pid)]:  # processes that it started are in other sessions
                os.kill(pid, signal.SIGKILL)
            said = child.communicate()[0]
            return f"hang:\n{said[-1500:]}", time.monotonic() - start
        seconds = time.monotonic() - start
    if said.count("DONE") == 2 and child.returncode == 0:
        return "went on" if fault.how == "swallow" else f"no rank noticed:\n{said[-1500:]}", seconds
    if child.returncode == 0:
        return f"ended with 0:\n{said[-1500:]}", seconds
    if not re.search(rf"ranks?:? ({ODD}|\d+ and {ODD})\b", said.lower()):
        return f"no rank is named:\n{said[-2500:]}", seconds
    return "ended and named", seconds


def _below(pid: int) -> list[int]:
    """Return the descendants of a process."""
    try:
        of = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return []
    return [below for child in map(int, of) for below in (child, *_below(child))]


def cases() -> Iterator[Case]:
    """Return the faults as cases. Each one runs in separate processes."""
    for how, when, axis in product(HOW, WHEN, LAYOUTS):
        found = partial(outcome_of, Fault(how, when, axis))
        yield Case("fault", f"{how} in {when}", {axis: 2}, lambda context: None, how=found)


def outcome_of(fault: Fault, case: Case) -> Outcome:
    what, seconds = ended(fault)
    kind, _, said = what.partition(":\n")
    return Outcome(case, OUTCOMES[kind], said, seconds)
