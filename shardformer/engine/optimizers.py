"""The optimizer that a user made of the plain model, given the parameters of the sharded one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardformer.checkpoint.model import ModelTensors
from shardformer.errors import ConfigError
from shardformer.optim.zero_grad import let_go

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, eq=False)
class Group:
    """A group of an optimizer: its list of parameters, and for each all names that the plain model has for it."""

    params: list[nn.Parameter]
    names: list[list[str]]


class Held:
    """Optimizers of a plain model, which let go of its parameters while it is sharded.

    The optimizers stay the objects that they were, so that schedulers made of them go on. Their lists of parameters are
    filled in place, since some optimizers keep a reference to them.
    """

    def __init__(self, optimizers: Sequence[Optimizer], model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        for optimizer in optimizers:
            _check(optimizer, names)
        self._groups = [
            Group(group["params"], [names[id(p)] for p in group["params"]])
            for o in optimizers
            for group in o.param_groups
        ]

    def let_go(self) -> None:
        """The lists are empty from here on."""
        for group in self._groups:
            group.params.clear()

    def take(self, model: nn.Module) -> None:
        """Fills the lists with this rank's parameters: none of those that other stages hold.

        Raises ConfigError where one that was trained has no place any more.
        """
        here = dict(model.named_parameters(remove_duplicate=False))
        for group in self._groups:
            found = [next((here[name] for name in names if name in here), None) for names in group.names]
            group.params[:] = [p for p in found if p is not None]
        names = {name for group in self._groups for aliases in group.names for name in aliases}
        taken = {id(p) for group in self._groups for p in group.params}
        lost = next((n for n, p in here.items() if n in names and id(p) not in taken), None)
        if lost is not None:
            raise ConfigError(
                f"{lost} of the sharded model is not the parameter that the optimizer was given",
                rule="A parameter has one name before and after the model is sharded",
                remedy="Give optimizer=, a function: lambda parameters: torch.optim.AdamW(parameters)",
            )


def fill(optimizers: Sequence[Optimizer], groups: Sequence[Sequence[Sequence[str]]], model: nn.Module) -> None:
    """Gives optimizers the parameters of a model, by name, of those that this rank has; and takes their states away."""
    here: dict[str, Any] = ModelTensors(model).tensors
    for optimizer, names in zip(optimizers, groups, strict=True):
        let_go(optimizer)
        optimizer.state.clear()
        for group, own in zip(optimizer.param_groups, names, strict=True):
            group["params"][:] = [here[name] for name in own if name in here]


def _check(optimizer: Optimizer, names: dict[int, list[str]]) -> None:
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise ConfigError(
                    f"This {kind} holds a parameter of the shape {tuple(param.shape)} that is none of the model's",
                    rule="The engine trains the parameters of one model",
                    remedy="Make a loss with parameters of its own a part of the model, or leave them out",
                )
    if optimizer.state:
        raise ConfigError(
            f"This {kind} has made steps already: it has a state for {len(optimizer.state)} parameters",
            rule="The parameters are cut when training begins, and the state of the plain ones is not",
            remedy="Save it with save_checkpoint(folder, model, optimizer) and load it with engine.load(folder)",
        )


def as_optimizers(given: Any) -> list[Optimizer] | MakeOptimizer | None:
    """Those that were given, or the function that makes one. Raises ConfigError for what is neither."""
    if given is None:
        return None
    if isinstance(given, Optimizer):
        return [given]
    if isinstance(given, (list, tuple)) and given and all(isinstance(each, Optimizer) for each in given):
        return list(given)
    if callable(given) and not isinstance(given, type):
        return given  # type: ignore[no-any-return]
    what = given.__name__ if isinstance(given, type) else f"{given!r:.80}"
    raise ConfigError(
        f"optimizer={what}",
        rule="It is an optimizer of the model's parameters, a list of some, or a function that makes one of parameters",
        remedy="Write optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4)",
    )
