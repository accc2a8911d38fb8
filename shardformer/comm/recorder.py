"""The recorder: how many collectives a step makes and how many bytes they carry.

Counted where they start, on this process. ``wire_bytes`` is what a bandwidth-optimal algorithm puts on the wire, sent
by all ranks of the group together; with R ranks and a full tensor of S bytes:

    all_reduce      2 (R-1) S        all_gather      (R-1) S        reduce_scatter  (R-1) S        send  S

A ring that does a gather or a scatter in steps counts as that one collective.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from torch import Tensor

from shardformer.mesh.axis import Axis, Traffic
from shardformer.mesh.context import ParallelContext

WIRE_FACTOR = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "send": 1}


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, the axis, its purpose, and the bytes of the full tensor it concerns."""

    op: str
    axis: str
    ranks: int
    payload_bytes: int
    purpose: str

    @property
    def wire_bytes(self) -> int:
        """Bytes that all ranks of the group send together."""
        return self.payload_bytes * WIRE_FACTOR[self.op] * (self.ranks - 1)


@dataclass
class Recorder:
    """Counts the collectives of this process while it is entered.

    >>> with Recorder(context) as recorder:      # doctest: +SKIP
    ...     model(**batch).loss.backward()
    >>> recorder.count("all_reduce"), recorder.wire_bytes()   # doctest: +SKIP
    """

    source: ParallelContext | Axis
    calls: list[Collective] = field(default_factory=list)
    _start: int = 0

    @property
    def _traffic(self) -> Traffic:
        return self.source.traffic

    def __enter__(self) -> Recorder:
        self._was_enabled = self._traffic.enabled[0]
        self._start = len(self._traffic.calls)
        self._traffic.enabled[0] = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.calls = self._traffic.calls[self._start :]
        self._traffic.enabled[0] = self._was_enabled
        if not self._was_enabled:
            self._traffic.calls.clear()

    def count(self, op: str | None = None, *, axis: str | None = None, purpose: str | None = None) -> int:
        """How many calls there were, of one kind, over one axis, for one purpose."""
        return len(self._chosen(op, axis, purpose))

    def payload_bytes(self, op: str | None = None, *, axis: str | None = None, purpose: str | None = None) -> int:
        """Bytes of the full tensors concerned."""
        return sum(c.payload_bytes for c in self._chosen(op, axis, purpose))

    def wire_bytes(self, op: str | None = None, *, axis: str | None = None, purpose: str | None = None) -> int:
        """Bytes that the ranks of the groups send together at the least."""
        return sum(c.wire_bytes for c in self._chosen(op, axis, purpose))

    def table(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """(kind, axis, purpose) -> (number of calls, wire bytes)."""
        count: Counter[tuple[str, str, str]] = Counter()
        sent: Counter[tuple[str, str, str]] = Counter()
        for c in self.calls:
            count[c.op, c.axis, c.purpose] += 1
            sent[c.op, c.axis, c.purpose] += c.wire_bytes
        return {key: (count[key], sent[key]) for key in sorted(count)}

    def _chosen(self, op: str | None, axis: str | None, purpose: str | None) -> list[Collective]:
        return [c for c in self.calls if op in (None, c.op) and axis in (None, c.axis) and purpose in (None, c.purpose)]


def record(op: str, axis: Axis, full_bytes: int, purpose: str) -> None:
    """Notes a collective that starts now, if somebody listens."""
    if axis.traffic.enabled[0]:
        axis.traffic.calls.append(Collective(op, axis.name, axis.size, full_bytes, purpose))


def bytes_of(x: Tensor) -> int:
    return x.numel() * x.element_size()
