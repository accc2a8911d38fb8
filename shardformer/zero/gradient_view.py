"""Tensor subclass for ``p.grad`` under ZeRO, which stores only this rank's slice of the gradient.

Training scripts scale, clamp, perturb and discard gradients between ``backward`` and ``step``. An element-wise function
is applied to this rank's slice, which the optimizer step uses. Other functions, such as a norm or an index, need the
full gradient. They work if this rank has the full gradient, and raise an error otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from shardformer import torch_compat
from shardformer.comm.sharded_tensor import Args, Kwargs, TorchFunction
from shardformer.errors import ConfigError
from shardformer.gradients.buckets import GradientSlot

FOREACH = "_foreach_"
UNTAGGED_ELEMENTWISE = frozenset({"zero_", "fill_", "copy_", "clone", "detach", "alias", "_to_copy", "zero", "copy"})
"""Element-wise functions that do not have torch's tag ``pointwise``."""


class GradStorage(Protocol):
    """Interface of objects that store the gradients of a bucket, such as ``FlatParamShard``."""

    @property
    def gradient_slots(self) -> Sequence[GradientSlot]: ...
    @property
    def wide_dtype(self) -> torch.dtype: ...
    def get_local_grad(self, param_index: int) -> Tensor: ...
    def has_full_grad(self, param_index: int) -> bool: ...
    def slice_like_local_grad(self, param_index: int, tensor: Tensor) -> Tensor: ...
    def record_grad_edit(self, param_index: int, edit_description: str) -> None: ...


