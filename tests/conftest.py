"""What all tests share: small processes, no network, and pools of workers that live as long as the session."""

from __future__ import annotations

import gc
import os

# Read by libraries when they are imported, and handed on to the workers.
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
settings.register_profile("no deadline", deadline=None)  # what an example takes depends on what else runs
settings.load_profile("no deadline")

# What is imported is never garbage, and tests make few cycles: searching less often takes 5 % of the time, not 14.
gc.set_threshold(50_000, 20, 20)

# docs/features.md is made of what the tests say.
pytest_plugins = ["tests.feature_table", "tests.tiers"]


@pytest.fixture(scope="module", autouse=True)
def _search_what_is_imported_no_more() -> Iterator[None]:
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[WorkerPools]:
    """``pools(n).run(fn, *args)`` calls ``fn`` on n workers; see ``local_ranks.worker_pool.WorkerPool``."""
    from tests.tiers import PRELOADED  # pytest imports its plugins itself

    with WorkerPools(imports=PRELOADED) as pools:
        yield pools


@pytest.fixture(scope="session")
def pool2(pools: WorkerPools) -> WorkerPool:
    return pools(2)


@pytest.fixture(scope="session")
def pool4(pools: WorkerPools) -> WorkerPool:
    return pools(4)
