"""Calls of functions of the package, and the files they are in: of `shard_model`, and of a batch that is trained on."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

import pytest
from torch import Tensor

import shardformer
from shardformer import torch_patches
from shardformer.layout import sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.shard_model_api import shard_model
from shardformer.train_command.config_schema import load_train_config
from shardformer.train_command.run import run_training
from shardformer.verify.small_models import SmallModelFactory
from tests.runs.small_run import MODEL_AND_DATA

PACKAGE = Path(shardformer.__file__).parent
TRANSPORT = str(PACKAGE / "local_ranks")
"""Excluded: threads poll each other, which depends on the load of the machine."""
MAX_CALLS = 5_000
MAX_FILES = 34
MAX_STOPS = 45
"""Maximum number of times that a batch of `shardformer train` moves from one file of the package to another."""
RUN = f"""
folder = "run"
{MODEL_AND_DATA}
[training]
steps = 3
"""


def test_shard_model_calls_few_functions_in_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    small_model, calls = SmallModelFactory("llama", changes={"num_hidden_layers": 2}), Counter[str]()
    torch_patches.uninstall()  # those of other tests, such as the one that LazyInit needs
    shard_model(
        small_model(), context=ParallelContext.from_sizes({})
    )  # imports the policy, and installs patches of torch
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


@pytest.mark.slow
def test_a_batch_of_the_train_command_passes_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the end of one step to that of the next, so that the batch is also collated."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A batch passes few files. " * 100, encoding="utf-8")
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    steps: list[list[str]] = [[]]

    def trace(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return
        if event == "return" and code.co_qualname == "Engine.train_step":
            steps.append([])
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
        if event == "call" and any(has_tokens(frame.f_locals.get(name)) for name in names):
            steps[-1].append(code.co_filename)

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        run_training(load_train_config(tmp_path / "run.toml"))
    finally:
        sys.setprofile(before)
    stops = [file for file, _ in groupby(steps[2])]
    assert 5 < len(stops) <= MAX_STOPS, [str(Path(file).relative_to(PACKAGE)) for file in stops]


def has_tokens(value: Any) -> bool:
    """Return whether a value is a tensor of tokens or labels, or a collection that contains one."""
    if isinstance(value, dict | list | tuple):
        return any(map(has_tokens, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor) and not value.is_floating_point() and value.shape[-1:] == (16,)
