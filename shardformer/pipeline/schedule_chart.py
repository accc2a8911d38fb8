"""A schedule as a picture: a grid of text, and a chart as SVG or PNG."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import floor
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

from shardformer.errors import ConfigError
from shardformer.filesystem.atomic_write import replacing
from shardformer.pipeline.schedules import Action, ActionKind, Schedule, Timeline, bubble_formula

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Blue and orange of Okabe and Ito, green of Tol: they and their shades differ for colour-blind eyes too.
ACTION_STYLES = {
    ActionKind.FORWARD: ("forward", "#0072B2"),
    ActionKind.BACKWARD: ("backward", "#E69F00"),
    ActionKind.INPUT: ("backward (input)", "#E69F00"),
    ActionKind.WEIGHT: ("backward (weights)", "#117733"),
}
CONTINUATION_MARK = "--"
MOST_COLUMNS = 2**15
SUFFIXES = (".svg", ".png")
_IDLE_COLOUR = "#EDEDED"
_INCHES = 0.3, 40.0  # a column of the chart where there is room, and the widest chart
_POINTS = 3.0, 9.0  # the smallest number that is still written into a box, and the largest


def schedule_as_text(schedule: Schedule, timeline: Timeline, width: int | None = None) -> str:
    """The grid, and below it what its letters mean, the bubble, and how much each rank holds.

    Args:
        width: the grid is folded into bands of no more than so many characters; None for a single one.
    """
    rows, unit = _cells(schedule, timeline), _unit(timeline)
    cell = 1 + max(len(text) for row in rows for text in row)
    heads = [f"rank {rank} |".rjust(len(f"rank {len(rows) - 1} |")) for rank in range(len(rows))]
    columns = len(rows[0])
    in_band = columns if width is None else max(1, (width - len(heads[0])) // cell)
    in_band -= in_band % 5 if 5 < in_band < columns else 0  # so that a band begins with a number
    bands = []
    for first in range(0, columns, in_band):
        times = [f"{i * unit:<{5 * cell}g}" for i in range(first, min(first + in_band, columns), 5)]
        lines = ["time   ".rjust(len(heads[0]) + 1) + "".join(times).rstrip()]
        lines += [_line(head, row[first : first + in_band], cell) for head, row in zip(heads, rows)]
        bands.append("\n".join(lines))
    return "\n\n".join([*bands, "\n".join([*_legend(schedule, timeline), *schedule_summary(schedule, timeline)])])


def grid(schedule: Schedule, timeline: Timeline) -> str:
    """A row for each rank, a column for each unit of time, which is what the shortest action takes.

    ``F3`` is the forward of micro-batch 3, ``--`` that it goes on, ``.`` that the rank is idle. Where a rank has
    several chunks, a letter behind the number says which: ``F3b``.
    """
    rows = _cells(schedule, timeline)
    cell = 1 + max(len(text) for row in rows for text in row)
    return "\n".join(_line(f"rank {rank} |", row, cell) for rank, row in enumerate(rows))


def schedule_summary(schedule: Schedule, timeline: Timeline) -> list[str]:
    """What a schedule costs, in two lines."""
    form = bubble_formula(schedule.name, schedule.stages, schedule.micro_batches, schedule.num_model_chunks)
    by_formula = "" if form is None or _kinds(schedule) == [ActionKind.FORWARD] else f" (formula: {form:.1%})"
    held = ", ".join(map(str, timeline.in_flight))
    on = f" on ranks 0 to {schedule.stages - 1}" if schedule.stages > 1 else ""
    return [
        f"bubble     {timeline.bubble:.1%} of {timeline.makespan:g} units of time{by_formula}",
        f"in flight  at most {held} micro-batches{_of_a_chunk(schedule)}{on}",
    ]


def _of_a_chunk(schedule: Schedule) -> str:
    return " (of one chunk)" if schedule.num_model_chunks > 1 else ""


def _line(head: str, cells: Sequence[str], cell: int) -> str:
    return (head + "".join(f" {text:{cell - 1}}" for text in cells)).rstrip()


def _legend(schedule: Schedule, timeline: Timeline) -> list[str]:
    lines = [", ".join(f"{kind} {ACTION_STYLES[kind][0]}" for kind in _kinds(schedule)) + "; then the micro-batch"]
    if schedule.num_model_chunks > 1:
        size = schedule.stages
        of = [f"s {c * size}-{c * size + size - 1}" if size > 1 else f" {c}" for c in range(schedule.num_model_chunks)]
        shown = [f"{_letter(schedule, chunk)} virtual stage{which}" for chunk, which in enumerate(of)]
        lines.append(f"chunk: {', '.join(shown)}")
    unit = _unit(timeline)
    if any(abs(span.start / unit - round(span.start / unit)) > 1e-6 for row in timeline.spans for span in row):
        lines.append(f"a column is {unit:g} units of time, to which the grid is rounded")
    return lines


def action_label(schedule: Schedule, action: Action) -> str:
    """What stands in the grid where ``action`` begins."""
    return f"{action.kind}{action.micro_batch}{_letter(schedule, schedule.chunk_of(action.stage))}"


def _letter(schedule: Schedule, chunk: int) -> str:
    if schedule.num_model_chunks == 1:
        return ""
    return ascii_lowercase[chunk] if schedule.num_model_chunks <= len(ascii_lowercase) else f".{chunk}"


def _kinds(schedule: Schedule) -> list[ActionKind]:
    found = {action.kind for order in schedule.actions for action in order}
    return [kind for kind in ActionKind if kind in found]


def _unit(timeline: Timeline) -> float:
    return min(span.end - span.start for row in timeline.spans for span in row)


def _cells(schedule: Schedule, timeline: Timeline) -> list[list[str]]:
    """What stands in each column of each rank. No action is shorter than a column, so each has one at least."""
    unit = _unit(timeline)
    if not 0 < timeline.makespan < MOST_COLUMNS * unit:
        raise ConfigError(
            f"A schedule that takes {timeline.makespan:g} units of time, with an action of {unit:g}",
            rule=f"A column of the picture is the shortest action: {MOST_COLUMNS} columns at the most",
            remedy="Give durations, and the time that sending takes, that are nearer to each other",
        )
    rows = [["."] * _column(timeline.makespan, unit) for _ in timeline.spans]
    for row, spans in zip(rows, timeline.spans):
        for action, start, end in spans:
            first, behind = _column(start, unit), _column(end, unit)
            row[first:behind] = [action_label(schedule, action)] + [CONTINUATION_MARK] * (behind - first - 1)
    return rows


def _column(time: float, unit: float) -> int:
    return floor(time / unit + 0.5 + 1e-9)


# ----------------------------------------------------------------------------------------------------------- the chart


def check_file(path: Path) -> None:
    """Raises ConfigError when no chart can be drawn into ``path``: its ending, its folder, or no matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"The file {str(path)!r}",
            rule="A chart's file ends in .svg or .png",
            remedy="Name it so: chart.svg",
        )
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"The file {str(path)!r}",
            rule="A chart is a file in a folder that exists and can be written to",
            remedy="Make the folder first, or name another",
        )
    if find_spec("matplotlib") is None:
        raise ConfigError(f"No chart {str(path)!r}: there is no matplotlib", remedy="pip install 'shardformer[plot]'")


