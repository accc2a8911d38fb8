"""Draws charts of logged metrics, with one panel per metric, and summarizes runs in a table."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from math import ceil, isfinite, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardformer.errors import ConfigError, check_names_are_known, format_bytes
from shardformer.pipeline.schedule_chart import check_chart_path, require_matplotlib, write_chart_atomically
from shardformer.training.metrics_log import (
    MetricsRecord,
    encode_float_for_json,
    find_metrics_file,
    read_metrics_records,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs: TypeAlias = Mapping[str, Sequence[MetricsRecord]]
Series: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps, and the recorded values."""

VALIDATION = "validation/"
_TITLES = {
    "loss": "loss",
    "tokens_per_s": "tokens per second",
    "memory_bytes": "memory per process",
    "learning_rate": "learning rate",
    "flops_per_s": "FLOP per second",
    "grad_norm": "norm of the gradients",
}
FROM_ZERO = {"tokens_per_s", "memory_bytes", "flops_per_s", "learning_rate"}
_SAME_CURVE = {"samples_per_s", "flops_per_s"}  # proportional to tokens_per_s
_NEVER_SMOOTHED = {"memory_bytes", "learning_rate"}
_LOG_IF_WIDE = {"loss", "grad_norm"}
_WIDE = 100.0  # ratio of largest to smallest value above which an axis is logarithmic
_MANY_POINTS = 100  # number of points above which a curve is smoothed
# Palette of Okabe and Ito without yellow, which is too light for a line.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
_INK, _GRID = "#444444", "#E4E4E4"
_STYLE = {"svg.hashsalt": "shardformer", "agg.path.chunksize": 10_000, "font.size": 9, "text.parse_math": False}
_COINCIDE = 0.005  # curves closer than this share of a panel's height are drawn as dashes of both colors
_DASH = 4.0  # length of a dash, in line widths
_EQUAL = 1e-3  # largest relative difference of losses that the legend states


def read_run_metrics(run_paths: Sequence[str | Path]) -> Runs:
    """Read the recorded metrics of training runs into a dict whose keys are run names.

    Args:
        run_paths: Output folders of training runs, or their record files.

    Raises:
        ConfigError: A folder contains no run, or a run is passed twice.
    """
    files = [find_metrics_file(path) for path in run_paths]
    real = [file.resolve() for file in files]
    if duplicate := next((str(file) for file, name in zip(files, real) if real.count(name) > 1), None):
        raise ConfigError(f"The run {duplicate!r} was passed twice.", remedy="Pass each run only once.")
    return dict(zip(make_unique_run_names([Path(path) for path in run_paths]), map(read_metrics_records, files)))


def make_unique_run_names(run_paths: Sequence[Path]) -> list[str]:
    """Shorten the paths of runs to unique names, which consist of the last parts of each path."""
    parts = [Path(os.path.abspath(path)).parts for path in run_paths]
    parts = [p[:-1] if path.is_file() and p[-1] == "records.jsonl" else p for path, p in zip(run_paths, parts)]
    count = 1
    while count < max(map(len, parts)) and len({part[-count:] for part in parts}) < len(run_paths):
        count += 1
    return [os.path.join(*part[-count:]) for part in parts]


def get_default_metric_names(runs: Runs) -> list[str]:
    """Return the names of the metrics that are plotted by default, with only one measure of training speed."""
    names = get_metric_names(runs)
    return [name for name in names if name not in _SAME_CURVE or "tokens_per_s" not in names]


def get_metric_names(runs: Runs) -> list[str]:
    """Return the names of all recorded metrics, starting with well-known metrics such as the loss.

    A validation metric shares the panel of its training metric: validation/loss is drawn with loss.
    """
    found = {name.removeprefix(VALIDATION): None for records in runs.values() for r in records for name in r.values}
    return [name for name in _TITLES if name in found] + [name for name in found if name not in _TITLES]


def get_metric_series(records: Sequence[MetricsRecord], metric_name: str) -> Series:
    """Return the steps and the values of a metric, sorted by step. NaN and infinite values are included."""
    pairs = sorted(
        ((r.step, r.values[metric_name]) for r in records if metric_name in r.values), key=lambda pair: pair[0]
    )
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def drop_nonfinite_points(series: Series) -> Series:
    """Remove the points of a curve whose value is NaN or infinite."""
    keep = np.isfinite(series[1])
    return series[0][keep], series[1][keep]


