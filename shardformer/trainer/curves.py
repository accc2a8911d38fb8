"""Runs as curves of characters, for a terminal, and what they reached as a table.

     10 ┤⠢⣀
        │  ⠑⢄   ●               braille dots: the values, or their moving mean; ● of the validation data
      5 ┤    ⠑⠤⣀    ●    ●
        │       ⠉⠒⠤⢄⣀⣀
      0 ┤
        └────────────────×××    × on the axis: a value that is not finite
         1          step 300

Without braille each run has a mark of its own: ``*`` for its values, ``1`` for those of the validation data.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardformer.trainer.picture import (
    FROM_ZERO,
    VALIDATION,
    Runs,
    Series,
    drawn,
    finite,
    is_log,
    is_smoothed,
    panel_names,
    said_bytes,
    series,
    title_of,
)
from shardformer.trainer.records import Record

HEIGHT = 9
_INTERVALS = 4  # between ticks, each as many lines
_ROUND = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)  # what is between two ticks, times a power of ten
NARROWEST = 40
_TWO_COLUMNS = 100  # width from which two charts stand side by side
_GAP = 3  # between them
MARKS = "*o#@%&=+" + string.ascii_lowercase.replace("o", "")
_VALIDATION_MARKS = "123456789" + string.ascii_uppercase
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Of a braille character, by row and column."""


@dataclass(frozen=True)
class Line:
    """A line of text in pieces, each with the number of the run whose colour it has; None: no run's."""

    pieces: tuple[tuple[str, int | None], ...]

    def __str__(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True)
class Characters:
    """What charts are made of: the run itself, its validation, what is not finite, and the axes."""

    run: str
    validation: str
    not_finite: str
    upright: str
    tick: str
    corner: str
    flat: str


_BRAILLE = Characters("⠿", "●", "×", "│", "┤", "└", "─")
_PLAIN = Characters("", "", "!", "|", "|", "+", "-")
NEEDED = "".join(vars(_BRAILLE).values())
"""The characters that a terminal prints where ``dots`` is true, and besides all of braille."""


def curves(runs: Runs, width: int, names: Sequence[str] | None = None, *, dots: bool = True) -> list[Line]:
    """A chart for each value, and what its characters mean. No line is wider than the terminal.

    Two charts stand side by side where there is room; the first takes the whole width where their number is odd.

    Args:
        width: of the terminal, in characters; 40 at the least are used.
        names: of values; None: of all.
        dots: whether the terminal can print braille dots; else each run has a mark.
    """
    names, width = list(panel_names(runs) if names is None else names), max(width, NARROWEST)
    beside = width >= _TWO_COLUMNS and len(names) > 1
    lines: list[Line] = []
    if not beside or len(names) % 2:
        for name in names[:1] if beside else names:
            lines += [*_Chart(runs, name, width, dots).lines(), Line(())]
        names = names[1:] if beside else []
    for left, right in zip(names[::2], names[1::2]):
        half = (width - _GAP) // 2
        both = (_Chart(runs, left, half, dots).lines(), _Chart(runs, right, half, dots).lines())
        lines += [*_side_by_side(*both, half), Line(())]
    return lines + _legend(runs, width, dots, any(map(_has_validation, runs.values())))


def _has_validation(records: Sequence[Record]) -> bool:
    return any(name.startswith(VALIDATION) for record in records for name in record.values)


