"""Output of Progress with and without a terminal."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shardformer.errors import ConfigError
from shardformer.training.hooks import progress
from shardformer.training.hooks.progress import Progress, StatusLine, format_duration, scale_to_si_prefix
from shardformer.training.hooks.throughput import Throughput
from shardformer.training.trainer import Trainer
from tests.trainer.hooks.runs import engine_of, pairs


def test_without_a_terminal_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(engine_of(), [Throughput(), Progress(every_s=0)]).fit(steps=4, validation=pairs(4))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {n}/4" for n in (1, 2, 3, 3, 4, 4)]
    assert lines[3].startswith("step 3/4  validation  loss 0.")
    assert all(what in lines[-2] for what in ("loss 0.", "lr 0.05", "tokens/s", "FLOP/s", "B"))


def test_the_last_step_is_always_printed(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(engine_of(), [Progress(every_s=1000)]).fit(epochs=2)
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["step 1/6", "step 6/6"]


def test_a_terminal_shows_a_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    Trainer(engine_of(), [Progress()]).fit(steps=4, validation=pairs(4))
    output = capsys.readouterr().out
    assert "4/4" in output
    assert "loss 0." in output
    assert "left" in output
    assert "validation  loss 0." in output


def test_a_complete_run_and_a_resumed_run_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(engine_of(), [Progress()])
    trainer.fit(steps=4)
    capsys.readouterr()
    trainer.fit(steps=4)
    assert capsys.readouterr().out == "Nothing to train: 4 of 4 steps are complete.\n"
    trainer.fit(steps=5)
    assert capsys.readouterr().out.startswith("Resuming from step 4.\nstep 5/5  loss 0.")


def test_a_notebook_shows_a_progress_bar_in_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def show(data: dict[str, str], raw: bool, display_id: bool = False) -> Any:
        assert raw
        shown.append(("new " if display_id else "update ") + data["text/plain"])
        return SimpleNamespace(update=show)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=show))
    monkeypatch.setattr(
        progress, "create_rich_console", lambda: SimpleNamespace(is_jupyter=True, is_terminal=False, print=print)
    )
    Trainer(engine_of(), [Progress()]).fit(steps=4)
    assert [line.split()[0] for line in shown] == ["new", *["update"] * (len(shown) - 1)]
    assert f"{'━' * 20} 4/4  loss 0." in shown[-1]


LINE = StatusLine(
    0.5,
    ["10000/20000", "loss 3.1416", "10:00:13 left"],
    ["3.74k tokens/s", "lr 0.000123", "468 MB", "0:00:40 elapsed", "epoch 1/3", "5.63 GFLOP/s"],
)


@pytest.mark.parametrize("width", [30, 45, 60, 80, 100, 120, 160])
def test_the_line_fits_and_keeps_step_loss_and_remaining_time(width: int) -> None:
    for total in (LINE, StatusLine(None, LINE.required[:2], LINE.optional)):
        text = total.to_rich_text(width).plain
        assert len(text) <= max(width, len("10000/20000  loss 3.1416  10:00:13 left"))
        assert all(each in text for each in total.required)


def test_a_wider_terminal_shows_more_values() -> None:
    shown = {width: LINE.to_rich_text(width).plain for width in (45, 80, 120, 160)}
    assert shown[45] == "10000/20000  loss 3.1416  10:00:13 left"
    assert shown[80] == "━━━━━───── 10000/20000  loss 3.1416  10:00:13 left  3.74k tokens/s  lr 0.000123"
    assert shown[120].endswith("lr 0.000123  468 MB  0:00:40 elapsed")
    assert shown[160].endswith("0:00:40 elapsed  epoch 1/3  5.63 GFLOP/s")
    assert LINE.to_rich_text(80, ascii_only=True).plain.startswith("#####----- 10000/20000")


def test_the_remaining_time_is_that_of_recent_steps() -> None:
    shown = Progress(every_s=0)
    trainer: Any = SimpleNamespace(num_steps=10, step=3)
    assert shown._estimate_remaining_seconds(trainer) is None
    shown._step_ends.extend([100.0, 102.0, 104.0])
    assert shown._estimate_remaining_seconds(trainer) == 14.0
    assert [format_duration(s) for s in (0.4, 59.6, 3600, 360_000)] == ["0:00:00", "0:01:00", "1:00:00", "100:00:00"]


def test_the_reason_of_an_early_stop_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Stops(Progress):
        def after_step(self, trainer: Any) -> None:
            trainer.stop("it is enough")

    Trainer(engine_of(), [Stops()]).fit(steps=4)
    assert "Stopped after step 1: it is enough." in capsys.readouterr().out


def test_numbers_have_unit_prefixes() -> None:
    assert [" ".join(scale_to_si_prefix(v)) for v in (0.5, 12, 999.6, 51200, 1.5e6, 2e12)] == [
        "0.5 ",
        "12 ",
        "1 k",
        "51.2 k",
        "1.5 M",
        "2 T",
    ]


@pytest.mark.parametrize("every_s", [-1, True, "10"])
def test_an_invalid_interval_raises(every_s: Any) -> None:
    with pytest.raises(ConfigError, match="every_s"):
        Progress(every_s=every_s)