def compute_centered_moving_average(curve_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the centered moving average of a curve. The window is shorter near both ends."""
    window = np.ones(min(len(curve_values) // 40, 250) * 2 + 1)
    # a running sum would lose the values that follow a loss of 1e18
    return np.convolve(curve_values, window, "same") / np.convolve(np.ones_like(curve_values), window, "same")


def should_smooth(metric_name: str, series: Series) -> bool:
    """Return whether a metric has so many points that a moving average is easier to read."""
    return metric_name not in _NEVER_SMOOTHED and int(np.isfinite(series[1]).sum()) > _MANY_POINTS


def get_plot_series(metric_name: str, series: Series) -> Series:
    """Return the points to plot for a metric, smoothed if there are many. Infinite values become NaN."""
    steps, values = series
    good = np.isfinite(values)
    shown = np.where(good, values, np.nan)
    if should_smooth(metric_name, series):
        shown[good] = compute_centered_moving_average(values[good])
    return steps, shown


def get_isolated_point_mask(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Mark finite values between two nonfinite values, because a line plot does not show isolated points."""
    good = np.isfinite(values)
    padded = np.concatenate([[False], good, [False]])
    found: NDArray[np.bool_] = good & ~padded[:-2] & ~padded[2:]
    return found


def needs_log_scale(metric_name: str, values: NDArray[np.float64]) -> bool:
    """Return whether a loss or gradient norm spans so many orders of magnitude that it needs a log axis."""
    if metric_name not in _LOG_IF_WIDE or len(values) == 0 or values.min() <= 0:
        return False
    return bool(log10(values.max()) - log10(values.min()) > log10(_WIDE))


def get_panel_title(metric_name: str) -> str:
    """Return the title of the chart panel for a metric."""
    return _TITLES.get(metric_name, metric_name.replace("_", " "))


class LayoutChange(NamedTuple):
    """Last step before a run was resumed or its parallel layout changed, with a description for the chart."""

    step: int
    text: str


def find_layout_changes(records: Sequence[MetricsRecord]) -> list[LayoutChange]:
    """Find the steps after which a run was resumed or its parallel layout changed."""
    changes, layout, step = [], "", 0
    for record in records:
        if record.layout and layout:
            changes.append(LayoutChange(step, record.layout if record.layout != layout else "resumed"))
        layout, step = record.layout or layout, record.step
    return changes


def compute_max_loss_difference(
    records: Sequence[MetricsRecord], other_records: Sequence[MetricsRecord]
) -> tuple[float, int] | None:
    """Return the largest relative loss difference between two runs, and the number of common steps."""
    one, two = (dict(zip(*drop_nonfinite_points(get_metric_series(each, "loss")))) for each in (records, other_records))
    common = one.keys() & two.keys()
    scale = {step: max(abs(one[step]), abs(two[step])) or 1.0 for step in common}
    return (max(abs(one[step] - two[step]) / scale[step] for step in common), len(common)) if common else None


def describe_loss_differences(records_by_run: Runs) -> list[str]:
    """Compare the losses of each run with those of the first run, and describe each comparison in one line."""
    (first, records), *others = records_by_run.items()
    found = ((run, compute_max_loss_difference(records, each)) for run, each in others)
    return [
        f"{run}: loss differs from {first} by at most {each[0]:.1e} (relative, {each[1]} steps)"
        if each[0]
        else f"{run}: loss equal to {first} ({each[1]} steps)"
        for run, each in found
        if each is not None
    ]


def get_curve_overlap_positions(runs: Runs, metric_name: str) -> list[tuple[int, int]]:
    """Find runs with overlapping curves of a metric, so that the chart can show all of them.

    Returns, for each run, its position among the runs with the same curve, and the number of these runs.
    """
    series = [dict(zip(*drop_nonfinite_points(get_metric_series(records, metric_name)))) for records in runs.values()]
    values = [value for each in series for value in each.values()]
    bound = _COINCIDE * (max(values) - min(values)) if values else 0.0
    groups: list[list[int]] = []
    for number, curve in enumerate(series):
        for group in groups:
            common = series[group[0]].keys() & curve.keys()
            if common and all(abs(series[group[0]][step] - curve[step]) <= bound for step in common):
                group.append(number)
                break
        else:
            groups.append([number])
    places = {number: (place, len(group)) for group in groups for place, number in enumerate(group)}
    return [places[number] for number in range(len(series))]


# ----------------------------------------------------------------------------------------------------------- the chart


def plot_metrics(*runs: str | Path, metrics: Sequence[str] | None = None) -> Figure:
    """Plot the metrics of one or more training runs. In a notebook, the returned figure is displayed.

    >>> shardformer.training.plot_metrics("runs/a", "runs/b", metrics=["loss"])                   # doctest: +SKIP

    Args:
        runs: Output folders of training runs, or their records.jsonl.
        metrics: Metrics to plot in one panel each. By default, all metrics are plotted.

    Returns:
        A matplotlib figure, which ``savefig`` saves to a file.

    Raises:
        ConfigError: A folder contains no run, a metric was not recorded, or matplotlib is not installed.
    """
    require_matplotlib("plot_metrics")
    found = read_run_metrics(runs)
    names = None if metrics is None else check_and_deduplicate_metric_names(metrics, found, "metrics")
    return make_metrics_figure(found, names)


def check_and_deduplicate_metric_names(
    metric_names: Sequence[str], records_by_run: Runs, argument_name: str
) -> list[str]:
    """Check that the metrics with these names were recorded, and return the names without duplicates."""
    rule = "Only recorded metrics can be plotted. Validation metrics are plotted with those of training"
    check_names_are_known(metric_names, get_metric_names(records_by_run), f"{argument_name} has no metric", rule)
    return list(dict.fromkeys(metric_names))


def save_metrics_plot(records_by_run: Runs, output_path: Path, metric_names: Sequence[str] | None = None) -> None:
    """Plot the metrics of runs, and save the chart as an .svg or .png file."""
    check_chart_path(output_path)
    figure = make_metrics_figure(records_by_run, metric_names)
    import matplotlib

    with matplotlib.rc_context(_STYLE), write_chart_atomically(output_path) as hidden:
        figure.savefig(hidden, dpi=150, metadata={"Date": None} if output_path.suffix.lower() == ".svg" else {})


def make_metrics_figure(records_by_run: Runs, metric_names: Sequence[str] | None = None) -> Figure:
    """Plot the metrics of runs, with one panel per metric and the same range of steps in each panel.

    Each run has a color, and curves that coincide are drawn as dashes of all their colors. Validation metrics are
    dashed, and a star marks the lowest validation loss. A vertical line marks a resume or a change of the layout. A
    curve of more than 100 points is drawn as a moving average over the recorded values. A cross on the lower edge marks
    a value that is not finite.

    Args:
        records_by_run: Records by run name.
        metric_names: Metrics to draw. By default, the metrics that ``get_default_metric_names`` returns are drawn.
    """
    metric_names = list(metric_names) if metric_names is not None else get_default_metric_names(records_by_run)
    if not metric_names:
        run_names = ", ".join(records_by_run) or "any run"
        raise ConfigError(
            f"No metrics to plot were found in {run_names}.", remedy="Record at least one metric, such as loss."
        )
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 1 if len(metric_names) == 1 else 2 if len(metric_names) <= 4 else 3
    rows = ceil(len(metric_names) / columns)
    size = (7.5, 11.0, 14.5)[columns - 1], (4.2, 3.1, 2.9)[columns - 1] * rows + 0.5
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size)
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(rows, columns)
        wide = 1 + rows * columns - len(metric_names)  # the first panel fills the remaining columns
        for number, name in enumerate(metric_names):
            place = divmod(number + wide - 1, columns)
            cell = grid[0, :wide] if number == 0 else grid[place]
            axes = figure.add_subplot(cell)
            _draw_metric_panel(axes, records_by_run, name)
            _draw_layout_change_lines(axes, records_by_run, show_text=number == 0)
            axes.set_xlabel("step" if number + columns >= len(metric_names) else "", color=_INK)
        _draw_legend(figure, records_by_run, metric_names)
    vars(figure)["_repr_png_"] = lambda: _render_png(figure)  # notebooks display it without pyplot
    return figure


