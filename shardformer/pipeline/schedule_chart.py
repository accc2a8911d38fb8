"""Draws pipeline schedules as a text grid, or as an SVG or PNG chart."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import floor
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from shardformer.errors import ConfigError
from shardformer.filesystem import replace_file_atomically
from shardformer.pipeline.schedules import (
    ActionKind,
    PipelineAction,
    PipelineSchedule,
    Timeline,
    compute_bubble_fraction,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Color-blind safe: blue and orange of Okabe and Ito, green of Tol.
ACTION_STYLES = {
    ActionKind.FORWARD: ("forward", "#0072B2"),
    ActionKind.BACKWARD: ("backward", "#E69F00"),
    ActionKind.INPUT: ("backward (input)", "#E69F00"),
    ActionKind.WEIGHT: ("backward (weights)", "#117733"),
}
CONTINUATION_MARK = "--"
MAX_COLUMNS = 2**15
MAX_BANDS = 5
SUFFIXES = (".svg", ".png")
_IDLE_COLOR = "#EDEDED"
_COLUMN_AND_MAX_WIDTH = 0.3, 40.0  # inches
_FONT_SIZE_RANGE = 3.0, 9.0  # points


def format_schedule_as_text(schedule: PipelineSchedule, timeline: Timeline, max_line_width: int | None = None) -> str:
    """Draw a pipeline schedule as a text grid with a legend, the idle time and the micro-batches in flight.

    The grid has a row per rank and a column per unit of time, which is the duration of the shortest action. ``F3`` is
    the forward pass of micro-batch 3, ``--`` is its continuation, and ``.`` is idle time. With several chunks per rank,
    a letter after the number names the chunk: ``F3b``.

    Args:
        max_line_width: maximum line length, or None for no limit. A longer grid is split into bands. If there are more
            than five bands, only the first two and the last two are printed, because the pattern repeats.
    """
    rows, unit = _make_grid_cells(schedule, timeline), _get_shortest_action_duration(timeline)
    cell = 1 + max(len(text) for row in rows for text in row)
    row_labels = [f"rank {rank} |".rjust(len(f"rank {len(rows) - 1} |")) for rank in range(len(rows))]
    columns = len(rows[0])
    in_band = columns if max_line_width is None else max(1, (max_line_width - len(row_labels[0])) // cell)
    in_band -= in_band % 5 if 5 < in_band < columns else 0  # bands start at a time label
    lines = []
    bands = range(0, columns, in_band)
    omitted = bands[2:-2] if len(bands) > MAX_BANDS else ()
    for first in bands:
        if omitted and first in omitted:
            if first == omitted[0]:
                lines += [f"  ...  time {first * unit:g} to {bands[-2] * unit:g} is not shown", ""]
            continue
        times = [f"{i * unit:<{5 * cell}g}" for i in range(first, min(first + in_band, columns), 5)]
        lines.append("time   ".rjust(len(row_labels[0]) + 1) + "".join(times).rstrip())
        lines += [_format_row(label, row[first : first + in_band], cell) for label, row in zip(row_labels, rows)]
        lines.append("")
    return "\n".join([*lines, *_get_legend_lines(schedule, timeline), *get_schedule_summary_lines(schedule, timeline)])


def timeline_to_dict(schedule: PipelineSchedule, timeline: Timeline) -> dict[str, Any]:
    """Convert a simulated schedule to a JSON-compatible dict with the start and end of each action."""
    ranks = [[{"action": str(s.action), "start": s.start, "end": s.end} for s in spans] for spans in timeline.spans]
    return {
        "schedule": schedule.name, "stages": schedule.stages, "micro_batches": schedule.micro_batches,
        "num_model_chunks": schedule.num_model_chunks, "makespan": timeline.makespan, "bubble": timeline.bubble,
        "idle": timeline.idle, "in_flight": timeline.in_flight, "ranks": ranks,
    }  # fmt: skip


def get_schedule_summary_lines(schedule: PipelineSchedule, timeline: Timeline) -> list[str]:
    """Summarize the idle time (bubble) and the micro-batches in flight of a schedule in two lines of text."""
    form = compute_bubble_fraction(schedule.name, schedule.stages, schedule.micro_batches, schedule.num_model_chunks)
    by_formula = (
        "" if form is None or _get_action_kinds(schedule) == [ActionKind.FORWARD] else f" (formula: {form:.1%})"
    )
    in_flight = ", ".join(map(str, timeline.in_flight))
    on = f" on ranks 0 to {schedule.stages - 1}" if schedule.stages > 1 else ""
    return [
        f"bubble     {timeline.bubble:.1%} of {timeline.makespan:g} units of time{by_formula}",
        f"in flight  at most {in_flight} micro-batches{_format_chunk_note(schedule)}{on}",
    ]


def _format_chunk_note(schedule: PipelineSchedule) -> str:
    return " (of one chunk)" if schedule.num_model_chunks > 1 else ""


def _format_row(label: str, cells: Sequence[str], cell_width: int) -> str:
    return (label + "".join(f" {text:{cell_width - 1}}" for text in cells)).rstrip()


def _get_legend_lines(schedule: PipelineSchedule, timeline: Timeline) -> list[str]:
    kinds = ", ".join(f"{kind} {ACTION_STYLES[kind][0]}" for kind in _get_action_kinds(schedule))
    lines = [f"{kinds}; the number is the micro-batch"]
    if schedule.num_model_chunks > 1:
        size = schedule.stages
        of = [f"s {c * size}-{c * size + size - 1}" if size > 1 else f" {c}" for c in range(schedule.num_model_chunks)]
        shown = [f"{_format_chunk_suffix(schedule, chunk)} virtual stage{which}" for chunk, which in enumerate(of)]
        lines.append(f"chunk: {', '.join(shown)}")
    unit = _get_shortest_action_duration(timeline)
    if any(abs(span.start / unit - round(span.start / unit)) > 1e-6 for row in timeline.spans for span in row):
        lines.append(f"a column is {unit:g} units of time; times are rounded to columns")
    return lines


def format_action(schedule: PipelineSchedule, action: PipelineAction) -> str:
    """Format a forward or backward pass in a schedule as short text, such as ``F3b`` for micro-batch 3."""
    return f"{action.kind}{action.micro_batch}{_format_chunk_suffix(schedule, schedule.get_chunk_index(action.stage))}"


def _format_chunk_suffix(schedule: PipelineSchedule, chunk: int) -> str:
    if schedule.num_model_chunks == 1:
        return ""
    return ascii_lowercase[chunk] if schedule.num_model_chunks <= len(ascii_lowercase) else f".{chunk}"


def _get_action_kinds(schedule: PipelineSchedule) -> list[ActionKind]:
    found = {action.kind for order in schedule.actions for action in order}
    return [kind for kind in ActionKind if kind in found]


def _get_shortest_action_duration(timeline: Timeline) -> float:
    return min(span.end - span.start for row in timeline.spans for span in row)


def _make_grid_cells(schedule: PipelineSchedule, timeline: Timeline) -> list[list[str]]:
    """Return the cells of the text grid of a schedule, one list per rank. Every action has at least one cell."""
    unit = _get_shortest_action_duration(timeline)
    if not 0 < timeline.makespan < MAX_COLUMNS * unit:
        raise ConfigError(
            f"The chart exceeds the maximum of {MAX_COLUMNS} columns, because the schedule takes "
            f"{timeline.makespan:g} time units and its shortest action, which fills one column, takes {unit:g}.",
            remedy="Use action durations and a send duration that are closer to each other.",
        )
    rows = [["."] * _get_column_index(timeline.makespan, unit) for _ in timeline.spans]
    for row, spans in zip(rows, timeline.spans):
        for action, start, end in spans:
            first, stop = _get_column_index(start, unit), _get_column_index(end, unit)
            row[first:stop] = [format_action(schedule, action)] + [CONTINUATION_MARK] * (stop - first - 1)
    return rows


def _get_column_index(timestamp: float, column_duration: float) -> int:
    return floor(timestamp / column_duration + 0.5 + 1e-9)


def check_chart_path(path: Path) -> None:
    """Raise ConfigError if a chart cannot be saved to ``path``, or matplotlib is not installed."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"The chart file {str(path)!r} does not end in .svg or .png.", remedy="Use a name such as chart.svg."
        )
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"Cannot save the chart to {str(path)!r}, because this path is a folder, or its parent folder does not "
            "exist or is not writable.",
            remedy="Create the parent folder first, or choose another path.",
        )
    require_matplotlib(f"The chart {str(path)!r}")


