"""A process that finishes its work on a signal, such as a trainer that saves, tells the launcher to wait for it.

It does so before a signal comes: then it may be inside of a long call of C++, where no handler of Python's runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "SHARDFORMER_FINISHING"
"""Environment variable, set by the launcher: the folder in which such a process leaves a file with its number."""
ENDED = "ended"
"""A file in it while the launcher ends all processes because one of them failed."""


@contextmanager
def finishes_on_signals() -> Iterator[None]:
    """While it lasts, the launcher that started this process waits for it after a signal."""
    note = _note(os.getpid())
    if note is not None:
        with suppress(OSError):  # without it the launcher waits as for any other process
            note.touch()
    try:
        yield
    finally:
        if note is not None:
            note.unlink(missing_ok=True)


def finishes(pid: int) -> bool:
    """Whether a process said so."""
    note = _note(pid)
    return note is not None and note.exists()


def has_launcher() -> bool:
    """Whether a launcher waits for such processes: it then decides when a second signal is to end them."""
    return FOLDER in os.environ


def is_ended() -> bool:
    """Whether the launcher ends this process because another one failed: there is nothing to finish."""
    return has_launcher() and Path(os.environ[FOLDER], ENDED).exists()


def _note(pid: int) -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder, str(pid)) if folder else None
