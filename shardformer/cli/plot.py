"""Command ``shardformer plot``, which prints and plots the metrics of training runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardformer.errors import ConfigError, check_names

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table

    from shardformer.training.metrics_plot import Runs


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Output folders of training runs, or their records.jsonl.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The plot, as .png or .svg. By default curves.png in the run's folder."),
    ] = None,
    values: Annotated[
        str, typer.Option(metavar="NAMES", help="The metrics to plot, as loss,grad_norm. By default all.")
    ] = "",
) -> None:
    """Print a table of the metrics of one or more runs, and plot their loss, tokens per second and memory."""
    from rich.console import Console

    from shardformer.pipeline.schedule_chart import check_chart_file
    from shardformer.training.metrics_log import find_metrics_file, read_records
    from shardformer.training.metrics_plot import draw_metrics, list_panels

    _check_duplicates([find_metrics_file(path) for path in runs])
    found = {name: read_records(path) for name, path in zip(_run_names(runs), runs)}
    known = list_panels(found)
    if not known:
        raise ConfigError(
            f"No metrics are recorded in {', '.join(map(str, runs))}",
            remedy="Wait for the first step, or pass another run",
        )
    selected = _parse_metric_names(values, known)
    path = out if out is not None else _default_output_folder(runs) / "curves.png"
    has_matplotlib = find_spec("matplotlib") is not None
    if has_matplotlib:
        check_chart_file(path)
    console = Console(highlight=False)
    _print_tables(console, found)
    if has_matplotlib:
        draw_metrics(found, path, selected or None)
        _print_line(console, f"Plot saved to {path}")
    elif out is not None:
        check_chart_file(out)
    else:
        _print_line(console, "No plot: matplotlib is not installed. pip install 'shardformer[plot]'", wraps=True)


def _parse_metric_names(values: str, known: Sequence[str]) -> list[str]:
    """Parse metric names such as ``loss,grad_norm``. Raises ConfigError for a metric that was not recorded."""
    names = list(dict.fromkeys(name.strip() for name in values.split(",")))
    if names == [""]:
        return []
    rule = "Only recorded metrics can be plotted. Validation metrics are plotted with those of training"
    check_names(names, known, "--values has no metric", rule)
    return names


def _default_output_folder(runs: list[Path]) -> Path:
    if len(runs) > 1:
        return Path()
    return runs[0] if runs[0].is_dir() else runs[0].parent


def _check_duplicates(files: list[Path]) -> None:
    real = [file.resolve() for file in files]
    if twice := [file for file, name in zip(files, real) if real.count(name) > 1]:
        raise ConfigError(f"{str(twice[0])!r} is passed twice", remedy="Pass each run once")


def _run_names(runs: list[Path]) -> list[str]:
    """Name each run by the shortest end of its path that distinguishes it from the other runs."""
    parts = [Path(os.path.abspath(path)).parts for path in runs]
    parts = [p[:-1] if path.is_file() and p[-1] == "records.jsonl" else p for path, p in zip(runs, parts)]
    count = 1
    while count < max(map(len, parts)) and len({part[-count:] for part in parts}) < len(runs):
        count += 1
    return [os.path.join(*part[-count:]) for part in parts]


def _print_tables(console: Console, runs: Runs) -> None:
    from shardformer.training.metrics_plot import metrics_summary

    runs = {_escape_unprintable(console, run): records for run, records in runs.items()}
    rows = [{name: cell for name, cell in row.items() if cell} for row in metrics_summary(runs)]
    columns = list(dict.fromkeys(name for row in metrics_summary(runs) for name in row if any(name in r for r in rows)))
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


def _make_metrics_table(rows: list[dict[str, str]], columns: list[str], is_transposed: bool = False) -> Table:
    """Create a table with a row per run or, if transposed for narrow terminals, a column per run."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    if is_transposed:
        table.add_column("run", no_wrap=True)
        for row in rows:
            table.add_column(Text(row["run"], overflow="fold"), justify="left" if len(rows) == 1 else "right")
        for name in columns[1:]:
            table.add_row(name, *(Text(row.get(name, "-")) for row in rows))
        return table
    for name in columns:
        justify: JustifyMethod = "left" if name == "run" else "right"
        table.add_column(name.replace(" ", "\n"), justify=justify, vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row.get(name, "-")) for name in columns))
    return table


def _print_line(console: Console, text: str, wraps: bool = False) -> None:
    console.print(_escape_unprintable(console, text), soft_wrap=not wraps, markup=False)


def _escape_unprintable(console: Console, text: str) -> str:
    r"""Replace characters that the terminal cannot print by escapes such as ``\u20ac``."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown.encode(console.encoding, "backslashreplace").decode(console.encoding)
