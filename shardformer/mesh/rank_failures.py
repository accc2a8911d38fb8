"""Report ranks that exited or are unreachable, with their host and the failed collective."""

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
import torch.distributed as dist

from shardformer.errors import LaunchError
from shardformer.mesh.transport import CollectiveLog
from shardformer.torch_compat import TCPStore

LOST_PEER_PATTERNS = (
    "Connection closed", "Connection reset", "Connection timed out", "No route to host", "Timed out",
    "Application timeout", "Broken pipe", "Socket", "remote",
)  # fmt: skip
"""Fragments of gloo's and NCCL's errors for a lost peer."""


class LostPeerError(LaunchError):
    """Raised when another rank has exited, is unreachable, or did not join a collective in time."""


@dataclass(frozen=True)
class PeerRanks:
    """Global ranks and host names of the ranks on one axis, for error messages.

    Args:
        ranks: global ranks in the order of the axis; ``own_index`` is the index of this process among them.
        axis: name of the axis; empty for a user's process group.
        hosts: host of each rank; empty if unknown.
    """

    ranks: Sequence[int]
    own_index: int
    axis: str = ""
    hosts: Sequence[str] = ()
    traffic: CollectiveLog = field(default_factory=CollectiveLog)

    @contextmanager
    def convert_to_lost_peer_error(self, operation: str, peer_index: int | None = None) -> Iterator[None]:
        """Convert torch's connection errors to a LostPeerError that identifies the lost rank.

        Args:
            peer_index: index of the peer on the axis, or None if any other rank may be the cause.
        """
        try:
            yield
        except RuntimeError as error:
            if any(pattern in str(error) for pattern in LOST_PEER_PATTERNS):
                raise self._make_lost_peer_error(operation, peer_index, error) from error
            raise

    def _make_lost_peer_error(self, operation: str, peer_index: int | None, exception: Exception) -> LostPeerError:
        others = (
            [index for index in range(len(self.ranks)) if index != self.own_index]
            if peer_index is None
            else [peer_index]
        )
        who = " or ".join(map(self._describe_rank, others[:4])) + (" or another" if len(others) > 4 else "")
        axis = f" on the {self.axis} axis" if self.axis else ""
        when = f", after step {self.traffic.steps} of the optimizer" if self.traffic.steps else ""
        cause = re.sub(r"^(\[[^\]]*\]\s*)+", "", str(exception).strip().partition(". This is")[0])
        return LostPeerError(
            f"{self._describe_rank(self.own_index).capitalize()} could not reach {who}{axis} in {operation}{when} "
            f"({cause[:120]}).",
            rule="A collective fails if a rank of the axis has exited, or does not join within timeout_s.",
            remedy="Check the last output of that rank. If it has none, check its host and the network.",
        )

    def _describe_rank(self, peer_index: int) -> str:
        host = f" on host {self.hosts[peer_index]}" if len(set(self.hosts)) > 1 else ""
        return f"rank {self.ranks[peer_index]}{host}"


class MonitoredWork:
    """Work handle whose ``wait`` reports the lost rank if the connection fails.

    Attributes:
        awaited_collective: (process group, number of collectives that this process has started on it including this
            one, kind of collective), or None if they are not counted.
    """

    __slots__ = ("_peer", "_peers", "_what", "_work", "awaited_collective")

    def __init__(
        self,
        work: dist.Work | None,
        peers: PeerRanks,
        operation: str,
        peer_index: int | None = None,
        awaited_collective: tuple[Any, int, str] | None = None,
    ) -> None:
        assert work is not None, "an axis contains this process, so torch returns a work handle"
        self._work, self._peers, self._what, self._peer = work, peers, operation, peer_index
        self.awaited_collective = awaited_collective

    def wait(self) -> bool:
        with self._peers.convert_to_lost_peer_error(self._what, self._peer):
            return self._work.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class ReceiveWork(MonitoredWork):
    """Work handle of a receive, which counts received messages for deadlock detection.

    Args:
        received_counts: number of received messages per peer, which this class updates.
    """

    __slots__ = ("_arrived", "_from")

    def __init__(
        self,
        work: dist.Work | None,
        peers: PeerRanks,
        src: int,
        awaited_collective: tuple[Any, int, str] | None,
        received_counts: list[int],
    ) -> None:
        super().__init__(work, peers, "a receive", src, awaited_collective)
        self._from, self._arrived = src, received_counts

    def wait(self) -> bool:
        done = super().wait()
        if self._from >= 0 and not torch.compiler.is_compiling():
            self._arrived[self._from] += 1
            self._from = -1  # counts once, even if wait is called again
        return done

    @property
    def awaited_message(self) -> tuple[Any, int, int] | None:
        """Message for which this rank waits, or None. It is (process group, sender, number of messages received)."""
        if self.awaited_collective is None or self._from < 0:
            return None
        return self.awaited_collective[0], self._peers.ranks[self._from], self._arrived[self._from]


