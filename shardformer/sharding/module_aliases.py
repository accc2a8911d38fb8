"""Replace and unwrap modules that have several names, are in plain containers, or are inside wrappers of torch."""

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
    """Replace modules under all of their names: as submodules, as attributes, and in lists, tuples and dicts.

    Args:
        made: id(module) -> its replacement.
    """
    for module in model.modules():
        for name, child in module._modules.items():
            if id(child) in made:
                module._modules[name] = made[id(child)]
        for name, value in vars(module).items():
            if not isinstance(value, _CONTAINER_TYPES) or not value or name in _MODULE_ATTRIBUTES:
                continue
            if (new := _with_replacements(value, made, set())) is not value:
                vars(module)[name] = new


_CONTAINER_TYPES = (nn.Module, list, dict, tuple)
"""Types of attributes that are modules or may contain modules."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every ``nn.Module`` has."""


def _with_replacements(value: Any, made: Mapping[int, nn.Module], seen: set[int]) -> Any:
    """Return the value with replaced modules. Modifies lists and dicts in place, because they may be shared."""
    if isinstance(value, nn.Module):
        return made.get(id(value), value)
    if type(value) not in (list, dict, tuple) or id(value) in seen:
        return value
    seen.add(id(value))
    held = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    inner = [(key, each) for key, each in held if isinstance(each, _CONTAINER_TYPES)]
    changed = {key: new for key, each in inner if (new := _with_replacements(each, made, seen)) is not each}
    if changed and isinstance(value, tuple):
        return tuple(changed.get(at, each) for at, each in held)
    for key, new in changed.items():
        value[key] = new
    return value


def readers_of(model: nn.Module, cut: Mapping[int, str], replaced: set[int]) -> Iterator[tuple[str, str, str]]:
    """Yield (path, name, name of the sharded parameter) for modules that read a sharded parameter as a full one.

    A linear or embedding reads its own parameters; any other module reads those that its forward names. BERT's head
    owns the bias of its decoder but does not read it.

    Args:
        cut: id(parameter) -> name, of parameters that will be sharded.
        replaced: ids of the modules that will be replaced.
    """
    for path, module in model.named_modules():
        if id(module) in replaced:
            continue
        for name, p in module.named_parameters(recurse=False):
            if id(p) in cut and (is_linear(module) or isinstance(module, nn.Embedding) or _reads(type(module), name)):
                yield path, name, cut[id(p)]


def _reads(kind: type[nn.Module], name: str) -> bool:
    """Whether the forward of a class, or a method that it calls, reads the attribute ``name``."""
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
    """A wrapper: module attribute ``owner.name``, which contains the module ``inner`` under ``key``."""

    owner: nn.Module
    name: str
    path: str
    wrapper: nn.Module
    key: str
    inner: nn.Module


@contextmanager
def unwrapped(model: nn.Module, *, stages: int = 1) -> Iterator[Mapping[int, nn.Module]]:
    """Remove the wrappers from the model inside the context.

    Args:
        stages: number of pipeline stages that the model will run on.

    Yields id(wrapped module) -> its outermost wrapper. Raises ConfigError for a compiled module that is in a pipeline
    or is replaced by sharding.
    """
    found: list[_Wrapped] = []
    outermost: dict[int, nn.Module] = {}
    has_wrappers = any(map(wrapped_name, {type(module): module for module in model.modules()}.values()))
    try:
        for path, owner in _modules_outside_wrappers(model) if has_wrappers else ():
            for name, child in list(owner._modules.items()):
                outer = child
                while child is not None and (key := wrapped_name(child)) is not None:
                    if stages > 1 and is_compiled_wrapper(child):
                        raise _compiled_error(f"{path}.{name}".lstrip("."), "it is part of a pipeline")
                    inner = child._modules[key]
                    assert inner is not None
                    found.append(_Wrapped(owner, name, f"{path}.{name}".lstrip("."), child, key, inner))
                    owner._modules[name] = child = inner
                if child is not None and child is not outer and outer is not None:
                    outermost[id(child)] = outer
        yield outermost
    finally:
        replaced = [w for w in reversed(found) if _restore_wrapper(w) and is_compiled_wrapper(w.wrapper)]
    if replaced:
        raise _compiled_error(replaced[0].path, "sharding replaces it")


def _modules_outside_wrappers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules in registration order while the caller removes wrappers."""
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        waiting += [(f"{path}.{name}".lstrip("."), m) for name, m in reversed(module._modules.items()) if m is not None]


def _restore_wrapper(wrapped: _Wrapped) -> bool:
    """Restore a wrapper around the current module. Returns whether the module was replaced."""
    now = wrapped.owner._modules[wrapped.name]
    wrapped.wrapper._modules[wrapped.key] = now
    wrapped.owner._modules[wrapped.name] = wrapped.wrapper
    return wrapped.inner is not now and wrapped_name(now) is None if now is not None else False


def _compiled_error(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"{path} was compiled with torch.compile before the model was sharded, but {why}",
        rule="A compiled module would keep running the unsharded module",
        remedy="Compile the model after shard_model, or compile in place with module.compile()",
    )
