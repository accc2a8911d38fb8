"""Tensor subclass that prevents saving a shard from a state dict as if it were the full tensor.

These tensors can be loaded, copied, compared and used in computations. ``torch.save``, pickle, safetensors and NumPy
raise an error, because their result would be mistaken for the full model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any, NoReturn, SupportsIndex

from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.torch_compat import DisableTorchFunctionSubclass, tree_leaves, tree_map

MARKED = "_shardformer_slices"
"""Module attribute with the names of the parameters to mark in its state dict. None: all parameters and buffers."""


class ExportGuardedShard(Tensor):
    """Tensor that holds only a shard and raises an error if it is saved or read by another library.

    Operations that keep the number of elements return a ``ExportGuardedShard``, too. ``as_subclass(torch.Tensor)``
    returns a plain tensor that shares the memory.
    """

    _param_name: str

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        slices = [x for x in leaves if isinstance(x, ExportGuardedShard)]
        if func in _get_data_export_functions():
            raise_shard_export_error(slices[0]._param_name, slices[0].shape)
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func is Tensor.as_subclass:
                return result
            arguments = {id(x) for x in leaves}
            return tree_map(lambda x: x if id(x) in arguments else _guard_if_same_size(x, slices), result)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise_shard_export_error(self._param_name, self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        result: Tensor = memo[id(self)]
        return result

    def __copy__(self) -> Tensor:
        return self.view_as(self)


def raise_shard_export_error(tensor_name: str, shape: tuple[int, ...]) -> NoReturn:
    """Raise ConfigError because another library tried to save or read a shard."""
    raise ConfigError(
        f"The tensor {tensor_name} of shape {tuple(shape)} is a shard and cannot be saved, pickled or read by "
        "another library.",
        remedy="Call model.save_pretrained(folder), shardformer.full_state_dict(model) or "
        "shardformer.save_checkpoint on all ranks instead. To read only this shard, use "
        "tensor.as_subclass(torch.Tensor).",
    )


@cache
def _get_data_export_functions() -> frozenset[Any]:
    names = ("data_ptr", "numpy", "__array__", "__dlpack__")
    return frozenset(getattr(Tensor, name) for name in names)


def _guard_if_same_size(output: Any, guarded_shards: Iterable[ExportGuardedShard]) -> Any:
    name = next(
        (each._param_name for each in guarded_shards if type(output) is Tensor and output.numel() == each.numel()), None
    )
    return output if name is None else _to_guarded_shard(output, name)


def _to_guarded_shard(tensor: Tensor, param_name: str) -> ExportGuardedShard:
    result = tensor.as_subclass(ExportGuardedShard)
    result._param_name = param_name
    return result


def to_plain_tensor(tensor: Tensor) -> Tensor:
    """Convert an ``ExportGuardedShard`` to a plain tensor, and return any other tensor unchanged."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, ExportGuardedShard) else tensor


def guard_state_dict_shards(module: nn.Module, param_names: Collection[str] | None) -> None:
    """Mark the shards in a module's state dict, so that they cannot be saved as full tensors.

    Args:
        param_names: names of the sharded parameters of the module itself. None marks all its parameters and buffers.
    """
    marked = module.__dict__.get(MARKED, ())
    if MARKED not in module.__dict__:
        module.register_state_dict_post_hook(_guard_shards_post_hook)
    module.__dict__[MARKED] = (
        None if param_names is None or marked is None else tuple(dict.fromkeys((*marked, *param_names)))
    )


def _guard_shards_post_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """State dict hook that converts the shards of one module to ``ExportGuardedShard``.

    The hook skips fake tensors, and the tensors of the module itself (``keep_vars=True``).
    """
    marked = module.__dict__[MARKED]
    for name in (*module._parameters, *module._buffers) if marked is None else marked:
        full = f"{prefix}{name}"
        if type(value := state_dict.get(full)) is Tensor and value is not module._buffers.get(name):
            state_dict[full] = _to_guarded_shard(value, full)


class _PickleGuard:
    """Callable that replaces ``__reduce_ex__`` of a sharded parameter, so that pickling raises ConfigError."""

    def __init__(self, param_name: str, shape: tuple[int, ...]) -> None:
        self._name, self._shape = param_name, shape

    def __call__(self, protocol: SupportsIndex) -> NoReturn:
        raise_shard_export_error(self._name, self._shape)


def disable_pickling(param_name: str, param: Tensor) -> None:
    """Make a sharded parameter raise ConfigError when it is pickled. Unlike a subclass, this has no overhead."""
    param.__dict__["__reduce_ex__"] = _PickleGuard(param_name, tuple(param.shape))
