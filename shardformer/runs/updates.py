"""What updates the weights of a run: an optimizer by name, and how its learning rate changes."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardformer.errors import ConfigError, first_line, nearest
from shardformer.optim.hybrid import HybridAdam
from shardformer.optim.layerwise import LAMB, LARS
from shardformer.runs.config import OptimizerTable, ScheduleTable

NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Of names in lower case, as in transformers."""
OURS = {kind.__name__: kind for kind in (LAMB, LARS, HybridAdam)}


MakeOptimizer = Callable[[nn.Module], Callable[[Iterable[nn.Parameter]], Optimizer]]
"""The model before it is sharded -> the parameters of it that are trained here -> what updates them."""
DECAY = "weight_decay"


def optimizer_of(table: OptimizerTable) -> MakeOptimizer:
    """How the optimizer is made. Raises ConfigError for a name, or an argument, that there is not."""
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
    default = inspect.signature(kind).parameters.get(DECAY)
    decays = bool(said.get(DECAY, default.default if default is not None else 0))
    if table.decay_biases_and_norms and not decays:
        raise ConfigError(
            f"optimizer.decay_biases_and_norms = true with {kind.__name__} and no {DECAY}",
            rule=f"It says to which parameters optimizer.{DECAY} applies",
            remedy=f"Write optimizer.{DECAY} = 0.01, or leave it out",
        )
    made = partial(_made, kind, {"lr": table.lr, **said})
    made(list)([nn.Parameter(torch.zeros(1))])  # refuses values that cannot be, before anything is loaded
    return lambda model: made(_grouping(model) if decays and not table.decay_biases_and_norms else list)


def _made(
    kind: Any, arguments: Mapping[str, Any], group: Callable[[Iterable[nn.Parameter]], list[Any]]
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    return lambda params: _built(kind, arguments, group(params))


def _built(kind: Any, arguments: Mapping[str, Any], groups: list[Any]) -> Optimizer:
    try:
        found: Optimizer = kind(groups, **arguments)
    except Exception as error:  # each class checks its arguments in its own way
        shown = ", ".join(f"{name} = {value!r}" for name, value in arguments.items())
        raise ConfigError(
            f"{kind.__name__} does not take {shown}: {first_line(error)}",
            rule="The keys of optimizer are its arguments",
            remedy="Correct the value",
        ) from error
    return found


def _grouping(model: nn.Module) -> Callable[[Iterable[nn.Parameter]], list[dict[str, Any]]]:
    """Parameters -> those that decay, and the others.

    Which these are is found by name before the model is sharded, so that it is the same under every layout. On every
    rank there are both groups, though a stage may have none of one: a checkpoint has the groups of all.
    """
    every = (name for name, _ in model.named_parameters(remove_duplicate=False))
    others = {name for name in every if not decays(model, name)}

    def grouped(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        names = {id(param): name for name, param in model.named_parameters()}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for param in params:
            groups[names[id(param)] not in others].append(param)
        return [{"params": groups[True]}, {"params": groups[False], DECAY: 0.0}]

    return grouped


def decays(model: nn.Module, name: str) -> bool:
    """Whether weight decay applies to a parameter: not to biases, nor to what a norm holds.

    As ``Trainer.get_decay_parameter_names`` of transformers, which goes by names and ``LayerNorm``; and every other
    module whose class is named as a norm, such as ``BatchNorm2d``.
    """
    holder = type(model.get_submodule(name.rpartition(".")[0]))
    is_norm = any("norm" in kind.__name__.lower() for kind in holder.__mro__)
    return not is_norm and NOT_DECAYED.search(name.lower()) is None


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
    share = shares_of(table, num_steps)
    return lambda optimizer: LambdaLR(optimizer, share)


def shares_of(table: ScheduleTable, num_steps: int) -> Callable[[int], float]:
    """step from 0 -> share of the learning rate, in a run of so many steps."""
    length = num_steps if table.steps is None else table.steps
    warmup = math.ceil(table.warmup * length) if table.warmup < 1 else round(table.warmup)
    return partial(share_of_rate, table.name, warmup, length, table.final)


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