class ShardedGradient(Tensor):
    """A gradient with the shape of its parameter that stores only this rank's slice.

    It is the gradient itself, or the result of an element-wise function of the gradient.

    Attributes:
        shard: Weak reference to the storage of the gradient, because a strong one would create a reference cycle.
        param_index: Index of the gradient in the shard.
        result: This rank's slice of a computed result, or None for the gradient itself.
    """

    shard: ref[GradStorage]
    param_index: int
    result: Tensor | None

    @staticmethod
    def __new__(
        cls, grad_storage: GradStorage, param_index: int, local_result: Tensor | None = None
    ) -> ShardedGradient:
        param, dtype = (
            grad_storage.gradient_slots[param_index].param,
            local_result.dtype if local_result is not None else None,
        )
        if dtype is None or dtype == grad_storage.wide_dtype:
            dtype = param.dtype  # torch requires .grad to have the dtype of the parameter; the sum may be wider
        self: ShardedGradient = torch_compat.make_wrapper_subclass(cls, param.shape, dtype=dtype, device=param.device)
        self.shard, self.param_index, self.result = ref(grad_storage), param_index, local_result
        return self

    def __init__(self, *args: Any) -> None:
        pass

    __torch_function__ = torch_compat.disabled_torch_function  # results keep their class

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return f"ShardedGradient of shape {tuple(self.shape)}, {self.local_grad.numel()} elements on this rank"

    @property
    def grad_storage(self) -> GradStorage:
        if (shard := self.shard()) is None:
            raise ConfigError(
                "A sharded gradient was read after its model or optimizer had been deleted.",
                remedy="Keep a reference to the optimizer as long as you use p.grad.",
            )
        return shard

    @property
    def local_grad(self) -> Tensor:
        """This rank's slice of the gradient, as a flat tensor."""
        return self.result if self.result is not None else self.grad_storage.get_local_grad(self.param_index)

    def is_grad_of(self, grad_storage: GradStorage, param_index: int) -> bool:
        return self.shard() is grad_storage and self.param_index == param_index

    def wrap_local_result(self, local_result: Tensor) -> ShardedGradient:
        return ShardedGradient(self.grad_storage, self.param_index, local_result)

    def record_grad_edit(self, func: TorchFunction) -> None:
        if self.result is None:
            self.grad_storage.record_grad_edit(self.param_index, str(func))

    def slice_operand_like_local_grad(self, operand: Tensor, func: TorchFunction) -> Tensor:
        """Slice ``operand`` to the elements that correspond to this rank's slice of the gradient."""
        local = self.local_grad
        if isinstance(operand, ShardedGradient):
            if not operand.is_grad_of(self.grad_storage, self.param_index):
                raise _make_unsupported_function_error(self, f"{func} cannot combine the gradients of two parameters.")
            return operand.local_grad
        if operand.dim() == 0:
            return operand.to(local.device) if operand.device != local.device else operand
        if torch.broadcast_shapes(operand.shape, self.shape) != self.shape:
            message = f"{func} cannot broadcast {tuple(operand.shape)} to the gradient's shape {tuple(self.shape)}."
            raise _make_unsupported_function_error(self, message)
        return self.grad_storage.slice_like_local_grad(self.param_index, operand.expand(self.shape)).to(local.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what it has where there is none
        cls, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = torch_compat.schema_of(func).name.partition("::")[2]
        if name.startswith(FOREACH) and _is_elementwise_op(getattr(torch.ops.aten, name.removeprefix(FOREACH), None)):
            return _apply_foreach_op(func, args, kwargs)
        first = next(x for x in torch_compat.tree_leaves((args, kwargs)) if isinstance(x, ShardedGradient))
        if name.endswith("_like"):
            return _call_with_replaced_tensors(func, args, kwargs, _make_empty_placeholder)
        writes = torch_compat.schema_of(func).is_mutable
        if (torch.Tag.pointwise in func.tags or name in UNTAGGED_ELEMENTWISE) and (
            not writes or isinstance(kwargs.get("out", args[0]), ShardedGradient)
        ):
            return _apply_elementwise_op(func, first, args, kwargs, is_inplace=writes)
        if first.grad_storage.has_full_grad(first.param_index) and first.local_grad.device == first.device:
            return _call_with_replaced_tensors(
                func, args, kwargs, lambda x: x.local_grad.view(x.shape) if isinstance(x, ShardedGradient) else x
            )
        if writes:
            raise _make_full_target_error(first, name)
        raise _make_unsupported_function_error(
            first, f"{name} cannot be applied to p.grad, because ZeRO shards the gradient."
        )


def _is_elementwise_op(op_packet: Any) -> bool:
    if op_packet is None:
        return False
    return op_packet.__name__ in UNTAGGED_ELEMENTWISE or any(
        torch.Tag.pointwise in getattr(op_packet, overload).tags for overload in op_packet.overloads()
    )


def _call_with_replaced_tensors(func: TorchFunction, args: Args, kwargs: Any, replace_fn: Callable[[Any], Any]) -> Any:
    return func(
        *torch_compat.tree_map_only(Tensor, replace_fn, args), **torch_compat.tree_map_only(Tensor, replace_fn, kwargs)
    )


def _apply_elementwise_op(func: Any, sharded_grad: ShardedGradient, args: Any, kwargs: Any, *, is_inplace: bool) -> Any:
    if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
        kwargs = {
            **kwargs,
            "device": sharded_grad.local_grad.device if kwargs["device"] == sharded_grad.device else kwargs["device"],
        }
    if func is torch.ops.aten.detach.default and sharded_grad.result is None:
        sharded_grad.grad_storage.get_local_grad(sharded_grad.param_index)  # raises if zero_grad discarded the gradient
        return ShardedGradient(
            sharded_grad.grad_storage, sharded_grad.param_index
        )  # still the gradient itself, not a computed result
    result = _call_with_replaced_tensors(
        func, args, kwargs, lambda x: sharded_grad.slice_operand_like_local_grad(x, func)
    )
    if is_inplace:
        sharded_grad.record_grad_edit(func)
        return kwargs.get("out", args[0])
    return torch_compat.tree_map_only(Tensor, sharded_grad.wrap_local_result, result)


def _apply_foreach_op(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Run a ``torch._foreach_`` function on this rank's slices of sharded gradients."""
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple))]
    firsts = [next((x for x in row if isinstance(x, ShardedGradient)), None) for row in zip(*lists, strict=False)]
    schema = torch_compat.schema_of(func)
    for first, target in zip(firsts, kwargs.get("out", args[0]) if schema.is_mutable else (), strict=False):
        if first is not None and not isinstance(target, ShardedGradient):
            if not first.grad_storage.has_full_grad(first.param_index):
                raise _make_full_target_error(first, schema.name.partition("::")[2])

    def unwrap_operands(operands: Any) -> Any:
        if not isinstance(operands, (list, tuple)):
            return operands
        pairs = zip(operands, firsts, strict=False)
        return [
            x if f is None or not isinstance(x, Tensor) else f.slice_operand_like_local_grad(x, func) for x, f in pairs
        ]

    results = func(*map(unwrap_operands, args), **{name: unwrap_operands(x) for name, x in kwargs.items()})
    if schema.is_mutable or results is None:
        for first in firsts:
            if first is not None:
                first.record_grad_edit(func)
        return None
    return [x if f is None else f.wrap_local_result(x) for f, x in zip(firsts, results, strict=True)]


def _make_empty_placeholder(tensor: Tensor) -> Tensor:
    """Replace a sharded gradient by an uninitialized tensor of the same shape that allocates one element."""
    return (
        torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        if isinstance(tensor, ShardedGradient)
        else tensor
    )


def _make_full_target_error(sharded_grad: ShardedGradient, func_name: str) -> ConfigError:
    name = sharded_grad.grad_storage.gradient_slots[sharded_grad.param_index].entry.name
    return ConfigError(
        f"{func_name} cannot write values computed from p.grad to another tensor, because each rank has only its slice "
        f"of the gradient of {name}.",
        remedy=f"Use optimizer.full_gradient({name!r}) instead of p.grad, and call it on all ranks.",
    )


def _make_unsupported_function_error(sharded_grad: ShardedGradient, message: str) -> ConfigError:
    name = sharded_grad.grad_storage.gradient_slots[sharded_grad.param_index].entry.name
    return ConfigError(
        message,
        rule="With ZeRO, p.grad supports only element-wise functions such as mul_, clamp_ and add_.",
        remedy=f"Call optimizer.full_gradient({name!r}) on all ranks, or grad_norm(model) for the gradient norm.",
    )
