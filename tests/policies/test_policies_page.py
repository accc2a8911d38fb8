"""The files in docs/policies.md and docs/derived-policies.md run unmodified and print the documented output."""

from __future__ import annotations

import importlib
import io
import re
import runpy
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.errors import ConfigError, PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.shard_model_api import shard_model
from shardformer.verify import VerifyPipeline, verify
from tests.scripts import PYTHON, importable_files

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("policies.md", "derived-policies.md"))
BLOCKS = re.findall(r"```(python|text)\n(.*?)```", PAGE, flags=re.DOTALL)
FILES = {text.split("\n", 1)[0].removeprefix("# "): text for kind, text in BLOCKS if kind == "python"}
PRINTED = {
    before.split("\n", 1)[0].removeprefix("# "): text
    for (_, before), (kind, text) in pairwise(BLOCKS)
    if kind == "text"
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the page's files to a folder from which they can be imported."""
    yield from importable_files(tmp_path_factory.mktemp("page"), FILES)


def _printed_by(path: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        runpy.run_path(path)
    return out.getvalue()


def test_the_page_has_a_file_for_each_form() -> None:
    assert list(FILES) == [
        "mine.py",
        "roles.py",
        "train.py",
        "check.py",
        "written.py",
        "stacks.py",
        "first.py",
        "wrong.py",
    ]
    assert list(PRINTED) == ["train.py", "wrong.py"]


@pytest.mark.parametrize("name", PRINTED)
def test_file_prints_the_output_on_the_page(pool2: WorkerPool, folder: Path, name: str) -> None:
    assert pool2.run(_printed_by, str(folder / name)) == [PRINTED[name]] * 2


@pytest.mark.parametrize("form", ["roles", "written", "stacks", "first"])
def test_policies_of_the_page_train_as_one_process(pool2: WorkerPool, folder: Path, form: str) -> None:
    mine, policy = importlib.import_module("mine"), importlib.import_module(form).MyPolicy
    report = verify(mine.MyModel, mine.batch, steps=2, loss_fn=mine.loss, policy=policy, pool=pool2)
    assert report.passed and report.collectives, report


def _tokens(step: int) -> dict[str, Tensor]:
    ids: Tensor = importlib.import_module("mine").batch(step)["ids"]
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def _cross_entropy(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize(
    ("tensor", "options"),
    [(1, {"pipeline": VerifyPipeline(2, 2)}), (2, {"config": {"enable_sequence_parallelism": True}})],
    ids=["pipeline", "sequence parallel"],
)
def test_the_policy_with_stacks_supports(
    pool2: WorkerPool, folder: Path, tensor: int, options: Mapping[str, Any]
) -> None:
    model, policy = importlib.import_module("mine").MyModel, importlib.import_module("stacks").MyPolicy
    report = verify(model, _tokens, tensor, steps=2, loss_fn=_cross_entropy, policy=policy, pool=pool2, **options)
    assert report.passed, report


@pytest.mark.slow
def test_sequence_parallelism_without_blocks_is_refused(folder: Path) -> None:
    mine, stacks = importlib.import_module("mine"), importlib.import_module("stacks")
    written = importlib.import_module("written")

    class WithoutBlocks(stacks.MyPolicy):  # type: ignore[misc, name-defined]
        def module_policy(self) -> dict[str, Any]:
            return written.MyPolicy.module_policy(self)  # type: ignore[no-any-return]

    def shard(context: ParallelContext) -> None:
        shard_model(mine.MyModel(), context=context, policy=WithoutBlocks, enable_sequence_parallelism=True)

    with pytest.raises(ConfigError, match=r"cannot shard the linear layer layers.0.attn.q, because the policy does"):
        run_as_threads(shard, tensor=2, one_at_a_time=True)


@pytest.mark.slow
def test_a_module_that_needs_all_tokens_but_is_not_listed_is_refused(folder: Path) -> None:
    mine, stacks = importlib.import_module("mine"), importlib.import_module("stacks")

    class Shifted(nn.Module):
        """Adds the previous token to each token."""

        def forward(self, x: Tensor) -> Tensor:
            return x + F.pad(x, (0, 0, 1, 0))[:, :-1]

    def shard(context: ParallelContext) -> None:
        model = mine.MyModel()
        for layer in model.layers:
            layer.norm1 = nn.Sequential(layer.norm1, Shifted())
        shard_model(model, context=context, policy=stacks.MyPolicy, enable_sequence_parallelism=True)

    with pytest.raises(
        PolicyError, match=r"does not support sequence parallelism: .* sharded by MyPolicy over 2 ranks"
    ):
        run_as_threads(shard, tensor=2, one_at_a_time=True)


@pytest.mark.slow
def test_the_check_of_the_page_passes(folder: Path) -> None:
    done = subprocess.run([PYTHON, "check.py"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "PASS: " in done.stdout
