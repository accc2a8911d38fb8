"""Settings and fixtures of all tests: one thread per process, no network, and pools of workers for the session."""

from __future__ import annotations

import gc
import os

# read by libraries at import time, and inherited by the workers
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import tests.models.chatglm2  # noqa: F401  (registers a family that transformers lacks)
from shardformer.local_ranks.worker_pool import WorkerPool
from tests.pools import WorkerPools

torch.set_num_threads(1)
settings.register_profile("no deadline", deadline=None)  # the time of an example depends on the load of the machine
settings.load_profile("no deadline")

# Imported objects are never garbage, and tests create few cycles. Rare collection takes 5 % of the time, not 14 %.
gc.set_threshold(50_000, 20, 20)

# generates docs/features.md from test results
pytest_plugins = ["tests.feature_table", "tests.tiers"]


@pytest.fixture(scope="module", autouse=True)
def _search_what_is_imported_no_more() -> Iterator[None]:
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[WorkerPools]:
    """``pools(n).run(fn, *args)`` calls ``fn`` on n workers. See ``WorkerPool``."""
    from tests.tiers import PRELOADED  # pytest imports its plugins itself

    with WorkerPools(imports=PRELOADED) as pools:
        yield pools


@pytest.fixture(scope="session")
def pool2(pools: WorkerPools) -> WorkerPool:
    return pools(2)


@pytest.fixture(scope="session")
def pool4(pools: WorkerPools) -> WorkerPool:
    return pools(4)
