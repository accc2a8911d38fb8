"""Charts of runs have a panel per metric, and can be drawn for all values."""

from __future__ import annotations

import math
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from shardformer.errors import ConfigError
from shardformer.training.metrics_log import MetricsRecord
from shardformer.training.metrics_plot import (
    curve_to_plot,
    draw_metrics,
    find_isolated_points,
    list_panels,
    metric_series,
    metrics_summary,
    uses_log_scale,
)

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is an extra")


def run(count: int, **values: float) -> list[MetricsRecord]:
    return [MetricsRecord(s, 0, float(s), {"loss": 3 / s, "memory_bytes": 1e9, **values}) for s in range(1, count + 1)]


def of(name: str, *values: float) -> list[MetricsRecord]:
    return [MetricsRecord(step, 0, float(step), {name: value}) for step, value in enumerate(values, start=1)]


def words(file: Path) -> list[str]:
    """Texts of an SVG chart; matplotlib writes each text as a comment next to its outline."""
    return re.findall(r"<!-- (.*?) -->", file.read_text(encoding="utf-8"))


def test_training_and_validation_losses_share_a_panel() -> None:
    records = [*run(3, kappa=0.5), MetricsRecord(3, 1, 3.0, {"validation/loss": 1.0, "validation/f1": 0.5})]
    assert list_panels({"a": records}) == ["loss", "memory_bytes", "kappa", "f1"]


def test_a_series_is_sorted_by_step() -> None:
    steps, values = metric_series([*of("loss", 1.0, 2.0)[::-1], MetricsRecord(9, 0, 0.0, {"other": 1.0})], "loss")
    assert steps.tolist() == [1, 2] and values.tolist() == [1, 2]


def test_a_long_curve_is_smoothed_and_interrupted_at_nonfinite_values() -> None:
    values = [1.0, 3.0] * 100
    values[40] = math.inf
    _, curve = curve_to_plot("loss", metric_series(of("loss", *values), "loss"))
    assert np.flatnonzero(np.isnan(curve)).tolist() == [40]
    assert np.abs(curve[10:30] - 2.0).max() < 0.2  # of 11 values 5 or 6 are 1
    assert curve_to_plot("learning_rate", metric_series(of("learning_rate", *values), "learning_rate"))[1][0] == 1.0


def test_isolated_points_are_found() -> None:
    values = np.array([1.0, np.nan, 2.0, 3.0, np.inf, 4.0])
    assert find_isolated_points(values).tolist() == [True, False, False, False, False, True]


def test_only_wide_losses_and_norms_have_a_logarithmic_axis() -> None:
    wide = np.array([0.01, 5.0])
    assert uses_log_scale("loss", wide) and uses_log_scale("grad_norm", wide)
    assert (
        not uses_log_scale("tokens_per_s", wide)
        and not uses_log_scale("loss", wide - 0.01)
        and not uses_log_scale("loss", wide[:1])
    )


@needs_matplotlib
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_runs_are_drawn(suffix: str, tmp_path: Path) -> None:
    bad = [*run(4), MetricsRecord(5, 0, 5.0, {"loss": math.nan}), MetricsRecord(6, 0, 6.0, {"loss": math.inf})]
    runs = {"long": run(250, tokens_per_s=5e4), "bad": bad, "one": run(1), "wide": of("loss", 1e6), "none": []}
    file = tmp_path / f"picture{suffix}"
    draw_metrics(runs, file)
    assert file.stat().st_size > 10_000
    if suffix == ".svg":
        draw_metrics(runs, tmp_path / "again.svg")
        assert (tmp_path / "again.svg").read_bytes() == file.read_bytes()


@needs_matplotlib
def test_the_legend_lists_only_what_is_drawn(tmp_path: Path) -> None:
    records = [*run(150), *of("grad_norm", 1.0, 2.0), *of("validation/loss", 1.0, math.nan)]
    runs = {"validation": records, "_second $x$": run(3)}
    kinds = ["validation", "moving average", "as recorded", "not finite"]
    draw_metrics(runs, tmp_path / "all.svg")
    assert [word for word in words(tmp_path / "all.svg") if word in [*runs, *kinds]] == [*runs, *kinds]
    draw_metrics(runs, tmp_path / "norm.svg", ["grad_norm"])
    assert [word for word in words(tmp_path / "norm.svg") if word in [*runs, *kinds]] == list(runs)