def _render_png(figure: Figure) -> bytes:
    import matplotlib

    with matplotlib.rc_context(_STYLE), io.BytesIO() as file:
        figure.savefig(file, dpi=100, format="png")
        return file.getvalue()


def _draw_metric_panel(axes: Axes, records_by_run: Runs, metric_name: str) -> None:
    places = zip(
        get_curve_overlap_positions(records_by_run, metric_name),
        get_curve_overlap_positions(records_by_run, VALIDATION + metric_name),
    )
    for color, records, (place, validation_place) in zip(
        _get_run_colors(len(records_by_run)), records_by_run.values(), places
    ):
        trained, validated = (
            get_metric_series(records, metric_name),
            get_metric_series(records, VALIDATION + metric_name),
        )
        _draw_curve(axes, trained, color, metric_name, place)
        _draw_validation_curve(
            axes, drop_nonfinite_points(validated), color, validation_place, mark_best=metric_name == "loss"
        )
        for steps, recorded in (trained, validated):
            bad = steps[~np.isfinite(recorded)]
            if len(bad):  # an empty line breaks the constrained layout
                edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
                axes.plot(bad, np.zeros_like(bad), "x", color=color, markersize=5, **edge)
    both = (metric_name, VALIDATION + metric_name)
    values = np.concatenate(
        [drop_nonfinite_points(get_metric_series(records, n))[1] for records in records_by_run.values() for n in both]
    )
    if needs_log_scale(metric_name, values):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(lambda *_: "")
    elif len(values) and values.min() >= 0 and (metric_name in FROM_ZERO or np.ptp(values) <= 1e-9 * values.max()):
        axes.set_ylim(bottom=0, top=1.1 * values.max() or 1.0)
    only_validation = all(metric_name not in record.values for records in records_by_run.values() for record in records)
    axes.set_title(
        f"{get_panel_title(metric_name)} (validation)" if only_validation else get_panel_title(metric_name),
        loc="left",
        fontsize=10,
    )
    _style_panel_axes(axes, records_by_run, _make_tick_formatter(metric_name, values))
    if len(values) == 0:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=_INK)


