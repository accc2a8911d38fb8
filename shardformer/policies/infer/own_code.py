"""Code that somebody gave to modules of a model, in the place of a library's: a small twin of its config lacks it."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Hashable
from types import MethodType
from typing import Any

from torch import nn

from shardformer.policies.infer.blame import LIBRARIES


def is_of_library(module: nn.Module) -> bool:
    """Whether a module runs the forward that a library gave its class."""
    of_class: Any = inspect.unwrap(type(module).forward)
    return "forward" not in vars(module) and _package_of(of_class) in LIBRARIES


def take_over(twin: nn.Module, model: nn.Module) -> None:
    """Gives a twin the forwards that were put in the place of those of classes in ``model``.

    Raises ValueError where the twin lacks a module that has one, and for a function that knows its module in another
    way than as a method does: it would go on with that.
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
    """The forwards in the place of others, by where they are in any layer."""
    found = ((path, vars(m)["forward"]) for path, m in model.named_modules() if "forward" in vars(m))
    return Counter((re.sub(r"\d+", "*", path), getattr(method, "__func__", None)) for path, method in found)


def known_by(model: nn.Module) -> Hashable | None:
    """By what models are told apart of which one's proof holds for the other, beside the number of their layers.

    None for a model that may differ in anything from another one: without a config, or with code of somebody's own.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not all(map(is_of_library, model.modules())):
        return None
    kinds = frozenset((re.sub(r"\d+", "*", path), type(module)) for path, module in model.named_modules())
    return type(model), config.to_json_string(), kinds


def _package_of(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]