@needs_matplotlib
def test_a_finite_value_between_nonfinite_values_is_visible(tmp_path: Path) -> None:
    def num_marks(*values: float) -> int:
        draw_metrics({"a": of("loss", *values)}, tmp_path / "a.svg")
        return (tmp_path / "a.svg").read_text(encoding="utf-8").count("<use")

    # as many crosses, and axes with as many numbers
    assert num_marks(1.0, math.nan, 2.0, math.nan, 1.0) == num_marks(1.0, 2.0, 1.0, math.nan, math.nan) + 3


@needs_matplotlib
def test_many_runs_have_different_colors(tmp_path: Path) -> None:
    draw_metrics({f"run {i}": run(5) for i in range(12)}, tmp_path / "many.svg", ["loss"])
    strokes = re.findall(r"stroke: (#[0-9a-f]{6}); stroke-width: 1.6", (tmp_path / "many.svg").read_text("utf-8"))
    assert len(set(strokes)) == 12


def test_metrics_that_cannot_be_drawn_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        draw_metrics({"a": run(2)}, tmp_path / "a.pdf")
    if find_spec("matplotlib") is not None:
        with pytest.raises(ConfigError, match=r"no metrics to draw in a"):
            draw_metrics({"a": [MetricsRecord(1, 0, 1.0, {})]}, tmp_path / "a.png")


@needs_matplotlib
def test_a_chart_replaces_a_link_and_a_failure_keeps_the_old_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    precious, path = tmp_path / "precious", tmp_path / "curves.svg"
    precious.write_text("precious")
    path.symlink_to(precious)
    draw_metrics({"a": run(3)}, path)
    assert precious.read_text() == "precious" and not path.is_symlink()
    before, real = path.read_bytes(), Figure.savefig

    def full(self: Figure, file: Path, **options: object) -> None:
        real(self, file)
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(ConfigError, match="No space left"):
        draw_metrics({"a": run(4)}, path)
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["curves.svg", "precious"]


def recorded(count: int) -> list[MetricsRecord]:
    values = {"tokens_per_s": 1000.0, "memory_bytes": 2e9}
    return [MetricsRecord(step, 0, step * 0.5, {"loss": 3.0 / step, **values}) for step in range(1, count + 1)]


def test_metrics_summary() -> None:
    speeds = [
        MetricsRecord(41 + n, 0, 20.0 + n, {"tokens_per_s": speed})
        for n, speed in enumerate([4000.0, 80000.0, math.nan])
    ]
    runs = {"a": [*recorded(40), *speeds], "b": of("loss", 4.0, 2.0, math.nan), "c": of("loss", math.inf), "d": []}
    assert metrics_summary(runs) == [
        {
            "run": "a", "step": "43", "time": "0:22", "last loss": "0.0750", "best loss": "0.0750",
            "last validation loss": "", "best validation loss": "", "mean tokens/s": "2952", "peak memory": "2.0 GB",
        },
        {
            "run": "b", "step": "3", "time": "0:03", "last loss": "nan", "best loss": "2.0000",
            "last validation loss": "", "best validation loss": "", "mean tokens/s": "", "peak memory": "",
        },
        {
            "run": "c", "step": "1", "time": "0:01", "last loss": "inf", "best loss": "inf",
            "last validation loss": "", "best validation loss": "", "mean tokens/s": "", "peak memory": "",
        },
        {
            "run": "d", "step": "0", "time": "0:00", "last loss": "", "best loss": "",
            "last validation loss": "", "best validation loss": "", "mean tokens/s": "", "peak memory": "",
        },
    ]  # fmt: skip


def test_small_and_large_losses_keep_their_digits() -> None:
    small, large = metrics_summary({"small": of("loss", 1.5e-6), "large": of("loss", 2.5e9)})
    assert (small["last loss"], large["last loss"]) == ("1.500e-06", "2.500e+09")
