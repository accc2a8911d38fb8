"""Shuts down the processes of ``shardformer run`` after a failure or a signal.

The launcher records which line of code each process was executing.

A process that needs time after a signal, such as a trainer that saves a checkpoint, registers itself in advance,
because Python cannot run signal handlers during a long C++ call. If the launcher itself receives a signal, it waits
until the registered processes have finished. A second signal ends all processes.
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
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardformer.errors import format_ranks

if TYPE_CHECKING:
    from subprocess import Popen

    from torch.distributed.elastic.multiprocessing.api import PContext

FOLDER = "SHARDFORMER_FINISHING"
"""Environment variable set by the launcher: the folder where a registered process creates a file named by its PID."""
ENDED_FILE = "ended"  # file in this folder while the launcher ends all processes because one of them failed


@contextmanager
def register_graceful_shutdown() -> Iterator[None]:
    """Context manager that makes the launcher wait after a signal until this process has saved its work."""
    note = _get_shutdown_registration_file(os.getpid())
    if note is not None:
        with suppress(OSError):  # the launcher then waits as for any other process
            note.touch()
    try:
        yield
    finally:
        if note is not None:
            note.unlink(missing_ok=True)


def is_graceful_shutdown_registered(pid: int) -> bool:
    """Return whether the launcher should give a process time to save its work after a signal."""
    note = _get_shutdown_registration_file(pid)
    return note is not None and note.exists()


def is_launched_by_shardformer() -> bool:
    """Return whether ``shardformer run`` started this process."""
    return FOLDER in os.environ


def is_aborted_by_launcher() -> bool:
    """Return whether the launcher is ending this process because another process failed."""
    return is_launched_by_shardformer() and Path(os.environ[FOLDER], ENDED_FILE).exists()


def _get_shutdown_registration_file(pid: int) -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder, str(pid)) if folder else None


SHUTDOWN_TIMEOUT_S = 8
"""Time for processes to end after a signal. Scripts with slower SIGTERM handlers set --shutdown-timeout 60."""
AT_ONCE_S = 3  # time for processes to end after a second signal
SAME_SIGNAL_S = 1.0  # signals within this time count as one, because a terminal and a wrapper may both send Ctrl-C
POLL_S = 0.05
CHECK_BEFORE_KILL_S = 0.5  # the launcher checks this long before it kills processes which of them are still running
SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
NOISE = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")
"""Loggers of torch that warn about each forwarded signal. The failure report replaces these warnings."""

STUCK_PROCESSES: dict[int, str] = {}
"""By PID, the reason why a process was still running shortly before the launcher killed it."""
STACK_LOCATIONS: dict[int, str] = {}
"""By rank, the line of user code that a process was executing when the launcher ended it before it failed."""


@contextmanager
def set_torchrun_shutdown_timeout(torchrun_args: argparse.Namespace) -> Iterator[None]:
    """Context manager that sets how long torch's launcher waits after a signal before it kills the processes."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    value = getattr(torchrun_args, "shutdown_timeout", None) or os.environ.get(SHUTDOWN_TIMEOUT_VARIABLE)
    timeout_s = int(value) if value is not None else None
    plain, signals = PContext.close, 0
    folder = tempfile.mkdtemp(prefix="shardformer-finishing-")
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = folder
    for name in NOISE:
        logging.getLogger(name).setLevel(logging.ERROR)

    def close_with_timeout(
        process_context: PContext, death_sig: signal.Signals | None = None, timeout: int = 0
    ) -> None:
        nonlocal signals
        processes, number = _get_running_workers(process_context), death_sig or signal.SIGTERM
        pids = [process.pid for process in processes]
        saves = any(map(is_graceful_shutdown_registered, pids))
        signals += _is_launcher_shutting_down_on_signal()
        seconds = timeout_s if timeout_s is not None else SHUTDOWN_TIMEOUT_S
        if not signals:
            Path(folder, ENDED_FILE).touch()
        if signals == 1 and processes and not saves:
            _print_shutdown_notice(len(processes), number, seconds)
        if signals > 1:
            seconds, number = AT_ONCE_S, signal.SIGKILL if saves else number
        elif signals == 1 and saves:
            _signal_processes_and_wait(processes, number, timeout_s)
            _record_stuck_processes(pids, number, seconds)
            seconds, number = AT_ONCE_S, signal.SIGKILL
        looks = threading.Timer(
            max(seconds - CHECK_BEFORE_KILL_S, seconds / 2), _record_stuck_processes, [pids, number, seconds]
        )
        looks.daemon = True
        if number is not signal.SIGKILL and signals <= 1:  # after a second signal, the user expects a kill
            looks.start()
        try:
            plain(process_context, number, seconds)
        finally:
            looks.cancel()
            Path(folder, ENDED_FILE).unlink(missing_ok=True)  # the launcher may restart the processes
            _collect_current_lines_from_error_files(process_context.error_files.values())

    PContext.close = close_with_timeout  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PContext.close = plain  # type: ignore[method-assign]
        if before is None:
            os.environ.pop(FOLDER, None)
        else:
            os.environ[FOLDER] = before
        shutil.rmtree(folder, ignore_errors=True)


