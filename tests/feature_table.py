"""The table of families and features, docs/features.md, generated from the results of marked tests.

    @pytest.mark.feature("sequence parallel")          # a column
    @pytest.mark.parametrize("family", ["bert", ...])  # a row, by its model type; or feature(..., family="bert")
    def test_...(family, record_property):
        ...
        record_property("feature", f"refused: {error}")  # a cell other than yes: a word and its footnote

A cell is "yes" if all of its tests passed, "no" if one failed, and empty if there is none. A family that is not in ROWS
gets an additional row. ``make features`` writes the page. A run of all tests fails if the page is outdated. A run with
fewer cases compares the cells that it tested.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

import pytest

from shardformer.errors import ConfigError, suggest_similar_names

PAGE = "docs/features.md"
EMPTY, NOT_YET, NOT_RUN = "–", "not yet", "not run"
WORDS = ("yes", "part", "refused")
RIDES = "feature case"
"""Property of a test report with the case it belongs to."""


@dataclass(frozen=True)
class Row:
    """A row of the table: the name of a family and its model types (``timm:`` and the class for models of timm)."""

    title: str
    families: tuple[str, ...]


ROWS = (
    Row("BERT", ("bert",)),
    Row("T5", ("t5",)),
    Row("LLaMA 1, 2 and 3", ("llama",)),
    Row("GPT-2", ("gpt2",)),
    Row("OPT", ("opt",)),
    Row("BLOOM", ("bloom",)),
    Row("ChatGLM 2", ("chatglm",)),
    Row("ViT", ("vit",)),
    Row("Whisper", ("whisper",)),
    Row("SAM", ("sam",)),
    Row("BLIP-2", ("blip-2",)),
    Row("Falcon", ("falcon",)),
    Row("RoBERTa", ("roberta",)),
    Row("ALBERT", ("albert",)),
    Row("ERNIE", ("ernie",)),
    Row("GPT-Neo", ("gpt_neo",)),
    Row("GPT-J", ("gptj",)),
    Row("BEiT", ("beit",)),
    Row("Swin", ("swin",)),
    Row("Swin V2", ("swinv2",)),
    Row("Qwen 2", ("qwen2",)),
    Row("Qwen 3", ("qwen3",)),
    Row("Mistral", ("mistral",)),
    Row("ViT and DeiT of timm", ("timm:VisionTransformer",)),
    Row("distilled DeiT of timm", ("timm:VisionTransformerDistilled",)),
    Row("BEiT of timm", ("timm:Beit",)),
    Row("Swin of timm", ("timm:SwinTransformer",)),
    Row("Swin V2 of timm", ("timm:SwinTransformerV2",)),
    Row("EVA-02 of timm", ("timm:Eva",)),
)
COLUMNS: Mapping[str, str] = {
    "tensor parallel": "`shard_model(model)` on two or more ranks",
    "tensor grids": "`launch_from_torch(tensor=(2, 2))`, and `tensor_parallel_mode` for 2D, 2.5D or 3D",
    "context parallel": "`launch_from_torch(sequence=2)`, which splits long sequences over the ranks",
    "pipeline parallel": "`launch_from_torch(pipe=2)` and `shardformer.Pipeline`, with layers on different ranks",
    "lazy initialization": "`LazyInit` or `shardformer.from_pretrained`, so that no rank stores the full model",
    "memory-efficient attention": "`enable_flash_attention`, with torch's memory-efficient kernel",
    "flash attention": "`enable_flash_attention`, with torch's flash kernel or the flash-attn package",
    "JIT-fused operators": "`enable_jit_fused`",
    "fused norm": "`enable_fused_normalization`",
    "sequence parallel": "`enable_sequence_parallelism`",
    "overlap": "`enable_sequence_overlap`, together with sequence parallelism",
}
"""Each feature, and the option that enables it."""


@dataclass(frozen=True)
class Case:
    """A marked test: its family, its columns, its location and its name."""

    family: str
    columns: tuple[str, ...]
    path: str
    name: str


@dataclass(frozen=True)
class Cell:
    """A cell of the table: a word, the test that it links to, and a footnote."""

    word: str
    label: str = ""
    note: str = ""


@dataclass
class Outcome:
    """The outcome of a case: all of its phases, and the word for its cell."""

    phases: set[str] = field(default_factory=set)
    says: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        return next((word for word in ("failed", "skipped") if word in self.phases), "passed")


Cells = dict[tuple[str, str], Cell]
"""(title of a row, column) -> cell."""


def case_of(item: pytest.Item) -> Case | None:
    """Return the case of a test's marks, or None without any. Raises UsageError for a mark without a cell."""
    marks = list(item.iter_markers("feature"))
    if not marks:
        return None
    columns = [str(name) for mark in reversed(marks) for name in mark.args]
    params: Mapping[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    said = [mark.kwargs["family"] for mark in marks if "family" in mark.kwargs]
    family = said[0] if said else params.get("family")
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown or not columns:
        raise pytest.UsageError(
            f"{item.nodeid}: feature({', '.join(map(repr, unknown))}). The features are {', '.join(COLUMNS)}. "
            + (suggest_similar_names(unknown[0], COLUMNS) if unknown else "Name one.")
        )
    if not isinstance(family, str):
        raise pytest.UsageError(
            f"{item.nodeid}: feature{mark_text(columns)} of no family. A cell is a family's: the test's parameter "
            "`family`, a model type, names it. Add the parameter, or write feature(..., family=...)."
        )
    path = item.path.relative_to(item.config.rootpath).as_posix()
    return Case(family, tuple(dict.fromkeys(columns)), path, getattr(item, "originalname", item.name))


def mark_text(columns: Sequence[str]) -> str:
    return f"({', '.join(map(repr, columns))})"


def rows_of(families: Iterable[str]) -> list[Row]:
    """Return ROWS, followed by a row for each other family."""
    known = {name for row in ROWS for name in row.families}
    return [*ROWS, *(Row(name, (name,)) for name in sorted(set(families) - known))]


def labels_of(cases: Iterable[Case]) -> dict[tuple[str, str], str]:
    """Return (path, name) of each test -> its label: the name, with the file if two tests have the same name."""
    tests = dict.fromkeys((case.path, case.name) for case in cases)
    names = [name for _, name in tests]
    return {(path, name): name if names.count(name) == 1 else f"{Path(path).stem}.{name}" for path, name in tests}


def cells_of(cases: Mapping[str, Case], outcomes: Mapping[str, Outcome], before: Cells) -> Cells:
    """Return the cells of the page. A cell whose tests were all skipped keeps its previous content."""
    labels = labels_of(cases.values())
    out: Cells = {}
    for row in rows_of(case.family for case in cases.values()):
        for column in COLUMNS:
            here = {n: c for n, c in cases.items() if c.family in row.families and column in c.columns}
            if not here:
                continue
            ended = [outcomes.get(nodeid, Outcome()) for nodeid in here]
            first = next(iter(here.values()))
            label = labels[first.path, first.name]
            if all(outcome.word == "skipped" for outcome in ended):
                out[row.title, column] = before.get((row.title, column), Cell(NOT_RUN, label))
            elif any(outcome.word == "failed" for outcome in ended):
                out[row.title, column] = Cell("no", label)
            else:
                said = dict.fromkeys(said for outcome in ended for said in outcome.says)
                words = [said.partition(": ")[0] for said in said]
                notes = [" ".join(note.split()) for said in said if (note := said.partition(": ")[2])]
                out[row.title, column] = Cell(words[0] if words else "yes", label, " ".join(dict.fromkeys(notes)))
    return out


INTRO = f"""# Families and features

This page shows which features each model family supports. Every word in the table is the result of a test of small
random models, and links to this test. The words mean:

- **yes**: the feature works, and all tests pass. If there is a footnote, it has more information.
- **part**: the feature works with restrictions. The footnote describes them.
- **refused**: the feature is not supported for this family. If you enable it, an error is raised before the model
  changes. The footnote has the reason.
- **{EMPTY}**: not tested. To find out whether the feature works, run `shardformer verify`.
- **{NOT_RUN}**: not tested on the machine that wrote this page.
- **{NOT_YET}**: not supported for any family.

If your family is not in the table, it may still work. To try it, see [add a model family](add-a-model.md).

For contributors: `make features` runs the tests and writes this page. `make test` fails if the page is not up to date.
"""


def page_of(cases: Iterable[Case], cells: Cells) -> str:
    """Render docs/features.md."""
    cases = list(cases)
    labels = labels_of(cases)
    tested = {column for case in cases for column in case.columns}
    notes = list(dict.fromkeys(cell.note for cell in cells.values() if cell.note))

    def shown(title: str, column: str) -> str:
        cell = cells.get((title, column), Cell(EMPTY if column in tested else NOT_YET))
        note = f"[^{notes.index(cell.note) + 1}]" if cell.note else ""
        return (f"[{cell.word}][{cell.label}]" if cell.label else cell.word) + note

    table = [["family", "model type", *COLUMNS], ["---"] * (2 + len(COLUMNS))]
    for row in rows_of(case.family for case in cases):
        types = ", ".join(f"`{name}`" for name in row.families)
        table.append([row.title, types, *(shown(row.title, column) for column in COLUMNS)])
    asked = [["feature", "how to enable it", "tests"], ["---"] * 3]
    for column, how in COLUMNS.items():
        said = dict.fromkeys(labels[case.path, case.name] for case in cases if column in case.columns)
        asked.append([column, how, ", ".join(f"[{label}]" for label in said) or EMPTY])
    links = [f"[{label}]: ../{path}" for (path, _), label in sorted(labels.items(), key=lambda item: item[1])]
    footnotes = [f"[^{number}]: {note}" for number, note in enumerate(notes, 1)]
    parts = [INTRO, _lines(table), "## The tests\n", _lines(asked), "\n".join(links) + "\n"]
    return "\n".join([*parts, *(["\n".join(footnotes) + "\n"] if footnotes else [])])


def _lines(table: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def read_page(text: str) -> Cells:
    """Parse a page into its non-empty cells, the inverse of ``page_of``."""
    notes = dict(re.findall(r"^\[\^(\d+)\]: (.*)$", text, re.MULTILINE))
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    out: Cells = {}
    for row in rows:
        for column, shown in zip(COLUMNS, row[2:] if len(row) == len(COLUMNS) + 2 else []):
            found = re.fullmatch(r"\[([^\]]+)\]\[([^\]^]+)\](?:\[\^(\d+)\])?", shown)
            if found:
                out[row[0], column] = Cell(found[1], found[2], notes.get(found[3], ""))
    return out


def stale(now: Cells, page: Cells) -> ConfigError | None:
    """Return the differences between a page and the current cells, ignoring link targets."""
    wrong = []
    for key in sorted(now.keys() | page.keys()):
        here, there = now.get(key, Cell(EMPTY)), page.get(key, Cell(EMPTY))
        if (here.word, here.note) != (there.word, there.note):
            as_well = " for another reason" if here.word == there.word else ""
            wrong.append(f"{key[1]} of {key[0]} is {there.word!r} there and {here.word!r}{as_well} now")
    if not wrong:
        return None
    more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    return _stale("; ".join(wrong[:5]) + more)


def _stale(what: str) -> ConfigError:
    return ConfigError(
        f"{PAGE} is not what the tests say: {what}.",
        rule="The table is written from the results of the tests.",
        remedy="Run `make features`, look at what changed, and commit the page.",
    )


class FeatureTable:
    """Collects marked tests and their outcomes, and writes or compares the page at the end of the session.

    Under pytest-xdist only reports reach the main process. Therefore each report carries the marks of its test, its
    index among marked tests, and their number.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.is_worker = hasattr(config, "workerinput")
        self.path = config.rootpath / PAGE
        self.writes: bool = config.getoption("write_features")
        self.collects: bool = config.getoption("collectonly")
        self.every_case: bool = config.getoption("tier", default="all") == "all"
        self.whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        self.whole &= config.getoption("tier", default="all") != "fast"
        self.cases: dict[str, Case] = {}
        self.places: dict[str, int] = {}
        self.num_cases = 0
        self.outcomes: dict[str, Outcome] = {}
        self.message = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Runs after the tier has deselected cases, and before other options do."""
        found = [(item, case) for item in items if (case := case_of(item)) is not None]
        self.cases = {item.nodeid: case for item, case in found}
        for place, (item, case) in enumerate(found):
            item.user_properties.append((RIDES, (place, len(found), *astuple(case))))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        if any(item.nodeid in self.cases for item in items):
            self.whole = False

    def pytest_collection_finish(self) -> None:
        if self.writes and not self.whole and not self.is_worker:
            raise pytest.UsageError(
                "--write-features with some of the tests. The page is written from all tests with the mark `feature`. "
                "Run `make features`, or `pytest -m feature --write-features` without paths."
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = dict(report.user_properties).get(RIDES)
        if said is not None:
            self.places[report.nodeid], self.num_cases, family, columns, *where = said
            self.cases[report.nodeid] = Case(family, tuple(columns), *where)
            outcome = self.outcomes.setdefault(report.nodeid, Outcome())
            outcome.phases.add(report.outcome)
            outcome.says = [str(value) for name, value in report.user_properties if name == "feature"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        wrong = None if self.is_worker else self._finish()
        if wrong is not None:
            self.message = str(wrong)
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _finish(self) -> ConfigError | None:
        """Write or compare the page. Return the differences."""
        if not self.cases or not self.whole:
            return None
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        before = read_page(text)
        if self.collects:
            return self._collected(before)
        if len(self.outcomes) != self.num_cases:
            return None  # the session was stopped, or some tests are deselected
        cases = {nodeid: self.cases[nodeid] for nodeid in sorted(self.places, key=self.places.__getitem__)}
        for nodeid, outcome in self.outcomes.items():
            if any(said.partition(": ")[0] not in WORDS for said in outcome.says):
                return ConfigError(
                    f"{nodeid} recorded {outcome.says}.",
                    rule=f"A record is a word, a colon and a note. The words are {', '.join(WORDS)}.",
                    remedy='Write record_property("feature", "refused: ...").',
                )
        cells = cells_of(cases, self.outcomes, before)
        page = page_of(cases.values(), cells)
        if self.writes:
            self.path.write_text(page, encoding="utf-8")
            self.message = f"wrote {PAGE}"
        elif page != text and all(outcome.word != "failed" for outcome in self.outcomes.values()):
            if not self.every_case:
                return stale(cells, {key: cell for key, cell in before.items() if key in cells})
            return stale(cells, before) or _stale("rows, links or words around the table have changed")
        return None

    def _collected(self, before: Cells) -> ConfigError | None:
        """If nothing ran, check that exactly the cells with tests have a word."""
        tested = cells_of(self.cases, {}, before)
        return stale({key: before.get(key, Cell("tested")) for key in tested}, before)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.message:
            terminalreporter.section("features")
            terminalreporter.line(self.message)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-features", action="store_true", help=f"write {PAGE} from the tests with the mark feature")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FeatureTable(config), "feature-table")
