"""Values for a model that was built without: all of it, or this rank's part."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from shardformer.errors import ConfigError, check_argument
from shardformer.layout.sharding_metadata import check_module
from shardformer.meta_init.init_recipe import DeferredStorage, defer_storage, deferred_storage_of, run_recipe, view_of
from shardformer.meta_init.lazy_init import VERSION, InitRecorder, end_recorded_calls, was_written
from shardformer.meta_init.safetensors_source import weight_files
from shardformer.torch_compat import DisableTorchFunction, tree_leaves, tree_map_only

NOTES = "_shardformer_loading"


def is_lazy(model: nn.Module) -> bool:
    """Whether some parameter or buffer of the model waits for its values."""
    return has_meta_tensors(model) and any(deferred_storage_of(t) is not None for _, t in named_tensors(model))


def has_meta_tensors(model: nn.Module) -> bool:
    """Whether some parameter or buffer has no values: most models have none, which this finds without a call each."""
    with DisableTorchFunction():  # inside of LazyInit tensors report another device
        return any([t.is_meta for t in (*model.parameters(), *model.buffers())])


def record_changes(model: nn.Module) -> AbstractContextManager[Any]:
    """Where a model without values is changed: what is done to its tensors goes into their recipes."""
    return InitRecorder() if is_lazy(model) else nullcontext()


def materialized_copy(model: nn.Module) -> nn.Module:
    """A whole copy, with values, of a model that has none and goes on without."""
    with record_changes(model):
        twin = copy.deepcopy(model)
    end_recorded_calls(twin)  # which are those of the first model
    return materialize_parameters(twin)


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a plain model whose parameters have no values, and take no memory.

    ``shard_model`` makes of it a model whose parameters are memory of this rank's part, with any numbers in it, for who
    fills all of it; buffers have their values.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        empty.__dict__.update({name: value for name, value in vars(param).items() if name != VERSION})
        defer_storage(empty)
        memo[id(param)] = empty
    for value in (value for module in model.modules() for value in vars(module).values()):
        if isinstance(value, Tensor) and value.grad_fn is not None:  # as torch.nn.utils.weight_norm and prune keep them
            memo[id(value)] = value.detach().clone()
    with record_changes(model):
        return copy.deepcopy(model, memo)


def lazy_notes(model: nn.Module) -> list[str]:
    """What is worth knowing of where a model's values come from."""
    if not is_lazy(model):
        return []
    return ["Built without values: each rank made its own part of them.", *vars(model).get(NOTES, ())]


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(name, tensor) of every parameter and buffer, each once."""
    return [*model.named_parameters(), *model.named_buffers()]


def materialize(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Gives a model that was built under ``LazyInit`` its values, whole, in place; on the CPU or on ``device``.

    Returns the model. Needs no processes. Raises ConfigError when some values cannot be made.
    """
    check_module(model)
    check_recipes(model)
    return materialize_parameters(model, _device_of(device))


def _device_of(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    rule, remedy = "It is a device of torch, with its values", "Write device='cuda:0', or leave it out"
    check_argument("device", device, isinstance(device, torch.device | str), rule, remedy)
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}", rule=rule, remedy=remedy) from error
    check_argument("device", device, found.type != "meta", rule, remedy)
    return found


def materialize_parameters(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Puts values in the place of tensors without, one after the other: a recipe's tensors are freed with it.

    Raises ConfigError where a file changed while its weights were read.
    """
    files = weight_files(model)
    storages: dict[DeferredStorage, UntypedStorage] = {}
    done: dict[int, Tensor] = {}
    cpu = torch.device("cpu")

    def filled(tensor: Tensor, target: torch.device) -> Tensor:
        place = deferred_storage_of(tensor)
        if place is None and target in (tensor.device, cpu):
            return tensor
        if id(tensor) not in done:
            with torch.no_grad():
                if place is not None and place not in storages:
                    whole = torch.empty(0, dtype=torch.uint8).set_(run_recipe(place))
                    storages[place] = whole.to(target).untyped_storage()
                new = tensor.to(target) if place is None else view_of(tensor).of(storages[place])
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            new.__dict__.update({name: value for name, value in vars(tensor).items() if name != VERSION})
            done[id(tensor)] = new
        return done[id(tensor)]

    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            table.update({n: filled(t, torch.device(device or cpu)) for n, t in table.items() if t is not None})
        for name, value in list(vars(module).items()):  # what is kept beside the tables does not move with the model
            if type(value) not in (Tensor, nn.Parameter, list, tuple, dict) or any(value is table for table in tables):
                continue
            if any(deferred_storage_of(x) is not None for x in tree_leaves(value)):
                vars(module)[name] = tree_map_only(Tensor, lambda x: filled(x, cpu), value)
    for file in files:
        file.check()
    end_recorded_calls(model)
    return model


def check_recipes(model: nn.Module) -> None:
    """Raises ConfigError for a model whose values cannot be made: on the meta device without a recipe, or changed.

    Or where the files that it reads are not those that were loaded.
    """
    if not has_meta_tensors(model):
        return
    empty = [name for name, t in named_tensors(model) if t.is_meta and deferred_storage_of(t) is None]
    if empty:
        raise ConfigError(
            f"{len(empty)} tensors of this {type(model).__name__} are on the meta device and nothing says what their "
            f"values are, the first is {empty[0]!r}",
            rule="Values are made for what was built under LazyInit, and converted or copied in there",
            remedy="Build the model in `with LazyInit():` in place of torch.device('meta'), with its .to() "
            "and .half() inside, or load it with shardformer.from_pretrained",
        )
    changed = [name for name, p in model.named_parameters() if was_written(p)]
    if changed:
        raise ConfigError(
            f"{changed[0]!r} of this {type(model).__name__} was written to after LazyInit ended",
            remedy="Change weights inside of the `with`, or after shard_model or materialize",
        )
    for file in weight_files(model):
        file.check(reads=True)
