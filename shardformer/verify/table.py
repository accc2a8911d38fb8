"""A report as text, for ``print(report)`` and for the command line."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from shardformer.verify.report import Report

WIDTH = 120


def as_text(report: Report) -> str:
    """The report without colours, at most 120 columns wide."""
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, color_system=None, highlight=False, legacy_windows=False)
    print_report(console, report)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def print_report(console: Console, report: Report, title: str = "") -> None:
    """Prints a report; ``title`` says where the model came from."""
    steps = "1 step" if report.steps == 1 else f"{report.steps} steps"
    came_from = f" ({escape(title)})" if title else ""
    console.print(f"[bold]{escape(report.model)}[/]{came_from}: plain, and over {escape(report.layout)}.")
    console.print(f"{steps} in {report.dtype}, dropout off in both, {report.seconds:.1f} s.")
    _print_differences(console, report)
    console.print(f"The bounds are those of {escape(report.bounds.why)}.")
    _print_collectives(console, report)
    told = [kind for kind, difference, _ in report.kinds if difference.used > 1]
    if report.missing:
        told.append("missing gradients")
        gone = f"Gradients that only one of the two has: {escape(', '.join(report.missing))}\n"
        console.print(gone, soft_wrap=True)  # names of parameters stay in one piece
    if told:
        console.print(f"[bold red]SOMEBODY CAN TELL[/] by {', '.join(told)}.")
    else:
        console.print("[bold green]Nobody can tell.[/]")


def _print_differences(console: Console, report: Report) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("largest difference", no_wrap=True)
    for column in ("relative", "bound"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("where", overflow="fold")
    for kind, difference, bound in report.kinds:
        mark = "[green]ok[/]" if difference.used <= 1 else "[bold red]too large[/]"
        table.add_row(kind, f"{difference.relative:.1e}", f"{bound:.0e}", mark, escape(difference.where))
    console.print(table)


def _print_collectives(console: Console, report: Report) -> None:
    if not report.collectives:
        console.print("No collectives.\n")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("collectives of one step")
    table.add_column("calls", justify="right")
    table.add_column("MB", justify="right")
    for name, (count, sent) in report.collectives.items():
        table.add_row(name.replace("_", "-"), str(count), f"{sent / 1e6:.3f}")
    console.print(table)
    sends = any(name.startswith("send over ") for name in report.collectives)
    alone = " Sends: rank 0's own, to the stages beside it." if sends else ""
    console.print(f"Calls: those of rank 0. MB: what all members of rank 0's groups send together, added up.{alone}\n")
