"""Draws charts of logged metrics, with one panel per metric, and summarizes runs in a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, isfinite, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardformer.errors import ConfigError
from shardformer.pipeline.schedule_chart import check_chart_file, replace_chart_file
from shardformer.training.metrics_log import MetricsRecord

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
FROM_ZERO = {"tokens_per_s", "memory_bytes", "flops_per_s"}
_NEVER_SMOOTHED = {"memory_bytes", "learning_rate"}
_LOG_IF_WIDE = {"loss", "grad_norm"}
_WIDE = 100.0  # ratio of largest to smallest value above which an axis is logarithmic
_MANY_POINTS = 100  # number of points above which a curve is smoothed
# Palette of Okabe and Ito without yellow, which is too light for a line.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
_INK, _GRID = "#444444", "#E4E4E4"


def list_panels(runs: Runs) -> list[str]:
    """Return the metric names to plot, one per panel: well-known metrics such as loss first, then all other metrics.

    A validation metric shares the panel of its training metric: validation/loss is drawn with loss.
    """
    found = {name.removeprefix(VALIDATION): None for records in runs.values() for r in records for name in r.values}
    return [name for name in _TITLES if name in found] + [name for name in found if name not in _TITLES]


def metric_series(records: Sequence[MetricsRecord], name: str) -> Series:
    """Return the steps and the values of a metric, sorted by step. NaN and infinite values are included."""
    pairs = sorted(((r.step, r.values[name]) for r in records if name in r.values), key=lambda pair: pair[0])
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def drop_nonfinite(series: Series) -> Series:
    """Remove the points of a curve whose value is NaN or infinite."""
    keep = np.isfinite(series[1])
    return series[0][keep], series[1][keep]


def moving_average(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the centered moving average of a curve, with a shorter window at both ends."""
    window = np.ones(min(len(values) // 40, 250) * 2 + 1)
    # a running sum would lose the values that follow a loss of 1e18
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def is_smoothed(name: str, series: Series) -> bool:
    """Return whether a training metric has enough points to be plotted as a moving average."""
    return name not in _NEVER_SMOOTHED and int(np.isfinite(series[1]).sum()) > _MANY_POINTS


def curve_to_plot(name: str, series: Series) -> Series:
    """Return the curve to plot for a metric: its values or their moving average, with NaN for infinite values."""
    steps, values = series
    good = np.isfinite(values)
    shown = np.where(good, values, np.nan)
    if is_smoothed(name, series):
        shown[good] = moving_average(values[good])
    return steps, shown


def find_isolated_points(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of the finite values without a finite neighbor, which a line plot would not show."""
    good = np.isfinite(values)
    padded = np.concatenate([[False], good, [False]])
    found: NDArray[np.bool_] = good & ~padded[:-2] & ~padded[2:]
    return found


def uses_log_scale(name: str, values: NDArray[np.float64]) -> bool:
    """Return whether to use a logarithmic axis: for a loss or gradient norm that spans more than two decades."""
    if name not in _LOG_IF_WIDE or len(values) == 0 or values.min() <= 0:
        return False
    return bool(log10(values.max()) - log10(values.min()) > log10(_WIDE))


def _format_bytes(value: float) -> str:
    """Format a number of bytes with a unit, as in 2.1 GB for 2.1e9."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value >= scale:
            return f"{value / scale:,.1f} {unit}"
    return f"{value:,.0f} B"


def panel_title(name: str) -> str:
    """Return the title of the panel that shows a metric."""
    return _TITLES.get(name, name.replace("_", " "))


# ----------------------------------------------------------------------------------------------------------- the chart


def draw_metrics(runs: Runs, path: Path, names: Sequence[str] | None = None) -> None:
    """Plot the metrics of runs, with one panel per metric, and save the chart as an .svg or .png file.

    Each run has a color. Validation metrics are dashed. A curve of more than 100 points is drawn as a moving average
    over the recorded values. A cross on the lower edge marks a value that is not finite.

    Args:
        runs: Records by run name.
        path: File to write.
        names: Metrics to draw. None draws all.
    """
    check_chart_file(path)
    names = list(names) if names is not None else list_panels(runs)
    if not names:
        where = ", ".join(runs) or "no run"
        raise ConfigError(f"There are no metrics to draw in {where}", remedy="Record a metric, such as loss")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 1 if len(names) == 1 else 2 if len(names) <= 4 else 3
    rows = ceil(len(names) / columns)
    size = (7.5, 11.0, 14.5)[columns - 1], (4.2, 3.1, 2.9)[columns - 1] * rows + 0.5
    style = {"svg.hashsalt": "shardformer", "agg.path.chunksize": 10_000, "font.size": 9, "text.parse_math": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size)
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(rows, columns)
        wide = 1 + rows * columns - len(names)  # the first panel fills the remaining columns
        for number, name in enumerate(names):
            place = divmod(number + wide - 1, columns)
            cell = grid[0, :wide] if number == 0 else grid[place]
            is_lowest = number + columns >= len(names)
            _draw_panel(figure.add_subplot(cell), runs, name, is_lowest)
        _draw_legend(figure, runs, names)
        with replace_chart_file(path) as hidden:
            figure.savefig(hidden, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else {})


def _draw_panel(axes: Axes, runs: Runs, name: str, has_axis_label: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    for color, records in zip(_choose_colors(len(runs)), runs.values()):
        trained, validated = metric_series(records, name), metric_series(records, VALIDATION + name)
        _draw_curve(axes, trained, color, name)
        steps, losses = drop_nonfinite(validated)
        marker = "o" if len(steps) <= 40 else ""
        axes.plot(steps, losses, "--", color=color, marker=marker, markersize=3.5, linewidth=1.3)
        for steps, recorded in (trained, validated):
            bad = steps[~np.isfinite(recorded)]
            if len(bad):  # an empty line breaks the constrained layout
                edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
                axes.plot(bad, np.zeros_like(bad), "x", color=color, markersize=5, **edge)
    both = (name, VALIDATION + name)
    values = np.concatenate([drop_nonfinite(metric_series(records, n))[1] for records in runs.values() for n in both])
    if uses_log_scale(name, values):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(lambda *_: "")
    elif name in FROM_ZERO and len(values) and values.min() >= 0:
        axes.set_ylim(bottom=0, top=1.1 * values.max() or 1.0)
    only_validation = all(name not in record.values for records in runs.values() for record in records)
    axes.set_title(
        f"{panel_title(name)} (validation)" if only_validation else panel_title(name), loc="left", fontsize=10
    )
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color="#BBBBBB")
    axes.tick_params(length=0, colors=_INK)
    axes.yaxis.set_major_formatter(_tick_formatter(name, values))
    axes.xaxis.set_major_formatter(_format_number)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if len(values) == 0:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=_INK)
    if has_axis_label:
        axes.set_xlabel("step", color=_INK)


def _draw_curve(axes: Axes, series: Series, color: Any, name: str) -> None:
    steps, curve = curve_to_plot(name, series)
    if is_smoothed(name, series):
        recorded = np.where(np.isfinite(series[1]), series[1], np.nan)
        axes.plot(steps, recorded, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps, curve, color=color, linewidth=1.6)
    axes.plot(steps[find_isolated_points(curve)], curve[find_isolated_points(curve)], "o", color=color, markersize=3.5)


def _tick_formatter(name: str, values: NDArray[np.float64]) -> Callable[[float, float], str]:
    if name == "memory_bytes":
        top = values.max(initial=0.0)
        unit, scale = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if top >= s), ("B", 1.0))
        return lambda value, _: f"{value / scale:g} {unit}"
    return _format_number


