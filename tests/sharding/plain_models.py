"""Plain models and batches in fp64, the reference of sharded models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import shardformer
from shardformer.verify.small_models import SmallModelFactory


def in_fp64(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in batch.items()}


@cache
def plain_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = SmallModelFactory(family)().double().train()
    return model


def train_steps(
    model: nn.Module,
    batches: Sequence[dict[str, Any]],
    loss_of: Callable[[nn.Module, dict[str, Any]], Tensor],
    learning_rate: float,
    **pipeline: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of some steps of SGD, and the gradients of the first step.

    Args:
        loss_of: loss of a batch, without pipeline stages.
        pipeline: arguments of ``Pipeline``, if the model has stages.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    step = shardformer.Pipeline(model, **pipeline).step if pipeline else None
    for batch in batches:
        if step is not None:
            loss = step(batch)
        else:
            loss = loss_of(model, batch)
            loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, first