def _style_panel_axes(axes: Axes, records_by_run: Runs, tick_formatter: Callable[[float, float], str]) -> None:
    """Set the grid, the tick labels and the range of steps of a panel. All panels have the same range."""
    from matplotlib.ticker import MaxNLocator

    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color="#BBBBBB")
    axes.tick_params(length=0, colors=_INK)
    axes.yaxis.set_major_formatter(tick_formatter)
    axes.xaxis.set_major_formatter(_format_tick_label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    steps = [record.step for records in records_by_run.values() for record in records] or [0]
    first, last = min(steps), max(steps)
    margin = 0.01 * (last - first) or 1
    axes.set_xlim((0 if first <= 0.1 * last else first) - margin, last + margin)


def _draw_validation_curve(
    axes: Axes, series: Series, color: Any, overlap_position: tuple[int, int], mark_best: bool
) -> None:
    steps, values = series
    number, count = overlap_position
    dashes = (-2 * number * _DASH, (_DASH, (2 * count - 1) * _DASH))
    size = 3.5 + 3.0 * (count - 1 - number)  # coinciding points are concentric
    marker = "o" if len(steps) <= 40 else ""
    axes.plot(steps, values, linestyle=dashes, color=color, marker=marker, markersize=size, linewidth=1.3)
    if mark_best and len(steps):
        best = int(values.argmin())
        style = {"markersize": 9 + size, "markerfacecolor": color, "markeredgecolor": "black", "zorder": 4}
        style |= {"markeredgewidth": 0.8, "clip_on": False}
        axes.plot(steps[best], values[best], "*", **style)


def _draw_layout_change_lines(axes: Axes, runs: Runs, *, show_text: bool) -> None:
    changes = [
        (change, color)
        for color, records in zip(_get_run_colors(len(runs)), runs.values())
        for change in find_layout_changes(records)
    ]
    low, high = axes.get_xlim()
    for number, (change, color) in enumerate(changes):
        axes.axvline(change.step, color=color, linestyle=":", linewidth=1.2, zorder=1)
        if show_text:
            is_right = change.step - low > 0.7 * (high - low)
            place = (change.step, 0.95 - 0.08 * (number % 6)), (-4 if is_right else 4, 0)
            text = axes.annotate(change.text, *place, axes.get_xaxis_transform(), "offset points")
            text.set(color=color if len(runs) > 1 else _INK, fontsize=8.5, ha="right" if is_right else "left", va="top")


def _draw_curve(axes: Axes, series: Series, color: Any, metric_name: str, overlap_position: tuple[int, int]) -> None:
    number, count = overlap_position
    dashes = (-number * _DASH, (_DASH, (count - 1) * _DASH)) if number else "solid"  # dashes over the first run's line
    steps, curve = get_plot_series(metric_name, series)
    if should_smooth(metric_name, series):
        recorded = np.where(np.isfinite(series[1]), series[1], np.nan)
        axes.plot(steps, recorded, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps, curve, color=color, linewidth=1.6, linestyle=dashes)
    axes.plot(
        steps[get_isolated_point_mask(curve)], curve[get_isolated_point_mask(curve)], "o", color=color, markersize=3.5
    )


def _make_tick_formatter(metric_name: str, values: NDArray[np.float64]) -> Callable[[float, float], str]:
    if metric_name == "memory_bytes":
        top = values.max(initial=0.0)
        unit, scale = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if top >= s), ("B", 1.0))
        return lambda value, _: f"{value / scale:g} {unit}"
    return _format_tick_label


