"""What updates the weights of a run: an optimizer by name, and how its learning rate changes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardformer.errors import ConfigError, nearest
from shardformer.optim.hybrid import HybridAdam
from shardformer.optim.layerwise import LAMB, LARS
from shardformer.runs.config import OptimizerTable, ScheduleTable

OURS = {kind.__name__: kind for kind in (LAMB, LARS, HybridAdam)}


def optimizer_of(table: OptimizerTable) -> Callable[[list[nn.Parameter]], Optimizer]:
    """A function of parameters. Raises ConfigError for a name, or an argument, that there is not."""
    theirs = {n: k for n, k in vars(torch.optim).items() if isinstance(k, type) and issubclass(k, Optimizer)}
    known = {name: kind for name, kind in {**theirs, **OURS}.items() if name != "Optimizer"}
    if table.name not in known:
        raise ConfigError(
            f"optimizer.name = {table.name!r}",
            rule=f"It is a class of torch.optim, or {', '.join(OURS)}",
            remedy=nearest(table.name, known),
        )
    kind = known[table.name]
    said = {key: tuple(v) if isinstance(v, list) else v for key, v in (table.model_extra or {}).items()}
    check_arguments(kind, {"lr": table.lr, **said}, "optimizer", taken=("params",))
    made = partial(_made, kind, {"lr": table.lr, **said})
    made([nn.Parameter(torch.zeros(1))])  # refuses values that cannot be, before anything is loaded
    return made


def _made(kind: Any, arguments: Mapping[str, Any], params: Iterable[nn.Parameter]) -> Optimizer:
    try:
        found: Optimizer = kind(params, **arguments)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{kind.__name__} does not take {', '.join(f'{n} = {v!r}' for n, v in arguments.items())}: {error}",
            rule="The keys of optimizer are its arguments",
            remedy="Correct the value",
        ) from error
    return found


def check_arguments(kind: Any, given: Mapping[str, Any], where: str, taken: Iterable[str] = ()) -> None:
    """Raises ConfigError for an argument that a class does not take, or lacks."""
    parameters = inspect.signature(kind).parameters
    known = [name for name in parameters if name not in taken]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{where}.{name} = {given[name]!r}",
                rule=f"{kind.__name__} has no such argument",
                remedy=nearest(name, known),
            )
    lacking = [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in given]
    named = [name for name in lacking if parameters[name].kind in (parameters[name].POSITIONAL_OR_KEYWORD,)]
    if named:
        raise ConfigError(f"{where} does not say {named[0]}", rule=f"{kind.__name__} needs it", remedy="Write it")


def scheduler_of(table: ScheduleTable, num_steps: int) -> Callable[[Optimizer], LambdaLR]:
    """A function of the optimizer, for a run of so many steps."""
    warmup = math.ceil(table.warmup * num_steps) if table.warmup < 1 else round(table.warmup)
    share = partial(share_of_rate, table.name, warmup, num_steps, table.final)
    return lambda optimizer: LambdaLR(optimizer, share)


def share_of_rate(name: str, warmup: int, num_steps: int, final: float, step: int) -> float:
    """Of the learning rate, in a step counted from 0.

    >>> [round(share_of_rate("linear", 2, 6, 0.0, step), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(num_steps - warmup, 1), 1.0)
    fallen = {"constant": 0.0, "linear": done, "cosine": 0.5 - 0.5 * math.cos(math.pi * done)}[name]
    return 1 - (1 - final) * fallen
