"""Collectives that autograd understands, as conjugate pairs: the backward of each is its partner's forward.

enter_block      forward identity         backward all-reduce        Megatron's f (Shoeybi et al. 2019, section 3)
leave_block      forward all-reduce       backward identity          Megatron's g
split_sequence   forward take a stretch   backward all-gather        where what is outside is replicated
join_sequence    forward all-gather       backward take a stretch
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardformer.comm.collectives import all_gather, all_reduce, local_chunk
from shardformer.mesh.axis import Axis


class _EnterBlock(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.axis), None


class _LeaveBlock(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, purpose: str) -> Tensor:
        return all_reduce(x.clone(), axis, purpose=purpose)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _SplitSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.full = axis, dim, x.shape[dim]
        return local_chunk(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim, ctx.full), None, None


class _JoinSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, full: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim, full)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return local_chunk(grad, ctx.axis, ctx.dim), None, None, None


class _JoinSlices(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, lengths: tuple[int, ...]) -> Tensor:
        ctx.axis, ctx.dim, ctx.lengths = axis, dim, lengths
        return all_gather(x, axis, dim, lengths=lengths, purpose="gather")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        start = sum(ctx.lengths[: ctx.axis.rank])
        return grad.narrow(ctx.dim, start, ctx.lengths[ctx.axis.rank]).contiguous(), None, None, None


def enter_block(x: Tensor, axis: Axis) -> Tensor:
    """x, replicated, enters a block. Backward: one all-reduce of the gradient of x."""
    return x if axis.size == 1 else _EnterBlock.apply(x, axis)


def leave_block(x: Tensor, axis: Axis, purpose: str = "block") -> Tensor:
    """The sum of every rank's partial x leaves a block. Forward: one all-reduce of x."""
    return x if axis.size == 1 else _LeaveBlock.apply(x, axis, purpose)


def split_sequence(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's stretch of a replicated x. Backward: one all-gather of x."""
    return x if axis.size == 1 else _SplitSequence.apply(x, axis, dim)


def join_sequence(x: Tensor, axis: Axis, dim: int, full: int) -> Tensor:
    """The whole from all stretches, used the same way on all ranks afterwards. Forward: one all-gather."""
    return x if axis.size == 1 else _JoinSequence.apply(x, axis, dim, full)


def join_slices(x: Tensor, axis: Axis, dim: int, lengths: tuple[int, ...]) -> Tensor:
    """The whole of a dim from slices of given lengths, used the same way on all ranks. Forward: one all-gather."""
    return x if axis.size == 1 else _JoinSlices.apply(x, axis, dim % x.dim(), lengths)
