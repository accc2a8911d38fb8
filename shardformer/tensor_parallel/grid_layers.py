"""Linear layers of 2D, 2.5D and 3D tensor parallelism, and their collectives.

              2D, 2.5D                                3D
    entry     all-gather of hidden over columns       all-gather of samples over columns
    weights   all-gather of hidden over rows          the same; partial products reduce-scattered over depth
    exit      reduce-scatter of hidden over columns   all-gather of samples over depth, reduce-scatter over columns

In the backward pass, each all-gather becomes a reduce-scatter and vice versa. Only local shards are saved, and gathered
again in the backward pass. The axes may have different sizes (Xu et al. 2021, "An efficient 2D method for training
super-large deep learning models"; Wang et al. 2021, "2.5-dimensional distributed model training"; Bian et al. 2021,
"Maximizing parallelism in distributed training for huge neural networks").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm import collectives
from shardformer.comm.collectives import (
    PendingCollective,
    all_gather,
    all_reduce,
    gather_from_region,
    gather_from_sp_region,
    get_local_chunk,
    once_differentiable,
    reduce_from_tp_region,
    reduce_scatter,
    reduce_scatter_to_sp_region,
)
from shardformer.comm.deferred_tensor import DeferredTensor
from shardformer.errors import ConfigError
from shardformer.kernels.fused_ops import rms_norm
from shardformer.layout.shard_spec import AnySplit, Coords, EvenSplit, ShardSpec, Split
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import GRID_MODES, TensorGrid
from shardformer.tensor_parallel.block import TensorParallelBlock
from shardformer.tensor_parallel.layers import (
    Embedding1D,
    Linear1D_Col,
    Linear1D_Row,
    ShardedNorm,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from shardformer.tensor_parallel.linear_communication import (
    ColumnParallel,
    TpRegion,
    apply_with_custom_backward,
    cast_projection_operands,
    compute_bias_grad,
    compute_weight_grad,
    get_even_split_length,
    linear_matmul,
)
from shardformer.tensor_parallel.parallel_module import ParallelModule

# B batch, b local samples, S sequence, H hidden, h local hidden features


@dataclass(frozen=True)
class GridRegion:
    """Collectives at the input and the output of a block in 2D, 2.5D or 3D tensor parallelism."""

    grid: TensorGrid
    full: int  # the number of hidden features on all ranks
    batch_dim: int = 0  # the sample dim of activations with three or more dims; for fewer it is 0

    @property
    def is_3d(self) -> bool:
        return self.grid.mode == "3d"

    @property
    def num_row_features(self) -> int:
        """Number of hidden features in one depth layer of a 3D grid, or the full hidden size in 2D and 2.5D."""
        return get_even_split_length(self.full, self.grid.contraction)

    def get_num_samples_inside_block(self, x: Tensor) -> int:
        """Return how many samples this rank has inside a block that receives the activations x."""
        return x.shape[self._get_sample_dim(x)] * self.grid.batch.size // self.grid.core.size

    def _get_sample_dim(self, x: Tensor) -> int:
        return self.batch_dim if x.dim() > 2 else 0

    def get_local_leading_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of this rank's block output without its hidden dim, for an activation x in the block."""
        dim = self._get_sample_dim(x)
        samples = x.shape[dim] * self.grid.core.size // self.grid.batch.size
        return (*x.shape[:dim], samples, *x.shape[dim + 1 : -1])

    def enter(self, x: Tensor) -> Tensor:
        """Return the full input (b, S, H) of a block for this rank's input x. It is gathered when it is first used."""
        dim = self._get_sample_dim(x)
        shape = (*x.shape[:dim], self.get_num_samples_inside_block(x), *x.shape[dim + 1 : -1], self.full)
        return DeferredTensor.from_local(
            x, shape, self.grid.column, None, self._gather_hidden_features, self._reduce_gradient
        )

    def _gather_hidden_features(self, x: Tensor) -> Tensor:
        if not self.is_3d:
            return all_gather(x, self.grid.column, -1, self.full)
        full = all_gather(all_gather(x, self.grid.column, self._get_sample_dim(x)), self.grid.depth, -1, self.full)
        return get_local_chunk(full, self.grid.depth, self._get_sample_dim(full))

    def _reduce_gradient(self, grad: Tensor) -> Tensor:
        """Run the backward pass of ``_gather_hidden_features``: sum the gradients and return this rank's shard."""
        if not self.is_3d:
            return reduce_scatter(grad, self.grid.column, -1)
        full = all_gather(grad, self.grid.depth, self._get_sample_dim(grad))
        local = get_local_chunk(full, self.grid.depth, full.dim() - 1)
        return reduce_scatter(local, self.grid.column, self._get_sample_dim(full))

    # --- communication of a compiled block, whose gathers autograd reverses

    def get_full_block_input(self, x: Tensor) -> Tensor:
        """Return the full input (b, S, H) of a block under torch.compile, for this rank's activations x."""
        return apply_with_custom_backward(x, self._gather_hidden_features, self._reduce_gradient)

    def gather_input(self, x: Tensor) -> Tensor:
        """All-gather the input of the column-parallel layers along the hidden dim, or in 3D along the samples."""
        dim = self._get_sample_dim(x) if self.is_3d else -1
        full = x.shape[dim] * self.grid.column.size if self.is_3d else self.full
        return gather_from_sp_region(x, self.grid.column, dim, full)

    def compute_column_output(self, x: Tensor, column: ColumnParallel) -> Tensor:
        """Return the output of a column-parallel linear layer for an input that ``gather_input`` returned."""
        weight, dim = column.weight, get_hidden_dim(column.transposed)
        weight = gather_from_sp_region(weight, self.grid.row, dim, self.num_row_features)
        y = linear_matmul(x, weight, None, column.transposed)
        y = reduce_scatter_to_sp_region(y, self.grid.contraction, self._get_sample_dim(y))
        return y if column.fused_bias is None else y + column.fused_bias.to(y.dtype)

    def multiply_and_reduce(self, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        """Compute a row-parallel linear layer without its bias, and return this rank's shard of the output."""
        contraction, dim = self.grid.contraction, self._get_sample_dim(x)
        weight = gather_from_sp_region(weight, self.grid.row, 1 - get_hidden_dim(transposed), self.num_row_features)
        gathered = gather_from_sp_region(x, contraction, dim, x.shape[dim] * contraction.size)
        y = linear_matmul(gathered, weight, None, transposed)
        return reduce_scatter_to_sp_region(y, self.grid.column, dim if self.is_3d else -1)

    # --- communication of the column- and row-parallel products

    def start_input_gather(self, x: Tensor) -> PendingCollective:
        """Start an all-gather of a matmul input along the hidden dim, or in 3D along the samples."""
        if self.is_3d:
            return collectives.start_all_gather(x, self.grid.column, self._get_sample_dim(x))
        return collectives.start_all_gather(x, self.grid.column, -1, self.full)

    def start_output_scatter(self, x: Tensor) -> PendingCollective:
        """Start a reduce-scatter that sums the partial products x over a row of the grid."""
        return collectives.start_reduce_scatter(x, self.grid.column, self._get_sample_dim(x) if self.is_3d else -1)

    def start_weight_gather(self, weight: Tensor, dim: int) -> PendingCollective:
        """Start an all-gather of a weight along its hidden dim ``dim``, over the rows of the grid."""
        return collectives.start_all_gather(weight, self.grid.row, dim, self.num_row_features, purpose="weights")

    def start_weight_grad_scatter(self, grad: Tensor, dim: int) -> PendingCollective:
        return collectives.start_reduce_scatter(grad, self.grid.row, dim, purpose="weights")

    def reduce_partial_products(self, x: Tensor) -> Tensor:
        """Sum partial matmul products over the depth of a 3D grid, and return this rank's samples."""
        return reduce_scatter(x, self.grid.contraction, self._get_sample_dim(x))

    def gather_samples(self, x: Tensor) -> Tensor:
        """All-gather the samples of x over the depth of a 3D grid."""
        return all_gather(x, self.grid.contraction, self._get_sample_dim(x))


# b local samples, S sequence, H hidden, F features of one linear layer; lower case: local shard


def compute_grid_column_linears(
    x: Tensor, region: GridRegion, columns: Sequence[ColumnParallel], gathered_x: Tensor | None = None
) -> tuple[Tensor | None, list[Tensor]]:
    """Compute all column-parallel linear layers of a block on a tensor grid. Return the detached input and the outputs.

    In 3D the input stays sharded, and None is returned for it. ``gathered_x`` is the full input, if already gathered.
    """
    x, gathered_x, weights = cast_projection_operands(x, columns, gathered_x)
    full_x, *outputs = _GridColumnProjections.apply(
        x, None if region.is_3d else gathered_x, region, [c.transposed for c in columns], *weights
    )
    return None if region.is_3d else full_x, outputs


class _GridColumnProjections(Function):
    """Autograd function that computes all column-parallel linear layers of a block on a tensor grid.

    Saves only local shards.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gathered_x: Tensor | None,
        region: GridRegion,
        transposed: list[bool],
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = params[::2], params[1::2]
        ctx.region, ctx.transposed = region, transposed
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        arriving = None if gathered_x is not None else region.start_input_gather(x)
        gathered = _start_weight_gathers(region, weights, transposed)
        full_x = gathered_x if arriving is None else arriving.wait()
        assert full_x is not None
        outputs = []
        for weight, t, bias in zip(gathered, transposed, biases, strict=True):
            y = region.reduce_partial_products(linear_matmul(full_x, weight.wait(), None, t))
            outputs.append(y if bias is None else y + bias)
        visible = full_x.detach()
        ctx.mark_non_differentiable(visible)
        return (visible, *outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        region, (x, *weights) = ctx.region, ctx.saved_tensors
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        gathering = region.start_input_gather(x) if any(needs[::2]) else None
        arriving = _start_weight_gathers(region, weights, ctx.transposed) if needs_x else []
        gathered_grads = [None if grad is None else region.gather_samples(grad) for grad in grads]
        summed: Tensor | None = None
        for weight, grad, t in zip(arriving, gathered_grads, ctx.transposed, strict=False):
            full_weight = weight.wait()
            if grad is not None:
                product = linear_matmul(grad, full_weight, None, not t)
                summed = product if summed is None else summed.add_(product)
        leaving = None if summed is None else region.start_output_scatter(summed)
        full_x = None if gathering is None else gathering.wait()
        pending: list[PendingCollective | None] = []
        for i, (grad, t) in enumerate(zip(gathered_grads, ctx.transposed, strict=True)):
            w_grad = (
                compute_weight_grad(full_x, grad, t)
                if needs[2 * i] and grad is not None and full_x is not None
                else None
            )
            pending.append(None if w_grad is None else region.start_weight_grad_scatter(w_grad, get_hidden_dim(t)))
        out: list[Tensor | None] = []
        for i, (grad, w_pending) in enumerate(zip(grads, pending, strict=True)):
            out.append(None if w_pending is None else w_pending.wait())
            out.append(compute_bias_grad(grad) if needs[2 * i + 1] else None)
        x_grad = leaving.wait() if leaving is not None else torch.zeros_like(x) if needs_x else None
        return (x_grad, None, None, None, *out)


class GridRowParallelMatmul(Function):
    """Autograd function that computes a row-parallel linear layer on a tensor grid. Does not add the bias.

    Sums the products over a row of the grid. If the backward pass runs separately for the input and for the weight, it
    gathers the output gradient only once.
    """

    leaves_block = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool, region: GridRegion) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.region, ctx.gathered = transposed, region, None
        arriving = region.start_weight_gather(weight, 1 - get_hidden_dim(transposed))
        gathered = region.gather_samples(x)
        return region.start_output_scatter(linear_matmul(gathered, arriving.wait(), None, transposed)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        region, (x, weight), t = ctx.region, ctx.saved_tensors, ctx.transposed
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dim, gathered_x, ctx.gathered = 1 - get_hidden_dim(t), ctx.gathered, None
        arriving = region.start_weight_gather(weight, dim) if needs_x else None
        full_grad = region.start_input_gather(grad).wait() if gathered_x is None else gathered_x
        pending = None
        if needs_weight:
            pending = region.start_weight_grad_scatter(compute_weight_grad(region.gather_samples(x), full_grad, t), dim)
        else:
            ctx.gathered = full_grad
        x_grad = (
            None
            if arriving is None
            else region.reduce_partial_products(linear_matmul(full_grad, arriving.wait(), None, not t))
        )
        return x_grad, None if pending is None else pending.wait(), None, None


def get_hidden_dim(transposed: bool) -> int:
    """Return which dim of a column-parallel weight is the hidden dim: 0 if stored transposed, otherwise 1."""
    return 0 if transposed else 1


def _start_weight_gathers(
    region: GridRegion, weights: Sequence[Tensor | None], transposed: Sequence[bool]
) -> list[PendingCollective]:
    return [
        region.start_weight_gather(w, get_hidden_dim(t))
        for w, t in zip(weights, transposed, strict=True)
        if w is not None
    ]


class GridTensorParallelBlock(TensorParallelBlock):
    """Tensor-parallel block in 2D, 2.5D or 3D tensor parallelism. If the input is replicated, gathers the weights."""

    def _compute_all_column_outputs(self, gathered_x: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        region = self.region
        assert self._source is not None and self._entered is not None
        if isinstance(region, GridRegion):
            return compute_grid_column_linears(self._source, region, self.columns, gathered_x)
        return None, [column.multiply(self._entered) for column in self.columns]

    def compute_column_output(self, column: ColumnParallel, x: Tensor) -> Tensor:
        region = self._region
        reads_input = self._source is not None and (x is self._source or x is self._entered)
        if not torch.compiler.is_compiling() or not isinstance(region, GridRegion) or not reads_input:
            return super().compute_column_output(column, x)
        if self._joined is None:
            assert self._source is not None
            self._joined = region.gather_input(self._source)
        return region.compute_column_output(self._joined, column)


# --- the layers. They are parts of a block; ``benchmarks.summa_linear`` has linear layers that work without a block.
# b local samples, S sequence, H hidden, F features; lower case: local shard


class GridModule(ParallelModule):
    """Base class of the layers in 2D, 2.5D and 3D tensor parallelism, which are sharded over a tensor grid."""

    takes_grid = True
    grid: TensorGrid

    @property
    def coords(self) -> Coords:
        return self.grid.coords


def get_hidden_splits(hidden_size: int, grid: TensorGrid) -> list[AnySplit]:
    """Return how the hidden dim of a weight is split over a tensor grid: over depth (only in 3D), then over rows."""
    size = grid.contraction.size * grid.row.size
    if hidden_size < size:
        raise ConfigError(
            f"The hidden size {hidden_size} cannot be sharded over {size} ranks of the tensor grid {grid}.",
            remedy="Use a tensor grid with fewer rows.",
        )
    contraction = grid.contraction
    over_contraction = (
        [Split.even(hidden_size, contraction.size, axes=(contraction.name,))] if grid.mode == "3d" else []
    )
    return [*over_contraction, EvenSplit(grid.row.name, grid.row.size)]


class _GridLinear(GridModule):
    """Mixin that shards a tensor-parallel linear layer over a tensor grid instead of a single axis."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Shard an nn.Linear, or a transformers Conv1D, over a ``TensorGrid``."""
        return super().from_native_module(module, process_group.column, grid=process_group, **kwargs)

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, grid: TensorGrid, **kw: Any) -> None:
        self.__dict__["grid"] = grid
        super().__init__(in_features, out_features, bias, **kw)  # type: ignore[call-arg, arg-type]  # Linear1D_Col, _Row


