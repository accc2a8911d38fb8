"""A parameter of several pipeline stages: its names differ, but a script that selects one of them trains the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.pipeline import Pipeline
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import SmallModelFactory
from shardformer.zero.shard_optimizer import shard_optimizer

_DRAWING = threading.Lock()
"""Ranks that are threads share one random generator."""
Change = Callable[[nn.Module, int], None]


def make_model() -> nn.Module:
    with _DRAWING:
        torch.manual_seed(0)
        model = SmallModelFactory("llama", changes={"num_hidden_layers": 2, "tie_word_embeddings": True})()
        return model.double()


def select_embedding(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if "embed" in name]


def freeze(model: nn.Module, step: int) -> None:
    for param in select_embedding(model):
        param.requires_grad_(step not in (1, 2))


def remove_grad(model: nn.Module, step: int) -> None:
    for param in select_embedding(model):
        if step == 2:
            param.grad = None


def train(context: ParallelContext | None, before: Change | None, after: Change | None, stage: int | None) -> Tensor:
    """Train for five steps, and return the sum of the rows of the embedding on the first stage."""
    model: Any = make_model()
    if context is not None:
        model = shard_model(model, context=context)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    if context is not None and stage is not None:
        optimizer = shard_optimizer(model, optimizer, stage=stage)
    pipeline = None if context is None else Pipeline(model, micro_batches=2)
    for step in range(5):
        ids = torch.randint(60, (4, 9), generator=torch.Generator().manual_seed(step))
        if before is not None:
            before(model, step)
        batch = {"input_ids": ids, "labels": ids}
        if pipeline is None:
            model(**batch).loss.backward()
        else:
            pipeline.step(batch)
        if after is not None:
            after(model, step)
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: p.detach().sum(0) for n, p in model.named_parameters() if "embed" in n or "lm_head" in n}
    return next(iter(weights.values()))


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_freezing_one_name_freezes_the_tied_parameter_on_all_stages(stage: int | None) -> None:
    want = train(None, freeze, None, None)
    assert (want - train(None, None, None, None)).abs().max() > 1e-3, "frozen steps change the result"
    for found in run_as_threads(lambda context: train(context, freeze, None, stage), pipe=2):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", [None, 0, 1, 2])
def test_changing_the_gradient_under_one_name_raises(stage: int | None) -> None:
    """Without this error, only one of the copies would be updated."""
    message = "model.embed_tokens.weight on stage 0, lm_head.weight on stage 1" if stage is None else "on each stage"
    with pytest.raises(InputError if stage is None else ConfigError, match=message):
        run_as_threads(lambda context: train(context, None, remove_grad, stage), pipe=2)


def test_zero_refuses_other_options_for_one_name_of_a_tied_parameter() -> None:
    def run(context: ParallelContext) -> None:
        model = shard_model(make_model(), context=context)
        chosen = {id(param) for param in select_embedding(model)}
        rest = [param for param in model.parameters() if id(param) not in chosen]
        groups = [{"params": select_embedding(model), "lr": 0.5}, {"params": rest}]
        shard_optimizer(model, torch.optim.SGD([group for group in groups if group["params"]], lr=0.1))

    with pytest.raises(ConfigError, match=r"0\.5.* for model\.embed_tokens\.weight and .*0\.1.* for lm_head\.weight"):
        run_as_threads(run, pipe=2)
