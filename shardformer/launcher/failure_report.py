"""Builds the failure report of ``shardformer run``, which shows the first error and hides errors that it caused.

A process that ends with a Python exception records the error, the time, and the innermost frame of user code
(``worker.py``). A ``ShardFormerError`` is only recorded, not printed, because usually all ranks raise the same one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shardformer.errors import TRACEBACK_VARIABLE, format_error, format_ranks, is_traceback_enabled
from shardformer.launcher.shutdown import STACK_LOCATIONS, STUCK_PROCESSES, format_current_lines_by_rank

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_FATAL = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL}
_BY_LAUNCHER = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a rank that the launcher ended, at once or after the grace period of ``worker.py``."""
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer")
MAX_TEXT_LENGTH = 600
FEW = 3


def format_failure_report(
    failures_by_rank: Mapping[int, ProcessFailure], all_ranks: Iterable[int] = (), command_name: str = "run"
) -> str:
    """Format the errors of all ranks for the terminal, with identical errors merged and the root cause last.

    Args:
        failures_by_rank: the failure of each rank that failed.
        all_ranks: all ranks, if the launcher knows them. Ranks that are not in ``failures_by_rank`` exited normally.
        command_name: the subcommand of ``shardformer`` that the report names.
    """
    me = f"shardformer {command_name}"
    # ranks that the launcher ended after another failure are not the cause
    own_fault = {
        r: f for r, f in failures_by_rank.items() if f.exitcode not in _BY_LAUNCHER or _read_error_message(f)
    } or failures_by_rank
    order = sorted(own_fault, key=lambda rank: _get_root_cause_sort_key(own_fault[rank]))
    first = failures_by_rank[order[0]]
    ours = _get_error_file_extra_info(first).get("parts")
    same_error = [
        rank for rank in order if ours and _get_error_file_extra_info(failures_by_rank[rank]).get("parts") == ours
    ] or order[:1]
    lines = [
        f"{me}: rank {r} failed as well, {_format_failure_cause(failures_by_rank[r])}"
        for r in order[::-1]
        if r not in same_error
    ]
    if ours:
        lines += [line for line in (_get_error_file_extra_info(first).get("frame"), format_error(*ours)) if line]
        more = "" if is_traceback_enabled() else f" ({TRACEBACK_VARIABLE}=1 shows the traceback of each rank)"
        # the launcher may have ended a rank that raised the same error
        left = next((failures_by_rank[rank] for rank in same_error if failures_by_rank[rank].exitcode > 0), first)
        lines.append(
            f"{me}: {_format_ranks_and_world_size(same_error, _get_error_file_extra_info(first))}: "
            f"{_format_exit_status(left)}{more}"
        )
    ended = sorted(set(all_ranks) - set(failures_by_rank))
    if (ended and _is_peer_timeout(first)) or (_is_lost_connection(first) and (ended or not ours)):
        who = format_ranks(ended) if ended else "a process of its group"
        lines.append(
            f"{me}: {who} exited before rank {order[0]}, which was waiting for it and failed (exit code "
            f"{first.exitcode}). All ranks must run the same steps: check why one exited early"
        )
    elif _is_peer_timeout(first) and STACK_LOCATIONS:
        who = format_ranks(sorted(STACK_LOCATIONS))
        lines.append(f"{me}: {who} had not failed when the launcher ended the run, and other ranks waited for it")
        lines += [f"{me}: {place}" for place in format_current_lines_by_rank()[:FEW]]
    elif not ours:
        lines.append(f"{me}: rank {order[0]} failed first, {_format_failure_cause(first)}")
    return "\n".join(lines)


def _get_root_cause_sort_key(failure: ProcessFailure) -> tuple[int, float]:
    # The error of a rank that waited for a killed or lost peer is a consequence. A rank that the launcher had to kill
    # only caused the others to wait.
    if failure.pid in STUCK_PROCESSES:
        kind = 2
    else:
        kind = (
            0 if -failure.exitcode in _FATAL else 3 if _is_lost_connection(failure) or _is_peer_timeout(failure) else 1
        )
    return kind, float(_get_error_file_extra_info(failure).get("time_s", failure.timestamp))


def _is_lost_connection(failure: ProcessFailure) -> bool:
    return any(words in _read_error_message(failure) for words in _LOST_PEER)


def _is_peer_timeout(failure: ProcessFailure) -> bool:
    kind = (_get_error_file_extra_info(failure).get("parts") or [""])[0]
    return kind == "LostPeerError" or "Timed out waiting" in _read_error_message(failure)


def _format_ranks_and_world_size(ranks: list[int], extra_info: Mapping[str, Any]) -> str:
    world_size = extra_info.get("world_size", 0)
    if len(ranks) == world_size:
        return f"all {world_size} ranks" if world_size > 1 else "the only rank"
    return f"{format_ranks(sorted(ranks))} of {world_size}" if world_size else format_ranks(sorted(ranks))


def _get_error_file_extra_info(failure: ProcessFailure) -> Mapping[str, Any]:
    message = failure.error_file_data.get("message")
    note: Mapping[str, Any] = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return note


def _read_error_message(failure: ProcessFailure) -> str:
    message = failure.error_file_data.get("message")
    return " ".join(str(message.get("message", "")).split()) if isinstance(message, dict) else ""


def _format_exit_status(failure: ProcessFailure) -> str:
    return (
        f"exit code {failure.exitcode}, {_get_error_file_extra_info(failure)['parts'][0]}"
        if failure.exitcode > 0
        else "as above"
    )


def _format_failure_cause(failure: ProcessFailure) -> str:
    if failure.exitcode in _BY_LAUNCHER and _read_error_message(failure):
        how = "ended by the launcher while it was exiting"
    elif failure.exitcode < 0:
        how = f"killed by {failure.signal_name()}"
        if failure.pid in STUCK_PROCESSES:
            return f"{how}: {STUCK_PROCESSES[failure.pid]}"
        if -failure.exitcode == signal.SIGKILL:
            return f"{how} (often because the machine ran out of memory)"
    else:
        how = f"exit code {failure.exitcode}"
    parts = _get_error_file_extra_info(failure).get("parts")
    text = f"{parts[0]}: {parts[1]}" if parts else _read_error_message(failure)
    return f"{how}: {text[:MAX_TEXT_LENGTH]}{'...' if len(text) > MAX_TEXT_LENGTH else ''}" if text else how
