"""Every mutant applies to the current source of the package."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.mutant import AREAS, DoesNotApplyError, Mutant
from tests.mutants.results import FOUND, SURVIVED, Result, page_of
from tests.mutants.tables import all_mutants
from tests.mutants.targets import TESTS_BY_PREFIX, related_tests
from tests.mutants.trees import ROOT, present, tier_arguments

MUTANTS = all_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_once_and_is_valid_python(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    mutated = mutant.mutated(source)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_tests_that_run_first_exist(mutant: Mutant) -> None:
    assert mutant.first and present(ROOT, mutant.first) == [*mutant.first]
    assert present(ROOT, related_tests(mutant)) == related_tests(mutant)


def test_names_are_unique_and_every_area_has_mutants() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    counts = Counter(mutant.area for mutant in MUTANTS)
    assert tuple(counts) == AREAS and min(counts.values()) >= 8 and len(MUTANTS) >= 72


def test_a_timeout_does_not_count_as_a_failed_test(tmp_path: Path) -> None:
    """On a machine with other load, any test may exceed its time limit."""
    assert tier_arguments(ROOT, "test") == ["--tier", "test", "--no-budget"]
    (tmp_path / "conftest.py").write_text('addoption("--tier")')  # an earlier commit, without the second option
    assert tier_arguments(tmp_path, "all") == ["--tier", "all"]


def test_folders_with_related_tests_exist() -> None:
    assert [folder for folder in TESTS_BY_PREFIX if not [*ROOT.glob(f"{folder}*")]] == []


@pytest.mark.parametrize("source", ["", "x = 1\nx = 1\n"])
def test_source_text_that_does_not_occur_exactly_once_raises(source: str) -> None:
    with pytest.raises(DoesNotApplyError, match=f"{source.count('x = 1')} times in a.py"):
        Mutant("tensor", "m", "a.py", "x = 1", "x = 2", "").mutated(source)


def test_the_page_lists_the_finding_test_and_survivors() -> None:
    mutants = [Mutant("tensor", name, "a.py", "a", "b", f"Effect of {name}.") for name in ("one", "two", "three")]
    results = {
        "one": Result("one", "tensor", FOUND, "related tests", "tests/test_a.py::test_b[c|d]", 3.2, {}),
        "two": Result("two", "tensor", SURVIVED, "tier test", None, 60.0, {}),
    }
    page = page_of(results, mutants)
    assert "3 mutants, 2 of them tried, 1 found." in page
    assert r"| tensor | one | `tests/test_a.py::test_b[c\|d]` | 3 |" in page
    assert "| tensor | three | not tried |  |" in page
    assert page.endswith("## Not found\n\n- **two** (survived, tier test). Effect of two.\n")
