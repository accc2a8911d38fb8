"""Compute the weights of models that were built lazily, on the meta device."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from shardformer.errors import ConfigError, check_argument
from shardformer.layout.sharding_metadata import check_is_module
from shardformer.meta_init.init_recipe import (
    DeferredStorage,
    defer_storage,
    get_deferred_storage,
    get_deferred_view,
    run_init_recipe,
)
from shardformer.meta_init.lazy_init import (
    VERSION,
    InitRecorderMode,
    restore_wrapped_methods,
    was_modified_outside_lazy_init,
)
from shardformer.meta_init.safetensors_source import find_weight_files
from shardformer.module_paths import list_named_tensors
from shardformer.torch_compat import has_meta_tensors, tree_leaves, tree_map_only

NOTES = "_shardformer_loading"


def has_deferred_weights(model: nn.Module) -> bool:
    """Return whether a lazily built parameter or buffer of the model has no values yet."""
    return has_meta_tensors(model) and any(get_deferred_storage(t) is not None for _, t in list_named_tensors(model))


def record_changes_if_lazy(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context manager that records changes to a model if it was built lazily."""
    return InitRecorderMode() if has_deferred_weights(model) else nullcontext()


def copy_and_materialize(model: nn.Module) -> nn.Module:
    """Copy a lazily built model, and compute the weights of the copy but not of the original."""
    with record_changes_if_lazy(model):
        copied = copy.deepcopy(model)
    restore_wrapped_methods(copied)  # they are bound to the original model
    return materialize_parameters(copied)


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Copy a model, with all parameters of the copy on the meta device. Its buffers keep their values.

    ``shard_model`` allocates uninitialized shards for the copy, which the caller must fill.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        empty.__dict__.update({name: value for name, value in vars(param).items() if name != VERSION})
        defer_storage(empty)
        memo[id(param)] = empty
    for value in (value for module in model.modules() for value in tree_leaves(vars(module))):
        if isinstance(value, Tensor) and value.grad_fn is not None:  # set by weight_norm, prune and PEFT
            memo[id(value)] = value.detach().clone()
    with record_changes_if_lazy(model):
        return copy.deepcopy(model, memo)


def list_lazy_init_notes(model: nn.Module) -> list[str]:
    """Return notes about how the weights of a lazily built model were computed."""
    return ["Built with LazyInit: each rank computed only its own shards.", *vars(model).get(NOTES, ())]


def materialize(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Compute the weights and buffers of a model that was built with ``LazyInit``, in place.

    The tensors are on ``device``, or on the CPU without it. This needs no process group. To compute only the shards of
    this rank, call ``shard_model`` instead.

    Returns:
        The same model.

    Raises:
        ConfigError: if some values cannot be computed.
    """
    check_is_module(model)
    if has_meta_tensors(model):
        check_init_recipes(model)
    return materialize_parameters(model, _parse_target_device(device))


def _parse_target_device(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    rule, remedy = "device must be a torch device other than meta", "Pass a device such as 'cuda:0', or omit device"
    check_argument("device", device, isinstance(device, torch.device | str), rule, remedy)
    try:
        torch_device = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"device={device!r} is not a torch device.", remedy="Pass a device such as 'cuda:0', or omit device."
        ) from error
    check_argument("device", device, torch_device.type != "meta", rule, remedy)
    return torch_device


def materialize_parameters(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Compute the values of all meta tensors in a model, one tensor at a time to limit peak memory.

    Raises:
        ConfigError: if a weight file changed while it was read.
    """
    files = find_weight_files(model)
    storages: dict[DeferredStorage, UntypedStorage] = {}
    materialized: dict[int, Tensor] = {}
    cpu = torch.device("cpu")

    def with_values(tensor: Tensor, target: torch.device) -> Tensor:
        deferred = get_deferred_storage(tensor)
        if deferred is None and target in (tensor.device, cpu):
            return tensor
        if id(tensor) not in materialized:
            with torch.no_grad():
                if deferred is not None and deferred not in storages:
                    values = torch.empty(0, dtype=torch.uint8).set_(run_init_recipe(deferred))
                    storages[deferred] = values.to(target).untyped_storage()
                new = tensor.to(target) if deferred is None else get_deferred_view(tensor).to_tensor(storages[deferred])
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            new.__dict__.update({name: value for name, value in vars(tensor).items() if name != VERSION})
            materialized[id(tensor)] = new
        return materialized[id(tensor)]

    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            table.update({n: with_values(t, torch.device(device or cpu)) for n, t in table.items() if t is not None})
        for name, value in list(vars(module).items()):  # tensors in plain attributes do not move with the model
            if type(value) not in (Tensor, nn.Parameter, list, tuple, dict) or any(value is table for table in tables):
                continue
            if any(get_deferred_storage(x) is not None for x in tree_leaves(value)):
                vars(module)[name] = tree_map_only(Tensor, lambda x: with_values(x, cpu), value)
    for file in files:
        file.check_unchanged()
    restore_wrapped_methods(model)
    return model


def check_init_recipes(model: nn.Module) -> None:
    """Check that the values of all meta tensors in a model can be computed.

    Raises:
        ConfigError: if a meta tensor has no recipe, a parameter was modified outside ``LazyInit``, or a weight file
            changed since it was loaded.
    """
    empty = [name for name, t in list_named_tensors(model) if t.is_meta and get_deferred_storage(t) is None]
    if empty:
        raise ConfigError(
            f"This {type(model).__name__} has tensors on the meta device without values, such as {empty[0]!r}.",
            remedy="Build the model inside `with LazyInit():` instead of torch.device('meta') and call .to() and "
            ".half() in the same block, or load it with shardformer.from_pretrained.",
        )
    changed = [name for name, p in model.named_parameters() if was_modified_outside_lazy_init(p)]
    if changed:
        raise ConfigError(
            f"The parameter {changed[0]!r} of this {type(model).__name__} was modified after the LazyInit block ended.",
            remedy="Modify weights inside the `with LazyInit():` block, or after calling shard_model or materialize.",
        )
    for file in find_weight_files(model):
        file.check_unchanged(compare_contents=True)