def require_matplotlib(feature: str) -> None:
    """Raise ConfigError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{feature} requires matplotlib, which is not installed.", remedy="Run pip install 'shardformer[plot]'."
        )


@contextmanager
def write_chart_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary file, and move it to ``path`` when it is complete. Raises ConfigError if writing fails."""
    try:
        with replace_file_atomically(path) as hidden:
            yield hidden
    except OSError as error:
        raise ConfigError(
            f"The chart file {str(path)!r} cannot be written: {error.strerror or error}.", remedy="Choose another path."
        ) from error


def save_schedule_chart(schedule: PipelineSchedule, timeline: Timeline, path: Path) -> None:
    """Draw a pipeline schedule as a chart with one row per rank, and save it as an SVG or PNG file.

    Raises ConfigError if ``path`` is invalid (see ``check_chart_path``) or writing fails.
    """
    check_chart_path(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_columns = timeline.makespan / _get_shortest_action_duration(timeline)
    size = min(max(7.5, _COLUMN_AND_MAX_WIDTH[0] * num_columns), _COLUMN_AND_MAX_WIDTH[1]), 1.7 + 0.42 * schedule.stages
    # a fixed salt makes the ids in the SVG reproducible
    with matplotlib.rc_context({"svg.hashsalt": "shardformer", "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw_action_boxes(axes, schedule, timeline, points_per_unit=72 * 0.85 * size[0] / timeline.makespan)
        _draw_axis_labels_and_title(axes, schedule, timeline)
        _draw_legend(axes, schedule)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        with write_chart_atomically(path) as hidden:
            figure.savefig(hidden, dpi=160, metadata=metadata)


def _draw_action_boxes(axes: Axes, schedule: PipelineSchedule, timeline: Timeline, points_per_unit: float) -> None:
    from matplotlib.patches import Rectangle

    digits = len(str(schedule.micro_batches - 1))
    column = _get_shortest_action_duration(timeline) * points_per_unit
    points = min(_FONT_SIZE_RANGE[1], column / (0.62 * digits + 0.5))
    for rank, row in enumerate(timeline.spans):
        axes.add_patch(Rectangle((0, rank - 0.4), timeline.makespan, 0.8, color=_IDLE_COLOR, linewidth=0))
        for action, start, end in row:
            face, ink = get_action_colors(schedule, action)
            box = Rectangle((start, rank - 0.4), end - start, 0.8, facecolor=face)
            box.set(edgecolor="white", linewidth=min(0.8, 0.06 * column))
            axes.add_patch(box)
            if points >= _FONT_SIZE_RANGE[0]:
                text = axes.text((start + end) / 2, rank, str(action.micro_batch), color=ink, fontsize=points)
                text.set(horizontalalignment="center", verticalalignment="center_baseline")


def _draw_axis_labels_and_title(axes: Axes, schedule: PipelineSchedule, timeline: Timeline) -> None:
    ranks = range(schedule.stages)
    axes.set(xlim=(0, timeline.makespan), ylim=(schedule.stages - 0.5, -0.5))
    axes.set_yticks(list(ranks), [f"rank {rank}" for rank in ranks])
    spans = (span for row in timeline.spans for span in row)
    takes = next(end - start for action, start, end in spans if action.kind is ActionKind.FORWARD)
    what = "forward of one chunk" if schedule.num_model_chunks > 1 else "forward"
    axes.set_xlabel(f"time (a {what} takes {takes:g}); the number in a box is the micro-batch", fontsize=9)
    right_axis = axes.secondary_yaxis("right")
    right_axis.set_yticks(list(ranks), [f"{number} in flight" for number in timeline.in_flight])
    for side in (axes, right_axis):
        side.tick_params(length=0, labelsize=9)
        side.spines[:].set_visible(False)
    stages = f"{schedule.stages} stage{'s' if schedule.stages > 1 else ''}"
    micro_batches = f"{schedule.micro_batches} micro-batch{'es' if schedule.micro_batches > 1 else ''}"
    chunks = f", {schedule.num_model_chunks} chunks per rank" if schedule.num_model_chunks > 1 else ""
    axes.set_title(f"{schedule.name}: {stages}, {micro_batches}{chunks}", loc="left", fontsize=11, pad=22)
    most = f"{max(timeline.in_flight)} micro-batch{'es' if max(timeline.in_flight) > 1 else ''}"
    cost = f"bubble (idle) {timeline.bubble:.1%}; activations of at most {most}{_format_chunk_note(schedule)} per rank"
    axes.annotate(cost, (0, 1), (0, 8), "axes fraction", "offset points", fontsize=9, color="#444444")


def _draw_legend(axes: Axes, schedule: PipelineSchedule) -> None:
    from matplotlib.patches import Patch

    patches = []
    for kind in _get_action_kinds(schedule):
        for chunk in range(schedule.num_model_chunks):
            face = get_action_colors(schedule, PipelineAction(kind, chunk * schedule.stages, 0))[0]
            of = f", chunk {_format_chunk_suffix(schedule, chunk)}" if schedule.num_model_chunks > 1 else ""
            patches.append(Patch(facecolor=face, label=ACTION_STYLES[kind][0] + of))
    # pad to a full column: matplotlib divides the list into columns of equal length
    patches.append(Patch(facecolor=_IDLE_COLOR, label="idle"))
    patches += [Patch(alpha=0, label="")] * (schedule.num_model_chunks - 1)
    columns = len(patches) // schedule.num_model_chunks
    axes.figure.legend(handles=patches, loc="outside lower left", ncols=columns, fontsize=8, frameon=False)


def get_action_colors(schedule: PipelineSchedule, action: PipelineAction) -> tuple[str, str]:
    """Return the box color and text color of an action in a chart. Later chunks have lighter shades."""
    share = 0.55 * schedule.get_chunk_index(action.stage) / max(1, schedule.num_model_chunks - 1)
    full = (int(ACTION_STYLES[action.kind][1][i : i + 2], 16) for i in (1, 3, 5))
    red, green, blue = (round(part + (255 - part) * share) for part in full)
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 125
    return f"#{red:02X}{green:02X}{blue:02X}", "white" if is_dark else "black"
