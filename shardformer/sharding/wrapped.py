"""Modules that torch put around others (activation checkpointing, offload, compilation), set aside while a model is
sharded.

Such a wrapper changes how a module runs and not what it computes. The paths of a policy lead through the model as if
there were none, and each wrapper is back around the sharded module afterwards: the same object, with its options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from shardformer.errors import ConfigError
from shardformer.torch_compat import is_compiled_wrapper, wrapped_name


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
