"""Small training runs for the tests of hooks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.engine import Engine
from shardformer.training.initialize import initialize


def pairs(count: int = 10, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Samples with four inputs and a target."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(4, generator=generator), torch.rand(1, generator=generator)) for _ in range(count)]


class Net(nn.Module):
    """Model with dropout, except for ranks that are threads, which share one random generator."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-1, 1, math.prod(p.shape)).view(p.shape) / (number + 1))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def engine_of(context: ParallelContext | None = None, **options: Any) -> Engine:
    """Engine over ``pairs()`` with batches of 4, three steps per epoch."""
    torch.manual_seed(0)
    model = Net(dropout=0.2 if context is None else 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return initialize(model, optimizer, nn.MSELoss(), pairs(), context=context, batch_size=4, **options)


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}
