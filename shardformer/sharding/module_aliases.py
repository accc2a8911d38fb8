"""Modules under several names, in containers that torch does not know, or inside wrappers of torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardformer.errors import ConfigError
from shardformer.module_paths import is_linear
from shardformer.torch_compat import is_compiled_wrapper, wrapped_name


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


@dataclass(frozen=True)
class _Wrapped:
    """One wrapper: the module that holds it under ``name``, and the module ``inner`` that it holds as ``key``."""

    owner: nn.Module
    name: str
    path: str
    wrapper: nn.Module
    key: str
    inner: nn.Module


@contextmanager
def unwrapped(model: nn.Module, *, stages: int = 1) -> Iterator[Mapping[int, nn.Module]]:
    """The model without its wrappers while this lasts.

    Args:
        stages: over how many pipeline stages the model will run.

    Yields the identity of each module that was wrapped -> its outermost wrapper. Raises ConfigError for what is
    compiled in a pipeline, or cut after it was compiled.
    """
    found: list[_Wrapped] = []
    outermost: dict[int, nn.Module] = {}
    try:
        for path, owner in _outside_of_wrappers(model):
            for name, child in list(owner._modules.items()):
                outer = child
                while child is not None and (key := wrapped_name(child)) is not None:
                    if stages > 1 and is_compiled_wrapper(child):
                        raise _compiled(f"{path}.{name}".lstrip("."), "is part of a pipeline")
                    inner = child._modules[key]
                    assert inner is not None
                    found.append(_Wrapped(owner, name, f"{path}.{name}".lstrip("."), child, key, inner))
                    owner._modules[name] = child = inner
                if child is not None and child is not outer and outer is not None:
                    outermost[id(child)] = outer
        yield outermost
    finally:
        replaced = [w for w in reversed(found) if _put_back(w) and is_compiled_wrapper(w.wrapper)]
    if replaced:
        raise _compiled(replaced[0].path, "is cut itself")


def _outside_of_wrappers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in the order of their registration, which are walked while wrappers are taken out."""
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        waiting += [(f"{path}.{name}".lstrip("."), m) for name, m in reversed(module._modules.items()) if m is not None]


def _put_back(wrapped: _Wrapped) -> bool:
    """Puts a wrapper around what is in its place now. Returns whether that is another module."""
    now = wrapped.owner._modules[wrapped.name]
    wrapped.wrapper._modules[wrapped.key] = now
    wrapped.owner._modules[wrapped.name] = wrapped.wrapper
    return wrapped.inner is not now and wrapped_name(now) is None if now is not None else False


def _compiled(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"{path} was compiled with torch.compile before the model was sharded, and {why}",
        rule="What was compiled goes on to run the module that it was made of",
        remedy="Compile after shard_model, or compile in place: module.compile()",
    )