def _print_shutdown_notice(num_processes: int, signum: signal.Signals, timeout_s: float) -> None:
    """Print the maximum time that the launcher waits for its processes to end after a signal."""
    processes = f"{num_processes} process{'es' * (num_processes > 1)}"
    again = "press Ctrl-C again" if signum is signal.SIGINT else "send it again"
    print(
        f"\n{signum.name}: waiting at most {timeout_s:g} s for {processes} to end; {again} to end them at once",
        file=sys.stderr,
        flush=True,
    )


def _get_running_workers(launcher_context: PContext) -> list[Popen[Any]]:
    """Return the processes of torch's launcher that are still running, as ``subprocess.Popen`` objects."""
    handlers: dict[int, Any] = getattr(launcher_context, "subprocess_handlers", {})
    return [handler.proc for handler in handlers.values() if handler.proc.poll() is None]


def _signal_processes_and_wait(processes: list[Popen[Any]], signum: signal.Signals, timeout_s: float | None) -> None:
    """Send a signal to worker processes, and wait until they have saved their work and exited.

    Unlike torch, this does not signal their process groups, because that would end the data loading workers of a
    process that is finishing its step. Raises SignalException at a second signal.

    Args:
        timeout_s: Maximum time to wait. If None, wait while a process is registered, and then SHUTDOWN_TIMEOUT_S.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    for process in processes:
        process.send_signal(signum)
    start = saving_until = time.monotonic()
    while running := [process for process in processes if process.poll() is None]:
        now = time.monotonic()
        if any(is_graceful_shutdown_registered(process.pid) for process in running):
            saving_until = now
        if now > (saving_until + SHUTDOWN_TIMEOUT_S if timeout_s is None else start + timeout_s):
            return
        try:
            time.sleep(POLL_S)
        except SignalException:
            if time.monotonic() - start > SAME_SIGNAL_S:
                raise


def _is_launcher_shutting_down_on_signal() -> bool:
    """Return whether the launcher is shutting down because it received a signal."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    return isinstance(sys.exc_info()[1], SignalException)


def _collect_current_lines_from_error_files(error_file_paths: Iterable[str]) -> None:
    STACK_LOCATIONS.clear()  # from an earlier attempt
    for path in error_file_paths:
        with suppress(OSError, ValueError, LookupError, TypeError):
            extra = json.loads(Path(path).read_text(encoding="utf-8"))["message"]["extraInfo"]
            STACK_LOCATIONS[extra["rank"]] = extra["at"]


def format_current_lines_by_rank() -> list[str]:
    """List the lines of user code that the ranks were executing, with the ranks at each line."""
    ranks: dict[str, list[int]] = {}
    for rank, place in sorted(STACK_LOCATIONS.items()):
        ranks.setdefault(place, []).append(rank)
    # a rank that differs from all others is usually the cause
    return [
        f"{format_ranks(of)} {'was' if len(of) == 1 else 'were'} at\n{place}"
        for place, of in sorted(ranks.items(), key=lambda item: len(item[1]))
        if place
    ]


def _record_stuck_processes(pids: list[int], signum: signal.Signals, waited_s: float) -> None:
    for pid in pids:
        state = _get_process_state(pid)
        if state in ("T", "t"):
            STUCK_PROCESSES[pid] = "it was stopped (SIGSTOP, Ctrl-Z or a debugger), and the launcher killed it"
        elif state not in ("", "Z"):
            how = (
                f"it did not finish its step and save within {waited_s:g} s after {signum.name}"
                if is_graceful_shutdown_registered(pid)
                else f"it did not end on {signum.name} (because of its own signal handler or a call into C++)"
            )
            STUCK_PROCESSES[pid] = f"{how}, and the launcher killed it"


def _get_process_state(pid: int) -> str:
    """Return the one-letter state of a process (such as R, S or Z) from ``/proc``, or "" if it is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
