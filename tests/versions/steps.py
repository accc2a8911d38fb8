"""The steps that run in each row: the columns of docs/versions.md."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.runs.small_run import MODEL_AND_DATA
from tests.versions.rows import ROOT, Environment

FAST = ("--tier", "fast")
"""Arguments of pytest for the fast tests."""
POLICIES = ("tests/policies",)
TORCHRUN = ("-m", "torch.distributed.run")
LIMIT_S = 3600.0
"""Time limit of a step."""
TRAIN = f"""{MODEL_AND_DATA}[parallel]
tensor = 2
[training]
steps = 2
"""
VERIFY = ("gpt2", "--tensor", "2")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step in a row.

    Args:
        problem: the last line that a failed step printed. Empty if it passed.
        seconds: its duration.
    """

    problem: str
    seconds: float

    @property
    def word(self) -> str:
        return "failed" if self.problem else "ok"


@dataclass(frozen=True)
class Step:
    """A column.

    Args:
        name: of the column.
        about: what it runs, for the page.
        arguments: of Python. ``{folder}`` is the folder of the row, ``{before}`` that of the previous row, ``{root}``
            the checkout.
    """

    name: str
    about: str
    arguments: tuple[str, ...]

    def log(self, environment: Environment) -> Path:
        return environment.work / f"{self.name.replace(' ', '-')}.log"

    def run(self, environment: Environment, before: Path) -> Outcome:
        """Run the step in the environment of a row, with output to ``log``. ``before`` is ``work`` of another row."""
        folder = environment.work
        places = {"folder": str(folder), "before": str(before), "root": str(ROOT)}
        command = [str(environment.python), *(argument.format(**places) for argument in self.arguments)]
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        env = {**os.environ, **own, "PYTHONPATH": str(ROOT), "PET_MASTER_PORT": str(_free_port())}
        start, log = time.monotonic(), self.log(environment)
        with log.open("wb") as out:
            where = ROOT if "pytest" in self.arguments else folder
            code = _code_of(command, out, env, where)
        printed = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = printed[-1].strip() if printed else f"status {code}"
        return Outcome(last if code else "", time.monotonic() - start)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _code_of(command: Sequence[str], out: IO[bytes], env: dict[str, str], where: Path) -> int:
    try:
        ended = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=where, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return 124
    return ended.returncode


def _pytest(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", *arguments)


def _program(name: str, folder: str = "{folder}/checkpoint", launcher: tuple[str, ...] = ()) -> tuple[str, ...]:
    started = launcher or ("-m", "shardformer", "run")
    return (*started, "--nproc_per_node", "2", "-m", "tests.versions.program", name, folder)


def _shardformer(*arguments: str) -> tuple[str, ...]:
    return ("-m", "shardformer", *arguments)


STEPS = (
    Step("fast tests", "the fast tests", _pytest(*FAST)),
    Step("policies", "the tests of all policies, including derived policies", _pytest(*POLICIES)),
    Step("own loop", "`shard_model` in a loop, under torchrun", _program("own_loop", launcher=TORCHRUN)),
    Step("run", "`shard_model` in a loop, under `shardformer run`", _program("own_loop")),
    Step("engine", "`initialize` with ZeRO, and a checkpoint", _program("engine")),
    Step("trainer", "`Trainer`", _program("trainer")),
    Step("train", "`shardformer train`", _shardformer("train", "--config", "run.toml")),
    Step("verify", f"`shardformer verify {' '.join(VERIFY)}`", _shardformer("verify", *VERIFY)),
    Step("demo", "`examples/demo.py`", ("{root}/examples/demo.py", "--steps", "4")),
    Step("checkpoint", "the engine resumes from the checkpoint of the row above (in the first row, of the last row)",
         _program("checkpoint", "{before}/checkpoint")),
)  # fmt: skip


def prepare(folder: Path) -> None:
    """Write the input files of the steps, and remove the output of an earlier ``train``, which would be resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    (folder / "run.toml").write_text(TRAIN, encoding="utf-8")
    (folder / "text.txt").write_text("All that is gold does not glitter. " * 20, encoding="utf-8")
