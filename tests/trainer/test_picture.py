"""Charts of runs have a panel per metric, and can be drawn for all values."""

from __future__ import annotations

import math
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from shardformer.errors import ConfigError
from shardformer.training.metrics_log import MetricsRecord, MetricsWriter
from shardformer.training.metrics_plot import (
    COLORS,
    describe_loss_differences,
    find_layout_changes,
    get_curve_overlap_positions,
    get_default_metric_names,
    get_isolated_point_mask,
    get_metric_names,
    get_metric_series,
    get_plot_series,
    make_metrics_figure,
    needs_log_scale,
    plot_metrics,
    save_metrics_plot,
    summarize_runs,
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
    assert get_default_metric_names({"a": records}) == ["loss", "memory_bytes", "kappa", "f1"]


def test_a_series_is_sorted_by_step() -> None:
    steps, values = get_metric_series([*of("loss", 1.0, 2.0)[::-1], MetricsRecord(9, 0, 0.0, {"other": 1.0})], "loss")
    assert steps.tolist() == [1, 2] and values.tolist() == [1, 2]


def test_a_long_curve_is_smoothed_and_interrupted_at_nonfinite_values() -> None:
    values = [1.0, 3.0] * 100
    values[40] = math.inf
    _, curve = get_plot_series("loss", get_metric_series(of("loss", *values), "loss"))
    assert np.flatnonzero(np.isnan(curve)).tolist() == [40]
    assert np.abs(curve[10:30] - 2.0).max() < 0.2  # of 11 values 5 or 6 are 1
    assert (
        get_plot_series("learning_rate", get_metric_series(of("learning_rate", *values), "learning_rate"))[1][0] == 1.0
    )


def test_isolated_points_are_found() -> None:
    values = np.array([1.0, np.nan, 2.0, 3.0, np.inf, 4.0])
    assert get_isolated_point_mask(values).tolist() == [True, False, False, False, False, True]


def test_only_wide_losses_and_norms_have_a_logarithmic_axis() -> None:
    wide = np.array([0.01, 5.0])
    assert needs_log_scale("loss", wide) and needs_log_scale("grad_norm", wide)
    assert (
        not needs_log_scale("tokens_per_s", wide)
        and not needs_log_scale("loss", wide - 0.01)
        and not needs_log_scale("loss", wide[:1])
    )


@needs_matplotlib
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_runs_are_drawn(suffix: str, tmp_path: Path) -> None:
    bad = [*run(4), MetricsRecord(5, 0, 5.0, {"loss": math.nan}), MetricsRecord(6, 0, 6.0, {"loss": math.inf})]
    runs = {"long": run(250, tokens_per_s=5e4), "bad": bad, "one": run(1), "wide": of("loss", 1e6), "none": []}
    file = tmp_path / f"picture{suffix}"
    save_metrics_plot(runs, file)
    assert file.stat().st_size > 10_000
    if suffix == ".svg":
        save_metrics_plot(runs, tmp_path / "again.svg")
        assert (tmp_path / "again.svg").read_bytes() == file.read_bytes()


@needs_matplotlib
def test_the_legend_lists_only_what_is_drawn(tmp_path: Path) -> None:
    records = [*run(150), *of("grad_norm", 1.0, 2.0), *of("validation/loss", 1.0, math.nan)]
    runs = {"validation": records, "_second $x$": run(3)}
    kinds = ["validation", "moving average", "as recorded", "not finite"]
    best = "lowest validation loss"
    entries = ["validation", "_second $x$ (loss equal to validation)", kinds[0], best, *kinds[1:]]
    save_metrics_plot(runs, tmp_path / "all.svg")
    assert words(tmp_path / "all.svg")[-len(entries) :] == entries
    save_metrics_plot(runs, tmp_path / "norm.svg", ["grad_norm"])
    assert words(tmp_path / "norm.svg")[-2:] == entries[:2]


@needs_matplotlib
def test_a_finite_value_between_nonfinite_values_is_visible(tmp_path: Path) -> None:
    def num_marks(*values: float) -> int:
        save_metrics_plot({"a": of("loss", *values)}, tmp_path / "a.svg")
        return (tmp_path / "a.svg").read_text(encoding="utf-8").count("<use")

    # as many crosses, and axes with as many numbers
    assert num_marks(1.0, math.nan, 2.0, math.nan, 1.0) == num_marks(1.0, 2.0, 1.0, math.nan, math.nan) + 3


@needs_matplotlib
def test_many_runs_have_different_colors(tmp_path: Path) -> None:
    save_metrics_plot({f"run {i}": run(5) for i in range(12)}, tmp_path / "many.svg", ["loss"])
    strokes = re.findall(r"stroke: (#[0-9a-f]{6}); stroke-width: 1.6", (tmp_path / "many.svg").read_text("utf-8"))
    assert len(set(strokes)) == 12


def test_the_speed_is_drawn_once() -> None:
    both = {"a": run(3, tokens_per_s=8.0, samples_per_s=2.0, flops_per_s=9.0)}
    assert get_default_metric_names(both) == ["loss", "tokens_per_s", "memory_bytes"]
    assert get_metric_names(both) == ["loss", "tokens_per_s", "memory_bytes", "flops_per_s", "samples_per_s"]
    assert get_default_metric_names({"a": of("samples_per_s", 1.0)}) == ["samples_per_s"]


def moved(records: list[MetricsRecord], factor: float) -> list[MetricsRecord]:
    return [MetricsRecord(r.step, 0, r.seconds, {"loss": r.values["loss"] * factor}) for r in records]


def test_curves_that_coincide_are_found() -> None:
    runs = {"a": run(40), "b": moved(run(40), 1.2), "c": moved(run(20), 1.001), "d": moved(run(30), 1.2)}
    assert get_curve_overlap_positions(runs, "loss") == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert get_curve_overlap_positions({"a": of("loss", 1.0), "b": of("grad_norm", 1.0)}, "loss") == [(0, 1), (0, 1)]


@needs_matplotlib
@pytest.mark.parametrize("validated", [False, True])
def test_every_run_is_visible_where_curves_coincide(validated: bool) -> None:
    records = [MetricsRecord(s, 0, 0.0, {"validation/loss" if validated else "loss": 3 / s}) for s in range(1, 60)]
    figure = make_metrics_figure({name: records for name in "abc"}, ["loss"])
    figure.legends[0].remove()
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[:, :, :3].astype(int)
    colors = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in COLORS[:3]]
    counts = [int((np.abs(pixels - color).sum(axis=2) < 40).sum()) for color in colors]
    assert min(counts) > 0.15 * sum(counts), counts


