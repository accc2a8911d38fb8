"""Whether an optimizer changes each number by itself, so that it may be given parts of parameters: tried, not known."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.errors import ConfigError

SHAPE, CUT, STEPS = (6, 4), 10, 3


def check_elementwise(optimizer: Optimizer) -> None:
    """Raises ConfigError for an optimizer that gives other numbers for a matrix than for two parts of it.

    A few steps are made with the settings of each of its groups, on a small matrix whole and in two parts.
    """
    for group in optimizer.param_groups:
        start = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        grads = [start.roll(step + 1, 0) / (step + 2) for step in range(STEPS)]
        try:
            whole = _after(optimizer, group, [start], [[grad] for grad in grads])
            cut = [[grad.flatten()[:CUT], grad.flatten()[CUT:]] for grad in grads]
            parts = _after(optimizer, group, [start.flatten()[:CUT], start.flatten()[CUT:]], cut)
        except Exception as error:
            raise _refused(optimizer, f"it cannot ({type(error).__name__}: {error!s:.120})") from error
        difference = float((whole - parts).abs().max())
        if not difference < 1e-6:
            raise _refused(optimizer, f"the numbers differ by {difference:.1e}")


def _after(optimizer: Optimizer, group: dict[str, Any], values: list[Tensor], grads: list[list[Tensor]]) -> Tensor:
    """The numbers after a step with each of the gradients."""
    tried: Any = object.__new__(type(optimizer))
    params = [nn.Parameter(value.clone()) for value in values]
    tried.__dict__.update(optimizer.__dict__, param_groups=[{**group, "params": params}], state=defaultdict(dict))
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        tried.step()
    return torch.cat([param.detach().flatten() for param in params])


def _refused(optimizer: Optimizer, why: str) -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__} was tried on a matrix and on two parts of it: {why}",
        rule="zero gives an optimizer parts of parameters, so it must change each number by itself",
        remedy="Use one that does (SGD, Adam, AdamW, Lion), or this one without zero",
    )
