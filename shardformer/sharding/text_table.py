"""How ``describe`` prints: rows under the stack of layers they belong to, siblings alike on one line."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

NAME_WIDTH = 52
"""Of the first column; longer lists of names go on in the next line."""

Row = tuple[str, tuple[str, ...], int]
"""Path with ``*`` for the index of a layer, the cells behind it, and how many there are of it."""


def table(head: tuple[str, ...], rows: Sequence[Row], layers: Mapping[str, int]) -> list[str]:
    """The rows as aligned lines, under one line for each stack of layers.

    Args:
        head: the titles of the columns.
        layers: ``transformer.h.*`` -> how many layers that stack has.

    >>> print("\\n".join(table(("", "was", "is"), [("head", ("6", "3"), 1), ("h.*.q", ("6", "3"), 2),
    ...                                           ("h.*.k", ("6", "3"), 2), ("h.*.t", ("9", "5"), 1)], {"h.*": 2})))
            was  is
    head    6    3
    h.*: 2 layers
      q, k  6    3
      t     9    5   1 of 2
    """
    lines: list[tuple[str, ...]] = [head]
    for section, members in _sections(rows):
        if section:
            count = layers.get(section, 0)
            lines.append((f"{section}: {count} layer{'' if count == 1 else 's'}",))
        for names, cells in _merged(members, layers.get(section, 1)):
            first, *more = wrapped(names, NAME_WIDTH)
            indent = "  " if section else ""
            lines += [(indent + first, *cells), *[(f"{indent}  {rest}",) for rest in more]]
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]], numbers: int | None = None) -> list[str]:
    """The lines with their cells in columns, from ``numbers`` on at the right; a line of one cell stands alone."""
    columns = range(max(map(len, lines)))
    widths = [max((len(line[i]) for line in lines if i < len(line) > 1), default=0) for i in columns]

    def padded(at: int, cell: str) -> str:
        return cell.ljust(widths[at]) if numbers is None or at < numbers else cell.rjust(widths[at])

    return ["  ".join(padded(at, cell) for at, cell in enumerate(line)).rstrip() for line in lines]


def wrapped(names: str, width: int, together: str = "(?<=:) ") -> list[str]:
    """The names in lines of that width; a space that matches ``together`` stays, and a long path breaks at a dot."""
    words = [_in_two(word, width) for word in re.sub(together, "\xa0", names).split(" ")]
    lines = textwrap.wrap(" ".join(words), width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def _in_two(path: str, width: int) -> str:
    at = path.rfind(".", 0, width) + 1 if len(path) > width else 0
    return f"{path[:at]} {path[at:]}" if at else path


def whole_rows(parameters: Iterable[tuple[str, str, int, float]]) -> list[Row]:
    """Rows of whole parameters (path, shape, how many, share): those of a module, and modules alike, on one line."""
    leaves: dict[tuple[str, str, int], tuple[list[str], float]] = {}
    for path, shape, count, share in parameters:
        owner, _, leaf = path.rpartition(".")
        names, total = leaves.get((owner, shape, count), ([], 0.0))
        leaves[owner, shape, count] = ([*names, leaf], total + share)
    alike: dict[tuple[str, str, str, int], tuple[list[str], float]] = {}
    for (owner, shape, count), (names, share) in leaves.items():
        section = _section(owner)
        key = (section, ", ".join(names), shape, count)
        owners, total = alike.get(key, ([], 0.0))
        alike[key] = ([*owners, _inside(section, owner)], total + share)
    out: list[Row] = []
    for (section, names_, shape, count), (owners, share) in alike.items():
        text = f"{', '.join(owners)}: {names_}" if any(owners) else names_
        out.append((f"{section}.{text}" if section else text, (shape, percent(share)), count))
    return out


def percent(share: float) -> str:
    """``0.3%``, and ``<0.1%`` for what would look like nothing."""
    return f"{share:.1%}" if share >= 0.0005 or share == 0 else "<0.1%"


def _section(path: str) -> str:
    """The path up to the first index: ``transformer.h.*`` of ``transformer.h.*.attn``."""
    before, star, _ = f"{path}.".partition(".*.")
    return f"{before}.*" if star else ""


def _inside(section: str, path: str) -> str:
    return path[len(section) :].lstrip(".") or "the layer itself" if section else path


def _sections(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {"": []}
    for path, cells, count in rows:
        section = _section(path)
        found.setdefault(section, []).append((_inside(section, path), cells, count))
    return [(section, members) for section, members in found.items() if members]


def _merged(rows: Sequence[Row], num_layers: int) -> list[tuple[str, tuple[str, ...]]]:
    """Names and cells; neighbours of one module that have the same cells share a line: ``attn.q, k, v``."""

    def alike(row: Row) -> tuple[str, tuple[str, ...], int, str]:
        path, cells, count = row
        return path.rpartition(".")[0], cells, count, path if ": " in path else ""

    out = []
    for _, neighbours in groupby(rows, alike):
        (first, cells, count), *others = neighbours
        names = [first, *(path.rpartition(".")[2] for path, *_ in others)]
        out.append((", ".join(names), (*cells, _how_many(count, num_layers))))
    return out


def _how_many(count: int, num_layers: int) -> str:
    if count == num_layers:
        return ""
    return f"{count} of {num_layers}" if count < num_layers else f"{count} times"