class _Chart:
    """The chart of one value."""

    def __init__(self, runs: Runs, name: str, width: int, dots: bool) -> None:
        self.name, self.width, self.dots = name, width, dots
        self.characters = _BRAILLE if dots else _PLAIN
        self.runs = list(runs)
        self.trained = [series(records, name) for records in runs.values()]
        self.validated = [series(records, VALIDATION + name) for records in runs.values()]
        self.shown = [drawn(name, one) for one in self.trained]
        self.values = np.concatenate([finite(one)[1] for one in [*self.shown, *self.validated]])
        self.steps = np.concatenate([steps for steps, _ in [*self.trained, *self.validated]])
        self.is_log = is_log(name, self.values)

    def lines(self) -> list[Line]:
        title = self._title()
        if len(self.values) == 0:
            return [Line(((_cut(f"{title}: no finite value", self.width), None),)), *self._notes(2)]
        low, high, values = self._ticks()
        ticks = {self._rows(np.array([t]), low, high, HEIGHT)[0]: _said(self.name, t) for t in values}
        margin = max(map(len, ticks.values())) + 2
        cells = self._cells(low, high, self.width - margin)
        lines = [Line(((f"{'':{margin}}{_cut(title, self.width - margin)}", None),))]
        for row in range(HEIGHT):
            label = ticks.get(HEIGHT - 1 - row, "")
            edge = self.characters.tick if label else self.characters.upright
            empty = (" ", None)
            found = [cells.get((row, column), empty) for column in range(self.width - margin)]
            lines.append(_line([(f"{label:>{margin - 2}} {edge}", None), *found]))
        return [*lines, *self._foot(margin), *self._notes(margin)]

    def _title(self) -> str:
        words = [title_of(self.name)]
        if not any(len(steps) for steps, _ in self.trained):
            words.append("of the validation data")
        if any(is_smoothed(self.name, one) for one in self.trained):
            words.append("moving mean")
        if self.is_log:
            words.append("logarithmic")
        return ", ".join(words)

    def _ticks(self) -> tuple[float, float, list[float]]:
        """The ends of the axis, of logarithms where it is logarithmic, and round values on it."""
        low, high = float(self.values.min()), float(self.values.max())
        if self.is_log:
            low, high = math.log10(low), math.log10(high)
            decades = range(math.ceil(low), math.floor(high) + 1)
            return low, high, [10.0**d for d in decades[:: math.ceil(len(decades) / _INTERVALS)]]
        if self.name in FROM_ZERO:
            low = min(low, 0.0)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            around = abs(low) / 10 or 1.0
            low, high = low - around, high + around
        unit = 10.0 ** math.floor(math.log10((high - low) / _INTERVALS))
        steps = [unit * n for n in (*_ROUND, 20)]
        step = next(step for step in steps if (math.floor(low / step) + _INTERVALS) * step >= high)
        ticks = [(math.floor(low / step) + n) * step for n in range(_INTERVALS + 1)]
        return ticks[0], ticks[-1], ticks

    def _rows(self, values: NDArray[np.float64], low: float, high: float, count: int) -> list[int]:
        return _scaled(np.log10(values) if self.is_log else values, low, high, count)

    def _cells(self, low: float, high: float, width: int) -> dict[tuple[int, int], tuple[str, int | None]]:
        """The characters of the curves, by row from the top and column."""
        first, last = float(self.steps.min()), float(self.steps.max())
        columns, rows = (width * 2, HEIGHT * 4) if self.dots else (width, HEIGHT)
        bits: dict[tuple[int, int], int] = {}
        cells: dict[tuple[int, int], tuple[str, int | None]] = {}
        for number, (trained, validated) in enumerate(zip(self.shown, self.validated)):
            # a line comes to the points of the validation where there is no other curve
            for steps, values in _unbroken(trained if len(trained[0]) else validated):
                places = zip(_scaled(steps, first, last, columns), self._rows(values, low, high, rows))
                for x, y in _filled(list(places)):
                    place, bit = (HEIGHT - 1 - y // 4, x // 2), DOTS[3 - y % 4][x % 2]
                    if self.dots:
                        bits[place] = bits.get(place, 0) | bit
                        cells[place] = chr(0x2800 + bits[place]), number
                    else:
                        cells[HEIGHT - 1 - y, x] = MARKS[number % len(MARKS)], number
        for number, validated in enumerate(self.validated):
            steps, values = finite(validated)
            mark = _validation_mark(number, self.dots)
            for x, y in zip(_scaled(steps, first, last, width), self._rows(values, low, high, HEIGHT)):
                cells[HEIGHT - 1 - y, x] = mark, number
        return cells

    def _foot(self, margin: int) -> list[Line]:
        """The axis of steps, with a mark where a value is not finite."""
        first, last = float(self.steps.min()), float(self.steps.max())
        width = self.width - margin
        axis: list[tuple[str, int | None]] = [(self.characters.flat, None)] * width
        for number, both in enumerate(zip(self.trained, self.validated)):
            for steps, values in both:
                for x in _scaled(steps[~np.isfinite(values)], first, last, width):
                    axis[x] = self.characters.not_finite, number
        labels = f"{first:.0f}" if first < last else ""
        end = f"step {last:.0f}"
        labels += f"{end:>{width - len(labels)}}" if labels else end
        return [
            _line([(f"{'':{margin - 1}}{self.characters.corner}", None), *axis]),
            _line([(" " * margin + labels, None)]),
        ]

    def _notes(self, margin: int) -> Iterator[Line]:
        """How many values of each run are not finite."""
        for number, both in enumerate(zip(self.trained, self.validated)):
            for (steps, values), is_validation in zip(both, (False, True)):
                bad = steps[~np.isfinite(values)]
                if len(bad) == 0:
                    continue
                room = self.width - margin - 2
                said = f"{'validation: ' if is_validation else ''}{len(bad)} of {len(steps)} not finite"
                where = f", first at step {bad[0]:.0f}"
                said += where if len(said) + len(where) <= room else ""
                if len(self.runs) > 1 and room - len(said) >= 6:
                    said = f"{_cut(self.runs[number], room - len(said) - 2)}: {said}"
                mark = self.characters.not_finite
                yield _line([(" " * margin, None), (mark, number), (f" {_cut(said, room)}", None)])


def _legend(runs: Runs, width: int, dots: bool, has_validation: bool) -> list[Line]:
    """As many entries in a line as fit."""
    entries: list[list[tuple[str, int | None]]] = []
    for number, run in enumerate(runs):
        mark = _BRAILLE.run if dots else MARKS[number % len(MARKS)]
        also = f" (validation {_validation_mark(number, dots)})" if has_validation and not dots else ""
        if len(runs) > 1 or also:
            entries.append([(mark, number), (f" {_cut(run, width - 2 - len(also))}{also}", None)])
    if has_validation and dots:
        entries.append([(_BRAILLE.validation, None), (" validation", None)])
    lines: list[list[tuple[str, int | None]]] = []
    for entry in entries:
        if lines and _length(lines[-1]) + _GAP + _length(entry) <= width:
            lines[-1] += [(" " * _GAP, None), *entry]
        else:
            lines.append(entry)
    return [_line(line) for line in lines]


def _validation_mark(number: int, dots: bool) -> str:
    return _BRAILLE.validation if dots else _VALIDATION_MARKS[number % len(_VALIDATION_MARKS)]


# ------------------------------------------------------------------------------------------------------------- places


def _scaled(values: NDArray[np.float64], low: float, high: float, count: int) -> list[int]:
    """Places from 0 to ``count - 1``."""
    places = np.clip(((values - low) / (high - low or 1.0) * (count - 1)).round(), 0, count - 1)
    return [int(place) for place in places]


def _unbroken(one: Series) -> Iterator[Series]:
    """The parts of a curve between values that are not finite."""
    steps, values = one
    gaps = np.flatnonzero(~np.isfinite(values))
    for start, end in pairwise([-1, *gaps, len(values)]):
        if end > start + 1:
            yield steps[start + 1 : end], values[start + 1 : end]


def _filled(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Places, with those between one and the next."""
    found = list(places[:1])
    for (x0, y0), (x1, y1) in pairwise(places):
        count = max(abs(x1 - x0), abs(y1 - y0))
        found += [(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)) for i in range(1, count + 1)]
    return found


def _side_by_side(left: list[Line], right: list[Line], width: int) -> Iterator[Line]:
    for row in range(max(len(left), len(right))):
        one, other = (lines[row] if row < len(lines) else Line(()) for lines in (left, right))
        between = " " * (width + _GAP - len(str(one)))
        yield _line([*one.pieces, (between, None), *other.pieces])


def _line(pieces: Sequence[tuple[str, int | None]]) -> Line:
    """Pieces of one colour become one; no blanks are left at the end."""
    joined: list[tuple[str, int | None]] = []
    for text, number in pieces:
        if joined and joined[-1][1] == number:
            joined[-1] = joined[-1][0] + text, number
        else:
            joined.append((text, number))
    if joined:
        joined[-1] = joined[-1][0].rstrip(), joined[-1][1]
    return Line(tuple(joined))


def _length(pieces: Sequence[tuple[str, int | None]]) -> int:
    return sum(len(text) for text, _ in pieces)


def _cut(text: str, most: int) -> str:
    """The end of a long name, which is where runs differ."""
    return text if len(text) <= most else f"..{text[2 - most :]}"


# --------------------------------------------------------------------------------------------------------- the summary


def summary(runs: Runs) -> list[dict[str, str]]:
    """A row for each run: how far it went, what it reached, how fast it was on the mean, what it held at the most.

    A best or mean value is of those that are finite; a last one is said as it is.
    """
    return [{"run": run, **_reached(records)} for run, records in runs.items()]


def _reached(records: Sequence[Record]) -> dict[str, str]:
    losses = {name: series(records, name)[1] for name in ("loss", VALIDATION + "loss")}
    cells = {
        "step": str(max((record.step for record in records), default=0)),
        "time": _time(records[-1].seconds if records else 0.0),
    }
    for name, values in losses.items():
        shown = name.replace("/", " ")
        best = values[np.isfinite(values)]
        cells[f"last {shown}"] = _said_loss(values[-1]) if len(values) else ""
        cells[f"best {shown}"] = _said_loss(best.min()) if len(best) else cells[f"last {shown}"]
    speed, memory = finite(series(records, "tokens_per_s"))[1], finite(series(records, "memory_bytes"))[1]
    cells["mean tokens/s"] = _said("tokens_per_s", float(f"{speed.mean():.4g}")) if len(speed) else ""
    cells["peak memory"] = said_bytes(float(memory.max())) if len(memory) else ""
    return cells


def _said_loss(value: float) -> str:
    """Four digits behind the point, where they say something."""
    return f"{value:.4f}" if value == 0 or 1e-2 <= abs(value) < 1e5 or not math.isfinite(value) else f"{value:.3e}"


def _said(name: str, value: float) -> str:
    """51200 as 51.2k."""
    if name == "memory_bytes":
        unit, scale = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if abs(value) >= s), ("B", 1.0))
        return f"{value / scale:g} {unit}"
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if scale * 1e4 > abs(value) >= scale * (10 if unit == "k" else 1):
            return f"{value / scale:.5g}{unit}"
    return f"{value:.10g}"


def _time(seconds: float) -> str:
    if not math.isfinite(seconds):
        return str(seconds)
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
