"""Output of Progress with and without a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from shardformer.errors import ConfigError
from shardformer.training.hooks.progress import Progress, format_metrics, scale_to_unit_prefix
from shardformer.training.hooks.throughput import Throughput
from shardformer.training.trainer import Trainer
from tests.trainer.hooks.runs import engine_of, pairs


def test_without_a_terminal_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(engine_of(), [Throughput(), Progress(every_s=0)]).fit(steps=4, validation=pairs(4))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {n}/4" for n in (1, 2, 3, 3, 4, 4)]
    assert lines[3].startswith("step 3/4  validation/loss 0.")
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
    assert "validation/loss" in output


def test_the_reason_of_an_early_stop_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Stops(Progress):
        def after_step(self, trainer: Any) -> None:
            trainer.stop("it is enough")

    Trainer(engine_of(), [Stops()]).fit(steps=4)
    assert "stopped at step 1: it is enough" in capsys.readouterr().out


def test_numbers_have_unit_prefixes() -> None:
    assert [" ".join(scale_to_unit_prefix(v)) for v in (0.5, 12, 51200, 1.5e6, 2e12)] == [
        "0.5 ",
        "12 ",
        "51.2 k",
        "1.5 M",
        "2 T",
    ]
    assert format_metrics({"loss": 1.0, "memory_bytes": 2.1e9, "other": 3.0}) == "loss 1.0000  2.1 GB"
    assert format_metrics({"tokens_per_s": 51200.0, "flops_per_s": 2.5e9}) == "51.2k tokens/s  2.5 GFLOP/s"


@pytest.mark.parametrize("every_s", [-1, True, "10"])
def test_an_invalid_interval_raises(every_s: Any) -> None:
    with pytest.raises(ConfigError, match="every_s"):
        Progress(every_s=every_s)
