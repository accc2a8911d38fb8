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

QUESTION = "shardformer/presence/question"
"""Where the number of questions is, in the launcher's store."""
ASK_EVERY_S = 2.0
LOOK_EVERY_S = 0.5
END_S = 2.0
SURE_AFTER = 8
"""So many answers in a row that a process waits at one place: longer than one collective takes."""
WAITS_IN = (os.path.join("torch", "distributed", ""), os.path.join("shardformer", "mesh", ""))
"""A thread whose innermost frame is in a file of these waits for other processes."""


class Presence:
    """Says through the store where this process waits, if it does; and asks where others wait.

    One for each process, which ``presence`` makes.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._ends = threading.Event()
        self._asked_at, self._has_left = 0.0, False
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

    def waiting(self, ranks: Collection[int]) -> dict[int, str]:
        """Those of ``ranks`` that wait for others, or have ended, and where, as far as it is known."""
        now = time.monotonic()
        with suppress(RuntimeError):
            if now - self._asked_at >= ASK_EVERY_S:
                self._asked_at = now
                self._store.add(QUESTION, 1)
            found = {}
            for rank in ranks:
                if not self._store.check([_key(rank)]):
                    continue
                count, _, place = self._store.get(_key(rank)).decode().partition(" ")
                if count == "ended":
                    found[rank] = "has come to the end of its script"
                elif int(count) >= SURE_AFTER:
                    found[rank] = f"waits for other ranks in {place}"
            return found
        return dict.fromkeys(ranks, "cannot be asked, since the process that has the store is gone")

    def _answer(self) -> None:
        """``COUNT PLACE``: at how many questions in a row the main thread waited at one place; 0 where it did not."""
        number = before = None
        count = 0
        while not self._ends.wait(LOOK_EVERY_S):
            try:
                asked = self._store.add(QUESTION, 0)
                if asked == number:
                    continue
                here = _place_of_main()
                count = 0 if here is None else count + 1 if here == before else 1
                before, number = here, asked
                self._store.set(_key(self._rank), f"{count} {'' if here is None else here[-1]}")
            except RuntimeError:  # the process that has the store is gone
                return
        if not self._has_left:
            with suppress(RuntimeError):
                self._store.set(_key(self._rank), "ended")


def _place_of_main() -> tuple[int, str] | None:
    """(the call in which the main thread waits for other processes, the line that made it); None if it does not."""
    at = sys._current_frames().get(threading.main_thread().ident or 0)
    call: FrameType | None = None
    while at is not None and any(part in at.f_code.co_filename for part in WAITS_IN):
        at, call = at.f_back, at
    return None if call is None else (id(call), _caller(call))


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
