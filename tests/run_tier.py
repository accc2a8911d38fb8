"""Runs a tier of the tests, with lint and type checks in parallel, and prints the total time.

    python -m tests.run_tier fast|test|all [--jobs N] [--started SECONDS] [options of pytest]

``--started`` is the start of the total time, in seconds since 1970. ``make`` passes its own start time, so that the
total includes the installation.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.tiers import LIMIT_MIN, TIERS

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
LINT = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("codespell",), ("mypy",))
OLDEST = ROOT / ".venv-oldest" / "bin" / "python"
AFTER_ALL = (
    (sys.executable, "-m", "tests.hostile", "--seed", "7", "--only", "argument", "--only", "divergence"),
    (sys.executable, "-m", "tests.mutants", "--recheck"),
    (sys.executable, "-m", "tests.hostile", "--seed", "7", "--only", "mutation"),
    (sys.executable, "-m", "tests.hostile", "--seed", "7", "--only", "fault", "--count", "16"),
    (str(OLDEST), "-m", "pytest", "-q", "--tier", "test", "-m", "feature"),
    (str(OLDEST), "-m", "pytest", "-q", "--tier", "test", "tests/policies"),
    (str(OLDEST), "-m", "pytest", "-q", "--tier", "test", "tests/integrations"),
)
"""Commands of `make test-all` that run after the tests, as many in parallel as there are jobs."""
AFTER_ALL_LIMIT_S = 2400
"""Time limit of each of these commands. A command that exceeds it is killed and fails."""


@dataclass
class Lint:
    """Run ruff, codespell and mypy in a background thread."""

    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def run(self) -> None:
        start = time.monotonic()
        for name, *options in LINT:
            command = [str(BIN / name), *options]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=lambda: os.nice(5))
            if done.returncode:
                self.failed.append(f"{' '.join([name, *options])}\n{done.stdout}{done.stderr}")
        self.seconds = time.monotonic() - start


def _run_after_all(command: Sequence[str]) -> int:
    """Run a command, then print its output."""
    start = time.monotonic()
    environment = {**os.environ, "TIMM_FOLDER": str(Path(sys.prefix) / "timm")}
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed = running.communicate(timeout=AFTER_ALL_LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        running.kill()
        printed = running.communicate()[0]
    lines = printed.splitlines()
    shown = lines if running.returncode else lines[-12:]
    outcome = f"status {running.returncode} after {time.monotonic() - start:.0f} s"
    print("\n".join([f"== {' '.join(command[1:])}: {outcome}", *shown]), flush=True)
    return abs(running.returncode)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--started", type=float, default=time.time())
    asked, options = parser.parse_known_args()
    lint = Lint()
    thread = threading.Thread(target=lint.run)
    thread.start()
    parallel = ["--numprocesses", str(asked.jobs), "--dist", "worksteal"]
    tests = [sys.executable, "-m", "pytest", "--tier", asked.tier, *parallel, *options]
    status = subprocess.run(tests, cwd=ROOT).returncode
    thread.join()
    for failed in lint.failed:
        print(failed)
    if asked.tier == "all":
        with ThreadPoolExecutor(asked.jobs) as executor:
            status = max(status, *executor.map(_run_after_all, AFTER_ALL))
    minutes = (time.time() - asked.started) / 60
    print(
        f"lint and types: {'FAILED' if lint.failed else 'passed'} in {lint.seconds:.0f} s, in parallel with the tests\n"
        f"make test{'' if asked.tier == 'test' else f'-{asked.tier}'}: {minutes:.1f} min in all, "
        f"of at most {LIMIT_MIN[asked.tier]} on two idle cores"
    )
    return status or int(bool(lint.failed))


if __name__ == "__main__":
    sys.exit(main())
