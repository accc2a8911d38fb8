"""Record the collectives of a process: their type, their size, and when the process waits for them.

Collectives are counted in this process, when they start. See ``shardformer.mesh.transport`` for the byte formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.transport import CollectiveEvent, CollectiveLog, CollectiveRecord


@dataclass
class CollectiveRecorder:
    """Context manager that records the collectives started in its ``with`` block.

    >>> with CollectiveRecorder(context) as recorder:      # doctest: +SKIP
    ...     model(**batch).loss.backward()
    >>> recorder.count("all_reduce"), recorder.wire_bytes()   # doctest: +SKIP

    Args:
        model: if passed, record which of its modules starts each collective (``CollectiveRecord.where``).

    After the ``with`` block, ``calls`` contains the collectives, and ``events`` contains their starts and waits in
    order, including those of point-to-point receives.
    """

    source: ParallelContext | Axis
    model: nn.Module | None = None
    calls: list[CollectiveRecord] = field(default_factory=list)
    events: list[CollectiveEvent] = field(default_factory=list)

    @property
    def _collective_log(self) -> CollectiveLog:
        return self.source.traffic

    def __enter__(self) -> CollectiveRecorder:
        traffic = self._collective_log
        self._was_enabled, traffic.enabled = traffic.enabled, True
        self._first = len(traffic.calls), len(traffic.events)
        self._hooks = [] if self.model is None else _register_module_tracking_hooks(self.model, traffic)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, exc_traceback: TracebackType | None
    ) -> None:
        traffic, (call, event) = self._collective_log, self._first
        for remove in self._hooks:
            remove()
        self.calls, self.events = traffic.calls[call:], traffic.events[event:]
        traffic.enabled = self._was_enabled
        if not self._was_enabled:
            traffic.calls.clear()
            traffic.events.clear()

    def count(self, op: str | None = None, *, axis: str | None = None, purpose: str | None = None) -> int:
        """Return the number of recorded collectives, optionally for one operation, axis or purpose only."""
        return len(self._filter_records(op, axis, purpose))

    def payload_bytes(self, op: str | None = None, *, axis: str | None = None, purpose: str | None = None) -> int:
        """Return the total size in bytes of the full tensors in the recorded collectives."""
        return sum(c.payload_bytes for c in self._filter_records(op, axis, purpose))

    def wire_bytes(self, op: str | None = None, *, axis: str | None = None, purpose: str | None = None) -> int:
        """Return the total number of bytes that all ranks send in the recorded collectives."""
        return sum(c.wire_bytes for c in self._filter_records(op, axis, purpose))

    def summarize_calls(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """Summarize the records as a dict from (operation, axis, purpose) to (number of calls, bytes sent)."""
        count: Counter[tuple[str, str, str]] = Counter()
        sent: Counter[tuple[str, str, str]] = Counter()
        for c in self.calls:
            count[c.op, c.axis, c.purpose] += 1
            sent[c.op, c.axis, c.purpose] += c.wire_bytes
        return {key: (count[key], sent[key]) for key in sorted(count)}

    def _filter_records(self, op: str | None, axis: str | None, purpose: str | None) -> list[CollectiveRecord]:
        return [c for c in self.calls if op in (None, c.op) and axis in (None, c.axis) and purpose in (None, c.purpose)]


def _register_module_tracking_hooks(model: nn.Module, collective_log: CollectiveLog) -> list[Any]:
    outer = collective_log.where.module
    running = [outer]

    def make_forward_pre_hook(module_path: str) -> Callable[..., None]:
        def forward_pre_hook(*_: Any) -> None:
            if not module_path:  # a pipeline stage may abort its previous forward pass without running its hooks
                running[:] = [outer]
            running.append(module_path)
            collective_log.where = collective_log.where._replace(module=module_path)

        return forward_pre_hook

    def forward_hook(*_: Any) -> None:
        running.pop()
        collective_log.where = collective_log.where._replace(module=running[-1])

    hooks: list[Any] = []
    for name, module in model.named_modules():
        enter_hook = make_forward_pre_hook(name)
        hooks.append(register_forward_hooks(module, HookOrder.RECORDER, enter_hook, forward_hook, always_call=True))
    return hooks


def skip_wait_recording() -> None:
    """Do nothing. This replaces the wait callback while no recorder is active."""


def record_collective_start(
    op: str, axis: Axis, payload_bytes: int, purpose: str, *, num_ranks: int | None = None
) -> Callable[[], None]:
    """Record the start of a collective. Returns a callback that records when the process waits for it."""
    traffic = axis.traffic
    if not traffic.enabled:
        return skip_wait_recording
    return traffic.record_start(
        CollectiveRecord(op, axis.name, num_ranks or axis.size, payload_bytes, purpose, traffic.where)
    )


def get_num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
