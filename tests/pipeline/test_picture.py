"""Pictures of schedules: the text grid and the chart."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from shardformer.errors import ConfigError
from shardformer.pipeline.schedule_chart import (
    check_chart_path,
    format_schedule_as_text,
    get_action_colors,
    save_schedule_chart,
)
from shardformer.pipeline.schedules import (
    SCHEDULES,
    ActionKind,
    PipelineAction,
    make_forward_only_schedule,
    make_schedule,
    simulate_schedule,
)
from tests.pipeline.schedule_checks import grid_rows

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an extra")


def test_text_contains_legend_and_costs() -> None:
    schedule = make_schedule("interleaved", 2, 2)
    assert format_schedule_as_text(schedule, simulate_schedule(schedule)).splitlines() == [
        "  time   0                   5                   10",
        "rank 0 | F0a F1a F0b F1b .   .   B0b --  .   B1b --  B0a --  B1a --",
        "rank 1 | .   F0a F1a F0b B0b --  F1b B1b --  B0a --  B1a --  .   .",
        "",
        "F forward, B backward; the number is the micro-batch",
        "chunk: a virtual stages 0-1, b virtual stages 2-3",
        "bubble     20.0% of 15 units of time (formula: 20.0%)",
        "in flight  at most 4, 3 micro-batches (of one chunk) on ranks 0 to 1",
    ]


def test_forward_schedule_has_no_formula_and_one_rank_no_range() -> None:
    schedule = make_forward_only_schedule(make_schedule("1f1b", 1, 3))
    assert format_schedule_as_text(schedule, simulate_schedule(schedule)).splitlines()[-3:] == [
        "F forward; the number is the micro-batch",
        "bubble     0.0% of 3 units of time",
        "in flight  at most 3 micro-batches",
    ]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
@pytest.mark.parametrize("name", SCHEDULES)
def test_long_grid_wraps_without_loss(name: str, width: int) -> None:
    schedule = make_schedule(name, 4, 16)
    timeline = simulate_schedule(schedule)
    folded = format_schedule_as_text(schedule, timeline, width).split("\n\n")[:-1]
    omitted = [number for number, band in enumerate(folded) if "is not shown" in band]
    bands = [band for band in folded if "is not shown" not in band]
    assert len(bands) > 1 and max(len(line) for band in bands for line in band.splitlines()) <= width
    assert omitted in ([], [2]) and (not omitted or len(bands) == 4)
    for rank, whole in enumerate(grid_rows(schedule, timeline)):
        parts = [band.splitlines()[1 + rank].partition("|")[2].split() for band in bands]
        start, end = ([cell for part in some for cell in part] for some in (parts[:2], parts[2:]))
        cells = whole.partition("|")[2].split()
        assert cells[: len(start)] == start and cells[len(cells) - len(end) :] == end
        assert omitted or len(start) + len(end) == len(cells)


def test_band_starts_with_time_of_first_column() -> None:
    schedule = make_schedule("1f1b", 2, 8)
    timeline = simulate_schedule(schedule, {ActionKind.FORWARD: 0.5, ActionKind.BACKWARD: 1})
    bands = format_schedule_as_text(schedule, timeline, max_line_width=45).split("\n\n")[:-1]
    assert [band.splitlines()[0].split() for band in bands] == [
        ["time", "0", "2.5"],
        ["time", "5", "7.5"],
        ["time", "10", "12.5"],
    ]


def test_rows_are_aligned_for_two_digit_numbers() -> None:
    schedule = make_schedule("1f1b", 11, 12)
    rows = format_schedule_as_text(schedule, simulate_schedule(schedule)).split("\n\n")[0].splitlines()[1:]
    assert len({row.index("|") for row in rows}) == 1
    assert {match.start() % 4 for row in rows for match in re.finditer(r"[FB]\d+", row)} == {rows[0].index("F") % 4}


def test_rounded_times_are_noted() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    timeline = simulate_schedule(schedule, {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2.4}, send_duration=0.3)
    text = format_schedule_as_text(schedule, timeline)
    assert "a column is 1 units of time; times are rounded to columns" in text
    for action in (action for order in schedule.actions for action in order):
        assert re.search(rf"^rank {action.stage} .* {action.kind}{action.micro_batch}\b", text, re.MULTILINE)
    assert "rounded" not in format_schedule_as_text(schedule, simulate_schedule(schedule))


# ----------------------------------------------------------------------------------------------------------- the chart


@needs_matplotlib
@pytest.mark.parametrize("name", SCHEDULES)
def test_chart_has_box_per_action_and_costs(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, 2, 4)
    timeline = simulate_schedule(schedule)
    save_schedule_chart(schedule, timeline, tmp_path / "chart.svg")
    svg = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    for said in ("rank 0", f"{name}: 2 stages, 4 micro-batches", f"bubble (idle) {timeline.bubble:.1%}", "forward"):
        assert said in svg
    wanted = Counter(get_action_colors(schedule, action)[0].lower() for order in schedule.actions for action in order)
    drawn = Counter(re.findall(r"fill: (#\w{6}); stroke: #ffffff", svg))
    assert drawn == wanted


@needs_matplotlib
def test_charts_are_reproducible(tmp_path: Path) -> None:
    schedule = make_schedule("zbv", 2, 4)
    for name in ("one.svg", "two.svg"):
        save_schedule_chart(schedule, simulate_schedule(schedule), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@needs_matplotlib
def test_png_chart_has_maximum_width(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", 2, 100)
    save_schedule_chart(schedule, simulate_schedule(schedule), tmp_path / "chart.png")
    head = (tmp_path / "chart.png").read_bytes()[:24]
    assert head[1:4] == b"PNG" and int.from_bytes(head[16:20]) <= 40 * 160


def test_kinds_and_chunks_have_distinct_colors() -> None:
    schedule = make_schedule("interleaved_zb", 2, 2, 4)
    kinds = (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT)
    faces = {get_action_colors(schedule, PipelineAction(kind, 2 * chunk, 0))[0] for kind in kinds for chunk in range(4)}
    assert len(faces) == 12


def test_invalid_chart_path_raises(tmp_path: Path) -> None:
    for path, said in [
        ("chart.pdf", r"does not end in \.svg or \.png"),
        ("nowhere/chart.svg", "its parent folder does not exist"),
    ]:
        with pytest.raises(ConfigError, match=said):
            check_chart_path(tmp_path / path)


def test_missing_matplotlib_raises_with_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardformer.pipeline.schedule_chart.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'shardformer\[plot\]'"):
        save_schedule_chart(
            make_schedule("1f1b", 2, 2), simulate_schedule(make_schedule("1f1b", 2, 2)), tmp_path / "chart.svg"
        )
