"""docs/extending.md: each example runs and gives the result of the plain model."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.verify import verify

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = {
    text.split("\n", 1)[0].removeprefix("# "): text
    for text in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("extending")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_the_page_has_these_files() -> None:
    assert list(FILES) == ["plain.py", "parallel.py", "check_layer.py", "optimizer.py", "train_with_optimizer.py"]


def test_the_parallel_layer_equals_the_plain_layer(pool2: WorkerPool, folder: Path) -> None:
    plain, policy = importlib.import_module("plain"), importlib.import_module("parallel").MyPolicy
    report = verify(plain.MyModel, plain.batch, tensor=2, loss_fn=plain.loss, policy=policy, pool=pool2)
    assert report.passed and report.collectives, report


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
