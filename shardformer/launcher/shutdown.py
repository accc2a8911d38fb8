"""How ``shardformer run`` ends the processes that are left: soon, with a note of what each of them was doing.

A process that finishes its work on a signal, such as a trainer that saves, tells the launcher so before any signal
comes (inside a long C++ call no Python handler runs). The launcher waits longer for such a process if it was signalled
itself. A second signal ends all processes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "SHARDFORMER_FINISHING"
"""Environment variable, set by the launcher: the folder in which such a process leaves a file with its number."""
ENDED_FILE = "ended"
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
    return has_launcher() and Path(os.environ[FOLDER], ENDED_FILE).exists()


def _note(pid: int) -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder, str(pid)) if folder else None


SHUTDOWN_TIMEOUT_S = 8
"""That processes have to end in. A script that needs longer for its own SIGTERM says so: --shutdown-timeout 60."""
FINISHES_S = 600
"""That those have that finish their step and save on a signal."""
AT_ONCE_S = 3
"""After a second signal."""
CHECK_BEFORE_KILL_S = 0.5
"""It kills them: what ends by itself until then, such as a script that saves, is no news."""
SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
NOISE = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")
"""Loggers of torch that warn of each signal that it sends on; what ended how is said at the end."""

STUCK_PROCESSES: dict[int, str] = {}
"""pid -> in words what it did, of processes that had not ended when the launcher looked."""
STACK_LOCATIONS: dict[int, str] = {}
"""rank -> the line of the user's own code that it was at, of processes that did not fail before they were ended."""


@contextmanager
def set_shutdown_timeout(options: argparse.Namespace) -> Iterator[None]:
    """While it lasts, torch's launcher waits for its processes as long as asked, by default ``SHUTDOWN_TIMEOUT_S``,
    not 30 s."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    said = getattr(options, "shutdown_timeout", None) or os.environ.get(SHUTDOWN_TIMEOUT_VARIABLE)
    asked = int(said) if said is not None else None
    plain, signals = PContext.close, 0
    folder = tempfile.mkdtemp(prefix="shardformer-finishing-")
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = folder
    for name in NOISE:
        logging.getLogger(name).setLevel(logging.ERROR)

    def close(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
        nonlocal signals
        pids = list(self.pids().values())
        signals += _is_signalled()
        seconds = asked if asked is not None else SHUTDOWN_TIMEOUT_S
        if not signals:
            Path(folder, ENDED_FILE).touch()
        if signals > 1:
            seconds = AT_ONCE_S
        elif signals == 1 and any(map(finishes, pids)):
            seconds = asked if asked is not None else FINISHES_S
        looks = threading.Timer(
            max(seconds - CHECK_BEFORE_KILL_S, seconds / 2),
            _process_states,
            [pids, death_sig or signal.SIGTERM, seconds],
        )
        looks.daemon = True
        if signals <= 1:  # the second one asks for what happens then
            looks.start()
        try:
            plain(self, death_sig, seconds)
        finally:
            looks.cancel()
            Path(folder, ENDED_FILE).unlink(missing_ok=True)  # the launcher may start them once more
            _read_places(self.error_files.values())

    PContext.close = close  # type: ignore[method-assign]
    try:
        yield
    finally:
        PContext.close = plain  # type: ignore[method-assign]
        if before is None:
            os.environ.pop(FOLDER, None)
        else:
            os.environ[FOLDER] = before
        shutil.rmtree(folder, ignore_errors=True)


def _is_signalled() -> bool:
    """Whether the launcher ends its processes because a signal came to it, and not because one of them failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    return isinstance(sys.exc_info()[1], SignalException)


def _read_places(notes: Iterable[str]) -> None:
    STACK_LOCATIONS.clear()  # of an earlier attempt
    for path in notes:
        with suppress(OSError, ValueError, LookupError, TypeError):
            extra = json.loads(Path(path).read_text(encoding="utf-8"))["message"]["extraInfo"]
            STACK_LOCATIONS[extra["rank"]] = extra["at"]


def describe_stack_locations() -> list[str]:
    """Each place with the ranks that were there, those of most ranks last."""
    ranks: dict[str, list[int]] = {}
    for rank, place in sorted(STACK_LOCATIONS.items()):
        ranks.setdefault(place, []).append(rank)
    # a rank that does something else than all others is what one looks for
    return [
        f"{listed(of)} {'was' if len(of) == 1 else 'were'} at\n{place}"
        for place, of in sorted(ranks.items(), key=lambda item: len(item[1]))
        if place
    ]


def listed(ranks: Sequence[int]) -> str:
    """As "rank 3", or "ranks 0, 2 and 5 more"."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _process_states(pids: list[int], number: signal.Signals, seconds: float) -> None:
    for pid in pids:
        state = _state_of(pid)
        if state in ("T", "t"):
            STUCK_PROCESSES[pid] = "it was stopped (SIGSTOP, Ctrl-Z, a debugger), and the launcher killed it"
        elif state not in ("", "Z"):
            how = (
                f"it did not finish its step and save within {seconds:g} s of {number.name}"
                if finishes(pid)
                else f"it did not end on {number.name} (a handler of its own, or a call of C++)"
            )
            STUCK_PROCESSES[pid] = f"{how}, and the launcher killed it"


def _state_of(pid: int) -> str:
    """The letter of ``ps``; empty for a process that is gone, or where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
