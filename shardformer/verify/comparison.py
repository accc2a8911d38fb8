"""Reports how much sharded and unsharded training differ, and whether the differences are within tolerance."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from shardformer.errors import ConfigError


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences of losses and gradients that ``verify`` accepts."""

    loss: float
    gradient: float
    eps: float


@dataclass(frozen=True)
class LargestDifference:
    """Largest difference in losses, gradients or weights between the sharded and the unsharded model.

    Args:
        relative: the relative difference.
        where: the step or the parameter in which it occurs.
        used: the difference divided by the allowed difference. The allowed difference is the tolerance, or the rounding
            noise of the unsharded model if the noise is larger. Above 1, the comparison fails.
    """

    relative: float
    where: str
    used: float


@dataclass
class Report:
    """Result of ``verify``: the largest differences, and whether they are within their tolerances (``passed``).

    ``collectives`` contains the communication of one step: the name of each collective, the number of calls of rank 0,
    and the bytes that all ranks of its groups sent.
    """

    model: str
    layout: str
    steps: int
    dtype: str
    bounds: Tolerances
    loss: LargestDifference
    gradient: LargestDifference
    weight: LargestDifference
    norm: LargestDifference
    collectives: dict[str, tuple[int, int]]
    losses: list[tuple[float, float]]
    seconds: float = 0.0
    missing: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.missing and all(d.used <= 1 for d in (self.loss, self.gradient, self.weight, self.norm))

    @property
    def compared_quantities(self) -> list[tuple[str, LargestDifference, float]]:
        """The name, largest difference and tolerance of each quantity, such as the losses or the weights."""
        return [
            ("losses", self.loss, self.bounds.loss),
            ("gradients", self.gradient, self.bounds.gradient),
            ("gradient norms", self.norm, self.bounds.gradient),
            ("weights", self.weight, self.bounds.gradient),
        ]

    @property
    def verdict(self) -> str:
        """Summary of the quantities that differ, with the largest difference relative to its tolerance."""
        kind, worst, bound = max(self.compared_quantities, key=lambda compared: compared[1].used)
        failed = [name for name, difference, _ in self.compared_quantities if difference.used > 1]
        reasons = [f"{', '.join(failed)} differ"] if failed else []
        reasons += [f"{len(self.missing)} gradients or weights are missing"] if self.missing else []
        prefix = f"{', '.join(reasons)}. " if reasons else ""
        return f"{prefix}Largest difference {worst.relative:.1e} in {kind}, tolerance {bound:.0e}, at {worst.where}."

    def to_json(self) -> str:
        calls = {name: {"calls": n, "wire_bytes": sent} for name, (n, sent) in self.collectives.items()}
        return json.dumps({"passed": self.passed, **asdict(self), "collectives": calls}, indent=2)

    def __str__(self) -> str:
        """Format the report as plain text, with tables of at most 120 columns."""
        text = io.StringIO()
        print_report(Console(file=text, width=120, color_system=None, highlight=False, legacy_windows=False), self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def get_tolerances(dtype: torch.dtype) -> Tolerances:
    """Return the tolerances for a comparison in float32 or float64. Raises ConfigError for other dtypes."""
    if dtype == torch.float64:
        return Tolerances(1e-10, 1e-10, 2.2e-16)
    if dtype == torch.float32:
        return Tolerances(1e-5, 1e-4, 1.2e-7)
    raise ConfigError(
        f"verify does not support dtype={dtype}, because rounding would hide errors of the sharded model.",
        remedy="Use dtype=torch.float64 or torch.float32.",
    )


def get_half_precision_tolerances(dtype: torch.dtype) -> Tolerances:
    """Return the tolerances for models with 16-bit parameters and fp32 master weights.

    The tolerances are larger than rounding errors, including a ReLU that rounding flips (T5), and smaller than the
    effect of a gradient that is left out or counted twice.
    """
    return Tolerances(1e-2, 5e-2, torch.finfo(dtype).eps)


def print_report(console: Console, report: Report, title: str = "") -> None:
    """Print a report of ``verify`` as tables, followed by the verdict.

    Args:
        title: description of the model's origin.
    """
    steps = "1 step" if report.steps == 1 else f"{report.steps} steps"
    source = f" ({escape(title)})" if title else ""
    console.print(f"[bold]{escape(report.model)}[/]{source}: unsharded, and sharded over {escape(report.layout)}.")
    off = "dropout and lower-precision casts" if report.dtype == "float64" else "dropout"
    console.print(f"{steps} in {report.dtype} ({report.seconds:.1f} s), with {off} disabled.")
    _print_differences(console, report)
    _print_step_collectives(console, report)
    if report.missing:
        missing = f"Gradients that only one of the two models has: {escape(', '.join(report.missing))}\n"
        console.print(missing, soft_wrap=True)  # does not break the names of parameters
    mark = "[bold green]PASS[/]" if report.passed else "[bold red]FAIL[/]"
    console.print(f"{mark}: {escape(report.verdict)}", soft_wrap=True)


def _print_differences(console: Console, report: Report) -> None:
    console.print(f"\n[bold]{'largest difference':20} {'relative':>8} {'bound':>8}      where[/]")
    for kind, difference, bound in report.compared_quantities:
        mark = "[green]ok[/]" if difference.used <= 1 else "[bold red]too large[/]"
        line = f"{kind:20} {difference.relative:8.1e} {bound:8.0e}  {mark}"
        start = len(Text.from_markup(line))
        gap = "  " if start + 2 + len(difference.where) <= console.width else "\n    "  # keeps the name whole
        console.print(f"{line}{gap}{escape(difference.where)}", soft_wrap=True)
    console.print()


def _print_step_collectives(console: Console, report: Report) -> None:
    if not report.collectives:
        console.print("No collectives.\n")
        return
    names = {name: name.replace("_", "-") for name in report.collectives}
    width = max(map(len, ("collectives of one step", *names.values())))
    console.print(f"[bold]{'collectives of one step':{width}} {'calls':>6} {'MB':>9}[/]")
    for name, (count, sent) in report.collectives.items():
        console.print(f"{names[name]:{width}} {count:6} {sent / 1e6:9.3f}", soft_wrap=True)
    sends = any(name.startswith("send over ") for name in report.collectives)
    note = " Sends: only those of rank 0, to the adjacent stages." if sends else ""
    console.print(f"Calls: made by rank 0. MB: sent by all members of rank 0's groups, in total.{note}\n")
