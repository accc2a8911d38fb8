"""User-defined modules without a config are validated on a copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext

pytestmark = pytest.mark.slow


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.inputs(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm(x))


class Language(nn.Module):
    """Reads tokens and creates its own positions. Its width is not a config field."""

    def __init__(self, width: int = 16, scale: float = 1.0) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(32, width), nn.Embedding(64, width)
        self.layers, self.head = nn.ModuleList(Layer(width) for _ in range(2)), nn.Linear(width, 32)
        self.scale = scale

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(tokens) * self.scale + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits if loss is None else {"loss": loss, "logits": logits}


class Features(nn.Module):
    """Reads features and pools after the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.layers, self.head = nn.Linear(5, 16), nn.Sequential(Layer(16), Layer(16)), nn.Linear(16, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.layers(self.inputs(x)).mean(1))
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(32, 16), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.encoder(self.embedding(tokens))[:, 0])
        return logits if labels is None else F.cross_entropy(logits, labels)


TOKENS = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "language": (Language, {"tokens": TOKENS, "labels": TOKENS}),
    "features": (
        Features,
        {"x": torch.linspace(-1, 1, 180).view(4, 9, 5).double().sin(), "labels": torch.arange(4) % 3},
    ),
    "encoder": (Encoder, {"tokens": TOKENS, "labels": torch.arange(4) % 3}),
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = MODELS[name][0]().double().train()
    return made


def losses(model: nn.Module, name: str, context: ParallelContext | None = None, **parallel: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardformer.initialize(model, optimizer, parallel=parallel, context=context)
    return [float(engine.train_step(MODELS[name][1])) for _ in range(3)]


@pytest.mark.reduced(at_most=1)
@pytest.mark.filterwarnings("ignore:The attention of:UserWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [{"sequence": 2}, {"pipe": 2}], ids=str)
def test_losses_equal_those_of_one_process(name: str, sizes: dict[str, int]) -> None:
    plain = model_of(name)
    expected = losses(copy.deepcopy(plain), name)

    def do(context: ParallelContext) -> list[float]:
        return losses(copy.deepcopy(plain), name, context, **sizes)

    for found in run_as_threads(do, **sizes, one_at_a_time=True):
        assert found == pytest.approx(expected, abs=1e-9)


def test_validation_is_not_reused_for_another_module_of_the_class() -> None:
    """The modules have no config that distinguishes them."""
    for width in (16, 32):
        plain = Language(width).double()
        expected = losses(copy.deepcopy(plain), "language")
        with pytest.warns(UserWarning, match="attention of Language"):
            found = run_as_threads(
                lambda context, plain=plain: losses(copy.deepcopy(plain), "language", context, sequence=2),
                sequence=2, one_at_a_time=True,
            )  # fmt: skip
        assert found[0] == pytest.approx(expected, abs=1e-9)


class Particular(Language):
    """Needs inputs that cannot be guessed."""

    def forward(self, tokens: Tensor, table: dict[str, Tensor]) -> Any:  # type: ignore[override]
        return super().forward(tokens, table["labels"])


def test_module_that_cannot_run_is_refused_with_its_needs() -> None:
    def do(context: ParallelContext) -> None:
        with pytest.raises(ConfigError) as caught:
            shardformer.shard_model(Particular(), context=context)
        assert "default" in str(caught.value) and "config" in str(caught.value)

    run_as_threads(do, sequence=2, one_at_a_time=True)
