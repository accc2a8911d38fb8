"""The matrix products of a block on a tensor grid. Weights are gathered over rows, and again in the backward."""

# b samples of this rank, S sequence, H hidden, F features of one linear; lower case: this rank's part

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardformer.comm.collectives import Pending
from shardformer.comm.conjugates import first_order_only
from shardformer.layers.grid.edges import GridEdges
from shardformer.layers.tensor.projection import Column, matmul_in, weight_grad
from shardformer.layers.wide_inputs import product_dtype


def project_on_grid(
    x: Tensor, edges: GridEdges, columns: Sequence[Column], known: Tensor | None = None
) -> tuple[Tensor | None, list[Tensor]]:
    """What the columns read, without history, and their outputs, for this rank's x of the stream.

    In 3D no rank has all that they read: it is None then.

    Args:
        known: the input of the block, where it was gathered before.
    """
    weights: list[Tensor | None] = [p for c in columns for p in (c.weight, c.fused_bias)]
    if (dtype := product_dtype(x, columns[0].weight)) is not None:
        x, known = x.to(dtype), known if known is None else known.to(dtype)
        weights = [None if w is None else w.to(dtype) for w in weights]
    seen, *outputs = _Columns.apply(
        x, None if edges.is_cube else known, edges, [c.transposed for c in columns], *weights
    )
    return None if edges.is_cube else seen, outputs


class _Columns(Function):
    """All column-parallel linears behind one entry. Saves what this rank holds of their input and weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, known: Tensor | None, edges: GridEdges, transposed: list[bool], *params: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = params[::2], params[1::2]
        ctx.edges, ctx.transposed, ctx.has_bias = edges, transposed, [b is not None for b in biases]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        arriving = None if known is not None else edges.start_gather(x)
        gathered = _start_weights(edges, weights, transposed)
        seen = known if arriving is None else arriving.wait()
        assert seen is not None
        outputs = []
        for weight, t, bias in zip(gathered, transposed, biases, strict=True):
            y = edges.inside(matmul_in(seen, weight.wait(), None, t))
            outputs.append(y if bias is None else y + bias)
        visible = seen.detach()
        ctx.mark_non_differentiable(visible)
        return (visible, *outputs)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        edges, (x, *weights) = ctx.edges, ctx.saved_tensors
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        again = edges.start_gather(x) if any(needs[::2]) else None
        arriving = _start_weights(edges, weights, ctx.transposed) if needs_x else []
        wide = [None if grad is None else edges.across(grad) for grad in grads]
        summed: Tensor | None = None
        for weight, grad, t in zip(arriving, wide, ctx.transposed, strict=False):
            whole = weight.wait()
            if grad is not None:
                part = matmul_in(grad, whole, None, not t)
                summed = part if summed is None else summed.add_(part)
        leaving = None if summed is None else edges.start_scatter(summed)
        seen = None if again is None else again.wait()
        pending: list[Pending | None] = []
        for i, (grad, t) in enumerate(zip(wide, ctx.transposed, strict=True)):
            of_weight = weight_grad(seen, grad, t) if needs[2 * i] and grad is not None and seen is not None else None
            pending.append(None if of_weight is None else edges.start_weight_grad(of_weight, hidden_dim(t)))
        out: list[Tensor | None] = []
        for i, (own, found) in enumerate(zip(grads, pending, strict=True)):
            out.append(None if found is None else found.wait())
            has_bias = needs[2 * i + 1] and ctx.has_bias[i] and own is not None
            out.append(own.reshape(-1, own.shape[-1]).sum(0) if has_bias and own is not None else None)
        x_grad = leaving.wait() if leaving is not None else torch.zeros_like(x) if needs_x else None
        return (x_grad, None, None, None, *out)


class GridRowExit(Function):
    """The row-parallel linear: partial products, summed over the ranks of a row. The bias comes after.

    In a backward that is run in two halves, for the input first and for the weight later, the gradient that comes in is
    gathered once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool, edges: GridEdges) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.edges, ctx.gathered = transposed, edges, None
        arriving = edges.start_weight(weight, 1 - hidden_dim(transposed))
        wide = edges.across(x)
        return edges.start_scatter(matmul_in(wide, arriving.wait(), None, transposed)).wait()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        edges, (x, weight), t = ctx.edges, ctx.saved_tensors, ctx.transposed
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dim, known, ctx.gathered = 1 - hidden_dim(t), ctx.gathered, None
        arriving = edges.start_weight(weight, dim) if needs_x else None
        wide = edges.start_gather(grad).wait() if known is None else known
        pending = None
        if needs_weight:
            pending = edges.start_weight_grad(weight_grad(edges.across(x), wide, t), dim)
        else:
            ctx.gathered = wide
        x_grad = None if arriving is None else edges.inside(matmul_in(wide, arriving.wait(), None, not t))
        return x_grad, None if pending is None else pending.wait(), None, None


def hidden_dim(transposed: bool) -> int:
    """Which dim of a column-parallel linear's weight is hidden; of a row-parallel one's it is the other."""
    return 0 if transposed else 1


def _start_weights(edges: GridEdges, weights: Sequence[Tensor | None], transposed: Sequence[bool]) -> list[Pending]:
    return [edges.start_weight(w, hidden_dim(t)) for w, t in zip(weights, transposed, strict=True) if w is not None]
