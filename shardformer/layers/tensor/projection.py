"""The matrix products of a block: the column-parallel linears behind its entry, the row-parallel one at its exit."""

# B batch, S sequence, H hidden, F features of one linear; lower case: this rank's part (f = F / tensor)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from shardformer.comm.conjugates import first_order_only
from shardformer.layers.tensor.edges import Edges, WholeEdges
from shardformer.layers.tensor.pending import PendingTensor
from shardformer.layers.wide_inputs import is_wider, product_dtype
from shardformer.mesh.axis import Axis


class Column(Protocol):
    """What a block must know of a column-parallel linear."""

    axis: Axis
    transposed: bool

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def fused_bias(self) -> Tensor | None:
        """The bias that the matmul adds itself."""

    def multiply(self, x: Tensor) -> Tensor:
        """The local product, for an input that has entered the block already."""


def project(
    x: Tensor, edges: Edges, columns: Sequence[Column], known: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The tensor that the columns read, without history, and their outputs (B, S, f), for this rank's x of the stream.

    Under autocast, and where it is wider than 16-bit weights, x is cast before it is sent. Communicates what the entry
    does; in the backward the gradient of x is on its way while the gradients of the weights are computed.

    Args:
        known: the full tensor of x, where it was gathered before.
    """
    weights: list[Tensor | None] = [p for c in columns for p in (c.weight, c.fused_bias)]
    if (dtype := product_dtype(x, columns[0].weight)) is not None:
        x, known = x.to(dtype), known if known is None else known.to(dtype)
        weights = [None if w is None else w.to(dtype) for w in weights]
    seen, *outputs = _Columns.apply(x, known, edges, [c.transposed for c in columns], *weights)
    return seen, outputs


def project_alone(column: Column, x: Tensor) -> Tensor:
    """The output of a column-parallel linear that is a block's whole entry by itself.

    Backward: one all-reduce of x; of what leaves a stack that cuts it, one reduce-scatter.
    """
    if isinstance(x, PendingTensor):
        if x.is_pending and x.edges is not None and x.axis is column.axis:
            seen, (y,) = project(x.local, x.edges, [column], x.known)
            if x.known is None and seen.dtype == x.dtype:
                x.offer(seen)
            return y
        x = x.value()
    return project(x, WholeEdges(column.axis), [column])[1][0]


def matmul_in(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x @ W^T + b for a weight stored (out, in), or x @ W + b for one stored (in, out)."""
    x = x.to(weight.dtype) if is_wider(x, weight) else x
    if not transposed:
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def weight_grad(x: Tensor, grad: Tensor, transposed: bool) -> Tensor:
    x2, g2 = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return x2.t() @ g2 if transposed else g2.t() @ x2


class _Columns(Function):
    """All column-parallel linears behind one entry. Returns the input they saw and their outputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, known: Tensor | None, edges: Edges, transposed: list[bool], *weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        # every linear has a weight
        pairs = cast("list[tuple[Tensor, Tensor | None]]", list(zip(weights[::2], weights[1::2], strict=True)))

        def multiply(piece: Tensor) -> list[Tensor]:
            return [matmul_in(piece, w, b, t) for (w, b), t in zip(pairs, transposed, strict=True)]

        seen, outputs = edges.gathered(x, multiply, known)
        ctx.edges, ctx.transposed = edges, transposed
        ctx.has_bias = [b is not None for _, b in pairs]
        ctx.save_for_backward(seen, *[w for w, _ in pairs])
        ctx.set_materialize_grads(False)
        visible = seen.detach()
        ctx.mark_non_differentiable(visible)
        return (visible, *outputs)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        seen, *weights = ctx.saved_tensors
        pending = None
        if ctx.needs_input_grad[0]:
            pending = ctx.edges.start_summed(_input_grad(seen, weights, ctx.transposed, grads))
        out: list[Tensor | None] = []
        for i, grad in enumerate(grads):
            needs_weight, needs_bias = ctx.needs_input_grad[4 + 2 * i], ctx.needs_input_grad[5 + 2 * i]
            out.append(weight_grad(seen, grad, ctx.transposed[i]) if needs_weight and grad is not None else None)
            has = needs_bias and ctx.has_bias[i] and grad is not None
            out.append(grad.reshape(-1, grad.shape[-1]).sum(0) if has and grad is not None else None)
        return (None if pending is None else pending.wait(), None, None, None, *out)


def _input_grad(
    seen: Tensor, weights: Sequence[Tensor], transposed: Sequence[bool], grads: Sequence[Tensor | None]
) -> Tensor:
    """The sum over the columns of the gradient of what they saw."""
    total = None
    for weight, t, grad in zip(weights, transposed, grads, strict=True):
        if grad is None:
            continue
        flat = grad.reshape(-1, grad.shape[-1])
        matrix = weight.t() if t else weight
        total = flat @ matrix if total is None else total.addmm_(flat, matrix)
    return torch.zeros_like(seen) if total is None else total.view(seen.shape)


class RowExit(Function):
    """The row-parallel linear: this rank's partial product, summed over the ranks. The bias comes after.

    Communicates what the exit does, in the backward also where that is run in two halves, for the input first and for
    the weight later: once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool, edges: Edges) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.edges, ctx.gathered = transposed, edges, None
        return edges.summed(x, lambda piece: [matmul_in(piece, weight, None, transposed)])

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]

        def multiply(piece: Tensor) -> list[Tensor]:
            return [matmul_in(piece, weight, None, not ctx.transposed)] if needs_x else []

        known, ctx.gathered = ctx.gathered, None
        full, x_grad = ctx.edges.gathered(grad, multiply, known)
        if needs_x and not needs_weight:
            ctx.gathered = full
        w_grad = weight_grad(x, full, ctx.transposed) if needs_weight else None
        return x_grad[0] if needs_x else None, w_grad, None, None
