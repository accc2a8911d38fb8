"""Detect deadlocks in which ranks wait for each other in different collective calls.

Rank a is blocked by rank b in three cases:

- b has not started the collective in which a waits;
- b has started another kind of collective instead, such as an all-reduce instead of a barrier;
- a waits for a message that b has not sent.

A rank is not blocked if it computes, or if its wait cannot be analyzed (in a send, in the launcher's store). It is also
not blocked if all ranks have started the transfer it waits for, however long it takes. A rank that waits for such a
rank may also continue. The remaining ranks block each other and wait forever.
"""

from __future__ import annotations

import atexit
import json
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch.distributed as dist

from shardformer.mesh.rank_failures import MonitoredWork, ReceiveWork
from shardformer.torch_compat import Store, count_gloo_collectives_by_group, get_group_name


@dataclass(frozen=True)
class RankWaitReport:
    """Report of one rank: whether it waits in a collective or a receive, and for which ranks.

    Args:
        seconds: time that its main thread has waited in one call; -1 if it does not wait.
        place: line of the script in which it waits.
        group: name of the collective's process group; ``get_message_count_key(name, rank)`` for a message; "" if
            unknown.
        ranks: ranks that must start the collective.
        number: number of the collective on its group, or of the message.
        what: kind of the collective.
        begun: group name -> number of collectives started; ``get_message_count_key(name, rank)`` -> number of messages
            sent.
    """

    seconds: float = -1.0
    place: str = ""
    group: str = ""
    ranks: Sequence[int] = ()
    number: int = 0
    what: str = ""
    begun: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, json_text: str) -> RankWaitReport:
        return cls(**json.loads(json_text))


def find_deadlocked_ranks(reports_by_rank: Mapping[int, RankWaitReport], timeout_s: float) -> dict[int, int]:
    """Find the ranks that have waited for each other for at least ``timeout_s`` seconds.

    Returns a dict from each deadlocked rank to a rank for which it waits.

    The result is empty if all of them wait at the same line of the script, which is the case in a slow collective.
    """
    waiting = {rank: each for rank, each in reports_by_rank.items() if each.seconds >= timeout_s and each.group}
    found = {
        rank: [other for other in each.ranks if other in waiting and _is_blocked_by(each, waiting[other])]
        for rank, each in waiting.items()
    }
    while lost := [rank for rank, others in found.items() if not any(other in found for other in others)]:
        for rank in lost:
            del found[rank]
    if len({reports_by_rank[rank].place for rank in found}) < 2:
        return {}
    return {rank: next(other for other in others if other in found) for rank, others in found.items()}


def get_message_count_key(group_name: str, dst_rank: int) -> str:
    """Return the report key of the number of messages sent to a rank over a process group."""
    return f"{group_name}>{dst_rank}"


def get_uncounted_messages_key(group_name: str) -> str:
    """Return the report key that marks a process group with uncounted messages."""
    return f"{group_name}>?"


def _is_blocked_by(report: RankWaitReport, peer_report: RankWaitReport) -> bool:
    if (peer_report.group, peer_report.number) == (report.group, report.number):
        return peer_report.what != report.what
    name, is_sent, _ = report.group.partition(">")
    if name not in peer_report.begun or (is_sent and get_uncounted_messages_key(name) in peer_report.begun):
        return False
    return peer_report.begun.get(report.group, 0 if is_sent else report.number) < report.number


def format_deadlock_error(
    awaited_rank_by_rank: Mapping[int, int], reports_by_rank: Mapping[int, RankWaitReport]
) -> str:
    """Format the error message for a deadlock."""
    shown = [
        f"rank {r} waits in {reports_by_rank[r].place} for rank {other}"
        for r, other in sorted(awaited_rank_by_rank.items())[:8]
    ]
    return (
        f"Deadlock: the ranks wait for each other: {'; '.join(shown)}. All ranks must make the same collective calls "
        "in the same order. Make these calls on every rank, not under `if rank == 0:`, and leave a loop early on all "
        "ranks or on none. This process exits with status 1; see docs/reliability.md"
    )


ENDED = "ended"
QUESTION = "shardformer/presence/question"
"""Key of the number of questions in the launcher's store."""
DEADLOCK, ENDING = "shardformer/presence/deadlock", "shardformer/presence/ending"
"""Keys of the ranks in a detected deadlock, and of the number of them that are about to exit."""
LOOK_EVERY_S = 0.5
END_S = 2.0
SURE_AFTER_S = 15.0
"""A process that has waited this long in one call is stuck: longer than a collective takes."""
FORGOTTEN_AFTER_S = 10.0
WATCH_AFTER_S = 30.0
"""Seconds in one collective after which the reports of the other processes are requested."""
WATCH_EVERY_S = 3.0
END_TOGETHER_S = 10.0
BLOCKED_AFTER_S = 12.0
"""All ranks of a deadlock have been in one call for at least this long. Reports arrive more often."""
_VARIANT_SUFFIX = re.compile("_(into_tensor|tensor|single|coalesced|uneven)$")
"""Suffixes of torch functions that start the same collective."""
WAITS_IN = (
    os.path.join("torch", "distributed", "distributed_c10d.py"),
    os.path.join("torch", "distributed", "c10d_logger.py"),
    os.path.join("torch", "distributed", "_functional_collectives.py"),
    os.path.join("shardformer", "mesh", ""),
)
"""A thread whose innermost frame is in one of these files waits for other processes."""


