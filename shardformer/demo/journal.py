"""What a run tells while it trains: a line of a file for each step, which the parent reads as it grows."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

POLL_S = 0.1


@dataclass(frozen=True)
class Note:
    """A step that is done: its number from 1, its loss, and how fast the run is by now."""

    step: int
    loss: float
    tokens_per_s: float


def write_note(journal: str, note: Note) -> None:
    """Adds a line to the file."""
    with open(journal, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(note)) + "\n")


@contextmanager
def follow(journal: str, tell: Callable[[Note], None]) -> Iterator[None]:
    """Calls ``tell`` with each note that comes while the ``with`` lasts, in a thread, and with the rest at its end."""
    done = threading.Event()
    path = Path(journal)
    path.touch()

    def read() -> None:
        with path.open(encoding="utf-8") as file:
            while True:
                last = done.is_set()
                for line in file:  # each was written at once
                    tell(Note(**json.loads(line)))
                if last:
                    return
                done.wait(POLL_S)

    thread = threading.Thread(target=read, name="follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
