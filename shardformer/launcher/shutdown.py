"""Ends the remaining processes of ``shardformer run`` quickly, and records what each of them was doing.

A process that finishes its work on a signal, such as a trainer that saves a checkpoint, registers itself in advance,
because Python cannot run signal handlers during a long C++ call. If the launcher itself receives a signal, it waits
longer for registered processes. A second signal ends all processes.
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
"""Environment variable set by the launcher: a folder in which such a process creates a file named after its PID."""
ENDED_FILE = "ended"  # file in this folder while the launcher ends all processes because one of them failed


@contextmanager
def finishes_on_signals() -> Iterator[None]:
    """Register this process, for the duration of the block, as one that needs time to finish after a signal."""
    note = _note(os.getpid())
    if note is not None:
        with suppress(OSError):  # the launcher then waits as for any other process
            note.touch()
    try:
        yield
    finally:
        if note is not None:
            note.unlink(missing_ok=True)


def finishes(pid: int) -> bool:
    """Whether a process is registered as one that finishes its work on a signal."""
    note = _note(pid)
    return note is not None and note.exists()


def has_launcher() -> bool:
    """Whether a launcher started this process and decides when a second signal ends it."""
    return FOLDER in os.environ


def is_ended() -> bool:
    """Whether the launcher is ending this process because another one failed, so that there is no work to finish."""
    return has_launcher() and Path(os.environ[FOLDER], ENDED_FILE).exists()


def _note(pid: int) -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder, str(pid)) if folder else None


SHUTDOWN_TIMEOUT_S = 8
"""Time for processes to end after a signal. Scripts with slower SIGTERM handlers set --shutdown-timeout 60."""
FINISHES_S = 600  # time for processes that finish their step and save
AT_ONCE_S = 3  # time after a second signal
CHECK_BEFORE_KILL_S = 0.5  # time before the kill at which the launcher checks which processes are still running
SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
NOISE = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")
"""Loggers of torch that warn about each forwarded signal. The report at the end replaces these warnings."""

STUCK_PROCESSES: dict[int, str] = {}
"""PID -> a description of why the process was still running shortly before the launcher killed it."""
STACK_LOCATIONS: dict[int, str] = {}
"""Rank -> the line of user code it was executing, for processes that the launcher ended before they failed."""


@contextmanager
def set_shutdown_timeout(options: argparse.Namespace) -> Iterator[None]:
    """Set the shutdown timeout of torch's launcher for the block, by default ``SHUTDOWN_TIMEOUT_S`` instead of 30 s."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    value = getattr(options, "shutdown_timeout", None) or os.environ.get(SHUTDOWN_TIMEOUT_VARIABLE)
    timeout_s = int(value) if value is not None else None
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
        seconds = timeout_s if timeout_s is not None else SHUTDOWN_TIMEOUT_S
        if not signals:
            Path(folder, ENDED_FILE).touch()
        if signals > 1:
            seconds = AT_ONCE_S
        elif signals == 1 and any(map(finishes, pids)):
            seconds = timeout_s if timeout_s is not None else FINISHES_S
        looks = threading.Timer(
            max(seconds - CHECK_BEFORE_KILL_S, seconds / 2),
            _process_states,
            [pids, death_sig or signal.SIGTERM, seconds],
        )
        looks.daemon = True
        if signals <= 1:  # after a second signal, the user expects a kill
            looks.start()
        try:
            plain(self, death_sig, seconds)
        finally:
            looks.cancel()
            Path(folder, ENDED_FILE).unlink(missing_ok=True)  # the launcher may restart the processes
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
    """Whether the launcher is ending its processes because it received a signal, not because one of them failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    return isinstance(sys.exc_info()[1], SignalException)


def _read_places(notes: Iterable[str]) -> None:
    STACK_LOCATIONS.clear()  # from an earlier attempt
    for path in notes:
        with suppress(OSError, ValueError, LookupError, TypeError):
            extra = json.loads(Path(path).read_text(encoding="utf-8"))["message"]["extraInfo"]
            STACK_LOCATIONS[extra["rank"]] = extra["at"]


def describe_stack_locations() -> list[str]:
    """Return each location with its ranks. The location with the most ranks is last."""
    ranks: dict[str, list[int]] = {}
    for rank, place in sorted(STACK_LOCATIONS.items()):
        ranks.setdefault(place, []).append(rank)
    # a rank that differs from all others is usually the cause
    return [
        f"{listed(of)} {'was' if len(of) == 1 else 'were'} at\n{place}"
        for place, of in sorted(ranks.items(), key=lambda item: len(item[1]))
        if place
    ]


def listed(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 3", or "ranks 0, 2 and 5 more"."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _process_states(pids: list[int], number: signal.Signals, seconds: float) -> None:
    for pid in pids:
        state = _state_of(pid)
        if state in ("T", "t"):
            STUCK_PROCESSES[pid] = "it was stopped (SIGSTOP, Ctrl-Z or a debugger), and the launcher killed it"
        elif state not in ("", "Z"):
            how = (
                f"it did not finish its step and save within {seconds:g} s after {number.name}"
                if finishes(pid)
                else f"it did not end on {number.name} (because of its own signal handler or a call into C++)"
            )
            STUCK_PROCESSES[pid] = f"{how}, and the launcher killed it"


def _state_of(pid: int) -> str:
    """Return the state letter of ``ps``, or empty if the process is gone or the system does not provide it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
