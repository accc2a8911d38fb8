"""A worker process whose accelerator is the fake one: registering it changes a process for good."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardformer.local_ranks.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def fake_gpu() -> Iterator[WorkerPool]:
    """A process in which ``tests.gpu.fake_steps`` runs."""
    with WorkerPool(1) as pool:
        yield pool
