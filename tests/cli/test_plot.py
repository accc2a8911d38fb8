"""``shardformer plot``: runs in the terminal and as a picture."""

from __future__ import annotations

import io
import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardformer.cli import main
from shardformer.cli.plot import _names
from shardformer.trainer.records import Record, RecordWriter

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is an extra")


def write(folder: Path, steps: int = 19, last: float = 0.5) -> None:
    writer = RecordWriter(folder)
    for step in range(1, steps + 1):
        loss = 2 / step if step < steps else last
        values = {"loss": loss, "tokens_per_s": 1000.0 * step, "grad_norm": 1.0, "memory_bytes": 1e9}
        writer.write(Record(step, 0, float(step), values))
    writer.write(Record(steps, 0, float(steps), {"validation/loss": 1.25}))
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
    monkeypatch.setattr("shardformer.pipeline.picture.find_spec", lambda name: None)


@needs_matplotlib
@pytest.mark.parametrize("path", ["first", "first/log", "first/log/records.jsonl"])
def test_a_run_is_drawn_into_its_folder(path: str, runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, path)
    assert code == 0
    picture = Path(path.removesuffix("/records.jsonl")) / "curves.png"
    assert out.endswith(f"The picture is in {picture}\n")
    assert picture.stat().st_size > 10_000


@needs_matplotlib
def test_several_runs_are_drawn_where_one_stands(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *runs)[0] == 0
    assert Path("curves.png").stat().st_size > 10_000
    assert said(capsys, *runs, "--out", "both.svg", "--values", "loss")[0] == 0
    assert Path("both.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_the_terminal_has_the_loss_speed_and_memory_and_names_the_rest(
    runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_matplotlib(monkeypatch)
    _, out, _ = said(capsys, runs[0])
    titles = [line.strip() for line in out.splitlines() if re.fullmatch(r" +[a-z ]+", line)]
    assert titles[:3] == ["loss", "tokens per second", "memory per process"]
    assert "Recorded, too: grad_norm (--values NAMES draws them here)" in out
    _, out, _ = said(capsys, runs[0], "--values", "grad_norm, loss,grad_norm")
    titles = [line.strip() for line in out.splitlines() if re.fullmatch(r" +[a-z ]+", line)]
    assert titles[:2] == ["norm of the gradients", "loss"] and "Recorded" not in out


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_table_says_what_the_runs_reached_at_any_width(
    width: int, runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    without_matplotlib(monkeypatch)
    _, out, _ = said(capsys, *runs)
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    table = "\n".join(line for line in lines if not re.search(r"[|+]", line))
    cells = {"19", "0:19", "nan", "0.1111", "0.5000", "1.2500", "10k", "1.0 GB", "first/log", "second/log"}
    assert cells <= set(re.split(r"  +|\n", table)), table


def test_runs_without_colours_have_marks_and_with_colours_have_dots(
    runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_matplotlib(monkeypatch)
    _, out, _ = said(capsys, *runs)
    assert "* first/log (validation 1)   o second/log (validation 2)" in out and "\x1b" not in out
    _, out, _ = said(capsys, runs[0])
    assert "⣀" in out and "● validation" in out  # one run needs no colour
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    _, out, _ = said(capsys, *runs)
    legend = dict(re.findall(r"\x1b\[([\d;]+)m⠿\x1b\[0m (\S+)", out))
    assert sorted(legend.values()) == runs and len(legend) == 2
    assert set(re.findall(r"\x1b\[(38[\d;]+)m[ ⠁-⣿]*[⠁-⣿]", out)) == set(legend)


def test_more_runs_than_colours_have_marks(
    runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_matplotlib(monkeypatch)
    monkeypatch.setenv("FORCE_COLOR", "1")
    for number in range(7):
        write(Path(f"many/{number}"), 3)
    _, out, _ = said(capsys, *(f"many/{number}" for number in range(7)))
    assert not re.search("[⠁-⣿]", out)


def test_a_terminal_of_ascii_gets_ascii(
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
    assert r"gr\xf6\xdfe\u200b\n" in out
    assert "\n* " in out and "!" in out
    terminal.close()


def test_without_matplotlib_the_terminal_is_drawn_and_the_extra_named(
    runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_matplotlib(monkeypatch)
    code, out, err = said(capsys, runs[0])
    assert (code, err) == (0, "")
    assert "loss" in out and "pip install 'shardformer[plot]'" in out
    code, out, err = said(capsys, runs[0], "--out", "asked.png")  # what was asked for cannot be: an error
    assert code == 2
    assert "loss" in out and "pip install 'shardformer[plot]'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("first", "--values", "los"), "Did you mean 'loss'?"),
        (("first", "--values", "loss,"), "--values loss,: ''"),
        (("third",), "'third' does not exist"),
        (("first", "frist"), "'frist' does not exist"),
        (("first", "first/log"), "is named twice"),
        (("first", "./first/log/../log"), "is named twice"),
        (("empty",), "There is no value in empty"),
        ((".",), "holds 2 runs"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_drawn(
    arguments: tuple[str, ...], message: str, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    RecordWriter("empty").close()
    if arguments == (".",):
        Path("empty/records.jsonl").unlink()
    code, out, err = said(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err
    assert not list(Path().rglob("*.png"))


@needs_matplotlib
@pytest.mark.parametrize("out", ["curves.pdf", "nowhere/curves.png"])
def test_a_picture_that_cannot_be_is_said_before_anything_is_drawn(
    out: str, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, err = said(capsys, "first", "--out", out)
    assert (code, printed) == (2, "")
    assert out in err


def test_names_are_as_long_as_they_must_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _names([Path("a/x"), Path("b/y")]) == ["x", "y"]
    assert _names([Path("a/x/log"), Path("a/y/log")]) == ["x/log", "y/log"]
    assert _names([Path()]) == [tmp_path.name]
    (tmp_path / "records.jsonl").write_text("")
    (tmp_path / "records.1.jsonl").write_text("")
    assert _names([Path("records.jsonl")]) == [tmp_path.name]
    assert _names([Path("records.jsonl"), Path("records.1.jsonl")]) == [tmp_path.name, "records.1.jsonl"]
