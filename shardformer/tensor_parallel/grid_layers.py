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
    gather_from_parallel_region,
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
    ColumnParallelLinear,
    TpRegion,
    apply_with_custom_backward,
    cast_matmul_operands,
    compute_bias_grad,
    compute_weight_grad,
    get_even_shard_length,
    linear_matmul,
)
from shardformer.tensor_parallel.parallel_module import ParallelModule

# B batch, b local samples, S sequence, H hidden, h local hidden features


@dataclass(frozen=True)
class GridTensorParallelRegion:
    """Collectives at the input and the output of a block in 2D, 2.5D or 3D tensor parallelism."""

    grid: TensorGrid
    hidden_size: int  # the number of hidden features on all ranks
    batch_dim: int = 0  # the sample dim of activations with three or more dims; for fewer it is 0

    @property
    def is_3d(self) -> bool:
        return self.grid.mode == "3d"

    @property
    def num_features_per_depth_layer(self) -> int:
        """Number of hidden features in one depth layer of a 3D grid, or the full hidden size in 2D and 2.5D."""
        return get_even_shard_length(self.hidden_size, self.grid.contraction)

    def get_num_local_samples_in_block(self, hidden_states: Tensor) -> int:
        """Compute how many samples this rank processes inside a block, from the block's input."""
        return hidden_states.shape[self._get_sample_dim(hidden_states)] * self.grid.batch.size // self.grid.core.size

    def _get_sample_dim(self, hidden_states: Tensor) -> int:
        return self.batch_dim if hidden_states.dim() > 2 else 0

    def get_local_leading_shape(self, hidden_states: Tensor) -> tuple[int, ...]:
        """Compute the shape of this rank's block output without the hidden dim, from an activation in the block."""
        dim = self._get_sample_dim(hidden_states)
        samples = hidden_states.shape[dim] * self.grid.core.size // self.grid.batch.size
        return (*hidden_states.shape[:dim], samples, *hidden_states.shape[dim + 1 : -1])

    def enter(self, hidden_states: Tensor) -> Tensor:
        """Wrap this rank's block input in a full input (b, S, H), which is gathered when it is first used."""
        dim = self._get_sample_dim(hidden_states)
        shape = (
            *hidden_states.shape[:dim],
            self.get_num_local_samples_in_block(hidden_states),
            *hidden_states.shape[dim + 1 : -1],
            self.hidden_size,
        )
        return DeferredTensor.from_local(
            hidden_states, shape, self.grid.column, None, self._gather_block_input, self._reduce_block_input_grad
        )

    def _gather_block_input(self, local_input: Tensor) -> Tensor:
        if not self.is_3d:
            return all_gather(local_input, self.grid.column, -1, self.hidden_size)
        full = all_gather(
            all_gather(local_input, self.grid.column, self._get_sample_dim(local_input)),
            self.grid.depth,
            -1,
            self.hidden_size,
        )
        return get_local_chunk(full, self.grid.depth, self._get_sample_dim(full))

    def _reduce_block_input_grad(self, grad: Tensor) -> Tensor:
        """Run the backward pass of ``_gather_block_input``: sum the gradients and return this rank's shard."""
        if not self.is_3d:
            return reduce_scatter(grad, self.grid.column, -1)
        full = all_gather(grad, self.grid.depth, self._get_sample_dim(grad))
        local = get_local_chunk(full, self.grid.depth, full.dim() - 1)
        return reduce_scatter(local, self.grid.column, self._get_sample_dim(full))

    # --- communication of a compiled block, whose gathers autograd reverses

    def get_full_block_input(self, hidden_states: Tensor) -> Tensor:
        """Gather the full input (b, S, H) of a block that is compiled with torch.compile."""
        return apply_with_custom_backward(hidden_states, self._gather_block_input, self._reduce_block_input_grad)

    def gather_column_input(self, hidden_states: Tensor) -> Tensor:
        """All-gather the input of the column-parallel layers along the hidden dim, or in 3D along the samples."""
        dim = self._get_sample_dim(hidden_states) if self.is_3d else -1
        full = hidden_states.shape[dim] * self.grid.column.size if self.is_3d else self.hidden_size
        return gather_from_sp_region(hidden_states, self.grid.column, dim, full)

    def compute_column_output(self, hidden_states: Tensor, column_linear: ColumnParallelLinear) -> Tensor:
        """Compute a column-parallel linear layer for an input that ``gather_column_input`` returned."""
        weight, dim = column_linear.weight, get_weight_hidden_dim(column_linear.transposed)
        weight = gather_from_sp_region(weight, self.grid.row, dim, self.num_features_per_depth_layer)
        y = linear_matmul(hidden_states, weight, None, column_linear.transposed)
        y = reduce_scatter_to_sp_region(y, self.grid.contraction, self._get_sample_dim(y))
        return y if column_linear.fused_bias is None else y + column_linear.fused_bias.to(y.dtype)

    def row_parallel_matmul(self, hidden_states: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        """Compute a row-parallel linear layer without its bias, and return this rank's shard of the output."""
        contraction, dim = self.grid.contraction, self._get_sample_dim(hidden_states)
        weight = gather_from_sp_region(
            weight, self.grid.row, 1 - get_weight_hidden_dim(transposed), self.num_features_per_depth_layer
        )
        gathered = gather_from_sp_region(hidden_states, contraction, dim, hidden_states.shape[dim] * contraction.size)
        y = linear_matmul(gathered, weight, None, transposed)
        return reduce_scatter_to_sp_region(y, self.grid.column, dim if self.is_3d else -1)

    # --- communication of the column- and row-parallel products

    def start_input_all_gather(self, matmul_input: Tensor) -> PendingCollective:
        """Start an all-gather of a matmul input along the hidden dim, or in 3D along the samples."""
        if self.is_3d:
            return collectives.start_all_gather(matmul_input, self.grid.column, self._get_sample_dim(matmul_input))
        return collectives.start_all_gather(matmul_input, self.grid.column, -1, self.hidden_size)

    def start_output_reduce_scatter(self, partial_products: Tensor) -> PendingCollective:
        """Start a reduce-scatter that sums the partial products over a row of the grid."""
        return collectives.start_reduce_scatter(
            partial_products, self.grid.column, self._get_sample_dim(partial_products) if self.is_3d else -1
        )

    def start_weight_all_gather(self, weight: Tensor, hidden_dim: int) -> PendingCollective:
        """Start an all-gather of a weight along its hidden dim ``hidden_dim``, over the rows of the grid."""
        return collectives.start_all_gather(
            weight, self.grid.row, hidden_dim, self.num_features_per_depth_layer, purpose="weights"
        )

    def start_weight_grad_reduce_scatter(self, grad: Tensor, hidden_dim: int) -> PendingCollective:
        return collectives.start_reduce_scatter(grad, self.grid.row, hidden_dim, purpose="weights")

    def reduce_scatter_partial_products(self, partial_products: Tensor) -> Tensor:
        """Sum partial matmul products over the depth of a 3D grid, and return this rank's samples."""
        return reduce_scatter(partial_products, self.grid.contraction, self._get_sample_dim(partial_products))

    def all_gather_samples(self, tensor: Tensor) -> Tensor:
        """All-gather the samples of ``tensor`` over the depth of a 3D grid."""
        return all_gather(tensor, self.grid.contraction, self._get_sample_dim(tensor))


# b local samples, S sequence, H hidden, F features of one linear layer; lower case: local shard


def compute_grid_column_linears(
    hidden_states: Tensor,
    region: GridTensorParallelRegion,
    column_linears: Sequence[ColumnParallelLinear],
    gathered_input: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor]]:
    """Compute a block's column-parallel linear layers on a tensor grid. Returns the detached input and the outputs.

    In 3D the input stays sharded, and None is returned for it. ``gathered_input`` is the full input, if already
    gathered.
    """
    hidden_states, gathered_input, weights = cast_matmul_operands(hidden_states, column_linears, gathered_input)
    full_x, *outputs = _GridColumnParallelLinears.apply(
        hidden_states,
        None if region.is_3d else gathered_input,
        region,
        [c.transposed for c in column_linears],
        *weights,
    )
    return None if region.is_3d else full_x, outputs


