"""Curves of characters show what was recorded, at any width."""

from __future__ import annotations

import math

import pytest

from shardformer.trainer.curves import curves, summary
from shardformer.trainer.records import Record


def run(count: int, start: float = 3.0, speed: float = 1000.0) -> list[Record]:
    found = []
    for step in range(1, count + 1):
        values = {"loss": start / step, "tokens_per_s": speed, "memory_bytes": 2e9}
        found.append(Record(step, 0, step * 0.5, values))
    return [*found, Record(count, 1, count * 0.5, {"validation/loss": start})]


@pytest.mark.parametrize("dots", [True, False])
@pytest.mark.parametrize("width", [20, 60, 133])
def test_no_line_is_wider_than_the_terminal(width: int, dots: bool) -> None:
    lines = curves({"a": run(30), "b": run(200, 5.0)}, width, dots=dots)
    assert max(len(str(line)) for line in lines) <= max(width, 40)


def test_a_falling_curve_falls() -> None:
    lines = [str(line) for line in curves({"a": run(40)}, 60, ["loss"], dots=False)]
    assert lines[0].strip() == "loss"
    assert lines[1].split()[:2] == ["3", "*"]
    first = [line[10:].find("*") for line in lines[1:9] if "*" in line]
    assert first == sorted(first)
    assert lines[8].rstrip().endswith("*****")
    assert lines[9].split() == ["1", "step", "40"]


def test_each_run_has_its_mark_and_its_name() -> None:
    lines = curves({"left": run(40), "right": run(40, 9.0)}, 60, ["loss"], dots=False)
    assert [str(line) for line in lines[-2:]] == ["* left", "o right"]
    assert {number for line in lines for _, number in line.pieces} == {None, 0, 1}


def test_what_is_not_finite_is_said() -> None:
    records = [*run(5), Record(6, 0, 3.0, {"loss": math.nan})]
    assert str(curves({"a": records}, 60, ["loss"])[0]).strip() == "loss, 1 not finite"
    assert "no finite value, 1 not finite" in str(curves({"a": records[-1:]}, 60, ["loss"])[0])


def test_a_run_is_summed_up() -> None:
    assert summary({"a": run(40)}) == [
        {
            "run": "a", "step": "40", "time": "0:20", "loss": "0.0750", "best validation": "3.0000", "tokens/s": "1000",
            "memory": "2.0 GB",
        }
    ]  # fmt: skip