SAY_AFTER_S = 20.0
MARK_AFTER_S = 1.0
"""Most processes have connected by then."""
AGAIN_S = 0.5
CONNECT_S = 3.0
SAME_ADDRESS = (
    "Start all processes with the same address and port, and check that they are running and that the firewall of "
    "this machine lets them connect"
)


@dataclass(frozen=True)
class Rendezvous:
    """Address at which the processes connect, with methods that report missing processes.

    Args:
        index: index of this process among the ``num_processes`` processes.
        process_kind: kind of the participants: "node" for launchers, "rank" for processes.
        attempt: number of restarts by the launcher, which separates the keys of different attempts.
        advice: hint that is printed if some processes have not connected.
    """

    host: str
    port: int
    index: int
    num_processes: int
    process_kind: str
    attempt: str = "0"
    advice: str = SAME_ADDRESS

    @contextmanager
    def report_missing_processes(self) -> Iterator[None]:
        """Print the processes that have not connected while the ``with`` block waits for them."""
        is_complete = threading.Event()
        report = self._print_missing_processes_after_delay if self.index == 0 else self._print_if_host_unreachable
        thread = threading.Thread(target=report, args=[is_complete], name="shardformer-rendezvous", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_complete.set()
            thread.join(2 * CONNECT_S)

    def describe_missing_processes(self) -> str:
        """Name the processes that have not connected, as in "rank 1 of 2", or return "" if this is unknown.

        Reliable once this process has waited for some seconds.
        """
        with suppress(RuntimeError):
            store = self._connect_to_store()
            absent = [
                place for place in range(self.num_processes) if not store.check([self._get_connected_store_key(place)])
            ]
            if absent and self.index not in absent:
                shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
                return f"{self.process_kind}{'s' if len(absent) > 1 else ''} {shown} of {self.num_processes}"
        return ""

    def _print_missing_processes_after_delay(self, all_connected: threading.Event) -> None:
        if all_connected.wait(MARK_AFTER_S):
            return
        if self._try_connect() is None:  # the store exists already if the launchers have connected
            self._mark_as_connected()
        if all_connected.wait(SAY_AFTER_S - MARK_AFTER_S):
            return
        if (error := self._try_connect()) is not None:
            self._print_connection_error(error)
            return
        self._mark_as_connected()
        if (missing := self.describe_missing_processes()) and not all_connected.is_set():
            self._print_message(
                f"has waited for {SAY_AFTER_S:g} s at {self.host}:{self.port} for {missing}. {self.advice}"
            )

    def _print_if_host_unreachable(self, all_connected: threading.Event) -> None:
        if all_connected.wait(MARK_AFTER_S):
            return
        end = time.monotonic() + SAY_AFTER_S - MARK_AFTER_S
        while (error := self._try_connect()) is not None:
            if time.monotonic() >= end:
                self._print_connection_error(error)
                return
            if all_connected.wait(AGAIN_S):
                return
        self._mark_as_connected()

    def _mark_as_connected(self) -> None:
        with suppress(RuntimeError):
            self._connect_to_store().set(self._get_connected_store_key(self.index), platform.node())

    def _print_connection_error(self, error: OSError) -> None:
        self._print_message(
            f"could not connect to {self.process_kind} 0 at {self.host}:{self.port} for {SAY_AFTER_S:g} s "
            f"({error.strerror or error}). Check that the address is correct and the port is free, that "
            f"{self.process_kind} 0 was started, and that its firewall allows the connection"
        )

    def _print_message(self, message: str) -> None:
        name = f"{self.process_kind} {self.index} ({platform.node()})"
        print(f"shardformer: {name} {message}.", file=sys.stderr, flush=True)

    def _try_connect(self) -> OSError | None:
        try:
            with socket.create_connection((self.host, self.port), timeout=CONNECT_S):
                return None
        except OSError as error:
            return error

    def _connect_to_store(self) -> TCPStore:
        return TCPStore(
            self.host, self.port, None, False, timedelta(seconds=CONNECT_S), wait_for_workers=False, use_libuv=True
        )

    def _get_connected_store_key(self, index: int) -> str:
        return f"shardformer/here/{self.process_kind}/{self.attempt}/{index}"
