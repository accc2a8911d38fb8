"""Errors that name a rank that is gone or unreachable, its host, and the collective in progress."""

from __future__ import annotations

import platform
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from shardformer.errors import LaunchError
from shardformer.mesh.transport import CollectiveLog
from shardformer.torch_compat import TCPStore

LOST_PEER_PATTERNS = (
    "Connection closed",
    "Connection reset",
    "Connection timed out",
    "No route to host",
    "Timed out",
    "Application timeout",
    "Broken pipe",
    "Socket",
    "remote",
)
"""How gloo and NCCL say that a peer is gone."""


class LostPeerError(LaunchError):
    """Another process is gone, or a link to it is cut, or it does something else for too long."""


@dataclass(frozen=True)
class PeerRanks:
    """The ranks that one transport reaches.

    Args:
        ranks: global ranks, in the order of the axis; ``rank`` is this process's place among them.
        axis: the name of the axis; empty for a group of the user's own.
        hosts: of each of the ranks; empty where they are not known.
    """

    ranks: Sequence[int]
    rank: int
    axis: str = ""
    hosts: Sequence[str] = ()
    traffic: CollectiveLog = field(default_factory=CollectiveLog)

    def is_lost(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and any(word in str(error) for word in LOST_PEER_PATTERNS)

    @contextmanager
    def report_lost_peer(self, what: str, peer: int | None = None) -> Iterator[None]:
        """Around a call of torch: where it fails for lack of another rank, LostPeerError names it.

        Args:
            peer: its place on the axis; None where any of the others may be the one.
        """
        try:
            yield
        except RuntimeError as error:
            if not self.is_lost(error):
                raise
            raise self._error(what, peer, error) from error

    def _error(self, what: str, peer: int | None, error: Exception) -> LostPeerError:
        others = [peer] if peer is not None else [place for place in range(len(self.ranks)) if place != self.rank]
        who = " or ".join(self._named(place) for place in others[:4]) + (" or another" if len(others) > 4 else "")
        axis = f" on the {self.axis} axis" if self.axis else ""
        when = f", after step {self.traffic.steps} of the optimizer" if self.traffic.steps else ""
        said = re.sub(r"^(\[[^\]]*\]\s*)+", "", str(error).strip().partition(". This is")[0])
        return LostPeerError(
            f"{self._named(self.rank).capitalize()} does not reach {who}{axis} in {what}{when} ({said[:120]})",
            rule="Ranks of one axis make the same calls together, and a call that one of them does not join ends in an "
            "error: at once where its process is gone, else after timeout_s",
            remedy="See what that rank says last. Where it says nothing, its host or the link to it is down",
        )

    def _named(self, place: int) -> str:
        on = f" on host {self.hosts[place]}" if len(set(self.hosts)) > 1 else ""
        return f"rank {self.ranks[place]}{on}"


class MonitoredWork:
    """A work of torch, whose wait says who is missing.

    Attributes:
        joined: the process group of a collective, how many this process had begun on it with this one, and its kind;
            None where they are not counted.
    """

    __slots__ = ("_peer", "_peers", "_what", "_work", "joined")

    def __init__(
        self,
        work: Any,
        peers: PeerRanks,
        what: str,
        peer: int | None = None,
        joined: tuple[Any, int, str] | None = None,
    ) -> None:
        assert work is not None, "this process is in the group, as an axis has none of others"
        self._work, self._peers, self._what, self._peer, self.joined = work, peers, what, peer, joined

    def wait(self) -> Any:
        with self._peers.report_lost_peer(self._what, self._peer):
            return self._work.wait()

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done


class ReceivedWork(MonitoredWork):
    """What one rank sends to another.

    Args:
        arrived: by the place of a rank, how often something has arrived from it; this adds to it.
    """

    __slots__ = ("_arrived", "_from")

    def __init__(
        self, work: Any, peers: PeerRanks, source: int, joined: tuple[Any, int, str] | None, arrived: list[int]
    ) -> None:
        super().__init__(work, peers, "a receive", source, joined)
        self._from, self._arrived = source, arrived

    def wait(self) -> Any:
        done = super().wait()
        if self._from >= 0 and not torch.compiler.is_compiling():
            self._arrived[self._from] += 1
            self._from = -1  # once, also where it is waited for again
        return done

    @property
    def awaited(self) -> tuple[Any, int, int] | None:
        """The process group, the rank that sends, and how often something has arrived from it; None where that is not
        counted."""
        if self.joined is None or self._from < 0:
            return None
        return self.joined[0], self._peers.ranks[self._from], self._arrived[self._from]


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
class Rendezvous:
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
    def report_missing(self) -> Iterator[None]:
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
            _print_status(
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
        _print_status(
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
        return TCPStore(
            self.host, self.port, None, False, timedelta(seconds=CONNECT_S), wait_for_workers=False, use_libuv=True
        )

    def _key(self, place: int) -> str:
        return f"shardformer/here/{self.what}/{self.attempt}/{place}"

    def _own(self) -> str:
        return f"{self.what} {self.place} ({platform.node()})"


def _print_status(text: str) -> None:
    print(f"shardformer: {text}.", file=sys.stderr, flush=True)
