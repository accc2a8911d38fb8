"""User code in a model of a library: classes and replaced forwards that a small twin of its config does not have."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardformer.comm.values import has_values
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


@contextmanager
def apart_from(model: nn.Module) -> Iterator[None]:
    """Raises ValueError if what runs in here, a copy of ``model``, reads weights or buffers of ``model`` itself.

    So does a copy with a replaced forward or a hook that is a closure over a module: copies of it share the closure. A
    comparison with such a copy would show nothing, and its gradients would be added to those of the model.
    """
    watch = _Reads(model)
    try:
        with watch:
            yield
    except Exception as error:
        if not watch.found:
            raise
        raise ValueError(_NOT_APART) from error
    if watch.found:
        raise ValueError(_NOT_APART)


_NOT_APART = "a copy of it runs modules of the model itself, by a replaced forward or a hook that holds them"


class _Reads(TorchDispatchMode):
    """Raises RuntimeError where a function of torch reads a weight or a buffer of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        held = (x for x in (*model.parameters(), *model.buffers()) if has_values(x) and x.layout == torch.strided)
        self._storages = {x.untyped_storage().data_ptr() for x in held if x.numel()}
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and has_values(x):
                self.found = self.found or x.untyped_storage().data_ptr() in self._storages
        if self.found:
            raise RuntimeError(_NOT_APART)
        return func(*args, **(kwargs or {}))


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
