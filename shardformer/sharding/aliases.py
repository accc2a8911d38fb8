"""A module that a model holds under several names, or in containers that torch does not know, is replaced in all."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardformer.layers.tensor.linear import is_linear


def put_everywhere(model: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Replaces modules under each of their names: as submodules, as attributes, and in lists, tuples and dicts.

    Args:
        made: identity of a module -> what takes its place.
    """
    for module in model.modules():
        for name, child in module._modules.items():
            if id(child) in made:
                module._modules[name] = made[id(child)]
        for name, value in vars(module).items():
            if name not in _TABLES and (new := _with_new(value, made, set())) is not value:
                vars(module)[name] = new


_TABLES = frozenset(vars(nn.Module()))
"""The tables of ``nn.Module`` itself."""


def _with_new(value: Any, made: Mapping[int, nn.Module], seen: set[int]) -> Any:
    """The value with the new modules in it. Lists and dicts are changed in place, since others may hold them too."""
    if isinstance(value, nn.Module):
        return made.get(id(value), value)
    if type(value) not in (list, dict, tuple) or id(value) in seen:
        return value
    seen.add(id(value))
    held = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    changed = {key: new for key, each in held if (new := _with_new(each, made, seen)) is not each}
    if changed and isinstance(value, tuple):
        return tuple(changed.get(at, each) for at, each in held)
    for key, new in changed.items():
        value[key] = new
    return value


def readers_of(model: nn.Module, cut: Mapping[int, str], replaced: set[int]) -> Iterator[tuple[str, str, str]]:
    """(path, name, name of what is cut) of each parameter that is cut and that another module reads as a whole one.

    A linear or an embedding reads its own parameters, any other module those that its forward names. BERT's head holds
    the bias of its decoder and leaves it to that.

    Args:
        cut: identity of each parameter that is cut -> a name of it.
        replaced: identities of the modules that are replaced.
    """
    for path, module in model.named_modules():
        if id(module) in replaced:
            continue
        for name, p in module.named_parameters(recurse=False):
            if id(p) in cut and (is_linear(module) or isinstance(module, nn.Embedding) or _reads(type(module), name)):
                yield path, name, cut[id(p)]


def _reads(kind: type[nn.Module], name: str) -> bool:
    """Whether the forward of a class, or a method that it calls, names an attribute."""
    waiting, seen = ["forward"], set[str]()
    while waiting:
        method = waiting.pop()
        code = getattr(inspect.unwrap(getattr(kind, method, None) or len), "__code__", None)
        if code is None or method in seen:
            continue
        seen.add(method)
        if name in code.co_names:
            return True
        waiting += code.co_names
    return False
