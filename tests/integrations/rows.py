"""Rows of the table of integrations: what the tests measured.

With INTEGRATION_ROWS=FILE, each row is appended to the file as one line of JSON.
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
    """Largest relative differences to one process.

    Args:
        files: files that were read back, and by what.
    """

    library: str
    release: str
    feature: str
    layout: str
    loss: float
    gradient: float
    files: str = ""


def record(library: str, feature: str, layout: dict[str, object], loss: float, gradient: float, files: str = "") -> Row:
    """Record a row of the table."""
    where = ", ".join(f"{name}={value}" for name, value in layout.items()) or "one process"
    found = next(each for path in ([str(FOLDER)], None) for each in distributions(name=library, path=path or sys.path))
    row = Row(library, found.version, feature, where, loss, gradient, files)
    if file := os.environ.get("INTEGRATION_ROWS"):
        with Path(file).open("a") as lines:
            lines.write(json.dumps(asdict(row)) + "\n")
    return row
