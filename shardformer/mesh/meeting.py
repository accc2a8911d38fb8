"""While processes wait for each other at the first one's address: who has not come is said soon, not at the timeout."""

from __future__ import annotations

import platform
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

SAY_AFTER_S = 20.0
MARK_AFTER_S = 1.0
"""Most have met by then."""
AGAIN_S = 0.5
CONNECT_S = 3.0
SAME_ADDRESS = (
    "All are started with the same address and port, and reach them: see whether they run, and the firewall of this "
    "machine"
)


@dataclass(frozen=True)
class Meeting:
    """Where so many processes meet, and which of them this one is; the first one has the store there.

    Args:
        what: what each of them is called: a node, where launchers meet, or a rank.
        attempt: of a launcher that starts its processes once more; their marks are apart from those before.
        advice: what to look for where some have not come.
    """

    host: str
    port: int
    place: int
    size: int
    what: str
    attempt: str = "0"
    advice: str = SAME_ADDRESS

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around what returns when all have come."""
        over = threading.Event()
        watch = self._say_who_is_missing if self.place == 0 else self._say_what_is_not_reached
        thread = threading.Thread(target=watch, args=[over], name="shardformer-meeting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(2 * CONNECT_S)

    def missing(self) -> str:
        """In words those that have not come, such as "rank 1 of 2"; empty where all have, or where this is not known.

        Of use once this one has waited for some seconds.
        """
        with suppress(RuntimeError):
            store = self._store()
            places = [place for place in range(self.size) if not store.check([self._key(place)])]
            if places and self.place not in places:
                shown = ", ".join(map(str, places[:8])) + (", ..." if len(places) > 8 else "")
                return f"{self.what}{'s' if len(places) > 1 else ''} {shown} of {self.size}"
        return ""

    def _say_who_is_missing(self, over: threading.Event) -> None:
        if over.wait(MARK_AFTER_S):
            return
        if self._problem() is None:  # with launchers that have met; else the store comes with the last process
            self._mark()
        if over.wait(SAY_AFTER_S - MARK_AFTER_S):
            return
        if (problem := self._problem()) is not None:
            self._say_it_is_not_reached(problem)
            return
        self._mark()
        if (missing := self.missing()) and not over.is_set():
            _say(
                f"{self._own()} has waited for {SAY_AFTER_S:g} s at {self.host}:{self.port}, and has heard nothing "
                f"of {missing}. {self.advice}"
            )

    def _say_what_is_not_reached(self, over: threading.Event) -> None:
        if over.wait(MARK_AFTER_S):
            return
        said_at = time.monotonic() + SAY_AFTER_S - MARK_AFTER_S
        while (problem := self._problem()) is not None:  # that nobody answers is known after seconds
            if time.monotonic() >= said_at:
                self._say_it_is_not_reached(problem)
                return
            if over.wait(AGAIN_S):
                return
        self._mark()

    def _mark(self) -> None:
        with suppress(RuntimeError):
            self._store().set(self._key(self.place), platform.node())

    def _say_it_is_not_reached(self, problem: OSError) -> None:
        _say(
            f"{self._own()} has not reached {self.host}:{self.port} for {SAY_AFTER_S:g} s, where {self.what} 0 waits "
            f"({problem.strerror or problem}). See whether this is the address of its machine and a free port there, "
            "whether it was started, and its firewall"
        )

    def _problem(self) -> OSError | None:
        """Why nobody is reached there; None where somebody is."""
        try:
            with socket.create_connection((self.host, self.port), timeout=CONNECT_S):
                return None
        except OSError as error:
            return error

    def _store(self) -> Any:
        from torch._C._distributed_c10d import TCPStore

        return TCPStore(
            self.host, self.port, None, False, timedelta(seconds=CONNECT_S), wait_for_workers=False, use_libuv=True
        )

    def _key(self, place: int) -> str:
        return f"shardformer/here/{self.what}/{self.attempt}/{place}"

    def _own(self) -> str:
        return f"{self.what} {self.place} ({platform.node()})"


def _say(text: str) -> None:
    print(f"shardformer: {text}.", file=sys.stderr, flush=True)
