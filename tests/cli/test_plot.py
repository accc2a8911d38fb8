"""``shardformer plot``: tables and plots of training runs."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardformer.cli import main
from shardformer.training.metrics_log import MetricsRecord, MetricsWriter
from shardformer.training.metrics_plot import make_unique_run_names

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is an extra")


def write(folder: Path, steps: int = 19, last: float = 0.5) -> None:
    writer = MetricsWriter(folder)
    for step in range(1, steps + 1):
        loss = 2 / step if step < steps else last
        values = {"loss": loss, "tokens_per_s": 1000.0 * step, "grad_norm": 1.0, "memory_bytes": 1e9}
        writer.write(MetricsRecord(step, 0, float(step), values))
    writer.write(MetricsRecord(steps, 0, float(steps), {"validation/loss": 1.25}))
    writer.close()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    write(tmp_path / "first" / "log")
    write(tmp_path / "second" / "log", last=math.nan)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    return ["first/log", "second/log"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plot", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardformer.cli.plot.find_spec", lambda name: None)
    monkeypatch.setattr("shardformer.pipeline.schedule_chart.find_spec", lambda name: None)


@needs_matplotlib
@pytest.mark.parametrize("path", ["first", "first/log", "first/log/records.jsonl"])
def test_the_plot_is_saved_in_the_folder_of_the_run(
    path: str, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = said(capsys, path)
    assert code == 0
    picture = Path(path.removesuffix("/records.jsonl")) / "curves.png"
    assert out.endswith(f"Plot saved to {picture}\n")
    assert picture.stat().st_size > 10_000


@needs_matplotlib
def test_the_plot_of_several_runs_is_saved_in_the_working_directory(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, *runs)[0] == 0
    assert Path("curves.png").stat().st_size > 10_000
    assert said(capsys, *runs, "--out", "both.svg", "--values", "loss")[0] == 0
    assert Path("both.svg").read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_table_fits_any_width(
    width: int, runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    without_matplotlib(monkeypatch)
    _, out, _ = said(capsys, *runs)
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    cells = {"19", "0:19", "nan", "0.1111", "0.5000", "1.2500", "10k", "1.0 GB", "first/log", "second/log"}
    assert cells <= set(re.split(r"  +|\n", out)), out


def test_an_ascii_terminal_gets_ascii(
    runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_matplotlib(monkeypatch)
    monkeypatch.setenv("COLUMNS", "40")
    write(Path("größe\u200b\n"), last=math.nan)
    raw = io.BytesIO()
    terminal = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        code, _, err = said(capsys, "größe\u200b\n", "first")
    out = raw.getvalue().decode("ascii")
    assert (code, err) == (0, "")
    assert r"gr\xf6\xdfe\u200b" in out
    terminal.close()


def test_without_matplotlib_the_table_and_the_extra_are_printed(
    runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_matplotlib(monkeypatch)
    code, out, err = said(capsys, runs[0])
    assert (code, err) == (0, "")
    assert "loss" in out and "pip install 'shardformer[plot]'" in out
    code, out, err = said(capsys, runs[0], "--out", "asked.png")  # an explicit --out that cannot be saved is an error
    assert code == 2
    assert "loss" in out and "pip install 'shardformer[plot]'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("first", "--values", "los"), "Did you mean 'loss'?"),
        (("first", "--values", "loss,"), "--values has no metric ''"),
        (("third",), "from 'third', because this path does not exist"),
        (("first", "frist"), "from 'frist', because this path does not exist"),
        (("first", "first/log"), "was passed twice"),
        (("first", "./first/log/../log"), "was passed twice"),
        (("empty",), "No metrics have been recorded in empty"),
        ((".",), "contains 2 runs"),
    ],
)
def test_invalid_arguments_raise_before_drawing(
    arguments: tuple[str, ...], message: str, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    MetricsWriter("empty").close()
    if arguments == (".",):
        Path("empty/records.jsonl").unlink()
    code, out, err = said(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err
    assert not list(Path().rglob("*.png"))


@needs_matplotlib
@pytest.mark.parametrize("out", ["curves.pdf", "nowhere/curves.png"])
def test_an_invalid_output_path_raises_before_drawing(
    out: str, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, err = said(capsys, "first", "--out", out)
    assert (code, printed) == (2, "")
    assert out in err


def test_run_names_are_as_short_as_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_unique_run_names([Path("a/x"), Path("b/y")]) == ["x", "y"]
    assert make_unique_run_names([Path("a/x/log"), Path("a/y/log")]) == ["x/log", "y/log"]
    assert make_unique_run_names([Path()]) == [tmp_path.name]
    (tmp_path / "records.jsonl").write_text("")
    (tmp_path / "records.1.jsonl").write_text("")
    assert make_unique_run_names([Path("records.jsonl")]) == [tmp_path.name]
    assert make_unique_run_names([Path("records.jsonl"), Path("records.1.jsonl")]) == [tmp_path.name, "records.1.jsonl"]


def test_the_summary_is_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", last=math.nan)
    with pytest.raises(SystemExit) as ended:
        main(["plot", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "x.png"), "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    a, b = found["runs"]
    assert (a["run"], a["step"], a["seconds"]) == ("a", 19, 19.0)
    loss = {"last": 0.5, "min": 2 / 18, "min_step": 18, "max": 2.0}
    assert a["metrics"]["loss"] == pytest.approx({**loss, "mean": a["metrics"]["loss"]["mean"]})
    assert a["metrics"]["validation/loss"]["last"] == 1.25 and b["metrics"]["loss"]["last"] == "nan"
    assert found["loss_differences"] == [{"run": "b", "other": "a", "relative": 0.0, "steps": 18}]
    assert (found["plot"] is not None) == (tmp_path / "x.png").exists()
