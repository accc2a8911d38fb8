"""Worker pools that import timm. No other test runs in these processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardformer.local_ranks.worker_pool import WorkerPool
from tests.pools import WorkerPools
from tests.timm.process import FOLDER, is_there


@pytest.fixture(scope="session")
def timm_pools() -> Iterator[WorkerPools]:
    """Return ``timm_pools(n)``: n workers in which ``tests.timm.process.timm()`` returns timm."""
    if not is_there():
        pytest.fail(f"timm is neither in this environment nor in {FOLDER}: make test puts it there")
    with WorkerPools() as pools:
        yield pools


@pytest.fixture(scope="session")
def timm_worker(timm_pools: WorkerPools) -> WorkerPool:
    return timm_pools(1)
