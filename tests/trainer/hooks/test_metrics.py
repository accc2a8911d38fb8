"""Metrics cover all validation samples under every layout."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import transformers
from sklearn import metrics as sklearn_metrics
from torch import Tensor, nn

from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.hooks.metrics import Metrics
from shardformer.training.initialize import initialize
from shardformer.training.trainer import Trainer

Rows = list[tuple[Tensor, Tensor]]


def rows(count: int, classes: int = 2) -> Rows:
    generator = torch.Generator().manual_seed(3)
    return [(torch.rand(4, generator=generator), torch.tensor(i * 7 % classes)) for i in range(count)]


def net(classes: int = 2) -> nn.Linear:
    model = nn.Linear(4, classes)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 4 * classes).view(classes, 4).roll(3))
        model.bias.copy_(torch.linspace(0.1, 0, classes))
    return model


def values_of(hook: Metrics, data: Rows, classes: int = 2, context: ParallelContext | None = None) -> dict[str, float]:
    model = net(classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = initialize(model, optimizer, nn.CrossEntropyLoss(), data, context=context, batch_size=4)
    return Trainer(engine, [hook]).fit(steps=1, validation=data)


def expected(data: Rows, classes: int = 2) -> tuple[Any, Any]:
    inputs = torch.stack([x for x, _ in data])
    return torch.stack([y for _, y in data]).numpy(), net(classes)(inputs).argmax(-1).numpy()


@pytest.mark.parametrize("classes", [2, 5])
def test_metrics_equal_those_of_sklearn_over_all_samples(classes: int) -> None:
    data = rows(10, classes)
    labels, predictions = expected(data, classes)
    average = "binary" if classes == 2 else "macro"
    wanted = {
        "validation/accuracy": sklearn_metrics.accuracy_score(labels, predictions),
        "validation/f1": sklearn_metrics.f1_score(labels, predictions, average=average),
        "validation/matthews_corrcoef": sklearn_metrics.matthews_corrcoef(labels, predictions),
    }
    names = [name.removeprefix("validation/") for name in wanted]
    alone = values_of(Metrics(*names), data, classes)
    assert {name: alone[name] for name in wanted} == pytest.approx(wanted)
    for found in run_as_threads(lambda c: values_of(Metrics(*names), data, classes, c), data=2):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_functions_and_torchmetrics_are_supported() -> None:
    from torchmetrics.classification import BinaryAccuracy

    data = rows(10)
    hook = Metrics(wrong=lambda labels, predictions: (labels != predictions).sum(), of_torch=BinaryAccuracy())
    labels, predictions = expected(data)
    found = values_of(hook, data)
    assert found["validation/wrong"] == (labels != predictions).sum()
    assert found["validation/of_torch"] == pytest.approx((labels == predictions).mean())


def language_model(context: ParallelContext | None, parallel: ParallelConfig) -> dict[str, float]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=23, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number)) * 0.3)
    ids = torch.randint(23, (6, 9), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row.masked_fill(torch.arange(9) == 2, -100)} for row in ids]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = initialize(model, optimizer, None, data, context=context, parallel=parallel, batch_size=2)
    return Trainer(engine, [Metrics("accuracy", "perplexity")]).fit(steps=1, validation=data)


def test_causal_predictions_are_compared_with_the_next_token() -> None:
    alone = language_model(None, ParallelConfig())
    torch.manual_seed(0)
    assert alone["validation/perplexity"] == pytest.approx(math.exp(alone["validation/loss"]))
    assert alone["validation/accuracy"] * 42 == pytest.approx(round(alone["validation/accuracy"] * 42))  # 6 x (8 - 1)
    for sizes in ({"tensor": 2}, {"pipe": 2}, {"data": 2}):
        for found in run_as_threads(lambda c, sizes=sizes: language_model(c, ParallelConfig(**sizes)), **sizes):
            assert found["validation/accuracy"] == alone["validation/accuracy"]
            assert found["validation/perplexity"] == pytest.approx(alone["validation/perplexity"], rel=1e-5)


def test_a_batch_without_labels_raises() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = [{"input": x} for x, _ in rows(4)]
    engine = initialize(model, optimizer, lambda output, batch: output.mean(), data, batch_size=4)
    with pytest.raises(InputError, match=r"found no labels in a validation batch, which consists of input"):
        Trainer(engine, [Metrics()]).fit(steps=1, validation=data)


def test_ignored_labels_alone_raise() -> None:
    data = [(x, torch.tensor(-100)) for x, _ in rows(4)]
    with pytest.raises(InputError, match=r"All labels .* are -100"):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine = initialize(model, optimizer, nn.CrossEntropyLoss(), rows(4), batch_size=4)
        Trainer(engine, [Metrics()]).fit(steps=1, validation=[*data[:3], rows(1)[0]][:3])


def test_an_unknown_metric_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'accuracy'"):
        Metrics("acuracy")
    with pytest.raises(ConfigError, match=r"The argument mine of Metrics must be .* got 3"):
        Metrics(mine=3)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"shardformer\[metrics\]"):
        Metrics("accuracy")
    Metrics("perplexity")


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.linear(x)
        assert labels is not None
        loss = (
            nn.functional.binary_cross_entropy_with_logits if logits.shape == labels.shape else nn.functional.mse_loss
        )
        return {"loss": loss(logits if logits.shape == labels.shape else logits[:, 0], labels), "logits": logits}


def test_several_labels_per_sample_are_compared_by_the_sign_of_the_logits() -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(8, 4), (torch.rand(8, 2) > 0.5).float()
    model = TwoOutputs()
    data = [{"x": x[i], "labels": labels[i]} for i in range(8)]
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), train_data=data, batch_size=4)
    values = Trainer(engine, [Metrics("accuracy", "f1")]).fit(steps=1, validation=data)
    predicted = (model.linear(x) > 0).long()
    assert values["validation/accuracy"] == pytest.approx(sklearn_metrics.accuracy_score(labels, predicted))
    assert values["validation/f1"] == pytest.approx(sklearn_metrics.f1_score(labels, predicted, average="macro"))


class OneOutput(TwoOutputs):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)


def test_a_regression_is_compared_by_its_output() -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(8, 4), torch.randn(8)
    model = OneOutput()
    data = [{"x": x[i], "labels": labels[i]} for i in range(8)]
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), train_data=data, batch_size=4)
    values = Trainer(engine, [Metrics("mean_squared_error", "r2")]).fit(steps=1, validation=data)
    predicted = model.linear(x)[:, 0].detach()
    assert values["validation/mean_squared_error"] == pytest.approx(
        sklearn_metrics.mean_squared_error(labels, predicted)
    )
    assert values["validation/r2"] == pytest.approx(sklearn_metrics.r2_score(labels, predicted), rel=1e-4)
    with pytest.raises(InputError, match=r"The metric 'accuracy' cannot compare.*mean_squared_error"):
        Trainer(engine, [Metrics("accuracy")]).fit(steps=2, validation=data)
