"""Pairs of collectives that support autograd: the backward pass of each is the forward pass of the other.

copy_to_tp_region            forward identity         backward all-reduce
reduce_from_tp_region        forward all-reduce       backward identity
gather_from_sp_region        forward all-gather       backward reduce-scatter
reduce_scatter_to_sp_region  forward reduce-scatter   backward all-gather
scatter_to_region            forward local slices     backward all-gather
gather_from_region           forward all-gather       backward local slices

The first pair is Megatron's f and g (Shoeybi et al. 2019, section 3), the second is its counterpart under sequence
parallelism (Korthikanti et al. 2022, section 4.2.2). The third pair is for computation that all ranks repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.collectives import all_gather, all_reduce, reduce_scatter
from shardformer.errors import ConfigError
from shardformer.layout.shard_spec import Split
from shardformer.mesh.parallel_context import Axis

SHARD_OF = "_shardformer_shard_of"
"""Name of the parameter attribute that contains a shard's name and the axes over which the parameter is sharded."""


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a ``backward`` method raise an error if it is called with ``create_graph=True``."""

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ConfigError(
                "Tensor parallelism does not support backward(create_graph=True).",
                remedy="Remove create_graph=True, or compute second derivatives on the unsharded model.",
            )
        return backward(ctx, *grads)

    return checked


class CopyToTpRegion(Function):
    """Autograd function that returns its input, and all-reduces the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.axis), None


class _ReduceFromTpRegion(Function):
    leaves_block = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.clone(), axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromSpRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, full_length: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim, full_length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, ctx.axis, ctx.dim), None, None, None


class _ReduceScatterToSpRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.full = axis, dim, x.shape[dim]
        return reduce_scatter(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim, ctx.full), None, None


class _ScatterToRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
        ctx.axis, ctx.dim, ctx.split = axis, dim, split
        return get_local_slices(x, axis, dim, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather_slices(grad, ctx.axis, ctx.dim, ctx.split, "block"), None, None, None


class _GatherFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, split: Split, purpose: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.split = axis, dim, split
        return _gather_slices(x, axis, dim, split, purpose)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return get_local_slices(grad, ctx.axis, ctx.dim, ctx.split), None, None, None, None


def get_local_slices(x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """Copy this rank's slices of a replicated tensor along ``dim``. Communicates nothing."""
    slices = [x.narrow(dim, a, b - a) for a, b in split.parts[axis.rank] or [(0, 0)]]
    return torch.cat(slices, dim) if len(slices) > 1 else slices[0].clone(memory_format=torch.contiguous_format)


def _gather_slices(x: Tensor, axis: Axis, dim: int, split: Split, purpose: str) -> Tensor:
    gathered = all_gather(x, axis, dim, lengths=split.get_local_lengths(), purpose=purpose)
    bounds = [slice_ for part in split.parts for slice_ in part]
    if all(a[1] <= b[0] for a, b in pairwise(bounds)):  # rank order equals the order along the dimension
        return gathered
    order = torch.cat([split.indices(rank) for rank in range(axis.size)])
    return gathered.index_select(dim, order.argsort().to(x.device))


def copy_to_tp_region(x: Tensor, axis: Axis) -> Tensor:
    """Pass ``x`` unchanged into a tensor-parallel block, and all-reduce its gradient in the backward pass.

    Raises:
        ConfigError: ``x`` is a parameter that is sharded over ``axis``. The sum of the gradients of different shards
            would be wrong, and gloo aborts if their sizes differ.
    """
    if axis.size == 1:
        return x
    name, axes = getattr(x, SHARD_OF, ("", ())) if isinstance(x, nn.Parameter) else ("", ())
    if axis.name in axes:
        raise ConfigError(
            f"copy_to_tp_region does not support the parameter {name!r}, which is sharded over the {axis.name} axis.",
            remedy="Use the sharded parameter directly, without copy_to_tp_region.",
        )
    copied: Tensor = CopyToTpRegion.apply(x, axis)
    return copied


def reduce_from_tp_region(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce the partial results ``x`` of all ranks at the end of a tensor-parallel block."""
    return x if axis.size == 1 else _ReduceFromTpRegion.apply(x, axis)


def gather_from_sp_region(x: Tensor, axis: Axis, dim: int, full_length: int) -> Tensor:
    """All-gather the sequence shards ``x`` of all ranks at the start of a tensor-parallel block.

    Dimension ``dim`` of the result has the length ``full_length``. Forward: one all-gather. Backward: one
    reduce-scatter.
    """
    return x if axis.size == 1 else _GatherFromSpRegion.apply(x, axis, dim, full_length)


def reduce_scatter_to_sp_region(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum ``x`` over all ranks, and return only this rank's shard of the sum along ``dim``.

    Forward: one reduce-scatter. Backward: one all-gather.
    """
    return x if axis.size == 1 else _ReduceScatterToSpRegion.apply(x, axis, dim)


def scatter_to_region(x: Tensor, axis: Axis, dim: int, split: Split) -> Tensor:
    """Return this rank's slices of a replicated tensor, and all-gather their gradients in the backward pass."""
    return x if axis.size == 1 else _ScatterToRegion.apply(x, axis, dim % x.dim(), split)


def gather_from_region(x: Tensor, axis: Axis, dim: int, split: Split, purpose: str = "block") -> Tensor:
    """All-gather a tensor that is sharded along ``dim``, and slice its gradient in the backward pass.

    For computations that every rank does in full. Forward: one all-gather. Backward: no communication.
    """
    return x if axis.size == 1 else _GatherFromRegion.apply(x, axis, dim % x.dim(), split, purpose)
