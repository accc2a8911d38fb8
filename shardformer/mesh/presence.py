"""Whether a process computes or waits for others: answered by a thread, for those that wait for it in turn.

A rank that has not come to a call may be slow, or it may wait in another collective and never come. Its main thread
cannot answer while it waits, so that a thread of each process does, through the launcher's store.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from types import FrameType
from typing import Any

ENDED = "ended"
QUESTION = "shardformer/presence/question"
"""Where the number of questions is, in the launcher's store."""
LOOK_EVERY_S = 0.5
END_S = 2.0
SURE_AFTER_S = 15.0
"""A process that has waited so long at one place does not come: longer than one collective takes."""
FORGOTTEN_AFTER_S = 10.0
WAITS_IN = (
    os.path.join("torch", "distributed", "distributed_c10d.py"),
    os.path.join("torch", "distributed", "c10d_logger.py"),
    os.path.join("torch", "distributed", "_functional_collectives.py"),
    os.path.join("shardformer", "mesh", ""),
)
"""A thread whose innermost frame is in a file of these waits for other processes."""


class Presence:
    """Says through the store where this process waits, if it does; and asks where others wait.

    One for each process, which ``presence`` makes.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._ends = threading.Event()
        self._has_left = False
        self._thread = threading.Thread(target=self._answer, name="shardformer-presence", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        """This process answers no more: it has come to the end of its script."""
        self._ends.set()
        self._thread.join(END_S)

    def leave(self) -> None:
        """This process answers in another store from now on; the one here may be gone."""
        atexit.unregister(self.end)
        self._has_left = True
        self._ends.set()

    @property
    def is_here(self) -> bool:
        return not self._ends.is_set()

    def is_in(self, store: Any) -> bool:
        return self._store is store

    def ask(self) -> int:
        """The number of a new question, which the threads of all processes answer."""
        with suppress(RuntimeError):
            return int(self._store.add(QUESTION, 1))
        return 0

    def waiting(self, ranks: Collection[int], since: int) -> dict[int, str]:
        """Those of ``ranks`` that wait for others, or have ended, and where, as far as it is known.

        Args:
            since: the question that the answers are not to be older than.
        """
        with suppress(RuntimeError):
            found = {}
            for rank in ranks:
                if not self._store.check([_key(rank)]):
                    continue
                question, _, answer = self._store.get(_key(rank)).decode().partition(" ")
                seconds, _, place = answer.partition(" ")
                if question == ENDED:
                    found[rank] = "has come to the end of its script"
                elif int(question) >= since and float(seconds) >= SURE_AFTER_S:
                    found[rank] = f"waits for other ranks in {place}"
            return found
        return dict.fromkeys(ranks, "cannot be asked, since the process that has the store is gone")

    def _answer(self) -> None:
        """``QUESTION SECONDS PLACE``: how long the main thread has waited in one call; -1 where it does not wait."""
        number, asked_at = 0, 0.0
        call: FrameType | None = None  # it is held, so that no other call has its address
        since = 0.0
        while not self._ends.wait(LOOK_EVERY_S):
            try:
                now, asked = time.monotonic(), self._store.add(QUESTION, 0)
                if asked == number:
                    if now > asked_at + FORGOTTEN_AFTER_S:
                        call = None
                    continue
                number, asked_at = asked, now
                here = _call_of_main()
                if here is not call:
                    call, since = here, now
                waited = f"{now - since:.1f} {_caller(call)}" if call is not None else "-1 "
                self._store.set(_key(self._rank), f"{asked} {waited}")
                here = None
            except RuntimeError:  # the process that has the store is gone
                return
        if not self._has_left:
            with suppress(RuntimeError):
                self._store.set(_key(self._rank), ENDED)


def _call_of_main() -> FrameType | None:
    """The call in which the main thread waits for other processes; None if it does not."""
    at = sys._current_frames().get(threading.main_thread().ident or 0)
    call: FrameType | None = None
    while at is not None and any(part in at.f_code.co_filename for part in WAITS_IN):
        at, call = at.f_back, at
    return call


def _caller(frame: FrameType) -> str:
    """The innermost line of a script, or a library, that is neither torch's nor this package's."""
    at: FrameType | None = frame
    own = (os.path.join("torch", ""), os.path.join("shardformer", ""))
    while at is not None and any(f"{os.sep}{part}" in at.f_code.co_filename for part in own) and at.f_back is not None:
        at = at.f_back
    return f"{os.path.basename((at or frame).f_code.co_filename)}:{(at or frame).f_lineno}"


def _key(rank: int) -> str:
    return f"shardformer/presence/{rank}"


_OF_PROCESS: dict[int, Presence] = {}
"""Process id -> its own: a fork has none of its parent's threads."""


def presence(store: Any, rank: int) -> Presence:
    """That of this process."""
    known = _OF_PROCESS.get(os.getpid())
    if known is None or not known.is_here or not known.is_in(store):
        if known is not None:
            known.leave()
        known = _OF_PROCESS[os.getpid()] = Presence(store, rank)
    return known
