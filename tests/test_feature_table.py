"""docs/features.md is generated from test results, and a full run of the tests fails if it is outdated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardformer.config import ShardConfig
from shardformer.verify.small_models import SMALL_CONFIGS
from tests.feature_table import COLUMNS, PAGE, ROWS, Case, Cell, labels_of, page_of, read_page

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.feature("tensor parallel")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["bert", "swin", "phi"])
def test_cut(family, size): {cut}

@pytest.mark.feature("sequence parallel", "overlap")
@pytest.mark.parametrize("family", ["bert", "swin"])
def test_sequence(family, record_property):
    if family == "swin":
        record_property("feature", {says!r})

@pytest.mark.feature("flash attention", family="bert")
def test_flash(): {flash}

def test_something_else(): pass
"""
INI = """
[pytest]
testpaths = tests
addopts = --strict-markers --import-mode=importlib
markers = feature: a cell
"""


@dataclass(frozen=True)
class Project:
    """A repository with tests of features, run in a separate process."""

    path: Path

    def write(self, cut: str = "pass", flash: str = "pass", says: str = "refused: windows | have no sequence") -> None:
        self.test.write_text(TESTS.format(cut=cut, flash=flash, says=says))

    @property
    def test(self) -> Path:
        return self.path / "tests" / "test_it.py"

    @property
    def page(self) -> Path:
        return self.path / PAGE

    def cell(self, row: str, column: str) -> Cell:
        return read_page(self.page.read_text())[row, column]

    def run(self, *arguments: str) -> tuple[int, str]:
        """Return the exit status and the output."""
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=self.path, env=env, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    def passes(self, *arguments: str) -> None:
        status, said = self.run(*arguments)
        assert status == 0, said

    def fails(self, *arguments: str, saying: tuple[str, ...]) -> None:
        status, said = self.run(*arguments)
        assert status != 0
        for part in saying:
            assert part in said, said


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Create a project whose page does not exist yet."""
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.feature_table"]\n')
    for folder in ("tests", "docs"):
        (tmp_path / folder).mkdir()
    project = Project(tmp_path)
    project.write()
    return project


def test_the_page_is_generated_from_test_results(project: Project) -> None:
    project.passes("-m", "feature", "--write-features")
    text = project.page.read_text()
    found = read_page(text)
    refused = Cell("refused", "test_sequence", "windows | have no sequence")
    assert found == {
        ("BERT", "tensor parallel"): Cell("yes", "test_cut"),
        ("Swin", "tensor parallel"): Cell("yes", "test_cut"),
        ("phi", "tensor parallel"): Cell("yes", "test_cut"),
        ("BERT", "sequence parallel"): Cell("yes", "test_sequence"),
        ("BERT", "overlap"): Cell("yes", "test_sequence"),
        ("Swin", "sequence parallel"): refused,
        ("Swin", "overlap"): refused,
        ("BERT", "flash attention"): Cell("yes", "test_flash"),
    }
    assert text.count("windows | have no sequence") == 1
    assert "[test_cut]: ../tests/test_it.py\n" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[2].startswith("| BERT | `bert` | [yes][test_cut] | not yet | not yet |")
    assert [line.split(" | ")[0] for line in lines[2:]][: len(ROWS)] == [f"| {row.title}" for row in ROWS]
    project.passes()


@pytest.mark.full
def test_tests_in_several_processes_write_and_compare_the_same_page(project: Project) -> None:
    several = ("-p", "xdist", "-n", "2")
    project.passes("-m", "feature", "--write-features")
    alone = project.page.read_text()
    project.page.unlink()
    project.passes("-m", "feature", "--write-features", *several)
    assert project.page.read_text() == alone
    project.passes(*several)
    project.passes(*several, "-k", "cut")
    project.write(cut="raise ValueError")
    project.fails(*several, saying=("ValueError",))
    project.write(says="part: a note")
    project.fails(*several, saying=("sequence parallel of Swin is 'refused' there and 'part' now",))


def test_a_full_run_fails_if_the_page_is_outdated(project: Project) -> None:
    project.fails(
        saying=("is not what the tests say", "tensor parallel of BERT is '–' there and 'yes' now", "make features")
    )
    assert not project.page.exists()
    project.run("--write-features")
    project.page.write_text(project.page.read_text().replace("[refused]", "[yes]", 1))
    project.fails(saying=("sequence parallel of Swin is 'yes' there and 'refused' now",))
    project.run("--write-features")
    project.page.write_text(project.page.read_text().replace("random models", "large models"))
    project.fails(saying=("rows, links or words around the table have changed",))


def test_a_changed_reason_changes_the_page(project: Project) -> None:
    project.run("--write-features")
    project.write(says="refused: no")
    project.fails(saying=("overlap of Swin is 'refused' there and 'refused' for another reason now",))


def test_added_and_removed_tests_are_detected_at_collection(project: Project) -> None:
    project.run("--write-features")
    project.passes("--collect-only", "-q")
    text = project.test.read_text()
    project.test.write_text(text.replace('"overlap"', '"fused norm"'))
    project.fails(
        "--collect-only", saying=("fused norm of BERT is '–' there and 'tested' now", "overlap of BERT is 'yes' there")
    )


@pytest.mark.parametrize("some", [("-k", "flash"), ("tests/test_it.py",)], ids=["-k", "a file"])
def test_a_partial_run_neither_compares_nor_writes_the_page(project: Project, some: Iterable[str]) -> None:
    project.passes(*some)
    project.fails(
        "--write-features",
        *some,
        saying=(
            "--write-features with some of the tests",
            "make features",
        ),
    )
    assert not project.page.exists()


def test_a_failure_is_counted_once(project: Project) -> None:
    project.run("--write-features")
    project.write(cut="assert family != 'swin' or size == 2")
    status, said = project.run()
    assert status != 0 and "1 failed" in said and "is not what the tests say" not in said
    project.fails("--write-features", saying=("1 failed", "wrote"))
    assert project.cell("Swin", "tensor parallel") == Cell("no", "test_cut")


def test_cells_that_this_machine_cannot_test_stay_unchanged(project: Project) -> None:
    project.write(flash="pytest.skip('no GPU')")
    project.run("--write-features")
    assert project.cell("BERT", "flash attention") == Cell("not run", "test_flash")
    project.passes()
    project.passes("--collect-only")
    project.write()
    project.fails(saying=("flash attention of BERT is 'not run' there and 'yes' now",))
    project.run("--write-features")
    project.write(flash="pytest.skip('no GPU')")
    project.passes()
    project.run("--write-features")
    assert project.cell("BERT", "flash attention") == Cell("yes", "test_flash")


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ('"sequence paralel", family="bert"', "Did you mean 'sequence parallel'"),
        ('family="bert"', "Name one"),
        ('"overlap"', "feature('overlap') of no family"),
    ],
)
def test_a_mark_without_a_cell_raises(project: Project, mark: str, said: str) -> None:
    project.test.write_text(f"import pytest\n\n@pytest.mark.feature({mark})\ndef test_it(): pass\n")
    project.fails(saying=(said,))


def test_a_word_without_legend_raises(project: Project) -> None:
    project.write(says="perhaps: who knows")
    project.fails(
        "--write-features",
        saying=(
            "perhaps: who knows",
            "The words are yes, part, refused",
        ),
    )
    assert not project.page.exists()


def test_tests_with_the_same_name_are_distinguished() -> None:
    cases = [Case("bert", ("overlap",), f"tests/{name}.py", "test_it") for name in ("test_a", "test_b")]
    assert list(labels_of(cases).values()) == ["test_a.test_it", "test_b.test_it"]
    assert "[test_b.test_it]: ../tests/test_b.py" in page_of(cases, {})


def test_rows_are_families_and_columns_are_options() -> None:
    families = [name for row in ROWS for name in row.families]
    assert len(set(families)) == len(families)
    assert {name for name in families if not name.startswith("timm:")} <= SMALL_CONFIGS.keys()
    for how in COLUMNS.values():
        for option in how.split("`")[1::2]:
            assert not option.startswith("enable_") or option in ShardConfig.__dataclass_fields__


def test_the_readme_counts_the_families() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"{len(SMALL_CONFIGS)} transformers model families" in readme