class _GridColumnParallelLinears(Function):
    """Autograd function that computes all column-parallel linear layers of a block on a tensor grid.

    Saves only local shards.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        gathered_input: Tensor | None,
        region: GridTensorParallelRegion,
        transposed: list[bool],
        *weights_and_biases: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        ctx.region, ctx.transposed = region, transposed
        ctx.save_for_backward(hidden_states, *weights)
        ctx.set_materialize_grads(False)
        arriving = None if gathered_input is not None else region.start_input_all_gather(hidden_states)
        gathered = _start_weight_all_gathers(region, weights, transposed)
        full_x = gathered_input if arriving is None else arriving.wait()
        assert full_x is not None
        outputs = []
        for weight, t, bias in zip(gathered, transposed, biases, strict=True):
            y = region.reduce_scatter_partial_products(linear_matmul(full_x, weight.wait(), None, t))
            outputs.append(y if bias is None else y + bias)
        visible = full_x.detach()
        ctx.mark_non_differentiable(visible)
        return (visible, *outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        region, (x, *weights) = ctx.region, ctx.saved_tensors
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        gathering = region.start_input_all_gather(x) if any(needs[::2]) else None
        arriving = _start_weight_all_gathers(region, weights, ctx.transposed) if needs_x else []
        gathered_grads = [None if grad is None else region.all_gather_samples(grad) for grad in grad_outputs]
        summed: Tensor | None = None
        for weight, grad, t in zip(arriving, gathered_grads, ctx.transposed, strict=False):
            full_weight = weight.wait()
            if grad is not None:
                product = linear_matmul(grad, full_weight, None, not t)
                summed = product if summed is None else summed.add_(product)
        leaving = None if summed is None else region.start_output_reduce_scatter(summed)
        full_x = None if gathering is None else gathering.wait()
        pending: list[PendingCollective | None] = []
        for i, (grad, t) in enumerate(zip(gathered_grads, ctx.transposed, strict=True)):
            w_grad = (
                compute_weight_grad(full_x, grad, t)
                if needs[2 * i] and grad is not None and full_x is not None
                else None
            )
            pending.append(
                None if w_grad is None else region.start_weight_grad_reduce_scatter(w_grad, get_weight_hidden_dim(t))
            )
        out: list[Tensor | None] = []
        for i, (grad, w_pending) in enumerate(zip(grad_outputs, pending, strict=True)):
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
    def forward(
        ctx: Any, hidden_states: Tensor, weight: Tensor, transposed: bool, region: GridTensorParallelRegion
    ) -> Tensor:
        ctx.save_for_backward(hidden_states, weight)
        ctx.transposed, ctx.region, ctx.gathered = transposed, region, None
        arriving = region.start_weight_all_gather(weight, 1 - get_weight_hidden_dim(transposed))
        gathered = region.all_gather_samples(hidden_states)
        return region.start_output_reduce_scatter(linear_matmul(gathered, arriving.wait(), None, transposed)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        region, (x, weight), t = ctx.region, ctx.saved_tensors, ctx.transposed
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dim, gathered_x, ctx.gathered = 1 - get_weight_hidden_dim(t), ctx.gathered, None
        arriving = region.start_weight_all_gather(weight, dim) if needs_x else None
        full_grad = region.start_input_all_gather(grad_output).wait() if gathered_x is None else gathered_x
        pending = None
        if needs_weight:
            pending = region.start_weight_grad_reduce_scatter(
                compute_weight_grad(region.all_gather_samples(x), full_grad, t), dim
            )
        else:
            ctx.gathered = full_grad
        x_grad = (
            None
            if arriving is None
            else region.reduce_scatter_partial_products(linear_matmul(full_grad, arriving.wait(), None, not t))
        )
        return x_grad, None if pending is None else pending.wait(), None, None


def get_weight_hidden_dim(transposed: bool) -> int:
    """Return the index of the hidden dim of a column-parallel weight: 0 if stored transposed, otherwise 1."""
    return 0 if transposed else 1


def _start_weight_all_gathers(
    region: GridTensorParallelRegion, weights: Sequence[Tensor | None], transposed_flags: Sequence[bool]
) -> list[PendingCollective]:
    return [
        region.start_weight_all_gather(w, get_weight_hidden_dim(t))
        for w, t in zip(weights, transposed_flags, strict=True)
        if w is not None
    ]


class GridTensorParallelBlock(TensorParallelBlock):
    """Tensor-parallel block in 2D, 2.5D or 3D tensor parallelism. If the input is replicated, gathers the weights."""

    def _compute_all_column_outputs(self, gathered_input: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        region = self.region
        assert self._local_input is not None and self._block_input is not None
        if isinstance(region, GridTensorParallelRegion):
            return compute_grid_column_linears(self._local_input, region, self.columns, gathered_input)
        return None, [column.multiply(self._block_input) for column in self.columns]

    def compute_column_output(self, column_linear: ColumnParallelLinear, hidden_states: Tensor) -> Tensor:
        region = self._region
        reads_input = self._local_input is not None and (
            hidden_states is self._local_input or hidden_states is self._block_input
        )
        if not torch.compiler.is_compiling() or not isinstance(region, GridTensorParallelRegion) or not reads_input:
            return super().compute_column_output(column_linear, hidden_states)
        if self._shared_input is None:
            assert self._local_input is not None
            self._shared_input = region.gather_column_input(self._local_input)
        return region.compute_column_output(self._shared_input, column_linear)


# --- the layers. They are parts of a block; ``benchmarks.summa_linear`` has linear layers that work without a block.
# b local samples, S sequence, H hidden, F features; lower case: local shard


class GridParallelModule(ParallelModule):
    """Base class of the layers in 2D, 2.5D and 3D tensor parallelism, which are sharded over a tensor grid."""

    takes_grid = True
    grid: TensorGrid

    @property
    def coords(self) -> Coords:
        return self.grid.coords


def get_hidden_dim_splits(hidden_size: int, grid: TensorGrid) -> list[AnySplit]:
    """Split the hidden dim of a weight over a grid of ranks: over depth (only in 3D), then over rows."""
    size = grid.contraction.size * grid.row.size
    if hidden_size < size:
        raise ConfigError(
            f"The hidden size {hidden_size} is too small to shard over {size} ranks of the tensor grid {grid}.",
            remedy="Use a tensor grid with fewer rows.",
        )
    contraction = grid.contraction
    over_contraction = (
        [Split.even(hidden_size, contraction.size, axes=(contraction.name,))] if grid.mode == "3d" else []
    )
    return [*over_contraction, EvenSplit(grid.row.name, grid.row.size)]


class _GridLinearMixin(GridParallelModule):
    """Mixin that shards a tensor-parallel linear layer over a tensor grid instead of a single axis."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Shard an nn.Linear, or a transformers Conv1D, over a ``TensorGrid``."""
        return super().from_native_module(module, process_group.column, grid=process_group, **kwargs)

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, grid: TensorGrid, **kwargs: Any
    ) -> None:
        self.__dict__["grid"] = grid
        super().__init__(in_features, out_features, bias, **kwargs)  # type: ignore[call-arg, arg-type]  # Linear1D_Col, _Row


