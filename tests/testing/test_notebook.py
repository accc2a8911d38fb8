"""``notebook_launcher`` runs functions of a notebook in several processes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

import shardformer
from shardformer.errors import ConfigError, LaunchError, WorkerError
from shardformer.local_ranks.worker_pool import notebook_launcher
from shardformer.local_ranks.worker_process import RemoteCall

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


@pytest.mark.slow
@pytest.mark.above_budget("it imports transformers and trains in two processes")
def test_the_block_of_the_page_trains_on_two_ranks() -> None:
    """``exec`` defines a function that cannot be pickled, like one of a notebook."""
    (block,) = re.findall(r"```python\n(def train.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    rows = torch.randint(128, (16, 8), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {
        "shardformer": shardformer,
        "torch": torch,
        "transformers": transformers,
        "config": transformers.LlamaConfig(
            vocab_size=128, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
        ),
        "data": [{"input_ids": row, "labels": row} for row in rows],
    }
    exec(block, names)
    first, second = names["values"]
    assert 4 < first["loss"] < 6 and first["loss"] == second["loss"]
    assert "RANK" not in os.environ and not torch.distributed.is_initialized()


@pytest.mark.slow
def test_errors_of_the_function_are_raised() -> None:
    def refuse() -> None:
        raise ConfigError("a value is wrong.", remedy="Correct it.")

    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("broken")
        torch.distributed.barrier()

    with pytest.raises(ConfigError, match="a value is wrong"):
        notebook_launcher(refuse)
    with pytest.raises(WorkerError, match="rank 1 raised ValueError: broken"):
        notebook_launcher(fail)


def test_what_cannot_be_launched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="a tuple of its arguments"):
        notebook_launcher(print, 1e-3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_processes=0"):
        notebook_launcher(print, num_processes=0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(LaunchError, match="has already used CUDA"):
            notebook_launcher(print)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LaunchError, match="already a rank of a distributed run"):
        notebook_launcher(print)


def test_functions_of_a_notebook_cannot_be_sent_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def model_fn() -> None: ...

    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    model_fn.__module__, model_fn.__qualname__ = "__main__", "model_fn"
    main.model_fn = model_fn  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError,
        match="model_fn is defined in a notebook or interactive session, so worker processes cannot import it",
    ):
        RemoteCall.from_function(model_fn, (), {})
    main.__file__ = "script.py"
    RemoteCall.from_function(model_fn, (), {})
