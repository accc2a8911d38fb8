"""Tensor that delays a collective until its values are read, because the collective may be unnecessary.

Two consecutive collectives between layers can often be fused. The all-reduce after the embedding is followed by a
split for the first layer, and both together are a reduce-scatter. The same holds for the gather before the head. A
module does not know which module comes next, so it returns a ``DeferredTensor``. The next module reads the ``local``
shard if it can use the shard directly. Any other operation runs the collective, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Function

from shardformer.comm.collectives import once_differentiable
from shardformer.comm.sharded_tensor import (
    METADATA,
    Args,
    Kwargs,
    TorchFunction,
    call_on_wrapper_without_gathering,
    is_inplace_call,
    iter_torch_functions,
)
from shardformer.mesh.parallel_context import Axis
from shardformer.torch_compat import (
    get_storage_id,
    is_view,
    make_wrapper_subclass,
    tree_leaves,
    tree_map_only,
)

Map = Callable[[Tensor], Tensor]


class DeferredTensor(Tensor):
    """Tensor whose values are computed by a collective only when they are read.

    Args (of ``make``):
        local: this rank's shard or summand.
        shape: the full shape.
        axis: axis of the collective, or None if nothing is communicated.
        region: layout in which a block can use ``local`` instead of the full values, or None for a sum.
        resolve: runs the collective: ``local`` -> full tensor.
        to_local: backward pass of the collective: gradient of the full tensor -> gradient of ``local``.
    """

    local: Tensor
    axis: Axis | None
    region: Any
    _resolve: Map
    _to_local: Map
    _full: Tensor | None
    _written: int
    _own: Tensor | None
    _is_watched: bool

    @classmethod
    def from_local(
        cls,
        local_tensor: Tensor,
        full_shape: tuple[int, ...],
        axis: Axis | None,
        region: Any,
        compute_full_tensor: Map,
        full_to_local_grad: Map,
    ) -> Self:
        if local_tensor.requires_grad and torch.is_grad_enabled():
            made: Self = _LocalToFullTensor.apply(
                local_tensor, lambda: cls._make_wrapper(local_tensor, full_shape), full_to_local_grad
            )
        else:
            made = cls._make_wrapper(local_tensor, full_shape)
        made.local, made.axis, made.region = local_tensor, axis, region
        made._resolve, made._to_local, made._is_watched = compute_full_tensor, full_to_local_grad, False
        made._full, made._written, made._own = None, 0, None
        return made

    @classmethod
    def _make_wrapper(cls, local_tensor: Tensor, full_shape: tuple[int, ...]) -> Self:
        wrapper: Self = make_wrapper_subclass(cls, full_shape, dtype=local_tensor.dtype, device=local_tensor.device)
        return wrapper

    @property
    def is_pending(self) -> bool:
        """Whether ``local`` can replace the full tensor, which is neither modified nor observed by gradient hooks."""
        is_written = self._own is not None or (self._full is not None and self._full._version != self._written)
        return not self._is_watched and not is_written

    @property
    def cached_full_tensor(self) -> Tensor | None:
        """Full tensor without autograd history, or None if it has not been computed yet."""
        return self._full

    def cache_full_tensor(self, full_tensor: Tensor) -> None:
        """Cache the full tensor for later calls, unless it was computed in inference mode."""
        if not full_tensor.is_inference():
            self._full, self._written = full_tensor, full_tensor._version

    def is_output_of_node(self, autograd_node: Any) -> bool:
        """Return whether this autograd node computed the full tensor."""
        return getattr(autograd_node, "to_local", None) is self._to_local

    def full_tensor(self) -> Tensor:
        """Return the full values as a plain tensor with autograd support. Only the first call communicates."""
        if self._own is not None:
            return self._own
        full = self._full
        if full is None:
            with torch.no_grad():
                full = self._resolve(self.local.detach())
            self.cache_full_tensor(full)
        if not (self.local.requires_grad and torch.is_grad_enabled()):
            return full
        if self._is_watched:  # the full gradient must pass through the wrapper
            out: Tensor = _LocalToFullTensor.apply(self, lambda: full.view_as(full), lambda grad: grad)
        else:
            out = _LocalToFullTensor.apply(self.local, lambda: full.view_as(full), self._to_local)
        return out

    @classmethod
    def __torch_function__(cls, func: TorchFunction, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], DeferredTensor) else None
        if first is not None and (func in _METADATA or func in _WATCHES):
            first._is_watched |= func in _WATCHES
            return call_on_wrapper_without_gathering(func, args, kwargs)
        if first is not None and _is_identity_view(func, first, args[1:]):
            return first
        if first is not None and is_inplace_call(func, kwargs):  # the modified tensor replaces the deferred one
            value = first.full_tensor()
            first._own = value.clone() if is_view(value) else value
        args, kwargs = tree_map_only(DeferredTensor, methodcaller("full_tensor"), (args, dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes func for self
        cls, func: TorchFunction, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Handle calls from autograd and C++ code, which bypass ``__torch_function__``."""
        with torch.no_grad():
            args, kwargs = tree_map_only(DeferredTensor, methodcaller("full_tensor"), (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # mypy drops the keyword's name
        return f"{type(self).__name__}(over {self.axis}, shape={tuple(self.shape)})"


class _LocalToFullTensor(Function):
    @staticmethod
    def forward(ctx: Any, local_tensor: Tensor, make_full_tensor: Callable[[], Tensor], to_local: Map) -> Tensor:
        ctx.to_local = to_local
        return make_full_tensor()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.to_local(grad), None, None


def _is_identity_view(func: TorchFunction, deferred_tensor: DeferredTensor, args: tuple[Any, ...]) -> bool:
    """Return whether a view function returns the whole tensor unchanged, such as ``x[:]``."""
    if func not in (Tensor.__getitem__, Tensor.view, Tensor.reshape):
        return False
    if any(isinstance(x, Tensor) for x in tree_leaves(args)):
        return False
    full = torch.empty(deferred_tensor.shape, dtype=deferred_tensor.dtype, device="meta")
    result = func(full, *args)
    has_same_layout = (result.shape, result.stride(), result.dtype) == (full.shape, full.stride(), full.dtype)
    return has_same_layout and get_storage_id(result) == get_storage_id(full)


def resolve_deferred_tensors(output: Any) -> Any:
    """Replace every ``DeferredTensor`` in a nested output by a plain tensor with the full values."""
    return tree_map_only(DeferredTensor, methodcaller("full_tensor"), output)


_METADATA = METADATA.union(iter_torch_functions("requires_grad"))
"""Attributes that can be read without computing the full values."""
_WATCHES = {Tensor.register_hook, Tensor.retain_grad}
"""Functions that access the gradient of the full tensor. After one of them, ``local`` can no longer be used."""
