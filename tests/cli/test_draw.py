"""``shardformer draw``."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from shardformer.cli import main
from shardformer.pipeline.schedule_chart import format_schedule_as_text
from shardformer.pipeline.schedules import SCHEDULES, ActionKind, make_schedule, simulate_schedule


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["draw", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_fits_into_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--schedule", name, "--stages", "4", "--micro-batches", "8") == 0
    said = capsys.readouterr().out
    schedule = make_schedule(name, 4, 8)
    assert said.split() == format_schedule_as_text(schedule, simulate_schedule(schedule), max_line_width=80).split()
    assert max(map(len, said.splitlines())) <= 80
    assert said.count("rank 3 |") > 1


def test_a_long_schedule_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--micro-batches", "32") == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) <= 36
    assert "F0 " in said and "B31" in said and "F15" not in said
    assert "time 30 to 75 is not shown" in said and "--out FILE.svg to see the whole schedule" in said
    schedule = make_schedule("1f1b", 4, 32)
    assert "F15" in format_schedule_as_text(schedule, simulate_schedule(schedule)), (
        "without a width, nothing is left out"
    )


def test_durations_and_send_time_are_applied(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--stages", "2", "--micro-batches", "3", "--durations", "F=1, B=3", "--send", "1") == 0
    schedule = make_schedule("1f1b", 2, 3)
    timeline = simulate_schedule(schedule, {ActionKind.BACKWARD: 3}, send_duration=1)
    assert f"{timeline.bubble:.1%} of {timeline.makespan:g} units" in capsys.readouterr().out


def test_model_chunks_are_applied(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--schedule", "interleaved", "--stages", "2", "--micro-batches", "2", "--num-model-chunks", "3") == 0
    assert "c virtual stages 4-5" in capsys.readouterr().out


def test_a_terminal_shows_each_action_as_one_colored_block(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "45")
    assert run("--stages", "2", "--micro-batches", "6") == 0
    said = capsys.readouterr().out
    cells = re.findall(r"\x1b\[([\d;]+)m( *[FB-][\d-])\x1b", said)
    of_kind = {kind: {style for style, cell in cells if cell.startswith(kind)} for kind in "FB"}
    assert len(of_kind["F"]) == len(of_kind["B"]) == 1 and of_kind["F"] != of_kind["B"]
    # the second half of a backward pass, with the gap before it, also at the start of a band
    assert {style for style, cell in cells if "--" in cell} == of_kind["B"]
    assert {cell for _, cell in cells if "--" in cell} == {" --", "--"}


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an extra")
def test_the_path_of_a_saved_chart_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ("a-long-name-that-a-user-may-copy-" * 3 + ".svg")
    assert run("--out", str(path)) == 0
    assert f"Chart saved to {path}\n" in capsys.readouterr().out
    assert path.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--schedule", "1f2b"), "Did you mean '1f1b'?"),
        (("--schedule", "interleaved", "--micro-batches", "10"), "Use 8 or 12"),
        (("--durations", "W=1"), "Use the actions of the schedule '1f1b': F, B"),
        (("--durations", "F=one"), "F=1.5"),
        (("--durations", "F"), "F=1.5"),
        (("--durations", "B=0"), "duration B=0"),
        (("--send", "-1"), "send=-1"),
        (("--out", "chart.pdf"), "chart.svg"),
        (("--micro-batches", "100000"), "Use --micro-batches 4096 or fewer"),
        (("--stages", "16384", "--micro-batches", "1"), "Use fewer stages, micro-batches or model chunks"),
        (
            ("--schedule", "interleaved", "--num-model-chunks", "1000000"),
            "Use fewer stages, micro-batches or model chunks",
        ),
        (
            ("--schedule", "zbv", "--stages", "16", "--micro-batches", "1024"),
            "Use fewer stages, micro-batches or model chunks",
        ),
        (("--durations", "F=1e308,B=1e308"), "schedule takes inf time units"),
        (("--durations", "F=1e-308"), "that are closer to each other"),
        (("--send", "1e9"), "exceeds the maximum of 32768 columns"),
    ],
)
def test_invalid_options_raise_before_drawing(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert said in err and "Traceback" not in err and out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grid", "2x2"], ["1, 0", "2/2, 1/2", "2.5 N H + 0.75 W"]),
        (["--grid", "4x1"], ["4/4, all", "2.25 W"]),
        (
            ["--grid", "8", "--tensor-parallel-mode", "3d"],
            ["1, 1, 1", "4/4, 2/2", "1.25 N H + 0.125 N (2 V + E) + 0.375 W"],
        ),
        (["--grid", "2x2x2", "--tensor-parallel-mode", "2.5d"], ["+ 0.25 W (copies)"]),
    ],
)
def test_a_grid_lists_the_shards_of_each_rank(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    assert [words for words in said if words not in out] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grid", "2x2", "--tensor-parallel-mode", "3d"], "Pass three sizes"),
        (["--grid", "ax2"], "--grid 4 or --grid 2x2"),
        (["--grid", "200x200"], "at most 1024 ranks"),
        (["--grid", "99999999999999999999x2"], "ranks per axis"),
        (["--grid", "2x2", "--out", "grid.png"], "--out has no effect with --grid"),
        (["--grid", "2x2", "--stages", "4"], "--stages has no effect with --grid"),
        (["--grid", "2x2", "--micro-batches", "2"], "--micro-batches has no effect with --grid"),
        (["--tensor-parallel-mode", "2d"], "--tensor-parallel-mode has no effect without --grid"),
    ],
)
def test_an_invalid_grid_raises(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err


def test_a_schedule_and_a_grid_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--stages", "2", "--micro-batches", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    timeline = simulate_schedule(make_schedule("1f1b", 2, 3))
    assert (found["bubble"], found["in_flight"]) == (timeline.bubble, [2, 1])
    assert [span["action"] for span in found["ranks"][1]] == ["F0@1", "B0@1", "F1@1", "B1@1", "F2@1", "B2@1"]
    assert run("--grid", "2x2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mode"] == "2d" and [each["place"] for each in found["ranks"]] == ["0, 0", "0, 1", "1, 0", "1, 1"]