def _format_number(value: float, _: float = 0) -> str:
    """Format a tick label with a unit prefix, as in 51.2k for 51200, because an axis offset would overlap the title."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if scale * 1e4 > abs(value) >= scale * (10 if unit == "k" else 1):
            return f"{value / scale:.10g}{unit}"
    return f"{value:.10g}"


def _choose_colors(count: int) -> list[Any]:
    if count <= len(COLORS):
        return list(COLORS[:count])
    import matplotlib

    return [matplotlib.colormaps["turbo"](i) for i in np.linspace(0.05, 0.95, count)]


def _draw_legend(figure: Figure, runs: Runs, names: Sequence[str]) -> None:
    """Add a legend that explains the run colors and line styles. A single run is named in the title instead."""
    from matplotlib.lines import Line2D

    entries: list[tuple[str, Any]] = []
    if len(runs) == 1:
        figure.suptitle(_shorten_run_name(next(iter(runs)), 90), x=0.01, ha="left", fontsize=12)
    else:
        for color, run in zip(_choose_colors(len(runs)), runs):
            entries.append((_shorten_run_name(run, 60), Line2D([], [], color=color, linewidth=2)))
    trained = [(name, metric_series(records, name)) for records in runs.values() for name in names]
    validated = [metric_series(records, VALIDATION + name) for records in runs.values() for name in names]
    if any(len(steps) for steps, _ in validated):
        line = Line2D([], [], color=_INK, linestyle="--", marker="o", markersize=3.5, linewidth=1.3)
        entries.append(("validation", line))
    if any(is_smoothed(name, series) for name, series in trained):
        entries.append(("moving average", Line2D([], [], color=_INK, linewidth=1.6)))
        entries.append(("as recorded", Line2D([], [], color=_INK, alpha=0.3, linewidth=1)))
    if not all(np.isfinite(values).all() for _, values in [*validated, *(series for _, series in trained)]):
        entries.append(("not finite", Line2D([], [], color=_INK, linestyle="", marker="x", markersize=5)))
    if entries:
        labels, lines = zip(*entries)
        columns = max(1, min(len(entries), int(figure.get_figwidth() * 12 / (max(map(len, labels)) + 8))))
        figure.legend(lines, labels, loc="outside lower left", ncols=columns, fontsize=9, frameon=False)


def _shorten_run_name(name: str, max_length: int) -> str:
    """Remove the beginning of a long run name, because run names usually differ at the end."""
    return name if len(name) <= max_length else f"...{name[3 - max_length :]}"


# --------------------------------------------------------------------------------------------------------- the summary


def metrics_summary(runs: Runs) -> list[dict[str, str]]:
    """Summarize each run in a table row, with its last and best loss, mean speed and peak memory.

    The best and mean values ignore NaN and infinite values.
    """
    return [{"run": run, **_summarize_run(records)} for run, records in runs.items()]


def _summarize_run(records: Sequence[MetricsRecord]) -> dict[str, str]:
    losses = {name: metric_series(records, name)[1] for name in ("loss", VALIDATION + "loss")}
    cells = {
        "step": str(max((record.step for record in records), default=0)),
        "time": _format_duration(records[-1].seconds if records else 0.0),
    }
    for name, values in losses.items():
        shown = name.replace("/", " ")
        best = values[np.isfinite(values)]
        cells[f"last {shown}"] = _format_loss(values[-1]) if len(values) else ""
        cells[f"best {shown}"] = _format_loss(best.min()) if len(best) else cells[f"last {shown}"]
    speed, memory = (drop_nonfinite(metric_series(records, name))[1] for name in ("tokens_per_s", "memory_bytes"))
    cells["mean tokens/s"] = _format_number(float(f"{speed.mean():.4g}")) if len(speed) else ""
    cells["peak memory"] = _format_bytes(float(memory.max())) if len(memory) else ""
    return cells


def _format_loss(value: float) -> str:
    """Format a loss with four decimals, or in scientific notation if the loss is very small or very large."""
    return f"{value:.4f}" if value == 0 or 1e-2 <= abs(value) < 1e5 or not isfinite(value) else f"{value:.3e}"


def _format_duration(seconds: float) -> str:
    if not isfinite(seconds):
        return str(seconds)
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
