"""Linears and norms on a tensor grid, and which parallel layer replaces which plain module in each mode.

They stand in the blocks of a model. ``benchmarks.summa_linear`` has linears that stand alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.autograd_collectives import (
    gather_from_region,
    gather_from_sp_region,
    once_differentiable,
    reduce_from_tp_region,
)
from shardformer.comm.collectives import all_gather, all_reduce
from shardformer.errors import ConfigError
from shardformer.kernels.fused_ops import rms_norm
from shardformer.layout.shard_spec import AnySplit, Coords, EvenSplit, ShardSpec, Split
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import GRID_MODES, TensorGrid
from shardformer.tensor_parallel.grid.region import GridRegion, GridRowParallelMatmul, even_length, hidden_dim
from shardformer.tensor_parallel.layers import (
    Embedding1D,
    Linear1D_Col,
    Linear1D_Row,
    ShardedNorm,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.tensor_parallel.region import TpRegion, linear_matmul

# b samples of this rank, S sequence, H hidden, F features; lower case: this rank's part


class GridModule(ParallelModule):
    """A layer that is given the tensor grid in the place of one axis."""

    takes_grid = True
    grid: TensorGrid

    @property
    def coords(self) -> Coords:
        return self.grid.coords


def hidden_splits(full: int, grid: TensorGrid) -> list[AnySplit]:
    """How the hidden dim of a weight is cut: over the contraction, and what that leaves over rows."""
    size = grid.contraction.size * grid.row.size
    if full < size:
        raise ConfigError(
            f"{full} hidden features over {size} ranks of the tensor grid {grid}", remedy="Use fewer rows"
        )
    contraction = grid.contraction
    of_contraction = [Split.even(full, contraction.size, axes=(contraction.name,))] if grid.mode == "3d" else []
    return [*of_contraction, EvenSplit(grid.row.name, grid.row.size)]


class _GridLinear(GridModule):
    """A linear over a tensor grid: the base before the class of its 1D layer."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Cuts an nn.Linear or a transformers Conv1D that holds the full weight over a ``TensorGrid``."""
        return super().from_native_module(module, process_group.column, grid=process_group, **kwargs)

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, grid: TensorGrid, **kw: Any) -> None:
        self.__dict__["grid"] = grid
        super().__init__(in_features, out_features, bias, **kw)  # type: ignore[call-arg, arg-type]  # of its 1D layer


