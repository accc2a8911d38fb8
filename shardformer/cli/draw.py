"""``shardformer draw``: the schedule of a pipeline as a picture, or what the ranks of a tensor grid hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardformer.cli._options import parallel_option
from shardformer.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from shardformer.pipeline.schedules import ActionKind, Schedule

MOST = 2**14
"""Micro-batches on all stages that a picture has room for."""
MOST_CELLS = 2**15
MOST_ROWS = 2**10


OF_GRID = ("grid", "tensor_parallel_mode")
RENAMED_OPTIONS = {"--mode": "--tensor-parallel-mode", "--chunks": "--num-model-chunks"}
"""Earlier name of an option -> its name."""


def draw(
    context: typer.Context,
    schedule: Annotated[str, parallel_option("schedule")] = "1f1b",
    stages: Annotated[int, typer.Option(help="Ranks of the pipe axis.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a batch.")] = 8,
    num_model_chunks: Annotated[int | None, parallel_option("num_model_chunks")] = None,
    durations: Annotated[
        str,
        typer.Option(
            metavar="F=1,B=2",
            help="How long a forward takes, and a backward: B the whole; I and W the parts of it for the input and for "
            "the weights, in interleaved_zb and zbv. By default F=1, B=2, I=1, W=1.",
        ),
    ] = "",
    send: Annotated[float, typer.Option(help="How long a result is on its way to the next rank.")] = 0.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a chart, too: a file that ends in .svg or .png.")
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            metavar="2x2",
            help="Draw a tensor grid instead: its rows and columns, or three numbers; with --tensor-parallel-mode.",
        ),
    ] = None,
    tensor_parallel_mode: Annotated[
        str | None, parallel_option("tensor_parallel_mode", "Mode of the tensor grid: 2d (the default), 2.5d or 3d.")
    ] = None,
) -> None:
    """Draw a pipeline schedule: what each rank does at what time, how much of it is idle, how much a rank holds.

    Or, with --grid, which part of activations and weights each rank of a tensor grid holds.
    """
    from rich.console import Console

    _check_used([name for name in context.params if _is_given(context, name)])
    if grid is not None:
        _draw_grid(Console(highlight=False), grid, tensor_parallel_mode or "2d")
        return

    from shardformer.pipeline.schedule_chart import check_file, save, schedule_as_text
    from shardformer.pipeline.schedules import default_chunks, make_schedule, simulate

    if out is not None:
        check_file(out)
    _check_size(stages, micro_batches, num_model_chunks or default_chunks(schedule))
    chosen = make_schedule(schedule, stages, micro_batches, num_model_chunks)
    timeline = simulate(chosen, _durations(durations, chosen), send)
    console = Console(highlight=False)
    console.print(_coloured(schedule_as_text(chosen, timeline, console.width), chosen))
    if out is not None:
        save(chosen, timeline, out)
        console.print(f"\nThe chart is in {out}", soft_wrap=True, markup=False)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_used(given: list[str]) -> None:
    """Raises ConfigError for options of a schedule beside --grid, and for --tensor-parallel-mode without."""
    with_grid = "grid" in given
    for name in given:
        if with_grid != (name in OF_GRID):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} {'with' if with_grid else 'without'} --grid",
                rule="A grid has --tensor-parallel-mode, and the other options are those of a schedule",
                remedy=f"Leave {option} out" if with_grid else "Add --grid 2x2, or leave it out",
            )


def _check_size(stages: int, micro_batches: int, chunks: int) -> None:
    if stages > 0 and micro_batches * stages > MOST:
        raise ConfigError(
            f"{micro_batches} micro-batches over {stages} stages",
            rule=f"A picture shows each of them on each stage: {MOST} at the most",
            remedy=f"Use --micro-batches {max(MOST // stages, 1)} or fewer: the pattern repeats",
        )

    if stages * chunks * (stages + micro_batches) > MOST_CELLS:
        raise ConfigError(
            f"{micro_batches} micro-batches over {stages} stages" + (f" of {chunks} chunks each" if chunks > 1 else ""),
            rule=f"A picture has a row for each stage, and columns for what fills and empties it: {MOST_CELLS} cells "
            "at the most",
            remedy="Use fewer stages, such as --stages 16, or fewer chunks: the pattern repeats",
        )


def _draw_grid(console: Console, given: str, mode: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from shardformer.mesh.rank_grid import num_ranks, parse_axis_size
    from shardformer.mesh.tensor_grid import describe_grid_shards, grid_communication

    sizes = parse_axis_size(given, "grid")
    if (ranks := num_ranks(sizes, "grid")) > MOST_ROWS:
        raise ConfigError(
            f"--grid {given}, of {ranks} ranks",
            rule=f"The table has a row for each rank: {MOST_ROWS} at the most",
            remedy="Draw a smaller one, such as 4x4: the pattern repeats",
        )
    table = Table(box=SIMPLE_HEAD, caption_justify="left", caption="Each as: which part of how many.")
    third = "row, column" if mode == "2d" else "row, column, depth"
    for name in ("rank", third, "between blocks:\nsamples, hidden", "in a block:\nsamples, heads"):
        table.add_column(name)
    table.add_column("weights:\nheads, hidden")
    for held in describe_grid_shards(mode, sizes):
        table.add_row(str(held.rank), held.place, held.between, held.inside, held.weights)
    console.print(table)
    console.print("Numbers that a rank sends for a layer, forward and backward, of N tokens,")
    console.print("H hidden features and W weights (V: the widths in its blocks, E: at their exits):")
    for layout, numbers in grid_communication(mode, sizes):
        console.print(f"  {layout:20} {numbers}")


def _durations(given: str, schedule: Schedule) -> dict[ActionKind, float]:
    """``F=1,B=2`` as a table; only of kinds that the schedule has."""
    kinds = {str(action.kind): action.kind for order in schedule.actions for action in order}
    found = {}
    for part in filter(None, (part.strip() for part in given.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in kinds:
            raise ConfigError(
                f"--durations {given}: {part!r}",
                rule=f"The schedule {schedule.name!r} has the actions {', '.join(kinds)}",
                remedy="Name only those, as in F=1",
            )
        try:
            found[kinds[name]] = float(value)
        except ValueError as error:
            raise ConfigError(
                f"--durations {given}: {part!r}", rule="A duration is a number", remedy=f"Write it as {name}=1.5"
            ) from error
    return found


def _coloured(text: str, schedule: Schedule) -> Text:
    """The grid in the colours of the chart; where there is no terminal rich leaves them out."""
    from rich.style import Style
    from rich.text import Text

    from shardformer.pipeline.schedule_chart import CONTINUATION_MARK, action_label, colours

    styles = {}
    for action in (action for order in schedule.actions for action in order):
        face, ink = colours(schedule, action)
        styles[action_label(schedule, action)] = Style(color=ink, bgcolor=face)
    result = Text()
    running: dict[str, Style] = {}  # what each rank does, also where a band ends in the middle of it
    for line in text.splitlines(keepends=True):
        shown = Text(line)
        head, bar, _ = line.partition("|")
        for number, cell in enumerate(re.finditer(r" *(\S+)", line[len(head) + 1 :] if bar else "")):
            goes_on = cell[1] == CONTINUATION_MARK
            running[head] = running.get(head, Style()) if goes_on else styles.get(cell[1], Style())
            start = cell.start() if goes_on and number > 0 else cell.start(1)
            shown.stylize(running[head], len(head) + 1 + start, len(head) + 1 + cell.end())
        result.append_text(shown)
    return result
