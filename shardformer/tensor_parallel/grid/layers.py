"""Linears and norms on a tensor grid, and the parallel layers of each tensor-parallel mode.

These linears are parts of a block. ``benchmarks.summa_linear`` has linears that work without a block.
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
from shardformer.tensor_parallel.grid.communication import GridRegion, GridRowParallelMatmul, hidden_dim
from shardformer.tensor_parallel.layers import (
    Embedding1D,
    Linear1D_Col,
    Linear1D_Row,
    ShardedNorm,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.tensor_parallel.region import TpRegion, linear_matmul, local_length

# b local samples, S sequence, H hidden, F features; lower case: local shard


class GridModule(ParallelModule):
    """Base class of parallel layers that are sharded over a tensor grid instead of one axis."""

    takes_grid = True
    grid: TensorGrid

    @property
    def coords(self) -> Coords:
        return self.grid.coords


def hidden_splits(full: int, grid: TensorGrid) -> list[AnySplit]:
    """Return the splits of a weight's hidden dim: over the contraction axis (3D only), then over the rows."""
    size = grid.contraction.size * grid.row.size
    if full < size:
        raise ConfigError(
            f"{full} hidden features cannot be sharded over {size} ranks of the tensor grid {grid}",
            remedy="Use a tensor grid with fewer rows",
        )
    contraction = grid.contraction
    over_contraction = [Split.even(full, contraction.size, axes=(contraction.name,))] if grid.mode == "3d" else []
    return [*over_contraction, EvenSplit(grid.row.name, grid.row.size)]


class _GridLinear(GridModule):
    """Mixin that turns a 1D tensor-parallel linear into a linear on a tensor grid."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Shard a full nn.Linear or transformers Conv1D over a ``TensorGrid``."""
        return super().from_native_module(module, process_group.column, grid=process_group, **kwargs)

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, grid: TensorGrid, **kw: Any) -> None:
        self.__dict__["grid"] = grid
        super().__init__(in_features, out_features, bias, **kw)  # type: ignore[call-arg, arg-type]  # Linear1D_Col, _Row


