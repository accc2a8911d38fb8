"""Results of the tests of integrations, one row per library, feature and layout.

If the environment variable ``INTEGRATION_ROWS`` names a file, each row is appended to it as one line of JSON.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One result.

    Args:
        loss: largest difference of a loss to one process; None if the layout refuses the feature.
        gradient: largest relative difference of a gradient; of the weights where ZeRO shards the gradients.
        files: largest difference of the files that the library writes and reads; None if not compared.
        note: the reason of a refusal.
    """

    library: str
    release: str
    feature: str
    layout: str
    loss: float | None = None
    gradient: float | None = None
    files: float | None = None
    note: str = ""


def record(row: Row) -> None:
    """Append a row to the file of results, if one is requested."""
    if path := os.environ.get("INTEGRATION_ROWS"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{json.dumps(asdict(row))}\n")
