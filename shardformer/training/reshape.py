"""What was changed in a sharded model since ``initialize``, for the model that takes its place in another layout.

A reshape builds the model once more from the plain one as it was. Weights, persistent buffers and what trains them move
with their values. Here is the rest: which parameters train, modes, settings of modules and of configs, modules without
weights, buffers that are not saved. What cannot be carried over, such as a hook, is refused before anything is changed.

Each is known by a key: what it is, the path of its module, and its name there.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collective_call import gather_from_all_ranks
from shardformer.errors import ConfigError
from shardformer.mesh.parallel_context import Axis
from shardformer.sharding.forward_checks import OF_LIBRARIES, is_of_library
from shardformer.tensor_parallel.parallel_module import MODULE_HOOK_TABLES
from shardformer.torch_compat import COMPILED_CALL, has_data, tensor_hooks_of

Key = tuple[str, str, str]
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
INTERNAL = {*vars(nn.Module()), COMPILED_CALL} - {"training"}
"""Attributes of every module, among them the tables of its parameters and hooks, and what ``compile()`` made of it."""
DEPTH = 2
"""How far objects that modules hold are looked into: a config, and the configs in it."""


@dataclass(frozen=True, eq=False)
class Seen:
    """One thing in a model.

    Args:
        words: what it is, equal on all ranks.
        value: what another model gets.
        moves: whether the value can be sent to other ranks; else each sets its own.
        copies: whether it can be put into another model at all.
        identity: of what is the same in this process alone.
        is_computed: whether a forward made it, and the next one makes it anew.
    """

    words: str
    value: Any = None
    moves: bool = False
    copies: bool = True
    identity: object = None
    is_computed: bool = False


def seen_in(model: nn.Module, plain: nn.Module) -> dict[Key, Seen]:
    """All that is noted of a sharded model; of our own layers what those of the plain model have, too."""
    modules = dict(plain.named_modules())
    found: dict[Key, Seen] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found["parameter", name, "requires_grad"] = Seen(str(param.requires_grad), param.requires_grad, moves=True)
        found["parameter", name, "hooks"] = _hooks(tensor_hooks_of(param))
    for path, module in model.named_modules():
        found["module", path, "hooks"] = _hooks(
            [h for table in MODULE_HOOK_TABLES for h in getattr(module, table).values()]
        )
        found["module", path, ""] = _module(module)
        found |= {("buffer", path, name): seen for name, seen in _buffers(module)}
        known = vars(modules[path]) if path in modules and _is_ours(module) else None
        found |= {("attribute", path, name): seen for name, seen in _attributes(module, known)}
    return found


@dataclass(frozen=True, eq=False)
class Changes:
    """What differs on any rank, with its new values."""

    values: Mapping[Key, Any]

    @classmethod
    def since(cls, before: Mapping[Key, Seen], model: nn.Module, plain: nn.Module, world: Axis) -> Changes:
        """Communicates the plain values. Raises ConfigError, on all ranks, for what cannot be carried over."""
        now, mine = seen_in(model, plain), dict[Key, Seen]()

        def look() -> dict[Key, tuple[str, Any]]:
            mine.update(_differing(before, now))
            return {key: (seen.words, _sent(seen)) for key, seen in mine.items()}

        every = gather_from_all_ranks(look, world, "Reshaping")
        values: dict[Key, Any] = {}
        for key, (words, value) in [pair for theirs in every for pair in theirs.items()]:
            is_same = all(theirs[key][0] == words for theirs in every if key in theirs)
            if not is_same or (value is None and key not in mine):
                raise _refused(key, "and not alike on all ranks")
            values[key] = mine[key].value if key in mine else value[0]
        return cls(values)

    def apply(self, plain: nn.Module) -> None:
        """Makes them in a plain model."""
        in_order = sorted(self.values, key=lambda key: (key[0] != "module", key))
        for kind, path, name in in_order:
            value = self.values[kind, path, name]
            if kind == "parameter":
                plain.get_parameter(path).requires_grad_(value)
            elif kind == "module":
                plain.set_submodule(path, copy.deepcopy(value))
            elif kind == "buffer":
                plain.get_submodule(path)._buffers[name] = value.clone()
            else:
                owner: Any = plain.get_submodule(path)
                *inner, last = name.split(".")
                for each in inner:
                    owner = getattr(owner, each)
                vars(owner)[last] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _differing(before: Mapping[Key, Seen], now: Mapping[Key, Seen]) -> dict[Key, Seen]:
    """What is new or another one now. Raises ConfigError for what cannot be carried over, or is gone."""
    changed = sorted(key for key in before.keys() | now.keys() if not _is_same(before.get(key), now.get(key)))
    anew = tuple(f"{path}." for kind, path, name in changed if (kind, name) == ("module", "") and path)
    found = {}
    for key in changed:
        kind, path, _ = key
        if key not in now and kind != "parameter" and f"{path}.".startswith(anew):
            continue  # of a module that another one replaced
        if key in now and now[key].is_computed:
            continue
        if key not in now or not now[key].copies:
            raise _refused(key)
        found[key] = now[key]
    return found


def _is_same(one: Seen | None, other: Seen | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.words, one.identity) == (other.words, other.identity)


def _sent(seen: Seen) -> tuple[Any] | None:
    """The value, in a tuple, where it can be sent."""
    if not seen.moves:
        return None
    return (seen.value.cpu() if isinstance(seen.value, Tensor) else seen.value,)


# ------------------------------------------------------------------------------------------------------- what is noted


def _hooks(hooks: list[Any]) -> Seen:
    """Of the user's own: they know the module or the parameter that they were registered on."""
    own = [hook for hook in hooks if not is_of_library(hook)]
    return Seen(f"{len(own)} hooks", copies=False, identity=tuple(map(id, own)))


