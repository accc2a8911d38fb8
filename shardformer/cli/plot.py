"""The ``shardformer plot`` command, which prints and plots the metrics of training runs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardformer.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table

    from shardformer.training.metrics_plot import Runs


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of training runs, or their records.jsonl files.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The .png or .svg file to write. Default: curves.png in the run's folder, or in the working "
            "directory if you pass several runs.",
        ),
    ] = None,
    values: Annotated[
        str, typer.Option(metavar="NAMES", help="Metrics to plot, such as loss,grad_norm. Default: all metrics.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all metrics as JSON instead of a table.")] = False,
) -> None:
    """Print the metrics of one or more training runs as a table, and plot them in a chart."""
    from rich.console import Console

    from shardformer.pipeline.schedule_chart import check_chart_path
    from shardformer.training.metrics_plot import (
        check_and_deduplicate_metric_names,
        describe_loss_differences,
        get_metric_names,
        read_run_metrics,
        save_metrics_plot,
        summarize_runs_for_json,
    )

    found = read_run_metrics(runs)
    if not get_metric_names(found):
        names_of_runs = ", ".join(map(str, runs))
        raise ConfigError(
            f"No metrics have been recorded in {names_of_runs}.",
            remedy="Wait until the run has finished its first step, or pass another run.",
        )
    names = [name.strip() for name in values.split(",")] if values else []
    selected = check_and_deduplicate_metric_names(names, found, "--values")
    path = out if out is not None else _get_default_plot_folder(runs) / "curves.png"
    has_matplotlib = find_spec("matplotlib") is not None
    if has_matplotlib:
        check_chart_path(path)
    console = Console(highlight=False)
    if as_json:
        print(json.dumps({**summarize_runs_for_json(found), "plot": str(path) if has_matplotlib else None}, indent=2))
    else:
        _print_metrics_tables(console, found)
        for line in describe_loss_differences(found):
            _print_escaped_line(console, line, wrap=True)
    if has_matplotlib:
        save_metrics_plot(found, path, selected or None)
    elif out is not None:
        check_chart_path(out)
    if not as_json:
        missing = "No plot: matplotlib is not installed. pip install 'shardformer[plot]'"
        _print_escaped_line(console, f"Plot saved to {path}" if has_matplotlib else missing, wrap=not has_matplotlib)


def _get_default_plot_folder(run_paths: list[Path]) -> Path:
    if len(run_paths) > 1:
        return Path()
    return run_paths[0] if run_paths[0].is_dir() else run_paths[0].parent


def _print_metrics_tables(console: Console, records_by_run: Runs) -> None:
    from shardformer.training.metrics_plot import summarize_runs

    records_by_run = {_escape_unprintable(console, run): records for run, records in records_by_run.items()}
    rows = [{name: cell for name, cell in row.items() if cell} for row in summarize_runs(records_by_run)]
    columns = list(
        dict.fromkeys(name for row in summarize_runs(records_by_run) for name in row if any(name in r for r in rows))
    )
    wide = console.options.update(width=10_000)
    layouts = (
        [_make_metrics_table(rows, columns)],
        [_make_metrics_table(rows, columns, True)],
        [_make_metrics_table([row], columns, True) for row in rows],
    )
    fitting = (ts for ts in layouts if all(console.measure(t, options=wide).maximum <= console.width for t in ts))
    for table in next(fitting, layouts[-1]):
        console.print(table)
    console.print()


def _make_metrics_table(rows: list[dict[str, str]], column_names: list[str], is_transposed: bool = False) -> Table:
    """Create a table of metrics with one row per run. If it is transposed, it has one column per run."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    if is_transposed:
        table.add_column("run", no_wrap=True)
        for row in rows:
            table.add_column(Text(row["run"], overflow="fold"), justify="left" if len(rows) == 1 else "right")
        for name in column_names[1:]:
            table.add_row(name, *(Text(row.get(name, "-")) for row in rows))
        return table
    for name in column_names:
        justify: JustifyMethod = "left" if name == "run" else "right"
        table.add_column(name.replace(" ", "\n"), justify=justify, vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row.get(name, "-")) for name in column_names))
    return table


def _print_escaped_line(console: Console, text: str, wrap: bool = False) -> None:
    console.print(_escape_unprintable(console, text), soft_wrap=not wrap, markup=False)


def _escape_unprintable(console: Console, text: str) -> str:
    r"""Replace characters that the terminal cannot print with escape sequences such as ``\u20ac``."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown.encode(console.encoding, "backslashreplace").decode(console.encoding)
