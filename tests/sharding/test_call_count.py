"""Host cost of sharding a model: calls of functions of the package, and files that they are in."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

import pytest

import shardformer
from shardformer import torch_patches
from shardformer.layout import sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import SmallModel

PACKAGE = Path(shardformer.__file__).parent
TRANSPORT = str(PACKAGE / "local_ranks")
"""Excluded: threads poll each other, which depends on the load of the machine."""
MAX_CALLS = 5_000
MAX_FILES = 37


def test_shard_model_calls_few_functions_in_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    small_model, calls = SmallModel("llama", changes={"num_hidden_layers": 2}), Counter[str]()
    torch_patches.uninstall()  # those of other tests, such as the one that LazyInit needs
    shard_model(small_model(), context=ParallelContext.of({}))  # imports the policy, and installs patches of torch
    models = [small_model() for _ in range(2)]

    def count(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)) and not file.startswith(TRANSPORT):
            calls[file] += 1

    def shard(context: Any) -> None:
        before = sys.getprofile()
        sys.setprofile(count if context.rank == 0 else before)
        try:
            shard_model(models[context.rank], context=context)
        finally:
            sys.setprofile(before)

    monkeypatch.setattr(sharding_metadata, "_TABLES", WeakSet())  # without models of other tests
    monkeypatch.setattr(sharding_metadata, "_OWNERS", {})
    run_as_threads(shard, tensor=2)
    assert 1_000 < calls.total() <= MAX_CALLS, calls.most_common(10)
    assert len(calls) <= MAX_FILES, sorted(str(Path(file).relative_to(PACKAGE)) for file in calls)
