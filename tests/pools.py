"""Pools of worker processes that tests share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

from shardformer.local_ranks.worker_pool import WorkerPool


class WorkerPools:
    """One :class:`WorkerPool` per number of workers, created when it is first requested. Takes the same options.

    >>> with WorkerPools(timeout_s=30.0) as pools:  # doctest: +SKIP
    ...     pools(2).run(torch.add, 1, 1)
    [tensor(2), tensor(2)]
    """

    def __init__(
        self,
        *,
        timeout_s: float = 60.0,
        threads: int = 1,
        imports: Sequence[str] = ("torch",),
        grace_s: float = 5.0,
    ) -> None:
        self._make = partial(
            WorkerPool, timeout_s=timeout_s, num_threads=threads, module_names=imports, grace_s=grace_s
        )
        self._pools: dict[int, WorkerPool] = {}

    def __call__(self, num_workers: int) -> WorkerPool:
        if num_workers not in self._pools:
            self._pools[num_workers] = self._make(num_workers)
        return self._pools[num_workers]

    def close(self) -> None:
        """End the workers of all pools."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
