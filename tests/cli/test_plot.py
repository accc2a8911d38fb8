"""``shardformer plot``: runs in the terminal and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardformer.cli import main
from shardformer.cli.plot import _names
from shardformer.errors import ConfigError
from shardformer.trainer.records import Record, RecordWriter


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("first", "second"):
        writer = RecordWriter(tmp_path / name / "log")
        for step in range(1, 20):
            writer.write(Record(step, 0, float(step), {"loss": 2 / step, "grad_norm": 1.0, "memory_bytes": 1e9}))
        writer.close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "70")
    return ["first/log", "second/log"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plot", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_a_run_is_drawn_into_its_folder(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, runs[0])
    assert code == 0
    assert "loss" in out and "memory per process" in out and "grad" not in out
    assert "The picture is in first/log/curves.png" in out
    assert Path("first/log/curves.png").stat().st_size > 10_000
    assert max(map(len, out.splitlines())) <= 70


def test_several_runs_are_told_apart(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, *runs, "--values", "loss,grad_norm", "--out", "both.svg")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("first/log ", "second/log "))] == runs
    assert "norm of the gradients" in out
    assert Path("both.svg").is_file()


def test_a_value_that_was_not_recorded_is_told(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, runs[0], "--values", "los")
    assert code == 2
    assert "Did you mean 'loss'" in err
    assert said(capsys, "third")[0] == 2


def test_names_are_as_long_as_they_must_be() -> None:
    assert _names([Path("a/x"), Path("b/y")]) == ["x", "y"]
    assert _names([Path("a/x/log"), Path("a/y/log")]) == ["x/log", "y/log"]
    with pytest.raises(ConfigError, match=r"twice"):
        _names([Path("a/x"), Path("a/x")])
