"""Finds changes that users made to a sharded model, so that ``Engine.reshard`` can repeat them on the resharded model.

Resharding rebuilds the model from a copy of the original, unsharded model. Weights, persistent buffers and optimizer
states are moved with their values. This module carries over all other changes: ``requires_grad``, training modes,
attributes of modules and configs, modules without weights, and buffers that are not saved. Changes that cannot be
carried over, such as hooks, raise an error before anything is modified.

Each item is identified by its kind, the path of its module, and its name there.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collective_call import run_and_all_gather
from shardformer.errors import ConfigError
from shardformer.mesh.parallel_context import Axis
from shardformer.sharding.forward_checks import OF_LIBRARIES, is_library_hook
from shardformer.tensor_parallel.parallel_module import MODULE_HOOK_TABLES
from shardformer.torch_compat import COMPILED_CALL, get_tensor_hooks, has_real_data, view_as_bytes

ItemKey = tuple[str, str, str]
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
INTERNAL = {*vars(nn.Module()), COMPILED_CALL} - {"training"}
"""Attributes of every module, including its tables of parameters and hooks, and its compiled forward."""
DEPTH = 2
"""Depth to which objects in module attributes are inspected: a config, and the configs in it."""


@dataclass(frozen=True, eq=False)
class AttributeSnapshot:
    """Recorded value of a module attribute, buffer, hook list or ``requires_grad`` flag.

    Args:
        description: Description of the value, equal on all ranks.
        value: Value to set in the new model.
        is_sendable: Whether the value can be sent to other ranks. Otherwise each rank sets its own.
        is_copyable: Whether the value can be set in another model.
        identity: Object identity, comparable only in this process.
        is_computed: Whether a forward pass computed the value, and will compute it again.
    """

    description: str
    value: Any = None
    is_sendable: bool = False
    is_copyable: bool = True
    identity: object = None
    is_computed: bool = False


def take_model_snapshot(model: nn.Module, unsharded_model: nn.Module) -> dict[ItemKey, AttributeSnapshot]:
    """Record the attributes, buffers and hooks of a sharded model, to detect later changes by the user."""
    modules = dict(unsharded_model.named_modules())
    found: dict[ItemKey, AttributeSnapshot] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        trains = param.requires_grad
        found["parameter", name, "requires_grad"] = AttributeSnapshot(str(trains), trains, is_sendable=True)
        found["parameter", name, "hooks"] = _snapshot_hooks(get_tensor_hooks(param))
    for path, module in model.named_modules():
        hooks = [hook for table in MODULE_HOOK_TABLES for hook in getattr(module, table).values()]
        found["module", path, "hooks"] = _snapshot_hooks(hooks)
        found["module", path, ""] = _snapshot_module(module)
        found |= {("buffer", path, name): snapshot for name, snapshot in _snapshot_nonpersistent_buffers(module)}
        known = vars(modules[path]) if path in modules and _is_shardformer_module(module) else None
        found |= {("attribute", path, name): snapshot for name, snapshot in _snapshot_attributes(module, known)}
    return found


def gather_user_changes(
    old_snapshot: Mapping[ItemKey, AttributeSnapshot], model: nn.Module, unsharded_model: nn.Module, world_axis: Axis
) -> dict[ItemKey, Any]:
    """Gather the changes that users made to the model on any rank since ``old_snapshot`` was taken.

    If a change cannot be carried over to another layout, all ranks raise ConfigError.
    """
    now, local = take_model_snapshot(model, unsharded_model), dict[ItemKey, AttributeSnapshot]()

    def describe_local_changes() -> dict[ItemKey, tuple[str, Any]]:
        local.update(_diff_snapshots(old_snapshot, now))
        cpu = {key: x.value.cpu() if isinstance(x.value, Tensor) else x.value for key, x in local.items()}
        return {key: (x.description, (cpu[key],) if x.is_sendable else None) for key, x in local.items()}

    by_rank = run_and_all_gather(describe_local_changes, world_axis, "engine.reshard")
    changes: dict[ItemKey, Any] = {}
    for key, (description, value) in [pair for items in by_rank for pair in items.items()]:
        is_same = all(items[key][0] == description for items in by_rank if key in items)
        if not is_same or (value is None and key not in local):
            item = _describe_snapshot_key(key)
            raise ConfigError(
                f"The {item} was modified differently on different ranks.",
                remedy="Make the same change on all ranks, or undo it before engine.reshard.",
            )
        changes[key] = local[key].value if key in local else value[0]
    return changes


def apply_user_changes(changes: Mapping[ItemKey, Any], unsharded_model: nn.Module) -> None:
    """Apply the changes that ``gather_user_changes`` found to an unsharded model."""
    for kind, path, name in sorted(changes, key=lambda key: (key[0] != "module", key)):
        value = changes[kind, path, name]
        if kind == "parameter":
            unsharded_model.get_parameter(path).requires_grad_(value)
        elif kind == "module":
            unsharded_model.set_submodule(path, copy.deepcopy(value))
        elif kind == "buffer":
            unsharded_model.get_submodule(path)._buffers[name] = value.clone()
        else:
            owner: Any = unsharded_model.get_submodule(path)
            *inner, last = name.split(".")
            for each in inner:
                owner = getattr(owner, each)
            vars(owner)[last] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _diff_snapshots(
    old_snapshot: Mapping[ItemKey, AttributeSnapshot], new_snapshot: Mapping[ItemKey, AttributeSnapshot]
) -> dict[ItemKey, AttributeSnapshot]:
    """Return the changes between two snapshots. Raise ConfigError if one cannot be set in a resharded model."""

    def get_comparable_value(snapshot: AttributeSnapshot | None) -> object:
        return snapshot and (snapshot.description, snapshot.identity)

    changed = sorted(
        key
        for key in old_snapshot.keys() | new_snapshot.keys()
        if get_comparable_value(old_snapshot.get(key)) != get_comparable_value(new_snapshot.get(key))
    )
    replaced = tuple(f"{path}." for kind, path, name in changed if (kind, name) == ("module", "") and path)
    found = {}
    for key in changed:
        kind, path, _ = key
        if key not in new_snapshot and kind != "parameter" and f"{path}.".startswith(replaced):
            continue  # its module was replaced
        if key in new_snapshot and new_snapshot[key].is_computed:
            continue
        if key not in new_snapshot or not new_snapshot[key].is_copyable:
            item = _describe_snapshot_key(key)
            raise ConfigError(
                f"engine.reshard cannot keep the {item}, because it was modified after initialize.",
                remedy="Undo the change before engine.reshard and repeat it afterwards, or load a checkpoint with the "
                "new layout.",
            )
        found[key] = new_snapshot[key]
    return found


# ----------------------------------------------------------------------------------------------------------- snapshots


def _snapshot_hooks(hooks: list[Callable[..., Any]]) -> AttributeSnapshot:
    """Record the user's hooks on a module or parameter. Hooks cannot be copied to another model."""
    own = [hook for hook in hooks if not is_library_hook(hook)]
    return AttributeSnapshot(f"{len(own)} hooks", is_copyable=False, identity=tuple(map(id, own)))


