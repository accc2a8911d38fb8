"""User code in a model of a library: classes and replaced forwards that a small twin of its config does not have."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Hashable
from types import MethodType
from typing import Any

from torch import nn

from shardformer.policies.infer.blame import LIBRARIES


def runs_library_code(module: nn.Module) -> bool:
    """Whether a module runs the forward of its class, and that class is from a library."""
    of_class: Any = inspect.unwrap(type(module).forward)
    return "forward" not in vars(module) and _package_of(of_class) in LIBRARIES


def take_over(twin: nn.Module, model: nn.Module) -> None:
    """Replaces forwards in a twin as they were replaced in ``model``.

    Raises ValueError if the twin does not have the module, and if the new forward is not a method of its module: it
    would still run on the module in ``model``.
    """
    places = dict(twin.named_modules())
    for path, module in model.named_modules():
        if "forward" not in vars(module):
            continue
        method = vars(module)["forward"]
        if not (inspect.ismethod(method) and method.__self__ is module):
            raise ValueError(f"the forward of {path} was replaced, and not by a method of it")
        if path in places:
            places[path].__dict__["forward"] = MethodType(method.__func__, places[path])
    if lacks := _replaced(model).keys() - _replaced(twin).keys():
        raise ValueError(f"it lacks the forward that {next(iter(lacks))[0]} was given")


def _replaced(model: nn.Module) -> Counter[tuple[str, Any]]:
    """The replaced forwards, each with its path, in which * stands for the number of a layer."""
    found = ((path, vars(m)["forward"]) for path, m in model.named_modules() if "forward" in vars(m))
    return Counter((re.sub(r"\d+", "*", path), getattr(method, "__func__", None)) for path, method in found)


def known_by(model: nn.Module) -> Hashable | None:
    """A key of a model: a proof holds for all models with the same key, whatever the number of their layers.

    None for a model without a config, or with user code: it shares no proof.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not all(map(runs_library_code, model.modules())):
        return None
    kinds = frozenset((re.sub(r"\d+", "*", path), type(module)) for path, module in model.named_modules())
    return type(model), config.to_json_string(), kinds


def _package_of(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]
