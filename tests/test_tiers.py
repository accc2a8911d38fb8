"""Tiers: the cases that each one runs, what the fast tier forbids, and the time limit of a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import PYTHON
from tests.tiers import _kept

ROOT = Path(__file__).resolve().parents[1]
CASES: list[dict[str, Any]] = [
    {"family": family, "mode": mode, "ranks": ranks}
    for family in ("llama", "bert", "t5")
    for mode in ("plain", "sequence")
    for ranks in (2, 4)
]
FILE = """
import subprocess
import sys
import time

import pytest

@pytest.mark.full
def test_full(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.reduced(cover="size")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", "abc")
def test_reduced(size, kind): pass

def test_of_workers(pool2): pass

@pytest.mark.above_budget("it is not about its time")
def test_that_starts_a_process():
    subprocess.run([sys.executable, "-c", "1"])

def test_that_takes_long(monkeypatch):
    time.sleep(0.3)

@pytest.mark.above_budget("it sleeps")
def test_that_may_take_long():
    time.sleep(0.3)

@pytest.fixture
def pool2(): pass
"""
CONFTEST = """
import pytest
from tests import scripts, tiers
scripts.set_up = scripts.tear_down = lambda: None  # the test starts no script that needs a fast Python
tiers.BUDGET_S = 0.01
tiers.NUM_SLOWEST = 2
pytest_plugins = ["tests.feature_table", "tests.tiers"]
"""


def of(cases: set[int]) -> list[dict[str, Any]]:
    return [CASES[place] for place in sorted(cases)]


def test_few_cases_cover_each_value() -> None:
    kept = of(_kept(CASES))
    assert len(kept) == 3
    for name in ("family", "mode", "ranks"):
        assert {case[name] for case in kept} == {case[name] for case in CASES}


def test_the_values_of_a_parameter_can_be_limited() -> None:
    kept = of(_kept(CASES, family=("t5",)))
    assert {case["family"] for case in kept} == {"t5"}
    assert {(case["mode"], case["ranks"]) for case in kept} == {("plain", 2), ("sequence", 4)}


def test_it_can_be_enough_to_cover_one_parameter() -> None:
    assert [case["mode"] for case in of(_kept(CASES, cover="mode"))] == ["plain", "sequence"]


def test_one_case_in_several_is_kept() -> None:
    assert _kept(CASES, one_in=5, first=1) == {1, 6, 11}
    assert _kept(CASES, one_in=5, first=1, at_most=2) == {1, 6}


def test_at_most_keeps_the_cases_that_cover_most_values() -> None:
    assert _kept(CASES, at_most=2) < _kept(CASES, at_most=3) == _kept(CASES, at_most=9) == _kept(CASES)
    first, second = of(_kept(CASES, at_most=2))
    assert all(first[name] != second[name] for name in first)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers = feature: a cell\n")
    (tmp_path / "test_it.py").write_text(FILE)
    return tmp_path


def run(folder: Path, tier: str, *options: str) -> tuple[set[str], str]:
    """Return the failed cases and the output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--tier", tier, "-rA", "-vv", *options]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))]
    return {words[1].partition("::")[2] for words in lines if words[0] == "FAILED"}, done.stdout + done.stderr


@pytest.mark.slow
def test_a_tier_runs_its_cases_and_fails_slow_tests(folder: Path) -> None:
    failed, printed = run(folder, "test")
    assert failed == {"test_that_takes_long"}
    assert "1 failed, 6 passed, 5 deselected" in printed
    assert "and a test may take" in printed and "the 2 slowest of 7 tests" in printed
    assert run(folder, "test", "--no-budget")[0] == set()


@pytest.mark.slow
def test_the_fast_tier_starts_no_process(folder: Path) -> None:
    failed, printed = run(folder, "fast")
    assert failed == {"test_that_takes_long", "test_that_starts_a_process"}
    assert "starts a process, which takes seconds" in printed
    assert "2 failed, 3 passed, 7 deselected" in printed


@pytest.mark.slow
def test_all_cases_run_without_a_tier(folder: Path) -> None:
    failed, printed = run(folder, "all")
    assert failed == set() and "12 passed" in printed


SCRIPT = """
import os, signal, sys
print(os.getcwd(), os.environ["OF_THE_TEST"], sys.argv[1:], __name__)
sys.stderr.write("an error\\n")
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "raise":
    raise ValueError("of the script")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("0", 0), ("3", 3), ("kill", -signal.SIGKILL), ("raise", 1)])
@pytest.mark.parametrize("program", [PYTHON, sys.executable])
def test_a_script_of_the_fast_python_exits_like_one_of_python(
    tmp_path: Path, program: str, end: str, status: int
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "OF_THE_TEST": "here"}
    done = subprocess.run([program, "-u", "script.py", end], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stdout == f"{tmp_path} here ['{end}'] __main__\n"
    assert done.stderr.startswith("an error\n")
    assert ("ValueError: of the script" in done.stderr) == (end == "raise")


@pytest.mark.slow
def test_a_signal_reaches_a_script_of_the_fast_python(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(7)); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        process.terminate()
        assert process.wait(20) == 7


@pytest.mark.slow
def test_a_script_ends_if_its_fast_python_ends(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        process.wait(20)
        for _ in range(200):
            if not Path(f"/proc/{pid}").exists():
                break
            signal.sigtimedwait([], 0.05)
        assert not Path(f"/proc/{pid}").exists()