def _snapshot_module(module: nn.Module) -> AttributeSnapshot:
    """Record a module, to detect whether it is replaced. A module without parameters or buffers can be copied."""
    inside = [*module.parameters(), *module.buffers(), *(m for m in module.modules() if _is_shardformer_module(m))]
    if inside:
        return AttributeSnapshot(type(module).__qualname__, is_copyable=False, identity=id(module))
    kinds = (f"{path} {type(m).__module__}.{type(m).__qualname__}" for path, m in module.named_modules())
    return AttributeSnapshot("; ".join(kinds), module)


def _snapshot_nonpersistent_buffers(module: nn.Module) -> Iterator[tuple[str, AttributeSnapshot]]:
    """Record the non-persistent buffers of a module, which checkpoints do not contain."""
    for name in module._non_persistent_buffers_set:
        if (buffer := module._buffers.get(name)) is not None and has_real_data(buffer):
            yield name, _snapshot_tensor(buffer)


def _snapshot_attributes(
    module: nn.Module, initial_attributes: Mapping[str, Any] | None
) -> Iterator[tuple[str, AttributeSnapshot]]:
    of_library = any(_get_package_name(cls) in OF_LIBRARIES for cls in type(module).__mro__ if cls is not nn.Module)
    for name, value in vars(module).items():
        if (
            name in INTERNAL
            or name.startswith("_shardformer")
            or (initial_attributes is not None and name not in initial_attributes)
        ):
            continue
        is_private = of_library and name.startswith("_")  # handles and caches of a library
        found = _snapshot_attribute(name, value, 0 if is_private else DEPTH)
        yield from (pair for pair in found if pair[1].is_copyable or pair[1].is_computed or not is_private)


