"""What each layer of a chain costs: estimated by its weights, or measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from shardformer.pipeline.chain import Chain

NOTHING = 1e-9
"""What a layer without any weight costs, so that it counts at all."""


def costs_of(model: nn.Module, chain: Chain, home: Mapping[str, frozenset[int]]) -> list[float]:
    """What each unit costs a token, about: the elements of the matrices that it meets, of experts those it is sent to.

    A table that is looked up costs nothing; what stands before and behind a stack counts with its first and last unit.
    """
    units = chain.units
    per_module = {path: _matrices(model, model.get_submodule(path)) for path in dict.fromkeys(units)}
    costs = [NOTHING + per_module[path] for path in units]
    tables = {id(m) for m in model.modules() if isinstance(m, nn.Embedding)}
    for path, module in model.named_modules() if units else ():
        for name, p in module.named_parameters(recurse=False):
            at, *others = home[f"{path}.{name}" if path else name]
            if p.dim() >= 2 and id(module) not in tables and not others and not f"{path}.".startswith(f"{units[at]}."):
                costs[at] += p.numel()
    return costs


def _matrices(model: nn.Module, module: nn.Module) -> float:
    config: Any = getattr(model, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    total = 0.0
    for p in module.parameters():
        if p.dim() == 2 or p.dim() > 3:
            total += p.numel()
        elif p.dim() == 3:
            total += p.numel() * min(1.0, chosen / p.shape[0]) if isinstance(chosen, int) else p.numel()
    return total


def measured_costs(
    model: nn.Module, chain: Chain, run: Callable[[], Any], rounds: int, device: torch.device
) -> list[float]:
    """The seconds of each unit in a forward of the plain model, the least of some rounds.

    What runs between two units counts with the second, what runs behind the last one with that.
    """
    marks: list[float] = []

    def mark(*_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    handles = [model.get_submodule(path).register_forward_hook(mark) for path in dict.fromkeys(chain.units)]
    found: list[list[float]] = []
    try:
        for _ in range(rounds + 1):  # the first only warms up
            marks.clear()
            mark()
            run()
            mark()
            marks[-2:] = marks[-1:]  # the last unit ends with the model
            found.append([b - a for a, b in pairwise(marks)])
    finally:
        for handle in handles:
            handle.remove()
    return [min(each) for each in zip(*found[1:], strict=True)]