def test_the_difference_of_losses_is_stated() -> None:
    runs = {"a": run(40), "b": moved(run(20), 1 + 2e-6), "c": of("grad_norm", 1.0)}
    assert describe_loss_differences(runs) == ["b: loss differs from a by at most 2.0e-06 (relative, 20 steps)"]
    assert describe_loss_differences({"a": run(3)}) == []


def with_layouts(**layouts: str) -> list[MetricsRecord]:
    return [MetricsRecord(r.step, 0, r.seconds, r.values, layouts.get(f"s{r.step}", "")) for r in run(40)]


def test_a_resume_and_a_change_of_the_layout_are_found() -> None:
    records = with_layouts(s1="tensor=2", s11="tensor=2", s31="pipe=2")
    assert find_layout_changes(records) == [(10, "resumed"), (30, "pipe=2")]
    assert find_layout_changes(run(3)) == []


@needs_matplotlib
def test_layout_changes_and_the_best_validation_point_are_marked() -> None:
    validation = [MetricsRecord(step, 0, 0.0, {"validation/loss": abs(step - 20) + 1.0}) for step in (10, 20, 30)]
    figure = make_metrics_figure({"a": [*with_layouts(s1="tensor=2", s31="pipe=2"), *validation]})
    for axes in figure.axes:
        assert [line.get_xdata() for line in axes.lines if line.get_linestyle() == ":"] == [[30, 30]]
    loss = figure.axes[0]
    assert [text.get_text() for text in loss.texts] == ["pipe=2"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in loss.lines if line.get_marker() == "*"] == [(20, 1.0)]


@needs_matplotlib
def test_all_panels_have_the_same_steps_and_round_ticks() -> None:
    records = [*run(33), *(MetricsRecord(s, 0, 0.0, {"grad_norm": 1.0, "learning_rate": 3e-3}) for s in (11, 16, 33))]
    figure = make_metrics_figure({"a": records})
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert all([tick for tick in axes.get_xticks() if 0 <= tick <= 33] == [0, 10, 20, 30] for axes in figure.axes)
    constant = [
        axes for axes in figure.axes if axes.get_title(loc="left") in ("norm of the gradients", "learning rate")
    ]
    assert len(constant) == 2 and all(axes.get_ylim()[0] == 0 for axes in constant)


@needs_matplotlib
def test_a_notebook_displays_the_figure_of_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        writer = MetricsWriter(tmp_path / name)
        for record in run(3):
            writer.write(record)
        writer.close()
    figure = plot_metrics(tmp_path / "a", tmp_path / "b", metrics=["loss"])
    assert len(figure.axes) == 1
    assert vars(figure)["_repr_png_"]().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"Did you mean 'loss'\?"):
        plot_metrics(tmp_path / "a", metrics=["los"])


def test_metrics_that_cannot_be_drawn_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        save_metrics_plot({"a": run(2)}, tmp_path / "a.pdf")
    if find_spec("matplotlib") is not None:
        with pytest.raises(ConfigError, match=r"No metrics to plot were found in a"):
            save_metrics_plot({"a": [MetricsRecord(1, 0, 1.0, {})]}, tmp_path / "a.png")


@needs_matplotlib
def test_a_chart_replaces_a_link_and_a_failure_keeps_the_old_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    precious, path = tmp_path / "precious", tmp_path / "curves.svg"
    precious.write_text("precious")
    path.symlink_to(precious)
    save_metrics_plot({"a": run(3)}, path)
    assert precious.read_text() == "precious" and not path.is_symlink()
    before, real = path.read_bytes(), Figure.savefig

    def full(self: Figure, file: Path, **options: object) -> None:
        real(self, file)
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(ConfigError, match="No space left"):
        save_metrics_plot({"a": run(4)}, path)
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
    assert summarize_runs(runs) == [
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
    small, large = summarize_runs({"small": of("loss", 1.5e-6), "large": of("loss", 2.5e9)})
    assert (small["last loss"], large["last loss"]) == ("1.500e-06", "2.500e+09")