def _snapshot_attribute(attribute_name: str, value: Any, max_depth: int) -> Iterator[tuple[str, AttributeSnapshot]]:
    if _is_plain_value(value):
        yield (
            attribute_name,
            AttributeSnapshot(
                f"{type(value).__name__} {_deterministic_repr(value)}", copy.deepcopy(value), is_sendable=True
            ),
        )
    elif isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield attribute_name, AttributeSnapshot(type(value).__qualname__, is_copyable=False, is_computed=True)
        elif not isinstance(value, nn.Parameter) and has_real_data(value):
            yield attribute_name, _snapshot_tensor(value)
    elif (function := _unwrap_partial(value)) is not None:
        description, is_copyable = (
            f"{function.__module__}.{function.__qualname__}",
            not _references_module_or_tensor(value),
        )
        yield attribute_name, AttributeSnapshot(description, value, is_copyable=is_copyable, identity=id(function))
    elif isinstance(value, MethodType):
        if not is_library_hook(value.__func__):
            yield attribute_name, AttributeSnapshot(value.__qualname__, is_copyable=False, identity=id(value.__func__))
    elif not isinstance(value, nn.Module) and _get_package_name(type(value)) not in ("shardformer", "builtins"):
        yield attribute_name, AttributeSnapshot(type(value).__qualname__, is_copyable=False)
        for inner, each in vars(value).items() if max_depth and hasattr(value, "__dict__") else ():
            yield from (
                (f"{attribute_name}.{path}", snapshot)
                for path, snapshot in _snapshot_attribute(inner, each, max_depth - 1)
            )


def _snapshot_tensor(tensor: Tensor) -> AttributeSnapshot:
    numbers = view_as_bytes(tensor.cpu()).numpy().tobytes()
    return AttributeSnapshot(
        f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(numbers).hexdigest()}", tensor.detach(), is_sendable=True
    )


def _unwrap_partial(function_or_partial: Any) -> Any:
    """Return a function, or the function that a ``functools.partial`` wraps, and None for other values."""
    function = function_or_partial.func if isinstance(function_or_partial, partial) else function_or_partial
    return function if isinstance(function, FUNCTIONS) else None


def _references_module_or_tensor(function_or_partial: Any) -> bool:
    """Return whether a function or ``functools.partial`` has a module or tensor in its arguments or closure."""
    references = (
        [*function_or_partial.args, *function_or_partial.keywords.values()]
        if isinstance(function_or_partial, partial)
        else []
    )
    for cell in getattr(_unwrap_partial(function_or_partial), "__closure__", None) or ():
        with suppress(ValueError):  # the cell is empty
            references.append(cell.cell_contents)
    return any(isinstance(getattr(x, "__self__", x), (nn.Module, Tensor)) for x in references)


def _deterministic_repr(value: Any) -> str:
    """Return a repr that is identical on all ranks, with the elements of sets in sorted order."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_deterministic_repr, value)))}}}"
    return repr(value)


def _is_plain_value(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain_value(each) for pair in value.items() for each in pair)
    if type(value) in (list, tuple, set, frozenset, torch.Size):
        return all(map(_is_plain_value, value))
    return isinstance(value, PLAIN)


def _is_shardformer_module(module: nn.Module) -> bool:
    return _get_package_name(type(module)) == "shardformer"


def _get_package_name(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _describe_snapshot_key(item_key: ItemKey) -> str:
    kind, path, name = item_key
    return f"{kind} {path or 'of the model'}{f' ({name})' if name else ''}"
