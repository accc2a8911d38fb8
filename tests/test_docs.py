"""The Python of the README runs as it stands there, on a small model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardformer.pool import WorkerPool
from shardformer.samples import Batches, Sample

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def _run_block(source: str, path: str) -> float:
    import transformers

    import shardformer

    sample = Sample("gpt2")
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "model": sample(),
        "batches": [Batches(sample.head_class)(step) for step in range(2)],
        "shardformer": shardformer,
        "transformers": transformers,
        "context": shardformer.launch_from_torch(),
    }
    if "describe" in source:
        names["model"] = shardformer.shard_model(names["model"])
    exec(compile(source.replace("path/or/hub-id", path), str(README), "exec"), names)
    loss = names["model"](**names["batches"][0]).loss
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("number", [i for i, b in enumerate(BLOCKS) if "verify" not in b])
def test_a_block_of_the_readme_runs(pool4: WorkerPool, tmp_path: Path, number: int) -> None:
    torch.manual_seed(0)
    Sample("gpt2")().save_pretrained(tmp_path)  # type: ignore[operator]
    losses = pool4.run(_run_block, BLOCKS[number], str(tmp_path))
    assert all(abs(loss - losses[0]) < 1e-5 for loss in losses)


def test_the_readme_verifies_a_model_of_ones_own() -> None:
    (block,) = [b for b in BLOCKS if "verify" in b]
    sample = Sample("gpt2")
    names: dict[str, Any] = {"model_fn": sample, "batch_fn": Batches(sample.head_class)}
    exec(compile(block, str(README), "exec"), names)
    assert names["report"].passed
