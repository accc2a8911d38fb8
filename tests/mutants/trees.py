"""Copies of the repository in which tests run, and the processes of these tests."""

from __future__ import annotations

import compileall
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN_TESTS = "tests/mutants"
FAILED, NO_SUCH_TEST = 1, (4, 5)
"""Exit codes of pytest: a test failed; no tests were collected, or a path does not exist."""


def copy_of_working_tree(target: Path) -> None:
    """Copy the tracked files in their current state, and compile them."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, names.decode().split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
    compileall.compile_dir(target / "shardformer", quiet=2)


def copy_of_commit(commit: str, target: Path) -> None:
    """Write the files of a commit, and compile them."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(target, filter="data")
    compileall.compile_dir(target / "shardformer", quiet=2)


def tier_arguments(tree: Path, tier: str) -> list[str]:
    """Return the options that select a tier without time limits. Empty if the tree has no such options."""
    sources = [tree / "conftest.py", *sorted((tree / "tests").glob("*.py"))]
    text = "".join(path.read_text(encoding="utf-8") for path in sources if path.is_file())
    return ["--tier", tier] * ('"--tier"' in text) + ["--no-budget"] * ('"--no-budget"' in text)


def present(tree: Path, tests: Sequence[str]) -> list[str]:
    """Return the tests that exist in the tree: files, folders, and functions by their names."""
    return [test for test in tests if _exists(tree, *test.partition("::")[::2])]


def _exists(tree: Path, file: str, function: str) -> bool:
    path, name = tree / file, function.partition("[")[0]
    return path.exists() and (not name or f"\ndef {name}(" in path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Run:
    """The result of one call of pytest.

    Args:
        status: the exit code, or None after a timeout.
        failed: node id of the first failed test.
    """

    status: int | None
    failed: str | None
    seconds: float


def run_tests(tree: Path, arguments: Sequence[str], limit_s: float) -> Run:
    """Run pytest in a tree up to the first failure, then end all processes it left.

    The tests import the package of this tree, also in processes that they start.
    """
    report = tree / ".mutants-report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    # the default family does not support record_property
    command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    begin = time.monotonic()
    with (tree / ".mutants-output.txt").open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_all(process, tree)
    return Run(status, _first_failure(report), time.monotonic() - begin)


def _end_all(process: subprocess.Popen[bytes], tree: Path) -> None:
    """End the process group, and processes outside it whose environment names this tree."""
    for _ in range(5):
        left = [process.pid] if process.poll() is None else []
        left += [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _belongs_to(entry, tree)]
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.poll()
        time.sleep(0.05)


def _belongs_to(entry: Path, tree: Path) -> bool:
    try:
        variables = (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"PYTHONPATH={tree}".encode() in variables


def _first_failure(report: Path) -> str | None:
    """Return the node id of the first failed test in a JUnit report."""
    try:
        cases = ElementTree.parse(report).iter("testcase")
    except (OSError, ElementTree.ParseError):
        return None
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            module = case.get("classname", "").replace(".", "/")
            return f"{module}.py::{case.get('name')}" if module else str(case.get("name"))
    return None
