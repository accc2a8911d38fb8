"""A rank that is gone, or out of reach: who, on which host, and what was under way."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shardformer.errors import LaunchError
from shardformer.mesh.traffic import Traffic

LOST = (
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
class Peers:
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
    traffic: Traffic = field(default_factory=Traffic)

    def is_lost(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)

    @contextmanager
    def reached(self, what: str, peer: int | None = None) -> Iterator[None]:
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


class ReachedWork:
    """A work of torch, whose wait says who is missing.

    Attributes:
        joined: the process group of a collective, how many this process had begun on it with this one, and its kind;
            None where they are not counted.
    """

    __slots__ = ("_peer", "_peers", "_what", "_work", "joined")

    def __init__(
        self, work: Any, peers: Peers, what: str, peer: int | None = None, joined: tuple[Any, int, str] | None = None
    ) -> None:
        assert work is not None, "this process is in the group, as an axis has none of others"
        self._work, self._peers, self._what, self._peer, self.joined = work, peers, what, peer, joined

    def wait(self) -> Any:
        with self._peers.reached(self._what, self._peer):
            return self._work.wait()

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done


class ReceivedWork(ReachedWork):
    """What one rank sends to another.

    Args:
        arrived: by the place of a rank, how often something has arrived from it; this adds to it.
    """

    __slots__ = ("_arrived", "_from")

    def __init__(
        self, work: Any, peers: Peers, source: int, joined: tuple[Any, int, str] | None, arrived: list[int]
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
