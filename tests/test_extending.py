"""docs/extending.md: each example runs and gives the result of the plain model."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardformer.comm.collectives import copy_to_tp_region
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError
from shardformer.layout.shard_spec import ShardSpec, Split
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.shard_model_api import shard_model
from shardformer.verify import verify
from tests.scripts import importable_files

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = {
    text.split("\n", 1)[0].removeprefix("# "): text
    for text in re.findall(r"```python\n(# .*?)```", PAGE, flags=re.DOTALL)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from importable_files(tmp_path_factory.mktemp("extending"), FILES)


def test_the_page_has_these_files() -> None:
    layer = ["plain.py", "parallel.py", "check_layer.py", "lookup.py", "count_collectives.py"]
    assert list(FILES) == [*layer, "optimizer.py", "train_with_optimizer.py"]


def test_the_parallel_layer_equals_the_plain_layer(pool2: WorkerPool, folder: Path) -> None:
    plain, policy = importlib.import_module("plain"), importlib.import_module("parallel").MyPolicy
    report = verify(plain.MyModel, plain.batch, tensor=2, loss_fn=plain.loss, policy=policy, pool=pool2)
    assert report.passed
    table = str(report).partition("collectives of one step")[2]
    printed, verdict = table.split("PASS: ")
    assert printed in PAGE and verdict.startswith("Largest difference ")


def _run(script: Path) -> str:
    sys.path.insert(0, str(script.parent))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(script))
    return out.getvalue().strip()


def test_collectives_of_the_parallel_layer_are_recorded(pool2: WorkerPool, folder: Path) -> None:
    """The layer builds its axis from the process group that it receives."""
    for table in pool2.run(_run, folder / "count_collectives.py"):
        assert ast.literal_eval(table) == {("all_reduce", "tensor", "block"): (2, 1024)} and table in PAGE


def test_the_parallel_layer_is_sharded_over_threads(folder: Path) -> None:
    plain, policy = importlib.import_module("plain"), importlib.import_module("parallel").MyPolicy

    def step(context: ParallelContext) -> tuple[int, int]:
        model = shard_model(plain.MyModel(), policy, context=context)
        with CollectiveRecorder(context) as recorder:
            plain.loss(model, plain.batch(0)).backward()
        return len(model.up.weight), recorder.count("all_reduce")

    assert run_as_threads(step, tensor=2) == [(32, 2), (32, 2)]


def test_the_lookup_table_equals_the_plain_table(folder: Path) -> None:
    """23 rows over three ranks."""
    plain = torch.nn.Embedding(23, 4)
    ids = torch.randint(23, (2, 40))
    expected = plain(ids)
    expected.square().sum().backward()
    assert plain.weight.grad is not None

    def step(context: ParallelContext) -> tuple[torch.Tensor, torch.Tensor]:
        table = importlib.import_module("lookup").ParallelLookup.from_native_module(plain, context.tensor)
        out = table(ids)
        out.square().sum().backward()
        return out.detach(), table.weight.grad

    outputs, gradients = zip(*run_as_threads(step, tensor=3), strict=True)
    assert [len(part) for part in gradients] == [8, 8, 7]
    torch.testing.assert_close(torch.cat(gradients), plain.weight.grad)
    for out in outputs:
        torch.testing.assert_close(out, expected.detach())


def test_a_layer_that_receives_a_process_group_instead_of_an_axis_is_refused(pool2: WorkerPool, folder: Path) -> None:
    assert all("Pass Axis.of(process_group)" in message for message in pool2.run(_pass_group))


def _pass_group() -> str:
    with pytest.raises(ConfigError) as refused:
        importlib.import_module("parallel").ParallelSquaredReLU(torch.distributed.group.WORLD)
    return str(refused.value)


def test_a_shard_as_replicated_input_is_refused(folder: Path) -> None:
    """The sum of the gradients of different shards is wrong, and gloo aborts if their sizes differ."""
    layer = importlib.import_module("parallel").ParallelSquaredReLU

    def copy_shard(context: ParallelContext) -> str:
        axis = context.tensor
        new = layer(axis)
        full = torch.nn.Parameter(torch.ones(5, 4))
        new.register_shard("weight", full, ShardSpec(full.shape, {0: Split.even(5, axis.size, axes=(axis.name,))}))
        with pytest.raises(ConfigError) as refused:
            copy_to_tp_region(new.weight, axis)
        return str(refused.value)

    for message in run_as_threads(copy_shard, tensor=2):
        assert "'ParallelSquaredReLU.weight' is sharded over the tensor axis" in message


def _train(script: Path) -> dict[str, torch.Tensor]:
    sys.path.insert(0, str(script.parent))
    weights: dict[str, torch.Tensor] = runpy.run_path(str(script))["weights"]
    return weights


def test_the_optimizer_under_zero_equals_one_process(pool2: WorkerPool, folder: Path) -> None:
    plain, optimizer = importlib.import_module("plain"), importlib.import_module("optimizer")
    torch.manual_seed(0)
    model = plain.MyModel()
    step = optimizer.SignSGD(model.parameters())
    for number in range(3):
        (sum(plain.loss(model, plain.batch(2 * number + rank)) for rank in range(2)) / 2).backward()
        step.step()
        step.zero_grad()
    for weights in pool2.run(_train, folder / "train_with_optimizer.py"):
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)
