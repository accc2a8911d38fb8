"""The picture of runs has a panel for each value, and is drawn whatever the values are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shardformer.errors import ConfigError
from shardformer.trainer.picture import draw, panel_names
from shardformer.trainer.records import Record


def run(count: int, **values: float) -> list[Record]:
    return [Record(s, 0, float(s), {"loss": 3 / s, "memory_bytes": 1e9, **values}) for s in range(1, count + 1)]


def test_there_is_a_panel_for_each_value_and_one_for_both_losses() -> None:
    records = [*run(3, kappa=0.5), Record(3, 1, 3.0, {"validation/loss": 1.0, "validation/f1": 0.5})]
    assert panel_names({"a": records}) == ["loss", "memory_bytes", "kappa", "f1"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_runs_are_drawn(suffix: str, tmp_path: Path) -> None:
    bad = [*run(4), Record(5, 0, 5.0, {"loss": math.nan}), Record(6, 0, 6.0, {"loss": math.inf})]
    runs = {"long": run(250, tokens_per_s=5e4), "bad": bad, "one": run(1), "wide": [Record(1, 0, 1.0, {"loss": 1e6})]}
    file = tmp_path / f"picture{suffix}"
    draw(runs, file)
    assert file.stat().st_size > 10_000
    if suffix == ".svg":
        draw(runs, tmp_path / "again.svg")
        assert (tmp_path / "again.svg").read_bytes() == file.read_bytes()


def test_many_runs_have_a_colour_each(tmp_path: Path) -> None:
    draw({f"run {i}": run(5) for i in range(12)}, tmp_path / "many.png", ["loss"])
    assert (tmp_path / "many.png").is_file()


def test_what_cannot_be_drawn_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing to draw in a"):
        draw({"a": [Record(1, 0, 1.0, {})]}, tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        draw({"a": run(2)}, tmp_path / "a.pdf")
