"""The rows cover all combinations they promise, and the page and ``shardformer check`` have the same versions."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from shardformer.cli.check import TESTED
from tests.versions.page import PAGE, page_of
from tests.versions.rows import NEWEST, OLDEST, ROOT, ROWS, Environment, Row, lower_bound, requirement
from tests.versions.steps import POLICIES, STEPS


def test_rows_cover_each_python_with_oldest_and_newest() -> None:
    pythons, ends = ("3.11", "3.12", "3.13"), (OLDEST, NEWEST)
    assert {(row.python, row.torch) for row in ROWS} >= set(product(pythons, ends))
    assert {(row.python, row.transformers) for row in ROWS} >= set(product(pythons, ends))
    assert {(row.torch, row.transformers) for row in ROWS} == set(product(ends, ends))


def test_the_oldest_versions_are_the_lower_bounds_of_the_package() -> None:
    assert requirement("torch", OLDEST) == f"torch=={lower_bound('torch')}.*"
    assert requirement("torch", NEWEST) == f"torch>={lower_bound('torch')}"
    for name in ("torch", "transformers"):
        assert ".".join(map(str, TESTED[name][0])) == lower_bound(name)


def test_a_complete_environment_is_reused(tmp_path: Path) -> None:
    """The Python does not exist, so that creating the environment would raise."""
    (tmp_path / ".complete").touch()
    Environment(Row("3.99", OLDEST, OLDEST), tmp_path).make()


def test_the_tested_files_exist() -> None:
    assert all((ROOT / path).exists() for path in POLICIES)
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_the_page_is_written_from_rows_and_steps() -> None:
    written = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in written.splitlines() if re.match(r"\| 3\.\d+\.\d+ ", line)]
    names = [step.name for step in STEPS]
    assert written == page_of([((python, torch, hub), dict(zip(names, said))) for python, torch, hub, *said in rows])
    for column, name in enumerate(("python", "torch", "transformers")):
        minors = [tuple(map(int, row[column].split(".")[:2])) for row in rows]
        assert TESTED[name][0] <= min(minors) and max(minors) == TESTED[name][1]
