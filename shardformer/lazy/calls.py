"""Methods of a model whose weights are not read yet: what they do to weights is recorded, as it is under ``LazyInit``.

A script resizes the embeddings of a loaded model, or casts it, before it is sharded. On tensors without values such a
method would fail, or do nothing. Recorded, it becomes a part of the recipes by which each rank makes its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

from shardformer.lazy.recipe import place_of
from shardformer.lazy.recorder import VERSION, LazyInit, was_written


class RecordedCall:
    """A method of a model that waits for its values, in the place of the class's own."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = getattr(type(self._model), self._name)
        with recorded(self._model):
            return method(self._model, *args, **kwargs)


@contextmanager
def recorded(model: nn.Module) -> Iterator[None]:
    """What is done in here to weights that wait for their values goes into their recipes.

    Weights that were written to before, where nothing recorded it, are still known to be.
    """
    lost = {id(p) for p in model.parameters() if was_written(p)}
    with LazyInit():
        yield
    for p in model.parameters():
        if place_of(p) is not None and id(p) not in lost:
            p.__dict__[VERSION] = p._version


def record_calls(model: nn.Module) -> None:
    """From now on the model's methods record what they do, until it has its values.

    These are the public ones that its own classes define, and those by which torch casts and initializes a module. The
    forward is none of them: it needs the values.
    """
    names = {"_apply", "apply"}
    for kind in type(model).__mro__:
        if kind is nn.Module:
            break
        own = vars(kind).items()
        names |= {name for name, value in own if isinstance(value, FunctionType) and not name.startswith("_")}
    vars(model).update({name: RecordedCall(model, name) for name in names - {"forward"} if name not in vars(model)})


def end_recorded_calls(model: nn.Module) -> None:
    """Gives the model its own methods back."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, RecordedCall):
                del vars(module)[name]
