"""A custom model with a policy, batches and a loss, without a transformers config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, LayerStack


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = hidden_states + self.mlp(self.norm(hidden_states))
        return out


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 35), nn.Linear(35, width), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.dropout(torch.tanh(self.up(x))))
        return out


class Tower(nn.Module):
    """A stack of MLPs with dropout and without a config."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(10) for _ in range(3))
        self.out = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.out(x)
        return out


class TowerPolicy(RolePolicy):
    stack = LayerStack("layers", [MLP("mlp", up="up", down="down")])
    keep_replicated = ("out",)


class ForgetfulPolicy(TowerPolicy):
    """Removes a bias: a mistake that a user can make."""

    def postprocess(self) -> nn.Module:
        model: nn.Module = super().postprocess()
        layers: Any = model.get_submodule("layers")
        for layer in layers:
            layer.mlp.up.bias = None
        return model


def numbers(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(6, 5, 10, generator=generator), "y": torch.randn(6, 5, 1, generator=generator)}


def distance(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()
