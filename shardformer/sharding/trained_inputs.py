"""Inputs of a tensor-parallel model whose gradient is asked for: it is whole on every rank, or refused.

Embeddings enter the blocks as hidden states do, and each rank has their whole gradient. What only an attention reads,
as a mask that trains, meets this rank's heads alone: each rank would go on with another part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import keystr, tree_leaves, tree_map_with_path

from shardformer.comm.collectives import gather_objects
from shardformer.comm.conjugates import first_order_only
from shardformer.comm.values import numbers_in
from shardformer.errors import InputError
from shardformer.layers.context.cut_tensor import CutTensor
from shardformer.mesh.axis import Axis

NEAR = 1e-3
"""By how much the sums of one gradient may differ between ranks, of its absolute values."""


class _Compared(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, axis: Axis) -> Tensor:
        ctx.name, ctx.axis = name, axis
        return x.view_as(x)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sums = torch.stack([grad.double().sum(), grad.double().abs().sum()])
        every = gather_objects(numbers_in(sums), ctx.axis)
        if any(abs(a - b) > NEAR * every[0][1] for theirs in every for a, b in zip(theirs, every[0], strict=True)):
            raise InputError(
                f"The {ctx.axis.size} tensor ranks found different gradients of {ctx.name}",
                rule="Each rank computes its own heads: of what only these read it finds a part of the gradient",
                remedy=f"Detach {ctx.name}, or leave the tensor axis out for a model whose {ctx.name} trains",
            )
        return grad, None, None


def compared(
    args: tuple[Any, ...], kwargs: dict[str, Any], axis: Axis
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The inputs, whose gradients are compared over the ranks when they are found; None where no input needs one.

    Communicates two numbers in the backward for each input that needs a gradient. There, raises InputError on all ranks
    where they differ.
    """

    def trains(x: Any) -> bool:
        return isinstance(x, Tensor) and x.requires_grad and not isinstance(x, CutTensor)

    if axis.size == 1 or not torch.is_grad_enabled() or not any(map(trains, tree_leaves((args, kwargs)))):
        return None

    def marked(path: Any, x: Any) -> Any:
        name = keystr(path[1:]).strip("[]'")
        out: Any = _Compared.apply(x, name, axis) if trains(x) else x
        return out

    changed: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_with_path(marked, (args, kwargs))
    return changed
