"""A script that calls ``verify`` without a guard: each worker imports the script, which calls ``verify`` again.

The worker finds that out, leaves a note and ends without a word; the parent, which misses the worker, reads the note.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from shardformer.errors import ConfigError, WorkerError

NOTE_VARIABLE = "SHARDFORMER_UNGUARDED"


def refuse_import() -> None:
    """Ends a process that imports its parent's script just now; raises ConfigError where that parent is not ours."""
    if not getattr(process.current_process(), "_inheriting", False):
        return
    place = _place(sys._getframe())
    note = Path(os.environ.get(NOTE_VARIABLE, ""))
    if NOTE_VARIABLE in os.environ and note.parent.is_dir():
        note.write_text(place, encoding="utf-8")
        sys.exit(1)
    raise _unguarded(place)


@contextmanager
def watch_workers() -> Iterator[None]:
    """Raises ConfigError, in place of WorkerError, when a worker left the note."""
    before = os.environ.get(NOTE_VARIABLE)
    with TemporaryDirectory(prefix="shardformer-") as folder:
        note = Path(folder, "unguarded")
        os.environ[NOTE_VARIABLE] = str(note)
        try:
            yield
        except WorkerError:
            if note.exists():
                raise _unguarded(note.read_text(encoding="utf-8")) from None
            raise
        finally:
            os.environ.pop(NOTE_VARIABLE)
            if before is not None:
                os.environ[NOTE_VARIABLE] = before


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            return f"line {frame.f_lineno} of {frame.f_code.co_filename}"
        frame = frame.f_back
    return "the script"


def _unguarded(place: str) -> ConfigError:
    return ConfigError(
        f"verify() is called without a guard, at {place}",
        rule="verify starts processes, each of which imports the script, and would call verify again",
        remedy='Put the call, and whatever else the script does, under if __name__ == "__main__":\n',
    )