class DeadlockMonitor:
    """Background thread that detects deadlocks between ranks and exits the deadlocked processes.

    Created once per process by ``get_deadlock_monitor``.

    Attributes:
        carriers: weak references to the transports of this process, which count messages.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self.carriers: list[Callable[[], Any]] = []
        self._ends = threading.Event()
        self._has_left = False
        self._answered, self._answered_at = 0, 0.0
        self._call: FrameType | None = None  # keeping the frame ensures that no other call gets its id
        self._call_since = 0.0
        self._watched: tuple[int, dict[str, int]] | None = None
        self._watched_since = self._ask_at = 0.0
        self._asked = 0
        self._thread = threading.Thread(target=self._run_monitor_loop, name="shardformer-presence", daemon=True)
        self._thread.start()
        atexit.register(self.stop_at_exit)

    def stop_at_exit(self) -> None:
        """Stop the monitor thread, and report to the other ranks that this script has ended."""
        self._ends.set()
        self._thread.join(END_S)

    def stop_reporting(self) -> None:
        """Stop the monitor thread so that a new monitor can replace it."""
        atexit.unregister(self.stop_at_exit)
        self._has_left = True
        self._ends.set()

    def is_reporting_to(self, store: Store) -> bool:
        return self._store is store and not self._ends.is_set()

    def request_reports(self) -> int:
        """Ask all processes for new reports, and return the request number."""
        with suppress(RuntimeError):
            return int(self._store.add(QUESTION, 1))
        return 0

    def describe_blocked_ranks(self, ranks: Collection[int], min_request_number: int) -> dict[int, str]:
        """Describe the ranks that cannot join a collective, because they have ended or wait for other ranks.

        Args:
            min_request_number: ignore reports for requests before this number.
        """
        with suppress(RuntimeError):
            found = {}
            for rank, (question, report) in self._read_stored_reports(ranks).items():
                if report is None:
                    found[rank] = "has reached the end of its script"
                elif question >= min_request_number and report.seconds >= SURE_AFTER_S:
                    found[rank] = f"waits for other ranks in {report.place}"
            return found
        return dict.fromkeys(ranks, "is unreachable, because the process with the store has exited")

    def _read_stored_reports(self, ranks: Iterable[int]) -> dict[int, tuple[int, RankWaitReport | None]]:
        """Read the last report of each rank, or None if it has ended, and the request number that it answers."""
        found: dict[int, tuple[int, RankWaitReport | None]] = {}
        for rank in ranks:
            if self._store.check([_get_report_store_key(rank)]):
                question, _, answer = self._store.get(_get_report_store_key(rank)).decode().partition(" ")
                found[rank] = (0, None) if question == ENDED else (int(question), RankWaitReport.from_json(answer))
        return found

    def _run_monitor_loop(self) -> None:
        while not self._ends.wait(LOOK_EVERY_S):
            try:
                now = time.monotonic()
                self._publish_report_if_requested(now)
                self._exit_if_deadlocked(now)
            except RuntimeError:  # the process with the store has exited
                return
            except (KeyError, ValueError):  # a process group was destroyed
                continue
        if not self._has_left:
            with suppress(RuntimeError):
                self._store.set(_get_report_store_key(self._rank), ENDED)

    def _publish_report_if_requested(self, now: float) -> None:
        request = self._store.add(QUESTION, 0)
        if request == self._answered:
            if now > self._answered_at + FORGOTTEN_AFTER_S:
                self._call = None
            return
        self._answered, self._answered_at = request, now
        call, joined = _find_blocking_call()
        if call is not self._call:
            self._call, self._call_since = call, now
        report = (
            RankWaitReport()
            if call is None
            else _build_wait_report(call, joined, now - self._call_since, self._get_communication_counts())
        )
        self._store.set(_get_report_store_key(self._rank), f"{request} {report.to_json()}")

    def _exit_if_deadlocked(self, now: float) -> None:
        frame, _ = _find_blocking_call()
        # the id, because a kept frame would keep its tensors alive
        seen = None if frame is None else (id(frame), self._get_communication_counts())
        del frame
        if seen is None or seen != self._watched:
            self._watched, self._watched_since, self._asked = seen, now, 0
            return
        waited = now - self._watched_since
        if waited >= BLOCKED_AFTER_S and self._store.check([DEADLOCK]):  # another rank found it
            self._exit_if_own_rank_deadlocked(json.loads(self._store.get(DEADLOCK)))
        if waited < WATCH_AFTER_S:
            return
        stored = self._read_stored_reports(range(dist.get_world_size())) if self._asked else {}
        reports = {rank: each for rank, (question, each) in stored.items() if each and question >= self._asked}
        found = find_deadlocked_ranks(reports, BLOCKED_AFTER_S)
        if self._rank in found:
            self._exit_if_own_rank_deadlocked(list(found), format_deadlock_error(found, reports))
        if now > self._ask_at:
            self._asked, self._ask_at = self.request_reports(), now + WATCH_EVERY_S

    def _get_communication_counts(self) -> dict[str, int]:
        found = count_gloo_collectives_by_group()
        for carrier in list(self.carriers):
            if (transport := carrier()) is not None:
                found |= transport.get_message_counts()
        return found

    def _exit_if_own_rank_deadlocked(self, deadlocked_ranks: Collection[int], message: str = "") -> None:
        """Exit this process if its rank is deadlocked. The first such process prints the error message.

        All of them exit together: if one exits earlier, gloo may leave the others waiting.
        """
        if self._rank not in deadlocked_ranks:
            return
        with suppress(RuntimeError):  # the process with the store has exited
            if self._store.add(ENDING, 1) == 1:
                print(f"shardformer: {message}.", file=sys.stderr)
                self._store.set(DEADLOCK, json.dumps(list(deadlocked_ranks)))
            until = time.monotonic() + END_TOGETHER_S
            while self._store.add(ENDING, 0) < len(deadlocked_ranks) and time.monotonic() < until:
                time.sleep(LOOK_EVERY_S)
            time.sleep(2 * LOOK_EVERY_S * (self._rank == 0))  # rank 0 has the store
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)


def _find_blocking_call() -> tuple[FrameType | None, Any]:
    """Find the stack frame and the collective in which the main thread waits for other processes.

    The collective is (group, number, kind), or None if unknown. The call is None if the main thread does not wait.
    """
    at = sys._current_frames().get(threading.main_thread().ident or 0)
    call: FrameType | None = None
    joined = None
    while at is not None and any(part in at.f_code.co_filename for part in WAITS_IN):
        joined = joined or _find_awaited_transfer(at)
        at, call = at.f_back, at
    return call, joined


def _find_awaited_transfer(frame: FrameType) -> tuple[Any, int | None, str] | tuple[Any, int, int] | None:
    """Find the collective or message for which a stack frame waits.

    (group, number, kind) of a collective, with number None for the latest one of the group; (group, sending rank,
    number of messages received from it) of a message; or None.
    """
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
    if frame.f_code is MonitoredWork.wait.__code__:
        work: MonitoredWork = frame.f_locals["self"]
        return work.awaited_message if isinstance(work, ReceiveWork) else work.awaited_collective
    if "async_op" in names and "group" in names:
        return frame.f_locals.get("group"), None, _VARIANT_SUFFIX.sub("", frame.f_code.co_name)
    return None


def _build_wait_report(
    blocking_frame: FrameType,
    awaited_transfer: tuple[Any, int | None, str] | tuple[Any, int, int] | None,
    seconds_waited: float,
    communication_counts: dict[str, int],
) -> RankWaitReport:
    place = _format_innermost_user_line(blocking_frame)
    name = "" if awaited_transfer is None else get_group_name(awaited_transfer[0])
    if awaited_transfer is None or name not in communication_counts:
        return RankWaitReport(seconds_waited, place, begun=communication_counts)
    group, number, what = awaited_transfer
    if isinstance(what, int):
        assert number is not None
        return RankWaitReport(
            seconds_waited,
            place,
            get_message_count_key(name, dist.get_rank()),
            [number],
            what + 1,
            "receive",
            communication_counts,
        )
    ranks = dist.get_process_group_ranks(group)
    return RankWaitReport(
        seconds_waited,
        place,
        name,
        ranks,
        communication_counts[name] if number is None else number,
        what,
        communication_counts,
    )


def _format_innermost_user_line(frame: FrameType) -> str:
    at: FrameType | None = frame
    own = (os.path.join("torch", ""), os.path.join("shardformer", ""))
    while at is not None and any(f"{os.sep}{part}" in at.f_code.co_filename for part in own) and at.f_back is not None:
        at = at.f_back
    path, number = (at or frame).f_code.co_filename, (at or frame).f_lineno
    line = linecache.getline(path, number).strip()
    return f"{os.path.basename(path)}:{number}" + f" ({line})" * bool(line)


def _get_report_store_key(rank: int) -> str:
    return f"shardformer/presence/{rank}"


_OF_PROCESS: dict[int, DeadlockMonitor] = {}
"""By process id, because a forked process does not have its parent's threads."""


def get_deadlock_monitor(store: Store, rank: int) -> DeadlockMonitor:
    """Return this process's ``DeadlockMonitor``, and create it at the first call."""
    current = _OF_PROCESS.get(os.getpid())
    if current is None or not current.is_reporting_to(store):
        if current is not None:
            current.stop_reporting()
        current = _OF_PROCESS[os.getpid()] = DeadlockMonitor(store, rank)
    return current
