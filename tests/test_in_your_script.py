"""docs/in-your-script.md: each snippet gives the same result on the plain and on the sharded model."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardformer
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory

PAGE = Path(__file__).resolve().parents[1] / "docs" / "in-your-script.md"
TEXT = PAGE.read_text(encoding="utf-8")
PIECES = dict(re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?```python\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE))
EPS = 1e-4
ATOL = 2e-5
PLAIN_STATE = "weights = shardformer.full_state_dict(model)"


def first(family: str) -> Any:
    torch.manual_seed(0)
    return SmallModelFactory(family)().train()


def ran(piece: str, model: Any, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Run a snippet, and return its variables."""
    code = PIECES[piece]
    if "_shardformer" not in model.__dict__:
        code = code.replace('model.compile(backend="eager")', "pass")  # compilation is slow and tested by torch
        code = code.replace(PLAIN_STATE, "weights = {n: w.clone() for n, w in model.state_dict().items()}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    names: dict[str, Any] = {"torch": torch, "shardformer": shardformer, "copy": copy, "model": model}
    names |= {"optimizer": optimizer, "batches": batches}
    exec(compile(code, f"in-your-script.md, {piece}", "exec"), names)
    return names


def batches_of(rank: int = 0) -> list[dict[str, Tensor]]:
    return [RandomBatchFactory(DEFAULT_HEAD["llama"])(10 * step + rank) for step in range(4)]


@pytest.mark.reduced(at_most=10)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("piece", [piece for piece in PIECES if piece != "torch.compile"])
def test_a_snippet_of_the_page_equals_the_plain_script(piece: str, family: str) -> None:
    plain = first(family)
    expected = ran(piece, copy.deepcopy(plain), batches_of())
    whole = expected["model"].state_dict()

    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), context=context)
        found = ran(piece, model, batches_of())
        for name, value in shardformer.full_state_dict(found["model"]).items():
            assert torch.allclose(value, whole[name], atol=ATOL), name
        if "losses" in found:
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        if "text" in found:
            assert torch.equal(found["text"], expected["text"])

    run_as_threads(do, tensor=2, one_at_a_time=True)


@pytest.mark.parametrize("piece", ["Gradient accumulation", "Clipping", "Loss scaling", "A learning rate schedule"])
def test_on_data_ranks_it_equals_training_on_both_batches(piece: str) -> None:
    plain = first("llama")
    both = [{n: torch.cat([a[n], b[n]]) for n in a} for a, b in zip(batches_of(0), batches_of(1), strict=True)]
    whole = ran(piece, copy.deepcopy(plain), both)["model"].state_dict()

    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), context=context)
        ran(piece, model, batches_of(context.data.rank))
        for name, value in shardformer.full_state_dict(model).items():
            assert torch.allclose(value, whole[name], atol=ATOL), name

    run_as_threads(do, data=2, one_at_a_time=True)


def compiled(sizes: dict[str, int]) -> bool:
    plain = first("llama")
    # each layer is compiled, which takes seconds
    plain.model.layers, plain.config.num_hidden_layers = plain.model.layers[:1], 1
    whole = ran("torch.compile", copy.deepcopy(plain), batches_of()[:2])["model"].state_dict()
    model = shardformer.shard_model(copy.deepcopy(plain), context=ParallelContext.from_default_process_group(sizes))
    ran("torch.compile", model, batches_of()[:2])
    return all(torch.allclose(x, whole[n], atol=ATOL) for n, x in shardformer.full_state_dict(model).items())


@pytest.mark.above_budget("torch.compile builds C++ code for a forward and a backward pass")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_model_trains_like_the_plain_one(pool2: Any) -> None:
    assert pool2.run(compiled, {"tensor": 2}) == [True, True]


def test_one_line_of_the_page_shards_the_model() -> None:
    (line,) = re.findall(r"^model = shardformer.shard_model\(.*$", TEXT, re.MULTILINE)
    assert line == "model = shardformer.shard_model(model, context=context)"