class GridLinear_Col(_GridLinearMixin, Linear1D_Col):
    """Column-parallel linear layer on a tensor grid: (b, S, H) -> (b, S, f).

    The weight is sharded along F over columns, by the split of its role, and along H over rows (in 3D first over
    depth). In a block, the block communicates. Outside a block, the layer gathers its weight (backward: a
    reduce-scatter).
    """

    def _make_weight_and_bias_specs(self, weight_shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        dim = get_weight_hidden_dim(self.transposed)
        splits: dict[int, AnySplit | list[AnySplit]] = {1 - dim: self.split}
        splits[dim] = get_hidden_dim_splits(self.in_features, self.grid)
        return ShardSpec(weight_shape, splits), ShardSpec((self.out_features,), {0: self.split})

    def multiply(self, hidden_states: Tensor) -> Tensor:
        weight = all_gather_weight(self.weight, self.grid, get_weight_hidden_dim(self.transposed), self.in_features)
        return linear_matmul(hidden_states, weight, self.fused_bias, self.transposed)


class GridLinear_Row(_GridLinearMixin, Linear1D_Row):
    """Row-parallel linear layer on a tensor grid: (b, S, f) -> (b, S, h).

    The weight is sharded as in ``GridLinear_Col``, and the bias along H like the activations.
    """

    def _make_weight_and_bias_specs(self, weight_shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        dim, grid = 1 - get_weight_hidden_dim(self.transposed), self.grid
        splits: dict[int, AnySplit | list[AnySplit]] = {1 - dim: self.split}
        splits[dim] = get_hidden_dim_splits(self.out_features, grid)
        bias_split = Split.even(self.out_features, grid.hidden.size, axes=(grid.hidden.name,))
        return ShardSpec(weight_shape, splits), ShardSpec((self.out_features,), {0: bias_split})

    def _get_num_output_features(self, region: TpRegion) -> int:
        if not isinstance(region, GridTensorParallelRegion):
            return self.out_features
        return get_even_shard_length(self.out_features, self.grid.hidden)

    def _row_parallel_matmul(self, hidden_states: Tensor, weight: Tensor, region: TpRegion) -> Tensor:
        if isinstance(region, GridTensorParallelRegion):
            if torch.compiler.is_compiling():
                return region.row_parallel_matmul(hidden_states, weight, self.transposed)
            y: Tensor = GridRowParallelMatmul.apply(hidden_states, weight, self.transposed, region)
            return y
        weight = all_gather_weight(weight, self.grid, 1 - get_weight_hidden_dim(self.transposed), self.out_features)
        return reduce_from_tp_region(linear_matmul(hidden_states, weight, None, self.transposed), self.grid.column)

    def _get_output_bias(self, output: Tensor) -> Tensor | None:
        if self.bias is None or output.shape[-1] != self.out_features:
            return self.bias
        split = Split.even(self.out_features, self.grid.hidden.size, axes=(self.grid.hidden.name,))
        return gather_from_parallel_region(self.bias, self.grid.hidden, 0, split)


def all_gather_weight(weight: Tensor, grid: TensorGrid, hidden_dim: int, hidden_size: int) -> Tensor:
    """All-gather a weight over the tensor grid along ``hidden_dim``. Backward: reduce-scatter its gradient."""
    contracted = get_even_shard_length(hidden_size, grid.contraction)
    return gather_from_sp_region(
        gather_from_sp_region(weight, grid.row, hidden_dim, contracted), grid.contraction, hidden_dim, hidden_size
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

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.axis.size == 1:
            return super().forward(hidden_states)
        if hidden_states.shape[-1] != self.full:
            if self.kind != "layer":
                return super().forward(hidden_states)
            local_params = (self._parameters["weight"], self._parameters.get("bias"))
            return sharded_layer_norm(hidden_states, *local_params, self.axis, self.full, self.eps)
        params = (self._parameters.get(name) for name in ("weight", "bias"))
        weight, bias = (None if p is None else gather_from_parallel_region(p, self.axis, 0, self.split) for p in params)
        if self.kind != "layer":
            return rms_norm(self.kind, hidden_states, weight, self.eps)
        return nn.functional.layer_norm(hidden_states, (self.full,), weight, bias, self.eps)


def sharded_layer_norm(
    hidden_states: Tensor, weight: Tensor | None, bias: Tensor | None, axis: Axis, num_features: int, eps: float
) -> Tensor:
    """Apply layer norm to features that are sharded over ``axis``, computed in fp32 or fp64."""
    x32 = hidden_states if hidden_states.dtype == torch.float64 else hidden_states.to(torch.float32)
    normed: Tensor = _ShardedNormalize.apply(x32, axis, num_features, eps)
    y = normed if weight is None else normed * weight
    return (y if bias is None else y + bias).to(hidden_states.dtype)


class _ShardedNormalize(Function):
    """Autograd function that normalizes sharded features to mean 0 and variance 1.

    Combines the local means and sums of squares of all ranks (Chan et al. 1979).
    """

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, axis: Axis, num_features: int, eps: float) -> Tensor:
        local_mean = hidden_states.mean(-1)
        squares = (hidden_states - local_mean[..., None]).square().sum(-1)
        means, sums = all_gather(torch.stack((local_mean, squares))[None], axis, 0, purpose="norm").unbind(1)
        counts = torch.tensor(
            Split.even(num_features, axis.size).get_local_lengths(),
            dtype=hidden_states.dtype,
            device=hidden_states.device,
        )
        counts = counts.view(-1, *[1] * local_mean.dim())
        mean = (means * counts).sum(0) / num_features
        variance = (sums + counts * (means - mean).square()).sum(0) / num_features
        scale = torch.rsqrt(variance + eps)[..., None]
        y = (hidden_states - mean[..., None]) * scale
        ctx.axis, ctx.full = axis, num_features
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        y, scale = ctx.saved_tensors
        sums = torch.stack((grad_output.sum(-1), (grad_output * y).sum(-1)))
        grad_mean, product_mean = all_reduce(sums, ctx.axis, purpose="norm")[..., None] / ctx.full
        return scale * (grad_output - grad_mean - y * product_mean), None, None, None
