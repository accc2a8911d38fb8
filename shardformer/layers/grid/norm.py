"""A norm between the blocks, over hidden features of which each rank of a tensor grid has a part."""

# H hidden; h: this rank's part

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.collectives import all_gather, all_reduce
from shardformer.comm.conjugates import enter_block, first_order_only, join_dim
from shardformer.layers.norm import rms_norm
from shardformer.layers.tensor.split_norm import SplitNorm
from shardformer.layout.split import Split
from shardformer.mesh.axis import Axis
from shardformer.mesh.tensor_grid import TensorGrid


class GridNorm(SplitNorm):
    """A layer norm or RMS norm over the H features of the stream: (..., h) -> (..., h), or of all (..., H) -> (..., H).

    Communicates: forward, of an RMS norm one all-reduce of one number a token, of a layer norm one all-gather of its
    ranks' means and sums of squares; backward one all-reduce of one number a token, or of two. Where it is given all
    features one all-gather of its weight.
    """

    takes_grid = True

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Cuts a norm that holds the full weight over a ``TensorGrid``. Raises ConfigError as ``SplitNorm``."""
        grid: TensorGrid = process_group
        return super().from_native_module(module, grid.hidden, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1:
            return super().forward(x)
        if x.shape[-1] != self.full:
            if self.kind != "layer":
                return super().forward(x)
            own = (self._parameters["weight"], self._parameters.get("bias"))
            return layer_norm(x, *own, self.axis, self.full, self.eps)
        whole = {n: None if p is None else join_dim(p, self.axis, 0, self.split) for n, p in self._parameters.items()}
        weight, bias = whole["weight"], whole.get("bias")
        if self.kind != "layer":
            return rms_norm(self.kind, x, weight, self.eps)
        return nn.functional.layer_norm(x, (self.full,), weight, bias, self.eps)


class LayerNorm2D(GridNorm):
    """A layer norm that stands alone on a tensor grid: (b, S, h) -> (b, S, h), for models written with its layers.

    Communicates as ``GridNorm``, and in the backward one all-reduce of the gradients of its weight and of its bias over
    the ranks that have other samples.
    """

    _others: Axis

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Cuts an nn.LayerNorm over a ``TensorGrid``. Raises ConfigError for a module that computes something else."""
        grid: TensorGrid = process_group
        full = sum(p.shape[0] for p in list(module.parameters())[:1])
        new = super().from_native_module(module, grid, split=Split.even(full, grid.hidden.size), **kwargs)
        new.__dict__["_others"] = grid.batch
        return new

    def forward(self, x: Tensor) -> Tensor:
        own = (self._parameters["weight"], self._parameters.get("bias"))
        weight, bias = (None if p is None else enter_block(p, self._others) for p in own)
        return layer_norm(x, weight, bias, self.axis, self.full, self.eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, axis: Axis, full: int, eps: float) -> Tensor:
    """The layer norm of features that the ranks of an axis have parts of, in fp32, or in fp64 where x is."""
    x32 = x if x.dtype == torch.float64 else x.to(torch.float32)
    normed: Tensor = _Normalise.apply(x32, axis, full, eps)
    y = normed if weight is None else normed * weight
    return (y if bias is None else y + bias).to(x.dtype)


class _Normalise(Function):
    """Mean 0 and variance 1 over all ranks' features: means and sums of squares merged (Chan et al. 1979)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, full: int, eps: float) -> Tensor:
        own = x.mean(-1)
        squares = (x - own[..., None]).square().sum(-1)
        means, sums = all_gather(torch.stack((own, squares))[None], axis, 0, purpose="norm").unbind(1)
        counts = torch.tensor(Split.even(full, axis.size).lengths(), dtype=x.dtype, device=x.device)
        counts = counts.view(-1, *[1] * own.dim())
        mean = (means * counts).sum(0) / full
        variance = (sums + counts * (means - mean).square()).sum(0) / full
        scale = torch.rsqrt(variance + eps)[..., None]
        y = (x - mean[..., None]) * scale
        ctx.axis, ctx.full = axis, full
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        y, scale = ctx.saved_tensors
        sums = torch.stack((grad.sum(-1), (grad * y).sum(-1)))
        of_grad, of_both = all_reduce(sums, ctx.axis, purpose="norm")[..., None] / ctx.full
        return scale * (grad - of_grad - y * of_both), None, None, None
