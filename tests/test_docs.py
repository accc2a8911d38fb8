"""The Python blocks of the README and of docs/concepts.md run unchanged on a small model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch

from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
from tests.scripts import SHARDFORMER

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
MOVING = (ROOT / "docs" / "moving.md").read_text(encoding="utf-8")
CONCEPTS = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")


def _run_block(source: str, folder: Path) -> float:
    import shardformer

    sample = SmallModelFactory("gpt2")
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "model": sample(),
        "torch": torch,
        "shardformer": shardformer,
        "context": shardformer.launch_from_torch(),
        "ids": RandomBatchFactory(sample.head_class)(0)["input_ids"],
    }
    if ("describe" in source and "shard_model" not in source) or "Pipeline(" in source:
        names["model"] = shardformer.shard_model(names["model"])
    with chdir(folder):
        exec(compile(source, str(README), "exec"), names)
    loss = names["model"](**RandomBatchFactory(sample.head_class)(0)).loss
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("number", [i for i, b in enumerate(BLOCKS) if "save_pretrained" not in b])
def test_a_block_of_the_readme_runs(pool4: WorkerPool, number: int, tmp_path: Path) -> None:
    losses = pool4.run(_run_block, BLOCKS[number], tmp_path)
    assert all(abs(loss - losses[0]) < 1e-5 for loss in losses)


def test_the_readme_block_equals_the_example_script() -> None:
    """tests/examples/test_train.py runs the script."""
    (block,) = [b for b in BLOCKS if "save_pretrained" in b]
    assert (ROOT / "examples" / "train.py").read_text(encoding="utf-8").endswith(block)


def test_the_block_of_the_first_api_runs(pool4: WorkerPool, tmp_path: Path) -> None:
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", MOVING, flags=re.DOTALL) if "compat.ShardConfig" in b]
    losses = pool4.run(_run_block, block, tmp_path)
    assert all(abs(loss - losses[0]) < 1e-5 for loss in losses)


@pytest.mark.slow
def test_the_verify_block_runs() -> None:
    page = (ROOT / "docs" / "in-your-script.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "verify(model_fn" in b]
    sample = SmallModelFactory("gpt2")
    names: dict[str, Any] = {
        "__name__": "__main__",
        "model_fn": sample,
        "batch_fn": RandomBatchFactory(sample.head_class),
    }
    exec(compile(block, "in-your-script.md", "exec"), names)
    assert names["report"].passed


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.slow
def test_the_command_with_a_config_file_runs(tmp_path: Path) -> None:
    for text in re.findall(r"```python\n(.*?)```", CONCEPTS, flags=re.DOTALL):
        (tmp_path / text.split("\n", 1)[0].removeprefix("# ")).write_text(text)
    found = re.search(r"^shardformer (run .*--config config.py.*)$", CONCEPTS, re.MULTILINE)
    assert found is not None
    main = [*SHARDFORMER, *shlex.split(found[1])]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
    done = subprocess.run(main, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"tensor {rank}/2, data 0/1: train" for rank in (0, 1)]


@pytest.mark.parametrize(
    "page", [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CHANGELOG.md"], ids=lambda page: page.name
)
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    by_name = dict(re.findall(r"^\[([^\]^]+)\]: (?!https?:)(\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"\]\[([^\]^]+)\]", text)) <= by_name.keys()
    for target in [*re.findall(r"\]\((?!https?:)([^)]+)\)", text), *by_name.values()]:
        path, _, part = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if part else []
        assert not part or part in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings], target


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_architecture_page_names_existing_modules() -> None:
    named = {name for name in re.findall(r"`([\w/]+(?:/|\.py))`", ARCHITECTURE)}
    places = [ROOT, ROOT / "shardformer", *(ROOT / "shardformer").iterdir(), ROOT / "shardformer" / "layers" / "tensor"]
    assert len(named) > 30
    assert {name for name in named if not any((place / name).exists() for place in places)} == set()


def _run_architecture_block() -> tuple[str, float]:
    """Return the activation layout, and the largest difference of a gradient from that of the full sequence."""
    (block,) = re.findall(r"```python\n(.*?)```", ARCHITECTURE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "architecture.md", "exec"), names)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    plain.load_state_dict(names["model"].state_dict())
    plain(names["x"]).square().mean().backward()
    pairs = zip(plain.parameters(), names["model"].parameters(), strict=True)
    difference = max(float((p.grad - sharded.grad).abs().max()) for p, sharded in pairs)
    return str(names["config"].resolve_activation_layout()), difference


def test_the_architecture_page_runs(pool2: WorkerPool) -> None:
    for layout, difference in pool2.run(_run_architecture_block):
        assert layout == "sequence over sequence (zigzag, from the inputs on)" and difference < 1e-6


def test_the_architecture_page_lists_every_package() -> None:
    from tests.test_architecture import FLOORS

    missing = [floor for floor in FLOORS if not re.search(rf"\b{floor.replace('.', '/')}\b", ARCHITECTURE)]
    assert missing == []