def _format_tick_label(tick_value: float, _: float = 0) -> str:
    """Format a tick label with a unit prefix, as in 51.2k for 51200. An axis offset would overlap the title."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if scale * 1e4 > abs(tick_value) >= scale * (10 if unit == "k" else 1):
            return f"{tick_value / scale:.10g}{unit}"
    return f"{tick_value:.10g}"


def _get_run_colors(num_runs: int) -> list[Any]:
    if num_runs <= len(COLORS):
        return list(COLORS[:num_runs])
    import matplotlib

    return [matplotlib.colormaps["turbo"](i) for i in np.linspace(0.05, 0.95, num_runs)]


def _draw_legend(figure: Figure, runs: Runs, metric_names: Sequence[str]) -> None:
    """Add a legend that explains the run colors and line styles. A single run is named in the title instead."""
    from matplotlib.lines import Line2D

    entries: list[tuple[str, Any]] = []
    if len(runs) == 1:
        figure.suptitle(_shorten_run_name(next(iter(runs)), 90), x=0.01, ha="left", fontsize=12)
    else:
        first = next(iter(runs))
        for color, (run, records) in zip(_get_run_colors(len(runs)), runs.items()):
            found = compute_max_loss_difference(runs[first], records) if run != first else None
            how = "equal to" if found and found[0] == 0 else f"within {found[0]:.0e} of" if found else ""
            equal = f" (loss {how} {_shorten_run_name(first, 30)})" if found and found[0] <= _EQUAL else ""
            entries.append((_shorten_run_name(run, 60) + equal, Line2D([], [], color=color, linewidth=2)))
    trained = [(name, get_metric_series(records, name)) for records in runs.values() for name in metric_names]
    validated = [get_metric_series(records, VALIDATION + name) for records in runs.values() for name in metric_names]
    if any(len(steps) for steps, _ in validated):
        line = Line2D([], [], color=_INK, linestyle="--", marker="o", markersize=3.5, linewidth=1.3)
        entries.append(("validation", line))
    if "loss" in metric_names and any(VALIDATION + "loss" in r.values for records in runs.values() for r in records):
        star = Line2D([], [], linestyle="", marker="*", markersize=10, color="white", markeredgecolor="black")
        entries.append(("lowest validation loss", star))
    if any(find_layout_changes(records) for records in runs.values()):
        entries.append(("resume or change of layout", Line2D([], [], color=_INK, linestyle=":", linewidth=1.2)))
    if any(should_smooth(name, series) for name, series in trained):
        entries.append(("moving average", Line2D([], [], color=_INK, linewidth=1.6)))
        entries.append(("as recorded", Line2D([], [], color=_INK, alpha=0.3, linewidth=1)))
    if not all(np.isfinite(values).all() for _, values in [*validated, *(series for _, series in trained)]):
        entries.append(("not finite", Line2D([], [], color=_INK, linestyle="", marker="x", markersize=5)))
    if entries:
        labels, lines = zip(*entries)
        columns = max(1, min(len(entries), int(figure.get_figwidth() * 12 / (max(map(len, labels)) + 8))))
        figure.legend(lines, labels, loc="outside lower left", ncols=columns, fontsize=9, frameon=False)


def _shorten_run_name(run_name: str, max_length: int) -> str:
    """Remove the beginning of a long run name, because run names usually differ at the end."""
    return run_name if len(run_name) <= max_length else f"...{run_name[3 - max_length :]}"


# --------------------------------------------------------------------------------------------------------- the summary


def summarize_runs(runs: Runs) -> list[dict[str, str]]:
    """Summarize each run in a table row, with its last and best loss, mean speed and peak memory.

    The best and mean values ignore NaN and infinite values.
    """
    return [{"run": run, **_summarize_run(records)} for run, records in runs.items()]


def summarize_runs_for_json(runs: Runs) -> dict[str, Any]:
    """Summarize the metrics of runs and the differences between their losses in a dict for JSON.

    For each metric, "last" is the value of the last step. "min", "min_step", "max" and "mean" ignore NaN and infinite
    values.
    """
    found = []
    for run, records in runs.items():
        recorded = {name: None for record in records for name in record.values}
        metrics = {name: _summarize_metric(records, name) for name in recorded}
        changes = [{"step": change.step, "text": change.text} for change in find_layout_changes(records)]
        found.append({"run": run, **_get_last_step_and_seconds(records), "metrics": metrics, "layout_changes": changes})
    (first, one), *others = runs.items()
    differences = [
        {"run": run, "other": first, "relative": each[0], "steps": each[1]}
        for run, records in others
        if (each := compute_max_loss_difference(one, records)) is not None
    ]
    return {"runs": found, "loss_differences": differences}


def _get_last_step_and_seconds(records: Sequence[MetricsRecord]) -> dict[str, Any]:
    return {
        "step": max((record.step for record in records), default=0),
        "seconds": encode_float_for_json(records[-1].seconds if records else 0.0),
    }


def _summarize_metric(records: Sequence[MetricsRecord], metric_name: str) -> dict[str, Any]:
    series = get_metric_series(records, metric_name)
    found: dict[str, Any] = {"last": encode_float_for_json(series[1][-1])}
    steps, values = drop_nonfinite_points(series)
    if len(values):
        found |= {"min": float(values.min()), "min_step": int(steps[values.argmin()])}
        found |= {"max": float(values.max()), "mean": float(values.mean())}
    return found


def _summarize_run(records: Sequence[MetricsRecord]) -> dict[str, str]:
    losses = {name: get_metric_series(records, name)[1] for name in ("loss", VALIDATION + "loss")}
    progress = _get_last_step_and_seconds(records)
    cells = {"step": str(progress["step"]), "time": _format_duration(float(progress["seconds"]))}
    for name, values in losses.items():
        shown = name.replace("/", " ")
        best = values[np.isfinite(values)]
        cells[f"last {shown}"] = _format_loss(values[-1]) if len(values) else ""
        cells[f"best {shown}"] = _format_loss(best.min()) if len(best) else cells[f"last {shown}"]
    speed, memory = (
        drop_nonfinite_points(get_metric_series(records, name))[1] for name in ("tokens_per_s", "memory_bytes")
    )
    cells["mean tokens/s"] = _format_tick_label(float(f"{speed.mean():.4g}")) if len(speed) else ""
    cells["peak memory"] = format_bytes(float(memory.max())) if len(memory) else ""
    return cells


def _format_loss(loss: float) -> str:
    """Format a loss with four decimals, or in scientific notation if the loss is very small or very large."""
    return f"{loss:.4f}" if loss == 0 or 1e-2 <= abs(loss) < 1e5 or not isfinite(loss) else f"{loss:.3e}"


def _format_duration(seconds: float) -> str:
    if not isfinite(seconds):
        return str(seconds)
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
