"""The ``shardformer draw`` command, which draws a pipeline schedule or the shards of a tensor parallel grid."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardformer.cli._options import parallel_config_option
from shardformer.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from shardformer.pipeline.schedules import ActionKind, PipelineSchedule, Timeline

MAX_MICRO_BATCHES = 2**14  # maximum number of micro-batches in a picture, over all stages
MAX_CELLS = 2**15
MAX_ROWS = 2**10


GRID_OPTIONS = ("grid", "tensor_parallel_mode")
RENAMED_OPTIONS = {"--mode": "--tensor-parallel-mode", "--chunks": "--num-model-chunks"}
"""Earlier name of an option -> its name."""
OPTION_GROUPS = {
    "Pipeline schedule": ("schedule", "stages", "micro_batches", "num_model_chunks", "durations", "send"),
    "Tensor grid": GRID_OPTIONS,
    "Output": ("out", "as_json"),
}


def draw(
    context: typer.Context,
    schedule: Annotated[str, parallel_config_option("schedule")] = "1f1b",
    stages: Annotated[int, typer.Option(metavar="N", help="Number of pipeline stages.")] = 4,
    micro_batches: Annotated[int, typer.Option(metavar="N", help="Number of micro-batches per batch.")] = 8,
    num_model_chunks: Annotated[int | None, parallel_config_option("num_model_chunks")] = None,
    durations: Annotated[
        str,
        typer.Option(
            metavar="F=1,B=2",
            help="Relative durations of a forward pass (F) and a backward pass (B). The schedules interleaved_zb and "
            "zbv split B into the gradients of inputs (I) and of weights (W). Default: F=1, B=2, I=1, W=1.",
        ),
    ] = "",
    send: Annotated[
        float, typer.Option(metavar="TIME", help="Time to send activations to the next rank (see --durations).")
    ] = 0.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also save an .svg or .png chart.")] = None,
    grid: Annotated[
        str | None,
        typer.Option(metavar="ROWSxCOLS", help="Draw the shards of a tensor parallel grid, such as 2x4 or 2x2x2."),
    ] = None,
    tensor_parallel_mode: Annotated[
        str | None,
        parallel_config_option("tensor_parallel_mode", "Tensor parallel mode of the grid: 2d (default), 2.5d or 3d."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the schedule with its times, or the shards of the grid, as JSON.")
    ] = False,
) -> None:
    """Draw what each rank does over time in a pipeline schedule, with its idle time and stored activations.

    With --grid, show which shards of activations and weights each rank of a tensor parallel grid stores.
    """
    from rich.console import Console

    _check_grid_options([name for name in context.params if _is_option_passed(context, name)])
    if grid is not None:
        _print_tensor_parallel_grid(Console(highlight=False), grid, tensor_parallel_mode or "2d", as_json)
        return

    from shardformer.pipeline.schedule_chart import check_chart_path, save_schedule_chart, timeline_to_dict
    from shardformer.pipeline.schedules import get_default_num_chunks, make_schedule, simulate_schedule

    if out is not None:
        check_chart_path(out)
    _check_schedule_fits_drawing_limits(stages, micro_batches, num_model_chunks or get_default_num_chunks(schedule))
    chosen = make_schedule(schedule, stages, micro_batches, num_model_chunks)
    timeline = simulate_schedule(chosen, _parse_action_durations(durations, chosen), send)
    if out is not None:
        save_schedule_chart(chosen, timeline, out)
    if as_json:
        print(json.dumps(timeline_to_dict(chosen, timeline)))
        return
    _print_schedule(Console(highlight=False), chosen, timeline)
    if out is not None:
        Console(highlight=False).print(f"\nChart saved to {out}", soft_wrap=True, markup=False)


def _print_schedule(console: Console, schedule: PipelineSchedule, timeline: Timeline) -> None:
    from shardformer.pipeline.schedule_chart import format_schedule_as_text

    text = format_schedule_as_text(schedule, timeline, console.width)
    console.print(_color_schedule(text, schedule))
    if "is not shown" in text:
        console.print("\nUse a wider terminal or --out FILE.svg to see the whole schedule.", soft_wrap=True)


def _is_option_passed(context: typer.Context, option_name: str) -> bool:
    source = context.get_parameter_source(option_name)
    return source is not None and source.name == "COMMANDLINE"


def _check_grid_options(passed_options: list[str]) -> None:
    """Raise ConfigError if schedule options were passed with ``--grid``, or grid options without it."""
    has_grid = "grid" in passed_options
    for name in passed_options:
        if name != "as_json" and has_grid != (name in GRID_OPTIONS):
            option = f"--{name.replace('_', '-')}"
            condition, change = ("with", "Remove --grid") if has_grid else ("without", "Add --grid 2x2")
            raise ConfigError(f"{option} has no effect {condition} --grid.", remedy=f"{change}, or remove {option}.")


def _check_schedule_fits_drawing_limits(num_stages: int, num_micro_batches: int, num_chunks_per_stage: int) -> None:
    if num_stages > 0 and num_micro_batches * num_stages > MAX_MICRO_BATCHES:
        most = max(MAX_MICRO_BATCHES // num_stages, 1)
        raise ConfigError(
            f"{num_micro_batches} micro-batches over {num_stages} stages are too many to draw.",
            remedy=f"Use --micro-batches {most} or fewer, which shows the same pattern.",
        )

    if num_stages * num_chunks_per_stage * (num_stages + num_micro_batches) > MAX_CELLS:
        raise ConfigError(
            f"{num_micro_batches} micro-batches over {num_stages} stages with {num_chunks_per_stage} model chunks "
            "each are too many to draw.",
            remedy="Use fewer stages, micro-batches or model chunks.",
        )


def _print_tensor_parallel_grid(console: Console, grid_size: str, tensor_parallel_mode: str, as_json: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from shardformer.mesh.rank_grid import count_ranks_on_axis, parse_axis_size
    from shardformer.mesh.tensor_grid import compare_comm_volume_with_1d, describe_grid_shards

    sizes = parse_axis_size(grid_size, "grid")
    if (ranks := count_ranks_on_axis(sizes, "grid")) > MAX_ROWS:
        raise ConfigError(
            f"--grid {grid_size} has {ranks} ranks, but the table shows at most {MAX_ROWS} ranks.",
            remedy="Use a smaller grid, such as 4x4, which has the same pattern.",
        )
    if as_json:
        all_shards = [asdict(shards) for shards in describe_grid_shards(tensor_parallel_mode, sizes)]
        print(
            json.dumps(
                {
                    "mode": tensor_parallel_mode,
                    "ranks": all_shards,
                    "sent_per_layer": dict(compare_comm_volume_with_1d(tensor_parallel_mode, sizes)),
                }
            )
        )
        return
    table = Table(box=SIMPLE_HEAD, caption_justify="left", caption="Each cell: number of the shard / number of shards.")
    third = "row, column" if tensor_parallel_mode == "2d" else "row, column, depth"
    for name in ("rank", third, "between blocks:\nsamples, hidden", "in a block:\nsamples, heads"):
        table.add_column(name)
    table.add_column("weights:\nheads, hidden")
    for shards in describe_grid_shards(tensor_parallel_mode, sizes):
        table.add_row(str(shards.rank), shards.place, shards.between, shards.inside, shards.weights)
    console.print(table)
    console.print("Elements that each rank sends for one layer, in the forward and backward pass, with N tokens,")
    console.print("H hidden features and W weights (V: features inside a block, E: features at the end of a block):")
    for layout, numbers in compare_comm_volume_with_1d(tensor_parallel_mode, sizes):
        console.print(f"  {layout:20} {numbers}")


def _parse_action_durations(durations_text: str, schedule: PipelineSchedule) -> dict[ActionKind, float]:
    """Parse durations such as ``F=1,B=2`` for forward and backward. Raises ConfigError for an unknown action."""
    kinds = {str(action.kind): action.kind for order in schedule.actions for action in order}
    found = {}
    for part in filter(None, (part.strip() for part in durations_text.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in kinds:
            actions = ", ".join(kinds)
            raise ConfigError(
                f"--durations {durations_text} contains the unknown action {part!r}.",
                remedy=f"Use the actions of the schedule {schedule.name!r}: {actions}. For example, --durations F=1.",
            )
        try:
            found[kinds[name]] = float(value)
        except ValueError as error:
            raise ConfigError(
                f"{part!r} in --durations {durations_text} is not a duration.",
                remedy=f"Use a number, such as {name}=1.5.",
            ) from error
    return found


def _color_schedule(schedule_text: str, schedule: PipelineSchedule) -> Text:
    """Color a pipeline schedule with the colors of the saved chart. Outside a terminal, rich prints no colors."""
    from rich.style import Style
    from rich.text import Text

    from shardformer.pipeline.schedule_chart import CONTINUATION_MARK, format_action, get_action_colors

    styles = {}
    for action in (action for order in schedule.actions for action in order):
        face, ink = get_action_colors(schedule, action)
        styles[format_action(schedule, action)] = Style(color=ink, bgcolor=face)
    result = Text()
    running: dict[str, Style] = {}  # the current action of each rank, which may continue in the next band
    for line in schedule_text.splitlines(keepends=True):
        shown = Text(line)
        head, bar, _ = line.partition("|")
        if head.startswith("  ..."):
            running.clear()  # an action that continues after the omitted part is not known
        for number, cell in enumerate(re.finditer(r" *(\S+)", line[len(head) + 1 :] if bar else "")):
            goes_on = cell[1] == CONTINUATION_MARK
            running[head] = running.get(head, Style()) if goes_on else styles.get(cell[1], Style())
            start = cell.start() if goes_on and number > 0 else cell.start(1)
            shown.stylize(running[head], len(head) + 1 + start, len(head) + 1 + cell.end())
        result.append_text(shown)
    return result
