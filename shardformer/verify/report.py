"""What verify found, the bounds it was held to, and both as text."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardformer.errors import ConfigError

WIDTH = 120
"""Columns of a report as text."""


@dataclass(frozen=True)
class Tolerances:
    """The largest relative differences allowed, and the rounding of the dtype."""

    loss: float
    gradient: float
    eps: float


@dataclass(frozen=True)
class Difference:
    """The worst difference of one kind: relative, where it is, and by how much it uses up what is allowed.

    ``used`` is the difference over what is allowed (the bound, or the reference's own noise where that is wider);
    above 1, somebody could tell.
    """

    relative: float
    where: str
    used: float


@dataclass
class Report:
    """What ``verify`` found. ``print`` it, or read ``passed`` and the worst differences.

    ``collectives`` of one step: name -> (calls of rank 0, bytes that all members of its groups send together).
    """

    model: str
    layout: str
    steps: int
    dtype: str
    bounds: Tolerances
    loss: Difference
    gradient: Difference
    weight: Difference
    norm: Difference
    collectives: dict[str, tuple[int, int]]
    losses: list[tuple[float, float]]
    seconds: float = 0.0
    missing: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.missing and all(d.used <= 1 for d in (self.loss, self.gradient, self.weight, self.norm))

    @property
    def kinds(self) -> list[tuple[str, Difference, float]]:
        """What is compared: its name, the worst difference and the bound."""
        return [
            ("losses", self.loss, self.bounds.loss),
            ("gradients", self.gradient, self.bounds.gradient),
            ("gradient norms", self.norm, self.bounds.gradient),
            ("weights", self.weight, self.bounds.gradient),
        ]

    def to_json(self) -> str:
        calls = {name: {"calls": n, "wire_bytes": sent} for name, (n, sent) in self.collectives.items()}
        return json.dumps({"passed": self.passed, **asdict(self), "collectives": calls}, indent=2)

    def __str__(self) -> str:
        return report_as_text(self)


def tolerances_for(dtype: torch.dtype) -> Tolerances:
    """The bounds for a dtype. Raises ConfigError for one in which nothing can be told."""
    if dtype == torch.float64:
        return Tolerances(1e-10, 1e-10, 2.2e-16)
    if dtype == torch.float32:
        return Tolerances(1e-5, 1e-4, 1.2e-7)
    raise ConfigError(
        f"dtype={dtype}",
        rule="verify compares in fp64 or fp32: in 16 bits the noise is as wide as most mistakes",
        remedy="Use dtype=torch.float64",
    )


def tolerances_of_16_bits(dtype: torch.dtype) -> Tolerances:
    """Where parameters have 16 bits and masters have more: over data ranks alone nothing differs, over others rounding.

    A part of a gradient that is left out, or counted twice, is told still. So is a ReLU that rounding lets flip (T5's).
    """
    return Tolerances(1e-2, 5e-2, torch.finfo(dtype).eps)


def report_as_text(report: Report) -> str:
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
    off = "dropout, and casts to fewer bits," if report.dtype == "float64" else "dropout"
    console.print(f"{steps} in {report.dtype}, {off} off in both, {report.seconds:.1f} s.")
    _print_differences(console, report)
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
