"""The tables of docs/integrations.md have one cell for each case of the tests, and no other."""

from __future__ import annotations

import pytest

from tests.integrations import table
from tests.integrations.rows import Row


def test_the_page_is_current() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.write_page(page) == page, "Run `make integration-table`, or `python -m tests.integrations.table`"


def test_a_case_without_a_result_is_reported() -> None:
    cells, _ = table.read_cells(table.PAGE.read_text(encoding="utf-8"))
    cell = "peft", "LoRA", "tensor"
    with pytest.raises(ValueError, match="was not measured"):
        table.current_cells({name: value for name, value in cells.items() if name != cell}, {})
    stale = {**cells, ("peft", "another feature", "tensor"): "0"}
    assert table.current_cells(stale, {}) == table.current_cells(cells, {})


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
