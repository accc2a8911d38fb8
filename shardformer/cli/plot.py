"""``shardformer plot``: the loss, speed and memory of runs, in the terminal and as a picture."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardformer.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from shardformer.trainer.picture import Runs

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SHOWN = ("loss", "tokens_per_s", "memory_bytes")


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders that training wrote into, or their records.jsonl.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The picture, in .png or .svg; by default curves.png in the run's folder."),
    ] = None,
    values: Annotated[
        str, typer.Option(metavar="NAMES", help="What is drawn, as loss,grad_norm; by default all in the picture.")
    ] = "",
) -> None:
    """Draw the loss, tokens per second and memory of one run or several, as a picture and in the terminal."""
    from rich.console import Console

    from shardformer.trainer.picture import draw, panel_names
    from shardformer.trainer.records import read_records

    found = {name: read_records(path) for name, path in zip(_names(runs), runs)}
    asked = [name.strip() for name in values.split(",") if name.strip()]
    known = panel_names(found)
    for name in asked:
        if name not in known:
            rule = "What is drawn was recorded; a value of the validation is drawn with the one of the training"
            raise ConfigError(f"--values {values}: {name!r}", rule=rule, remedy=nearest(name, known))
    console = Console(highlight=False)
    _print(console, found, asked or [name for name in SHOWN if name in known] or known)
    path = out if out is not None else _folder(runs) / "curves.png"
    draw(found, path, asked or None)
    console.print(f"\nThe picture is in {path}", soft_wrap=True, markup=False)


def _folder(runs: list[Path]) -> Path:
    if len(runs) > 1:
        return Path()
    return runs[0] if runs[0].is_dir() else runs[0].parent


def _names(runs: list[Path]) -> list[str]:
    """For people: as much of the end of each path as tells the runs apart."""
    parts = [(path.parent if path.is_file() else path).absolute().parts for path in runs]
    count = 1
    while count < max(map(len, parts)) and len({part[-count:] for part in parts}) < len(runs):
        count += 1
    names = [os.path.join(*part[-count:]) for part in parts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{twice!r} is named twice", rule="Each run is drawn once", remedy="Name it once")
    return names


def _print(console: Console, runs: Runs, names: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from shardformer.trainer.curves import curves, summary

    dots = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    dots = dots and (len(runs) == 1 or console.color_system is not None)  # without colours marks tell runs apart
    for line in curves(runs, console.width, names, dots=dots):
        text = Text()
        for piece, run in line.pieces:
            text.append(piece, style=COLOURS[run % len(COLOURS)] if run is not None else "")
        console.print(text, soft_wrap=True)
    rows = summary(runs)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in columns:
        table.add_column(name, justify="left" if name == "run" else "right")
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    console.print(table)