class GridLinear_Col(_GridLinear, Linear1D_Col):
    """Column-parallel linear on a tensor grid: (b, S, H) -> (b, S, f).

    Shards its weight along F over columns, by the split of its role, and along H over rows (in 3D first over depth).
    In a block, the block communicates. Outside of a block it gathers its weight (backward: a reduce-scatter).
    """

    def _make_specs(self, shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        dim = hidden_dim(self.transposed)
        splits: dict[int, AnySplit | list[AnySplit]] = {1 - dim: self.split}
        splits[dim] = hidden_splits(self.in_features, self.grid)
        return ShardSpec(shape, splits), ShardSpec((self.out_features,), {0: self.split})

    def multiply(self, x: Tensor) -> Tensor:
        weight = gather_weight(self.weight, self.grid, hidden_dim(self.transposed), self.in_features)
        return linear_matmul(x, weight, self.fused_bias, self.transposed)


class GridLinear_Row(_GridLinear, Linear1D_Row):
    """Row-parallel linear on a tensor grid: (b, S, f) -> the local activations (b, S, h).

    Shards its weight like ``GridLinear_Col``, and its bias along H like the activations.
    """

    def _make_specs(self, shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        dim, grid = 1 - hidden_dim(self.transposed), self.grid
        splits: dict[int, AnySplit | list[AnySplit]] = {1 - dim: self.split}
        splits[dim] = hidden_splits(self.out_features, grid)
        bias_split = Split.even(self.out_features, grid.hidden.size, axes=(grid.hidden.name,))
        return ShardSpec(shape, splits), ShardSpec((self.out_features,), {0: bias_split})

    def _output_width(self, region: TpRegion) -> int:
        if not isinstance(region, GridRegion):
            return self.out_features
        return local_length(self.out_features, self.grid.hidden)

    def _compute_reduced_product(self, x: Tensor, weight: Tensor, region: TpRegion) -> Tensor:
        if isinstance(region, GridRegion):
            y: Tensor = GridRowParallelMatmul.apply(x, weight, self.transposed, region)
            return y
        weight = gather_weight(weight, self.grid, 1 - hidden_dim(self.transposed), self.out_features)
        return reduce_from_tp_region(linear_matmul(x, weight, None, self.transposed), self.grid.column)

    def _bias_for_output(self, y: Tensor) -> Tensor | None:
        if self.bias is None or y.shape[-1] != self.out_features:
            return self.bias
        split = Split.even(self.out_features, self.grid.hidden.size, axes=(self.grid.hidden.name,))
        return gather_from_region(self.bias, self.grid.hidden, 0, split)


def gather_weight(weight: Tensor, grid: TensorGrid, dim: int, full: int) -> Tensor:
    """All-gather a weight along its hidden dim ``dim``. Backward: reduce-scatters of its gradient."""
    contracted = local_length(full, grid.contraction)
    return gather_from_sp_region(gather_from_sp_region(weight, grid.row, dim, contracted), grid.contraction, dim, full)


@dataclass(frozen=True)
class ModeLayers:
    """Layer classes of one tensor-parallel mode, by their role in a model."""

    column: type[ParallelModule]  # the first linears of a block
    row: type[ParallelModule]  # the last linear of a block
    norm: type[ParallelModule]  # a norm over sharded features inside of a block
    bias_table: type[ParallelModule]  # an embedding inside of a block whose columns are heads
    embedding: type[ParallelModule]  # the vocabulary embedding
    head: type[ParallelModule]  # the linear that computes logits


_1D = ModeLayers(Linear1D_Col, Linear1D_Row, ShardedNorm, Embedding1D, VocabParallelEmbedding1D, VocabParallelLMHead1D)
LAYERS_BY_MODE = {"1d": _1D} | dict.fromkeys(GRID_MODES, replace(_1D, column=GridLinear_Col, row=GridLinear_Row))
"""``tensor_parallel_mode`` -> its layer classes."""
# H hidden; h: local shard


class GridNorm(ShardedNorm):
    """Layer norm or RMS norm over hidden features that are sharded over a tensor grid, or replicated.

    (..., h) -> (..., h) for a sharded input, or (..., H) -> (..., H).

    Communicates for (..., h): forward one all-reduce of one number per token for an RMS norm, or one all-gather of the
    local means and sums of squares for a layer norm; backward one all-reduce of one or two numbers per token.
    For (..., H): one all-gather of the weight.
    """

    takes_grid = True

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Shard a full layer norm or RMS norm over a ``TensorGrid``. Raises ConfigError like ``ShardedNorm``."""
        grid: TensorGrid = process_group
        return super().from_native_module(module, grid.hidden, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1:
            return super().forward(x)
        if x.shape[-1] != self.full:
            if self.kind != "layer":
                return super().forward(x)
            local_params = (self._parameters["weight"], self._parameters.get("bias"))
            return layer_norm(x, *local_params, self.axis, self.full, self.eps)
        params = (self._parameters.get(name) for name in ("weight", "bias"))
        weight, bias = (None if p is None else gather_from_region(p, self.axis, 0, self.split) for p in params)
        if self.kind != "layer":
            return rms_norm(self.kind, x, weight, self.eps)
        return nn.functional.layer_norm(x, (self.full,), weight, bias, self.eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, axis: Axis, full: int, eps: float) -> Tensor:
    """Apply a layer norm over features that are sharded over ``axis``, in fp32, or fp64 for fp64 inputs."""
    x32 = x if x.dtype == torch.float64 else x.to(torch.float32)
    normed: Tensor = _Normalize.apply(x32, axis, full, eps)
    y = normed if weight is None else normed * weight
    return (y if bias is None else y + bias).to(x.dtype)


class _Normalize(Function):
    """Autograd function that normalizes sharded features to mean 0 and variance 1.

    Combines the local means and sums of squares of all ranks (Chan et al. 1979).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, full: int, eps: float) -> Tensor:
        local_mean = x.mean(-1)
        squares = (x - local_mean[..., None]).square().sum(-1)
        means, sums = all_gather(torch.stack((local_mean, squares))[None], axis, 0, purpose="norm").unbind(1)
        counts = torch.tensor(Split.even(full, axis.size).lengths(), dtype=x.dtype, device=x.device)
        counts = counts.view(-1, *[1] * local_mean.dim())
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
        grad_mean, product_mean = all_reduce(sums, ctx.axis, purpose="norm")[..., None] / ctx.full
        return scale * (grad - grad_mean - y * product_mean), None, None, None
