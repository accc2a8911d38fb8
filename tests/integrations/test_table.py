"""The tables of docs/integrations.md have one cell for each case of the tests, and no other."""

from __future__ import annotations

import pytest

from tests.integrations import table
from tests.integrations.rows import Row


def test_the_page_is_current() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.write_page(page) == page, "Run `make integration-table`, or `python -m tests.integrations.table`"


def test_cells_follow_the_cases_of_the_tests() -> None:
    cases = table.existing_cases()
    cells = table.current_cells({}, {})
    assert cells.keys() == cases.keys() and set(cells.values()) == {"not run", "error"}
    cell, gone = ("peft", "LoRA", "tensor"), ("peft", "another feature", "tensor")
    assert table.current_cells({cell: "1e-7", gone: "0"}, {}) == cells | {cell: "1e-7"}
    assert table.current_cells({cell: "1e-7"}, {cell: "2e-7"}) == cells | {cell: "2e-7"}
    refused = "peft", "AdaLoRA", "pipeline"
    assert table.current_cells({refused: "1e-7"}, {})[refused] == "error"


def test_a_cell_is_the_largest_difference_of_its_layouts() -> None:
    rows = [
        Row("peft", "1", "LoRA", "tensor", 1e-8, 2.4e-7),
        Row("peft", "1", "LoRA", "tensor, 4 ranks", 3e-9, 1e-9),
        Row("peft", "1", "LoRA", "data", files=0.0),
        Row("transformers", "1", "bf16", "tensor=2, sequence_parallel=True", 0.012, 0.0, "read by both"),
    ]
    assert table.cells_of(rows) == {
        ("peft", "LoRA", "tensor"): "2e-7",
        ("peft", "LoRA", "files"): "0",
        ("transformers", "bf16", "sequence parallel"): "1e-2",
        ("transformers", "bf16", "files"): "read by both",
    }


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("tensor=2", "tensor"),
        ("tensor=2, sequence_parallel=True", "sequence parallel"),
        ("sequence=2", "context"),
        ("pipe=2, micro_batches=2", "pipeline"),
        ("data=2, zero_stage=3", "ZeRO 3"),
        ("tensor=2, zero_stage=1", "combined"),
        ("tensor=2, data=2", "combined"),
    ],
)
def test_layouts_have_columns(text: str, column: str) -> None:
    assert table.column_of(table.parse_layout(text)) == column
