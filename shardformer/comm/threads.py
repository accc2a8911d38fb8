"""Ranks as threads of one process: to try out a sharded model without starting any.

The ranks compute what processes would. A collective among them is a meeting: each lays down what it has, waits for the
others, and takes what it needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardformer.mesh.axis import Axis, Traffic
from shardformer.mesh.context import AXES, ParallelContext

R = TypeVar("R")

TIMEOUT_S = 60.0


class ThreadGroup:
    """``size`` tensor ranks as threads, which stands where an axis has its process group.

    Meetings end with an error for all when one rank raises or does not come, so nothing hangs.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._table: list[Any] = [None] * size

    def meet(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        self._table[rank] = value
        self._barrier.wait()
        values = list(self._table)
        self._barrier.wait()  # none lays down its next value before all have taken these
        return values

    def context(self, rank: int) -> ParallelContext:
        """The grid as the rank sees it: all ranks along the tensor axis."""
        traffic = Traffic()
        axes = {name: Axis(name, ranks=(rank,), traffic=traffic) for name in AXES[:-1]}
        tensor = Axis("tensor", self.size, rank, self, tuple(range(self.size)), traffic)
        return ParallelContext({**axes, "tensor": tensor}, torch.device("cpu"))

    def run(self, fn: Callable[[ParallelContext], R]) -> list[R]:
        """Calls ``fn`` with the context of each rank, in a thread each; the results in rank order.

        Raises what the first rank raised that did.
        """
        outcomes: list[_Outcome] = [_Outcome() for _ in range(self.size)]

        def play(rank: int) -> None:
            try:
                outcomes[rank].result = fn(self.context(rank))
            except BaseException as error:
                outcomes[rank].error = error
                self._barrier.abort()

        threads = [threading.Thread(target=play, args=(r,), name=f"rank-{r}", daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [o.error for o in outcomes if o.error is not None]
        if errors:  # what broke the meeting, before what the others say of the broken one
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [outcome.result for outcome in outcomes]


@dataclass
class _Outcome:
    result: Any = None
    error: BaseException | None = None
