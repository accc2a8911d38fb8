"""Runs as curves of characters, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardformer.trainer.picture import VALIDATION, Runs, finite, panel_names, said_bytes, series, smoothed, title_of
from shardformer.trainer.records import Record

HEIGHT = 8
LABELS = 9
"""Characters at the left, for the values."""
MARKS = "*o+x#@%&"
"""Of the runs, where dots cannot be printed."""
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Of a braille character, by row and column."""


@dataclass(frozen=True)
class Line:
    """A line of text in pieces, each with the number of the run whose colour it has; None: no run's."""

    pieces: tuple[tuple[str, int | None], ...]

    def __str__(self) -> str:
        return "".join(text for text, _ in self.pieces)


def curves(runs: Runs, width: int, names: Sequence[str] | None = None, *, dots: bool = True) -> list[Line]:
    """A chart for each value, under each other.

    Args:
        width: of the terminal, in characters; 40 at the least are used.
        names: of values; None: of all.
        dots: whether the terminal can print braille dots; else each run has a mark.
    """
    lines: list[Line] = []
    for name in names if names is not None else panel_names(runs):
        lines += [*_chart(runs, name, max(width, 40) - LABELS - 1, dots), Line(())]
    if len(runs) > 1:
        for number, run in enumerate(runs):
            lines.append(Line(((f"{'⠿' if dots else MARKS[number % len(MARKS)]} ", number), (run, None))))
    return lines


def _chart(runs: Runs, name: str, width: int, dots: bool) -> list[Line]:
    found = [_of_run(records, name) for records in runs.values()]
    steps = np.concatenate([one[0] for one in found])
    values = np.concatenate([one[1] for one in found])
    bad = sum(int((~np.isfinite(series(records, name)[1])).sum()) for records in runs.values())
    said = f", {bad} not finite" if bad else ""
    if len(values) == 0:
        return [Line(((f"{title_of(name)}: no finite value{said}", None),))]
    low, high = float(values.min()), float(values.max())
    if name in ("tokens_per_s", "memory_bytes", "flops_per_s"):
        low = min(low, 0.0)
    first, last = float(steps.min()), float(steps.max())
    grid: dict[tuple[int, int], tuple[int, int]] = {}
    for number, (at, what) in enumerate(found):
        rows, columns = (HEIGHT * 4, width * 2) if dots else (HEIGHT, width)
        for x, y in _points(_scaled(at, first, last, columns), _scaled(what, low, high, rows)):
            _set(grid, x, rows - 1 - y, number, dots)
    lines = [Line(((f"{'':{LABELS}} {title_of(name)}{said}", None),))]
    for row in range(HEIGHT):
        share = (HEIGHT - 1 - row) / (HEIGHT - 1)
        label = _short(name, low + share * (high - low)) if row % 7 in (0, 3) or row == HEIGHT - 1 else ""
        pieces: list[tuple[str, int | None]] = [(f"{label:>{LABELS}} ", None)]
        for column in range(width):
            bits, number = grid.get((row, column), (0, -1))
            text = " " if not bits else chr(0x2800 + bits) if dots else MARKS[number % len(MARKS)]
            pieces.append((text, number if bits else None))
        lines.append(Line(tuple(pieces)))
    foot = f"{first:g}"
    lines.append(Line(((f"{'':{LABELS}} {foot}{f'step {last:g}':>{width - len(foot)}}", None),)))
    return lines


def _of_run(records: Sequence[Record], name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Training values, smoothed as the picture has them; those of the validation where there are no others."""
    steps, values = finite(series(records, name))
    if len(values) == 0:
        return finite(series(records, VALIDATION + name))
    return steps, smoothed(values) if len(values) > 100 and name != "memory_bytes" else values


def _scaled(values: NDArray[np.float64], low: float, high: float, count: int) -> NDArray[np.int64]:
    span = high - low or 1.0
    return np.clip(((values - low) / span * (count - 1)).round(), 0, count - 1).astype(np.int64)


def _points(columns: NDArray[np.int64], rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The points of a curve, with those between one and the next."""
    found = [(int(x), int(y)) for x, y in zip(columns, rows)]
    between: list[tuple[int, int]] = found[:1]
    for (x0, y0), (x1, y1) in pairwise(found):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        between += [(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)) for i in range(1, count + 1)]
    return between


def _set(grid: dict[tuple[int, int], tuple[int, int]], x: int, y: int, number: int, dots: bool) -> None:
    if not dots:
        grid[y, x] = (1, number)
        return
    place = (y // 4, x // 2)
    bits, _ = grid.get(place, (0, number))
    grid[place] = (bits | DOTS[y % 4][x % 2], number)


def _short(name: str, value: float) -> str:
    if name == "memory_bytes":
        return said_bytes(value)
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale * (10 if unit == "k" else 1):
            return f"{value / scale:.3g}{unit}"
    return f"{value:.4g}"


def summary(runs: Runs) -> list[dict[str, str]]:
    """A row for each run: how far it went, what it reached, how fast it was, what it held."""
    return [{"run": run, **_reached(records)} for run, records in runs.items()]


def _reached(records: Sequence[Record]) -> dict[str, str]:
    def of(name: str) -> NDArray[np.float64]:
        return finite(series(records, name))[1]

    loss, tried, speed, memory = of("loss"), of("validation/loss"), of("tokens_per_s"), of("memory_bytes")
    cells: Mapping[str, Any] = {
        "step": records[-1].step if records else 0,
        "time": _time(records[-1].seconds if records else 0.0),
        "loss": f"{loss[-1]:.4f}" if len(loss) else "",
        "best validation": f"{tried.min():.4f}" if len(tried) else "",
        "tokens/s": _short("tokens_per_s", float(np.median(speed))) if len(speed) else "",
        "memory": said_bytes(float(memory.max())) if len(memory) else "",
    }
    return {name: str(value) for name, value in cells.items()}


def _time(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
