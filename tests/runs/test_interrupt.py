"""A run of two processes that is interrupted again and again loses nothing, and ends as an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from shardformer.training.metrics_log import read_metrics_records
from tests.runs.files import write_text
from tests.runs.small_run import MODEL_AND_DATA
from tests.scripts import SHARDFORMER

RUN = f"""{MODEL_AND_DATA}num_workers = 1
[parallel]
tensor = 2
[training]
steps = 100000
[hooks]
"pauses.py:Pauses" = true
throughput = false
checkpoint = {{ every_steps = 5 }}
"""
HOOK = """
import json, pathlib, time, shardformer
class Pauses(shardformer.hooks.Hook):
    '''Logs each step, and waits at the moment in the file `moment`, two steps after the run started.'''
    def setup(self, trainer):
        self.moment, self.first = json.loads(pathlib.Path("moment").read_text()), None
    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if not callable(found) or name.startswith(("_", "state", "load", "setup", "pause")):
            return found
        return lambda trainer, *rest: (found(trainer, *rest), self.pause(name, trainer))
    def pause(self, name, trainer):
        self.first = trainer.step if self.first is None else self.first
        if name == "after_step" and trainer.is_first:
            with open("steps", "a") as file:
                file.write(f"{trainer.step}\\n")
        if name == self.moment and trainer.step >= self.first + 2:
            self.moment = None
            pathlib.Path("reached").touch()
            time.sleep(1)
        elif name == "before_forward":
            time.sleep(0.05)
"""
Interruption = tuple[str | float, signal.Signals]
"""When to send a signal, and which one.

The time is a method of a hook, seconds after the first step of the run, or negative seconds after its start.
SIGINT goes to the process group of the launcher, as from a terminal, and SIGTERM to the launcher, as from a scheduler.
"""
IN_A_STEP = ("before_forward", "after_backward", "after_optimizer_step")
MOMENTS = ("before_step", *IN_A_STEP, "before_save", "after_save")


def start(*changes: str) -> subprocess.Popen[str]:
    """Start the run in a process group of its own."""
    command = [*SHARDFORMER, "train", "--config", "run.toml", *changes]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, start_new_session=True, **output)


def interrupt(when: str | float, number: signal.Signals) -> str:
    """Start the run, send it a signal, and return what it printed to the standard error."""
    Path("reached").unlink(missing_ok=True)
    Path("moment").write_text(json.dumps(when), encoding="utf-8")
    process = start()
    before = len(executed_steps())
    while process.poll() is None:
        if isinstance(when, str):
            if Path("reached").exists():
                break
        elif when < 0 or len(executed_steps()) > before:
            time.sleep(abs(when))
            break
        time.sleep(0.02)
    time.sleep(random.random() / 2)
    assert process.poll() is None, process.communicate()[1]
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=120)
    is_early = process.returncode in (-number, 128 + number) and len(executed_steps()) == before
    assert is_early or process.returncode == 128 + number, errors
    assert not isinstance(when, str) or Path("reached").exists(), errors
    return errors


def check_nothing_is_lost(interruptions: list[Interruption]) -> None:
    saved = 0
    for when, number in interruptions:
        before = len(executed_steps())
        errors = interrupt(when, number)
        checkpoints = sorted(Path("run/checkpoints").glob("step-*"))
        saved = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0
        new = executed_steps()[before:]
        print(f"{when!s:.20} {number.name}: {len(new)} steps, saved {saved}")
        assert not new or saved == new[-1], f"{errors}\nThe last step was {new[-1]}, but {saved} was saved."
        last = f"The newest checkpoint is {checkpoints[-1]}.\nRun the same command to resume." if checkpoints else ""
        last = last or "There is no checkpoint yet. The same command starts again from step 1."
        assert errors.rstrip().endswith(last) or (not errors.strip() and not new)
        if isinstance(when, str):
            text = f"inishing step {saved} and saving." if when in IN_A_STEP else "aving."
            again = "Press Ctrl-C again to stop at once." if number == signal.SIGINT else "Received SIGTERM: "
            assert text in errors and again in errors
    steps = saved + 2
    changes = ["--set", f"training.steps={steps}", "--set", "hooks.checkpoint={every_steps=5}"]
    for more in ([], ["--set", "folder=whole"]):
        Path("moment").write_text("null", encoding="utf-8")
        process = start(*changes, *more)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        if not more:
            repeats = Counter(executed_steps())
            assert sorted(repeats) == list(range(1, steps + 1))
            assert sum(repeats.values()) - len(repeats) <= len(interruptions)
    cut, whole = ([(r.step, r.values["loss"]) for r in read_metrics_records(folder)] for folder in ("run", "whole"))
    assert cut == whole


def executed_steps() -> list[int]:
    return [int(line) for line in Path("steps").read_text().split()] if Path("steps").exists() else []


@pytest.mark.slow
@pytest.mark.above_budget("starts a run of two processes several times")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.full)])
def test_an_interrupted_run_loses_nothing(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    Path("run.toml").write_text(RUN, encoding="utf-8")
    Path("pauses.py").write_text(HOOK, encoding="utf-8")
    random.seed(count)
    interruptions: list[Interruption] = [("before_forward", signal.SIGINT), ("before_save", signal.SIGTERM)]
    for _ in range(count - 2):
        when = random.choice([*MOMENTS, random.uniform(0, 3), random.uniform(0, 3), random.uniform(-8, 0)])
        interruptions.append((when, random.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM])))
    check_nothing_is_lost(interruptions)