class GridLinear_Col(_GridLinear, Linear1D_Col):
    """A linear that reads what enters a block: (b, S, H) -> (b, S, f).

    Its weight is cut along F over columns, as the role says, and along H over rows (in 3D over depth first). In a block
    the block's entry communicates. Called with anything else it gathers its weight (backward: a reduce-scatter).
    """

    def _specs(self, shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        dim = hidden_dim(self.transposed)
        splits: dict[int, AnySplit | list[AnySplit]] = {1 - dim: self.split}
        splits[dim] = hidden_splits(self.in_features, self.grid)
        return ShardSpec(shape, splits), ShardSpec((self.out_features,), {0: self.split})

    def multiply(self, x: Tensor) -> Tensor:
        weight = gather_weight(self.weight, self.grid, hidden_dim(self.transposed), self.in_features)
        return linear_matmul(x, weight, self.fused_bias, self.transposed)


class GridLinear_Row(_GridLinear, Linear1D_Row):
    """The linear at a block's exit: (b, S, f) -> this rank's part (b, S, h) of the stream.

    Its weight is cut as that of a ``GridLinear_Col``; its bias along H as the stream is.
    """

    def _specs(self, shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        dim, grid = 1 - hidden_dim(self.transposed), self.grid
        splits: dict[int, AnySplit | list[AnySplit]] = {1 - dim: self.split}
        splits[dim] = hidden_splits(self.out_features, grid)
        of_bias = Split.even(self.out_features, grid.hidden.size, axes=(grid.hidden.name,))
        return ShardSpec(shape, splits), ShardSpec((self.out_features,), {0: of_bias})

    def _leave(self, x: Tensor, weight: Tensor, edges: TpRegion) -> Tensor:
        if self.shared_exit:
            self.shared_exit[0].product_of_other = x, weight
            width = even_length(self.out_features, self.grid.hidden.size, self.grid.hidden.rank)
            if not isinstance(edges, GridRegion):
                return x.new_zeros((*x.shape[:-1], self.out_features))
            return x.new_zeros((*edges.leading_shape(x), width))
        if self.product_of_other is not None:
            (other, its_weight), self.product_of_other = self.product_of_other, None
            x, weight = torch.cat((x, other), -1), torch.cat((weight, its_weight), 0 if self.transposed else 1)
        if isinstance(edges, GridRegion):
            y: Tensor = GridRowParallelMatmul.apply(x, weight, self.transposed, edges)
            return y
        weight = gather_weight(weight, self.grid, 1 - hidden_dim(self.transposed), self.out_features)
        return reduce_from_tp_region(linear_matmul(x, weight, None, self.transposed), self.grid.column)

    def _bias_for(self, y: Tensor) -> Tensor | None:
        if self.bias is None or y.shape[-1] != self.out_features:
            return self.bias
        split = Split.even(self.out_features, self.grid.hidden.size, axes=(self.grid.hidden.name,))
        return gather_from_region(self.bias, self.grid.hidden, 0, split)


def gather_weight(weight: Tensor, grid: TensorGrid, dim: int, full: int) -> Tensor:
    """The weight with its hidden dim whole. Backward: each rank brings its samples' gradient of all of it."""
    contracted = even_length(full, grid.contraction.size, grid.contraction.rank)
    return gather_from_sp_region(gather_from_sp_region(weight, grid.row, dim, contracted), grid.contraction, dim, full)


@dataclass(frozen=True)
class ModeLayers:
    """The layers of one mode.

    Args:
        column: for the linears that read what enters a block.
        row: for the linear at its exit.
        norm: for a norm between them, over features that ranks have parts of.
        bias_table: for an embedding inside of a block, with columns for heads.
        embedding: for the embedding of the vocabulary.
        head: for the linear that gives its logits.
    """

    column: type[ParallelModule]
    row: type[ParallelModule]
    norm: type[ParallelModule]
    bias_table: type[ParallelModule]
    embedding: type[ParallelModule]
    head: type[ParallelModule]


_1D = ModeLayers(
    column=Linear1D_Col,
    row=Linear1D_Row,
    norm=ShardedNorm,
    bias_table=Embedding1D,
    embedding=VocabParallelEmbedding1D,
    head=VocabParallelLMHead1D,
)
LAYERS_BY_MODE = {"1d": _1D} | dict.fromkeys(GRID_MODES, replace(_1D, column=GridLinear_Col, row=GridLinear_Row))
"""``tensor_parallel_mode`` -> its layers."""
# H hidden; h: this rank's part


class GridNorm(ShardedNorm):
    """A layer norm or RMS norm over the H features of the stream: (..., h) -> (..., h), or of all (..., H) -> (..., H).

    Communicates: forward, of an RMS norm one all-reduce of one number a token, of a layer norm one all-gather of its
    ranks' means and sums of squares; backward one all-reduce of one number a token, or of two. Where it is given all
    features one all-gather of its weight.
    """

    takes_grid = True

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Cuts a norm that holds the full weight over a ``TensorGrid``. Raises ConfigError as ``ShardedNorm``."""
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
        whole = {
            n: None if p is None else gather_from_region(p, self.axis, 0, self.split)
            for n, p in self._parameters.items()
        }
        weight, bias = whole["weight"], whole.get("bias")
        if self.kind != "layer":
            return rms_norm(self.kind, x, weight, self.eps)
        return nn.functional.layer_norm(x, (self.full,), weight, bias, self.eps)


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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        y, scale = ctx.saved_tensors
        sums = torch.stack((grad.sum(-1), (grad * y).sum(-1)))
        of_grad, of_both = all_reduce(sums, ctx.axis, purpose="norm")[..., None] / ctx.full
        return scale * (grad - of_grad - y * of_both), None, None, None