class GridLinear_Col(_GridLinear, Linear1D_Col):
    """Column-parallel linear layer on a tensor grid: (b, S, H) -> (b, S, f).

    The weight is sharded along F over columns, by the split of its role, and along H over rows (in 3D first over
    depth). In a block, the block communicates. Outside a block, the layer gathers its weight (backward: a
    reduce-scatter).
    """

    def _make_weight_and_bias_specs(self, shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        dim = get_hidden_dim(self.transposed)
        splits: dict[int, AnySplit | list[AnySplit]] = {1 - dim: self.split}
        splits[dim] = get_hidden_splits(self.in_features, self.grid)
        return ShardSpec(shape, splits), ShardSpec((self.out_features,), {0: self.split})

    def multiply(self, x: Tensor) -> Tensor:
        weight = gather_weight(self.weight, self.grid, get_hidden_dim(self.transposed), self.in_features)
        return linear_matmul(x, weight, self.fused_bias, self.transposed)


class GridLinear_Row(_GridLinear, Linear1D_Row):
    """Row-parallel linear layer on a tensor grid: (b, S, f) -> (b, S, h).

    The weight is sharded as in ``GridLinear_Col``, and the bias along H like the activations.
    """

    def _make_weight_and_bias_specs(self, shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        dim, grid = 1 - get_hidden_dim(self.transposed), self.grid
        splits: dict[int, AnySplit | list[AnySplit]] = {1 - dim: self.split}
        splits[dim] = get_hidden_splits(self.out_features, grid)
        bias_split = Split.even(self.out_features, grid.hidden.size, axes=(grid.hidden.name,))
        return ShardSpec(shape, splits), ShardSpec((self.out_features,), {0: bias_split})

    def _get_output_width(self, region: TpRegion) -> int:
        if not isinstance(region, GridRegion):
            return self.out_features
        return get_even_split_length(self.out_features, self.grid.hidden)

    def _compute_reduced_product(self, x: Tensor, weight: Tensor, region: TpRegion) -> Tensor:
        if isinstance(region, GridRegion):
            if torch.compiler.is_compiling():
                return region.multiply_and_reduce(x, weight, self.transposed)
            y: Tensor = GridRowParallelMatmul.apply(x, weight, self.transposed, region)
            return y
        weight = gather_weight(weight, self.grid, 1 - get_hidden_dim(self.transposed), self.out_features)
        return reduce_from_tp_region(linear_matmul(x, weight, None, self.transposed), self.grid.column)

    def _get_output_bias(self, y: Tensor) -> Tensor | None:
        if self.bias is None or y.shape[-1] != self.out_features:
            return self.bias
        split = Split.even(self.out_features, self.grid.hidden.size, axes=(self.grid.hidden.name,))
        return gather_from_region(self.bias, self.grid.hidden, 0, split)


def gather_weight(weight: Tensor, grid: TensorGrid, dim: int, hidden_size: int) -> Tensor:
    """All-gather a weight over the tensor grid along its hidden dim ``dim``. Backward: reduce-scatter its gradient."""
    contracted = get_even_split_length(hidden_size, grid.contraction)
    return gather_from_sp_region(
        gather_from_sp_region(weight, grid.row, dim, contracted), grid.contraction, dim, hidden_size
    )


@dataclass(frozen=True)
class ParallelLayerClasses:
    """Layer classes that a tensor-parallel mode, such as 2D, uses for linear layers, embeddings and norms."""

    column: type[ParallelModule]  # the first linear layers of a block
    row: type[ParallelModule]  # the last linear layer of a block
    norm: type[ParallelModule]  # a norm over sharded features inside a block
    bias_table: type[ParallelModule]  # an embedding inside a block whose columns are heads
    embedding: type[ParallelModule]  # the vocabulary embedding
    head: type[ParallelModule]  # the linear layer that computes logits


_1D = ParallelLayerClasses(
    Linear1D_Col, Linear1D_Row, ShardedNorm, Embedding1D, VocabParallelEmbedding1D, VocabParallelLMHead1D
)
LAYERS_BY_MODE = {"1d": _1D} | dict.fromkeys(GRID_MODES, replace(_1D, column=GridLinear_Col, row=GridLinear_Row))
"""``tensor_parallel_mode`` -> its layer classes."""


# H hidden; h: local shard


class GridNorm(ShardedNorm):
    """Layer norm or RMS norm on a tensor grid, over hidden features that are sharded or replicated.

    (..., h) -> (..., h) for a sharded input, or (..., H) -> (..., H).

    Communicates for (..., h): forward one all-reduce of one number per token for an RMS norm, or one all-gather of the
    local means and sums of squares for a layer norm; backward one all-reduce of one or two numbers per token.
    For (..., H): one all-gather of the weight.
    """

    takes_grid = True

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Shard a layer norm or an RMS norm over a ``TensorGrid``. Raises ConfigError like ``ShardedNorm``."""
        grid: TensorGrid = process_group
        return super().from_native_module(module, grid.hidden, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1:
            return super().forward(x)
        if x.shape[-1] != self.full:
            if self.kind != "layer":
                return super().forward(x)
            local_params = (self._parameters["weight"], self._parameters.get("bias"))
            return sharded_layer_norm(x, *local_params, self.axis, self.full, self.eps)
        params = (self._parameters.get(name) for name in ("weight", "bias"))
        weight, bias = (None if p is None else gather_from_region(p, self.axis, 0, self.split) for p in params)
        if self.kind != "layer":
            return rms_norm(self.kind, x, weight, self.eps)
        return nn.functional.layer_norm(x, (self.full,), weight, bias, self.eps)


def sharded_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, axis: Axis, full_width: int, eps: float
) -> Tensor:
    """Apply a layer norm to features that are sharded over ``axis``, and compute it in fp32 or fp64."""
    x32 = x if x.dtype == torch.float64 else x.to(torch.float32)
    normed: Tensor = _Normalize.apply(x32, axis, full_width, eps)
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
        counts = torch.tensor(Split.even(full, axis.size).get_local_lengths(), dtype=x.dtype, device=x.device)
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
