"""A loss may be an attribute, a dict item, the first item of a tuple, or the output itself."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import shardformer
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.runtime import find_loss_in_output
from shardformer.verify.verification import verify

Named = namedtuple("Named", "logits loss")

FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "attribute": lambda loss, logits: CausalLMOutput(loss=loss, logits=logits),
    "key": lambda loss, logits: {"logits": logits, "loss": loss},
    "first of a tuple": lambda loss, logits: (loss, logits),
    "first of a list": lambda loss, logits: [loss, logits],
    "field": lambda loss, logits: Named(logits, loss),
    "itself": lambda loss, logits: loss,
    "of one element": lambda loss, logits: {"loss": loss[None]},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return FORMS[self.form](F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def model(form: str) -> Model:
    torch.manual_seed(0)
    return Model(form).double()


def batch(step: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.roll(1, -1)}


def losses(form: str, context: ParallelContext | None, **parallel: Any) -> list[float]:
    made = model(form)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    engine = shardformer.initialize(made, optimizer, parallel=parallel, context=context)
    found = [float(engine.train_step(batch(step))) for step in range(2)]
    found.append(float(engine.evaluate([batch(2), batch(3)])))
    shardformer.Trainer(engine, hooks=[]).fit([{n: x[0] for n, x in batch(4).items()}] * 4, steps=3, batch_size=4)
    return [*found, float(engine.evaluate(batch(5)))]


@pytest.mark.parametrize("form", FORMS)
def test_the_engine_accepts_each_form_of_a_loss(form: str) -> None:
    expected = losses("attribute", None)
    assert losses(form, None, micro_batches=2) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("form", ["key", "first of a tuple", "itself"])
def test_two_pipeline_stages_accept_each_form_of_a_loss(form: str) -> None:
    expected = losses("attribute", None)
    for found in run_as_threads(lambda context: losses(form, context, pipe=2), pipe=2, one_at_a_time=True):
        assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.full
def test_verify_accepts_each_form_of_a_loss() -> None:
    assert verify(
        functools.partial(model, "first of a tuple"), batch, data=2, tensor=1, dtype=torch.float64, steps=2
    ).passed


NOT_LOSSES: dict[str, Any] = {
    "no loss": {"logits": torch.zeros(4, 6)},
    "an output without labels": CausalLMOutput(logits=torch.zeros(4, 6)),
    "logits first": (torch.zeros(4, 6), torch.zeros(4, 6)),
    "logits alone": torch.zeros(4, 6),
    "a loss for each sample": {"loss": torch.zeros(4)},
    "a number": 3.5,
    "nothing": None,
    "an empty tuple": (),
}


@pytest.mark.parametrize("what", NOT_LOSSES)
def test_an_output_without_a_loss_raises(what: str) -> None:
    assert find_loss_in_output(NOT_LOSSES[what]) is None

    class Returns(Model):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            return NOT_LOSSES[what]

    made = Returns("itself")
    engine = shardformer.initialize(made, torch.optim.SGD(made.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"returned a \w+.*which contains no scalar loss"):
        engine.train_step(batch())


def test_a_loss_function_may_return_each_form_of_a_loss() -> None:
    expected = losses("attribute", None)[0]
    made = model("key")
    engine = shardformer.initialize(
        made, torch.optim.SGD(made.parameters(), lr=0.1), lambda output, batch: (output["loss"], {"extra": 1})
    )
    assert float(engine.train_step(batch())) == pytest.approx(expected, abs=1e-9)