@contextmanager
def reporting_write_errors(path: Path) -> Iterator[Path]:
    """Where a picture is written that takes the place of ``path`` when it is complete.

    Raises ConfigError where it cannot be written after all.
    """
    try:
        with replacing(path) as hidden:
            yield hidden
    except OSError as error:
        raise ConfigError(
            f"The file {str(path)!r} cannot be written: {error.strerror or error}", remedy="Name another file"
        ) from error


def save(schedule: Schedule, timeline: Timeline, path: Path) -> None:
    """Draws a chart, a lane for each rank, into a file whose name ends in .svg or .png.

    Raises ConfigError where that cannot be: see ``check_file``.
    """
    check_file(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_columns = timeline.makespan / _unit(timeline)
    size = min(max(7.5, _INCHES[0] * num_columns), _INCHES[1]), 1.7 + 0.42 * schedule.stages
    # ids of an SVG that do not change from run to run
    with matplotlib.rc_context({"svg.hashsalt": "shardformer", "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw_boxes(axes, schedule, timeline, points_per_unit=72 * 0.85 * size[0] / timeline.makespan)
        _draw_frame(axes, schedule, timeline)
        _draw_legend(axes, schedule)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        with reporting_write_errors(path) as hidden:
            figure.savefig(hidden, dpi=160, metadata=metadata)


def _draw_boxes(axes: Axes, schedule: Schedule, timeline: Timeline, points_per_unit: float) -> None:
    from matplotlib.patches import Rectangle

    digits = len(str(schedule.micro_batches - 1))
    column = _unit(timeline) * points_per_unit
    points = min(_POINTS[1], column / (0.62 * digits + 0.5))
    for rank, row in enumerate(timeline.spans):
        axes.add_patch(Rectangle((0, rank - 0.4), timeline.makespan, 0.8, color=_IDLE_COLOUR, linewidth=0))
        for action, start, end in row:
            face, ink = colours(schedule, action)
            box = Rectangle((start, rank - 0.4), end - start, 0.8, facecolor=face)
            box.set(edgecolor="white", linewidth=min(0.8, 0.06 * column))
            axes.add_patch(box)
            if points >= _POINTS[0]:
                text = axes.text((start + end) / 2, rank, str(action.micro_batch), color=ink, fontsize=points)
                text.set(horizontalalignment="center", verticalalignment="center_baseline")


def _draw_frame(axes: Axes, schedule: Schedule, timeline: Timeline) -> None:
    """The axes, with what each rank holds on the right, and the title."""
    ranks = range(schedule.stages)
    axes.set(xlim=(0, timeline.makespan), ylim=(schedule.stages - 0.5, -0.5))
    axes.set_yticks(list(ranks), [f"rank {rank}" for rank in ranks])
    takes = next(
        span.end - span.start for row in timeline.spans for span in row if span.action.kind is ActionKind.FORWARD
    )
    what = "forward of one chunk" if schedule.num_model_chunks > 1 else "forward"
    axes.set_xlabel(f"time (a {what} takes {takes:g}); the number in a box is the micro-batch", fontsize=9)
    held = axes.secondary_yaxis("right")
    held.set_yticks(list(ranks), [f"holds {number}" for number in timeline.in_flight])
    for side in (axes, held):
        side.tick_params(length=0, labelsize=9)
        side.spines[:].set_visible(False)
    stages = f"{schedule.stages} stage{'s' if schedule.stages > 1 else ''}"
    micro_batches = f"{schedule.micro_batches} micro-batch{'es' if schedule.micro_batches > 1 else ''}"
    chunks = f", {schedule.num_model_chunks} chunks a rank" if schedule.num_model_chunks > 1 else ""
    axes.set_title(f"{schedule.name}: {stages}, {micro_batches}{chunks}", loc="left", fontsize=11, pad=22)
    most = f"{max(timeline.in_flight)} micro-batch{'es' if max(timeline.in_flight) > 1 else ''}"
    cost = f"bubble (idle) {timeline.bubble:.1%}; a rank holds activations of at most {most}{_of_a_chunk(schedule)}"
    axes.annotate(cost, (0, 1), (0, 8), "axes fraction", "offset points", fontsize=9, color="#444444")


def _draw_legend(axes: Axes, schedule: Schedule) -> None:
    """A column for each kind, in it its chunks; and one for what is idle."""
    from matplotlib.patches import Patch

    patches = []
    for kind in _kinds(schedule):
        for chunk in range(schedule.num_model_chunks):
            face = colours(schedule, Action(kind, chunk * schedule.stages, 0))[0]
            of = f", chunk {_letter(schedule, chunk)}" if schedule.num_model_chunks > 1 else ""
            patches.append(Patch(facecolor=face, label=ACTION_STYLES[kind][0] + of))
    # a whole column, for matplotlib cuts the list into columns of one length
    patches += [
        Patch(facecolor=_IDLE_COLOUR, label="idle"),
        *[Patch(alpha=0, label="")] * (schedule.num_model_chunks - 1),
    ]
    columns = len(patches) // schedule.num_model_chunks
    axes.figure.legend(handles=patches, loc="outside lower left", ncols=columns, fontsize=8, frameon=False)


def colours(schedule: Schedule, action: Action) -> tuple[str, str]:
    """Of a box and of the number in it. Each further chunk is a lighter shade."""
    share = 0.55 * schedule.chunk_of(action.stage) / max(1, schedule.num_model_chunks - 1)
    full = (int(ACTION_STYLES[action.kind][1][i : i + 2], 16) for i in (1, 3, 5))
    red, green, blue = (round(part + (255 - part) * share) for part in full)
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 125
    return f"#{red:02X}{green:02X}{blue:02X}", "white" if is_dark else "black"
