"""Tables of docs/integrations.md: what was measured against one process, and what is refused.

``make integration-table`` runs the tests, and calls ``python -m tests.integrations.table ROWS`` with the file of
results that ``rows.py`` wrote. A cell is the largest difference to one process over the layouts of its column. Cells
that this run did not measure keep their value, and cells without a test disappear. The cell of a new case is "not run".
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.integrations import refusals, test_accelerate, test_lightning, test_peft, test_qlora, test_trainer
from tests.integrations.peft_models import LAYOUTS as PEFT_LAYOUTS
from tests.integrations.rows import Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
COLUMNS = (
    "tensor",
    "sequence parallel",
    "context",
    "pipeline",
    "data",
    "ZeRO 1",
    "ZeRO 2",
    "ZeRO 3",
    "combined",
    "files",
)
MEASURED, REFUSED, NOT_RUN, EMPTY = "measured", "error", "not run", "–"
LIBRARIES = ("peft", "bitsandbytes", "transformers", "accelerate", "lightning")
Cells = dict[tuple[str, str, str], str]
"""(library, feature, column) -> text of the cell."""


def column_of(layout: Mapping[str, Any]) -> str:
    """Return the column of a layout, a dict of fields of ``ParallelConfig``."""
    axes = [axis for axis in ("tensor", "sequence", "pipe", "data") if layout.get(axis, 1) > 1]
    stage = layout.get("zero_stage")
    if len(axes) > 1 or (stage is not None and axes != ["data"]):
        return "combined"
    if layout.get("sequence_parallel"):
        return "sequence parallel"
    if stage is not None:
        return f"ZeRO {stage}"
    return {"sequence": "context", "pipe": "pipeline"}.get(axes[0], axes[0])


def column_of_peft(name: str) -> str:
    layout = PEFT_LAYOUTS[name]
    fields = {"sequence_parallel": bool(layout.options), "zero_stage": layout.zero}
    return column_of({**layout.sizes, **fields})


def parse_layout(text: str) -> dict[str, Any]:
    """Return the layout that ``rows.record_difference`` wrote."""
    pairs = [part.split("=") for part in text.split(", ") if "=" in part]
    return {name: value == "True" if value in ("True", "False") else int(value) for name, value in pairs}


def existing_cases() -> dict[tuple[str, str, str], str]:
    """Return whether the tests measure or refuse each cell."""
    found: dict[tuple[str, str, str], str] = {}

    def add(library: str, feature: str, column: str, kind: str = MEASURED) -> None:
        if found.get((library, feature, column)) != MEASURED:
            found[library, feature, column] = kind

    for feature, layout in test_peft.MATRIX:
        is_refused = (feature, layout) in test_peft.REFUSED
        add("peft", feature, column_of_peft(layout), REFUSED if is_refused else MEASURED)
    for feature in test_peft.FEATURES_WITH_FILES:
        add("peft", feature, "files")
    for feature, layout in test_qlora.MATRIX:
        kind = REFUSED if (feature, layout) in test_qlora.REFUSED else MEASURED
        add("bitsandbytes", feature, column_of_peft(layout), kind)
    for feature in test_trainer.FEATURES:
        for layout in test_trainer.LAYOUTS:
            reasons = {test_trainer.EXCLUDED.get((feature, axis)) for axis in layout} - {None}
            if reasons <= {"refused"}:
                add("transformers", feature, column_of(layout), REFUSED if reasons else MEASURED)
        add("transformers", feature, "files")
    for feature in test_trainer.FEATURES_COMBINED:
        for layout in test_trainer.COMBINED:
            add("transformers", feature, column_of(layout))
    for feature in test_accelerate.FEATURES:
        for layout in test_accelerate.LAYOUTS:
            add("accelerate", feature, column_of(layout))
        add("accelerate", feature, "files")
    for feature in test_lightning.OPTIONS:
        for layout in test_lightning.LAYOUTS.values():
            add("lightning", feature, column_of(layout))
    for layout in test_lightning.COMBINED:
        add("lightning", test_lightning.COMBINED_OPTIONS, column_of(layout))
    return found


def cells_of(rows: Iterable[Row]) -> Cells:
    """Return the cells that a run measured."""
    numbers: dict[tuple[str, str, str], float] = {}
    texts: Cells = {}
    for row in rows:
        is_peft = row.library in ("peft", "bitsandbytes")
        column = column_of_peft(row.layout) if is_peft else column_of(parse_layout(row.layout))
        for key, value in (
            (column, row.loss),
            (column, row.gradient),
            ("files", row.files if isinstance(row.files, float) else None),
        ):
            if value is not None:
                cell = row.library, row.feature, key
                numbers[cell] = max(numbers.get(cell, 0.0), value)
        if isinstance(row.files, str) and row.files:
            texts[row.library, row.feature, "files"] = row.files
    return texts | {cell: format_number(value) for cell, value in numbers.items()}


def format_number(value: float) -> str:
    """Return a difference with one digit, such as ``3e-7``."""
    digits, _, exponent = f"{value:.0e}".partition("e")
    return f"{digits}e{int(exponent)}" if value else "0"


def read_cells(page: str) -> tuple[Cells, dict[str, str]]:
    """Return the cells and the releases of the tables on a page."""
    cells: Cells = {}
    releases: dict[str, str] = {}
    for library in LIBRARIES:
        for line in _between(page, f"measured {library}").splitlines():
            first, *values = [cell.strip() for cell in line.strip("| ").split(" | ")]
            if first.startswith(f"{library} "):
                releases[library] = first.removeprefix(f"{library} ")
            elif values and not first.startswith("---"):
                cells |= {(library, first, c): v for c, v in zip(COLUMNS, values, strict=True) if v != EMPTY}
    return cells, releases


def measured_table(library: str, cells: Cells, release: str) -> str:
    """Return the table of a library in Markdown."""
    features = dict.fromkeys(feature for name, feature, _ in existing_cases() if name == library)
    lines = [f"| {' | '.join([f'{library} {release}', *COLUMNS])} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for feature in features:
        values = [cells.get((library, feature, column), EMPTY) for column in COLUMNS]
        lines.append(f"| {' | '.join([feature, *values])} |")
    return "\n".join(lines)


def current_cells(before: Cells, measured: Cells) -> Cells:
    """Return the cells of the new page."""
    cells = {}
    for cell, kind in existing_cases().items():
        value = measured.get(cell) or before.get(cell, NOT_RUN)
        cells[cell] = REFUSED if kind == REFUSED else NOT_RUN if value == REFUSED else value
    return cells


def write_page(page: str, rows: Iterable[Row] = ()) -> str:
    """Return the page with the tables of all libraries."""
    rows = list(rows)
    before, releases = read_cells(page)
    releases |= {row.library: row.release for row in rows}
    cells = current_cells(before, cells_of(rows))
    for library in LIBRARIES:
        page = _replace(page, f"measured {library}", measured_table(library, cells, releases.get(library, NOT_RUN)))
        page = _replace(page, f"refused {library}", refusals.table(library))
    return page


def read_rows(file: Path) -> Iterator[Row]:
    for line in file.read_text(encoding="utf-8").splitlines():
        yield Row(**json.loads(line))


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name} -->\n\n)(.*?)(\n*<!-- end -->)", re.DOTALL)


def _between(page: str, name: str) -> str:
    found = _pattern(name).search(page)
    if found is None:
        raise ValueError(f"{PAGE.name} has no table '{name}'")
    return found[2]


def _replace(page: str, name: str, text: str) -> str:
    _between(page, name)
    return _pattern(name).sub(lambda found: f"{found[1]}{text}\n\n<!-- end -->", page)


if __name__ == "__main__":
    rows = [row for path in sys.argv[1:] for row in read_rows(Path(path))]
    PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