def _module(module: nn.Module) -> Seen:
    """Which module is there. One that is made of settings alone can be copied."""
    inside = [*module.parameters(), *module.buffers(), *(m for m in module.modules() if _is_ours(m))]
    if inside:
        return Seen(type(module).__qualname__, copies=False, identity=id(module))
    kinds = (f"{path} {type(m).__module__}.{type(m).__qualname__}" for path, m in module.named_modules())
    return Seen("; ".join(kinds), module)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Seen]]:
    """Those that are not saved, which no checkpoint would bring."""
    for name in module._non_persistent_buffers_set:
        if (buffer := module._buffers.get(name)) is not None and has_data(buffer):
            yield name, _tensor(buffer)


def _attributes(module: nn.Module, known: Mapping[str, Any] | None) -> Iterator[tuple[str, Seen]]:
    of_library = any(_library(cls) in OF_LIBRARIES for cls in type(module).__mro__ if cls is not nn.Module)
    for name, value in vars(module).items():
        if name in INTERNAL or name.startswith("_shardformer") or (known is not None and name not in known):
            continue
        is_private = of_library and name.startswith("_")  # a library's handles and caches are none of the user's
        found = _attribute(name, value, 0 if is_private else DEPTH)
        yield from (pair for pair in found if pair[1].copies or pair[1].is_computed or not is_private)


def _attribute(name: str, value: Any, depth: int) -> Iterator[tuple[str, Seen]]:
    if _is_plain(value):
        yield name, Seen(f"{type(value).__name__} {_shown(value)}", copy.deepcopy(value), moves=True)
    elif isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield name, Seen(type(value).__qualname__, copies=False, is_computed=True)
        elif not isinstance(value, nn.Parameter) and has_data(value):
            yield name, _tensor(value)
    elif (function := _function_in(value)) is not None:
        copies = not _knows_a_module(value)
        yield name, Seen(f"{function.__module__}.{function.__qualname__}", value, copies=copies, identity=id(function))
    elif isinstance(value, MethodType):
        if not is_of_library(value.__func__):
            yield name, Seen(value.__qualname__, copies=False, identity=id(value.__func__))
    elif not isinstance(value, nn.Module) and _library(type(value)) not in ("shardformer", "builtins"):
        yield name, Seen(type(value).__qualname__, copies=False)
        for inner, each in vars(value).items() if depth and hasattr(value, "__dict__") else ():
            yield from ((f"{name}.{path}", seen) for path, seen in _attribute(inner, each, depth - 1))


def _tensor(x: Tensor) -> Seen:
    numbers = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return Seen(f"{tuple(x.shape)} {x.dtype} {hashlib.sha256(numbers).hexdigest()}", x.detach(), moves=True)


def _function_in(value: Any) -> Any:
    """The function that this is, or a partial of; None for any other thing, and for what knows an object."""
    function = value.func if isinstance(value, partial) else value
    return function if isinstance(function, FUNCTIONS) else None


def _knows_a_module(value: Any) -> bool:
    """Whether a function, or a partial of one, holds a module or a tensor, which would be one of the old model."""
    held = [*value.args, *value.keywords.values()] if isinstance(value, partial) else []
    for cell in getattr(_function_in(value), "__closure__", None) or ():
        with suppress(ValueError):  # it is empty
            held.append(cell.cell_contents)
    return any(isinstance(getattr(x, "__self__", x), (nn.Module, Tensor)) for x in held)


def _shown(value: Any) -> str:
    """A plain value in print, the same on all ranks: each process has an order of its own for what is in a set."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_shown, value)))}}}"
    return repr(value)


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if type(value) in (list, tuple, set, frozenset, torch.Size):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _is_ours(module: nn.Module) -> bool:
    return _library(type(module)) == "shardformer"


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _refused(key: Key, how: str = "in a way that another model cannot take over") -> ConfigError:
    kind, path, name = key
    what = f"{kind} {path or 'of the top'}{f', {name}' if name else ''}"
    return ConfigError(
        f"reshape of a model that was changed since initialize, {how}: {what}",
        rule="The model is built once more from the plain one as it was. Carried over are requires_grad, modes, plain "
        "values in modules and configs, functions, and modules without weights",
        remedy="Undo the change before reshape and make it again after, or save, and load in an engine of the other "
        "layout",
    )
