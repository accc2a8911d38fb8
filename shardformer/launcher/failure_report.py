"""What ``shardformer run`` says at the end of a run that failed: the cause once, apart from its consequences.

A process that Python's exceptions end leaves a note (``worker.py``): its error, the time, and the user's own frame. A
``ShardFormerError`` is in the note alone, not printed by each process, as all of them often raise the same one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shardformer.errors import TRACEBACK_VARIABLE, format_error, wants_traceback
from shardformer.launcher.shutdown import STACK_LOCATIONS, STUCK_PROCESSES, describe_stack_locations, listed

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_FATAL = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL}
_BY_LAUNCHER = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""How a rank ends that the launcher ended: at once, or after the grace of ``worker.py``."""
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer")
LONGEST = 600
FEW = 3


def describe_failures(failures: Mapping[int, ProcessFailure], ranks: Iterable[int] = (), command: str = "run") -> str:
    """Ours once, for all ranks that raised it alike; a line for each other rank that failed, the first one last.

    Args:
        failures: rank -> how it failed, for those that did.
        ranks: all ranks that were started, where the launcher knows them: those not in ``failures`` ended well.
        command: that started them.
    """
    me = f"shardformer {command}"
    # Those that the launcher ended itself, once another had failed, are no news.
    own_fault = {r: f for r, f in failures.items() if f.exitcode not in _BY_LAUNCHER or _text(f)} or dict(failures)
    order = sorted(own_fault, key=lambda rank: _order(own_fault[rank]))
    first = failures[order[0]]
    ours = _note(first).get("parts")
    alike = [rank for rank in order if ours and _note(failures[rank]).get("parts") == ours] or order[:1]
    lines = [f"{me}: rank {r} failed as well, {_cause(failures[r])}" for r in order[::-1] if r not in alike]
    if ours:
        lines += [line for line in (_note(first).get("frame"), format_error(*ours)) if line]
        more = "" if wants_traceback() else f" ({TRACEBACK_VARIABLE}=1 shows the traceback of each rank)"
        # one that raised it may have been ended by the launcher on its way out
        left = next((failures[rank] for rank in alike if failures[rank].exitcode > 0), first)
        lines.append(f"{me}: {_ranks_text(alike, _note(first))}: {_short(left)}{more}")
    ended = sorted(set(ranks) - set(failures))
    if (ended and _waited(first)) or (_lost_peer(first) and (ended or not ours)):
        who = listed(ended) if ended else "a process of its group"
        missed = f"before rank {order[0]} was done, which then failed for lack of it (exit code {first.exitcode})"
        lines.append(f"{me}: {who} had ended {missed}. All ranks take the same steps: see why one left")
    elif _waited(first) and STACK_LOCATIONS:
        who = listed(sorted(STACK_LOCATIONS))
        lines.append(f"{me}: {who} had not failed when the launcher ended the run: the others waited for it")
        lines += [f"{me}: {place}" for place in describe_stack_locations()[:FEW]]
    elif not ours:
        lines.append(f"{me}: rank {order[0]} failed first, {_cause(first)}")
    return "\n".join(lines)


def _order(failure: ProcessFailure) -> tuple[int, float]:
    # A rank that was killed leaves no note, and what the others then raise is its consequence; so is a lost peer. One
    # that the launcher had to kill was the reason of nothing but of others' waiting for it.
    if failure.pid in STUCK_PROCESSES:
        kind = 2
    else:
        kind = 0 if -failure.exitcode in _FATAL else 3 if _lost_peer(failure) or _waited(failure) else 1
    return kind, float(_note(failure).get("time_s", failure.timestamp))


def _lost_peer(failure: ProcessFailure) -> bool:
    return any(words in _text(failure) for words in _LOST_PEER)


def _waited(failure: ProcessFailure) -> bool:
    return (_note(failure).get("parts") or [""])[0] == "LostPeerError" or "Timed out waiting" in _text(failure)


def _ranks_text(ranks: list[int], note: Mapping[str, Any]) -> str:
    world_size = note.get("world_size", 0)
    if len(ranks) == world_size:
        return f"all {world_size} ranks" if world_size > 1 else "the only rank"
    return f"{listed(sorted(ranks))} of {world_size}" if world_size else listed(sorted(ranks))


def _note(failure: ProcessFailure) -> Mapping[str, Any]:
    message = failure.error_file_data.get("message")
    note: Mapping[str, Any] = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return note


def _text(failure: ProcessFailure) -> str:
    message = failure.error_file_data.get("message")
    return " ".join(str(message.get("message", "")).split()) if isinstance(message, dict) else ""


def _short(failure: ProcessFailure) -> str:
    return f"exit code {failure.exitcode}, {_note(failure)['parts'][0]}" if failure.exitcode > 0 else "as above"


def _cause(failure: ProcessFailure) -> str:
    if failure.exitcode in _BY_LAUNCHER and _text(failure):
        how = "ended by the launcher on its way out"
    elif failure.exitcode < 0:
        how = f"killed by {failure.signal_name()}"
        if failure.pid in STUCK_PROCESSES:
            return f"{how}: {STUCK_PROCESSES[failure.pid]}"
        if -failure.exitcode == signal.SIGKILL:
            return f"{how} (often: the machine ran out of memory)"
    else:
        how = f"exit code {failure.exitcode}"
    parts = _note(failure).get("parts")
    text = f"{parts[0]}: {parts[1]}" if parts else _text(failure)
    return f"{how}: {text[:LONGEST]}{'...' if len(text) > LONGEST else ''}" if text else how
