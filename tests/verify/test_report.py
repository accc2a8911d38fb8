"""The report of ``verify`` fits into a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardformer.verify.report import Difference, Report, Tolerances, print_report

PATH = "model.transformer.encoder.layers.11.attention.self_attention.query_projection.weight"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_place_of_a_difference_breaks_only_at_dots(width: int) -> None:
    of = Difference(1e-16, PATH, 0.1)
    report = Report(
        "Net", "tensor=2", 3, "float64", Tolerances(1e-10, 1e-10, 1e-16), of, of, of, of, {}, [(1.0, 1.0)], seconds=5.3
    )
    console = Console(file=io.StringIO(), width=width)
    print_report(console, report)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[1] == "3 steps in float64 (5.3 s), with dropout and casts to lower precision disabled." or width == 60
    table = [line for line in lines if not line.startswith("PASS")]
    assert max(map(len, table)) <= width
    words = [word for line in table for word in line.split() if word.strip(".") and word.strip(".") in PATH]
    assert set("".join(words).replace(PATH, "")) == set(), "each row contains the path"
    assert all(word.endswith(".") or word.endswith("weight") for word in words)
