"""Rows of the table of integrations: what the tests measured.

If the environment variable ``INTEGRATION_ROWS`` names a file, each row is appended to it as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path

from tests.integrations.process import FOLDER


@dataclass(frozen=True)
class Row:
    """Largest relative differences from one process.

    Args:
        loss: difference of a loss, or None if the layout refuses the feature.
        gradient: difference of a gradient, or of the weights where ZeRO shards the gradients.
        files: difference of the files that the library writes and reads, or which files were read back.
        note: the reason of a refusal.
    """

    library: str
    release: str
    feature: str
    layout: str
    loss: float | None = None
    gradient: float | None = None
    files: float | str | None = None
    note: str = ""


def record(row: Row) -> None:
    """Append a row to the file of results, if one is requested."""
    if path := os.environ.get("INTEGRATION_ROWS"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(asdict(row))}\n")


def record_difference(
    library: str, feature: str, layout: dict[str, object], loss: float, gradient: float, files: str = ""
) -> Row:
    """Record a row with the installed release of the library."""
    where = ", ".join(f"{name}={value}" for name, value in layout.items()) or "one process"
    found = next(each for path in ([str(FOLDER)], None) for each in distributions(name=library, path=path or sys.path))
    row = Row(library, found.version, feature, where, loss, gradient, files)
    record(row)
    return row
