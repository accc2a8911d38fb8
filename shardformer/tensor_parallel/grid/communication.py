"""Communication at the entry and the exit of a block on a tensor grid (2D, 2.5D and 3D tensor parallelism).

              2D, 2.5D                                3D
    entry     all-gather of hidden over columns       all-gather of samples over columns
    weights   all-gather of hidden over rows          the same; partial products reduce-scattered over depth
    exit      reduce-scatter of hidden over columns   all-gather of samples over depth, reduce-scatter over columns

In the backward, each all-gather becomes a reduce-scatter and vice versa. Only local shards are saved, and gathered
again in the backward. The axes may have different sizes (Xu et al. 2021, "An efficient 2D method for training
super-large deep learning models"; Wang et al. 2021, "2.5-dimensional distributed model training"; Bian et al. 2021,
"Maximizing parallelism in distributed training for huge neural networks").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm import collectives
from shardformer.comm.autograd_collectives import gather_from_region, once_differentiable, scatter_to_region
from shardformer.comm.collectives import PendingCollective, all_gather, local_chunk, reduce_scatter
from shardformer.comm.deferred_tensor import DeferredTensor, resolve_deferred
from shardformer.errors import InputError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.layout.activation_layout import ActivationLayout
from shardformer.layout.shard_spec import Split
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.tensor_parallel.block import TensorParallelBlock
from shardformer.tensor_parallel.region import (
    ColumnParallel,
    LocalRandomState,
    ReplicatedRegion,
    TpRegion,
    cast_projection_operands,
    compute_bias_grad,
    compute_weight_grad,
    linear_matmul,
    local_length,
    with_backward,
)
from shardformer.tensor_parallel.sequence_parallel import (
    GatherHook,
    StackActivations,
    map_first_output,
    map_first_tensor,
)
from shardformer.torch_compat import current_graph_task_id
from shardformer.transformers_compat import caches_in, holds_tokens

# B batch, b local samples, S sequence, H hidden, h local hidden features


@dataclass(frozen=True)
class GridRegion:
    """Communication at the entry and the exit of a tensor-parallel block on a 2D, 2.5D or 3D tensor grid."""

    grid: TensorGrid
    full: int  # the number of hidden features on all ranks
    batch_dim: int = 0  # the sample dim of activations with three or more dims; for fewer it is 0

    @property
    def is_3d(self) -> bool:
        return self.grid.mode == "3d"

    @property
    def num_row_features(self) -> int:
        """Number of hidden features in one row of the grid: all in 2D and 2.5D, those of this depth in 3D."""
        return local_length(self.full, self.grid.contraction)

    def num_samples_inside_block(self, x: Tensor) -> int:
        """Return the number of local samples inside a block, for activations x between the blocks."""
        return x.shape[self._sample_dim(x)] * self.grid.batch.size // self.grid.core.size

    def _sample_dim(self, x: Tensor) -> int:
        return self.batch_dim if x.dim() > 2 else 0

    def leading_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape that x, an activation inside a block, has between the blocks, without the hidden dim."""
        dim = self._sample_dim(x)
        samples = x.shape[dim] * self.grid.core.size // self.grid.batch.size
        return (*x.shape[:dim], samples, *x.shape[dim + 1 : -1])

    def enter(self, x: Tensor) -> Tensor:
        """Return the block's input (b, S, H) for a local activation x, which is gathered on first use."""
        dim = self._sample_dim(x)
        shape = (*x.shape[:dim], self.num_samples_inside_block(x), *x.shape[dim + 1 : -1], self.full)
        return DeferredTensor.make(x, shape, self.grid.column, None, self._gather_hidden, self._reduce_gradient)

    def _gather_hidden(self, x: Tensor) -> Tensor:
        if not self.is_3d:
            return all_gather(x, self.grid.column, -1, self.full)
        full = all_gather(all_gather(x, self.grid.column, self._sample_dim(x)), self.grid.depth, -1, self.full)
        return local_chunk(full, self.grid.depth, self._sample_dim(full))

    def _reduce_gradient(self, grad: Tensor) -> Tensor:
        """Sum the gradient of ``_gather_hidden`` over the ranks of a row, and return the local shard."""
        if not self.is_3d:
            return reduce_scatter(grad, self.grid.column, -1)
        full = all_gather(grad, self.grid.depth, self._sample_dim(grad))
        local = local_chunk(full, self.grid.depth, full.dim() - 1)
        return reduce_scatter(local, self.grid.column, self._sample_dim(full))

    # --- communication of the column- and row-parallel products

    def start_input_gather(self, x: Tensor) -> PendingCollective:
        """Start to all-gather the hidden features of a matmul input, or its samples on a 3D grid."""
        if self.is_3d:
            return collectives.start_all_gather(x, self.grid.column, self._sample_dim(x))
        return collectives.start_all_gather(x, self.grid.column, -1, self.full)

    def start_output_scatter(self, x: Tensor) -> PendingCollective:
        """Start the reduce-scatter of the partial products x over the ranks of a row."""
        return collectives.start_reduce_scatter(x, self.grid.column, self._sample_dim(x) if self.is_3d else -1)

    def start_weight_gather(self, weight: Tensor, dim: int) -> PendingCollective:
        """Start the all-gather of a weight's hidden dim ``dim`` over the rows of the grid."""
        return collectives.start_all_gather(weight, self.grid.row, dim, self.num_row_features, purpose="weights")

    def start_weight_grad_scatter(self, grad: Tensor, dim: int) -> PendingCollective:
        return collectives.start_reduce_scatter(grad, self.grid.row, dim, purpose="weights")

    def reduce_partial_products(self, x: Tensor) -> Tensor:
        """Sum partial products over the contraction axis, and return the local samples. Only in 3D."""
        return reduce_scatter(x, self.grid.contraction, self._sample_dim(x))

    def gather_samples(self, x: Tensor) -> Tensor:
        """All-gather the samples of x for a matmul with a weight that is sharded over depth. Only in 3D."""
        return all_gather(x, self.grid.contraction, self._sample_dim(x))


# b local samples, S sequence, H hidden, F features of one linear; lower case: local shard


def project_grid_columns(
    x: Tensor, region: GridRegion, columns: Sequence[ColumnParallel], gathered_x: Tensor | None = None
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the detached input of the column-parallel linears, and their outputs, on a tensor grid.

    In 3D the input stays sharded, and None is returned for it. ``gathered_x`` is the full input, if already gathered.
    """
    x, gathered_x, weights = cast_projection_operands(x, columns, gathered_x)
    full_x, *outputs = _GridColumnProjections.apply(
        x, None if region.is_3d else gathered_x, region, [c.transposed for c in columns], *weights
    )
    return None if region.is_3d else full_x, outputs


class _GridColumnProjections(Function):
    """Autograd function that multiplies the block input by all column-parallel weights of a tensor grid.

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
            pending.append(None if w_grad is None else region.start_weight_grad_scatter(w_grad, hidden_dim(t)))
        out: list[Tensor | None] = []
        for i, (grad, w_pending) in enumerate(zip(grads, pending, strict=True)):
            out.append(None if w_pending is None else w_pending.wait())
            out.append(compute_bias_grad(grad) if needs[2 * i + 1] else None)
        x_grad = leaving.wait() if leaving is not None else torch.zeros_like(x) if needs_x else None
        return (x_grad, None, None, None, *out)


class GridRowParallelMatmul(Function):
    """Row-parallel linear without bias on a tensor grid, which sums the products of a row of ranks.

    If the backward runs separately for the input and for the weight, it gathers the output gradient only once.
    """

    leaves_block = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool, region: GridRegion) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.region, ctx.gathered = transposed, region, None
        arriving = region.start_weight_gather(weight, 1 - hidden_dim(transposed))
        gathered = region.gather_samples(x)
        return region.start_output_scatter(linear_matmul(gathered, arriving.wait(), None, transposed)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        region, (x, weight), t = ctx.region, ctx.saved_tensors, ctx.transposed
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dim, gathered_x, ctx.gathered = 1 - hidden_dim(t), ctx.gathered, None
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


def hidden_dim(transposed: bool) -> int:
    """Return the hidden dim of a column-parallel weight: 0 if it is stored transposed, otherwise 1."""
    return 0 if transposed else 1


def _start_weight_gathers(
    region: GridRegion, weights: Sequence[Tensor | None], transposed: Sequence[bool]
) -> list[PendingCollective]:
    return [
        region.start_weight_gather(w, hidden_dim(t)) for w, t in zip(weights, transposed, strict=True) if w is not None
    ]


class GridTensorParallelBlock(TensorParallelBlock):
    """State of one tensor-parallel block on a tensor grid. Gathers the weights if the input is replicated."""

    def _project_all_columns(self, gathered_x: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        region = self.region
        assert self._source is not None and self._entered is not None
        if isinstance(region, GridRegion):
            return project_grid_columns(self._source, region, self.columns, gathered_x)
        return None, [column.multiply(self._entered) for column in self.columns]


# B batch, b local samples, S sequence, H hidden, h local hidden features


class GridStackActivations(StackActivations):
    """Sharding of the activations between the blocks of a stack, over samples and hidden features.

    Pads a batch that does not divide with copies of its last sample, and drops their outputs. Outside of training, a
    forward that reads or returns cached keys and values is replicated over the ranks.
    """

    def __init__(self, layout: ActivationLayout, grid: TensorGrid, *, random: bool = False) -> None:
        super().__init__(ActivationLayout(), grid.column)
        self.layout, self.grid, self.width = layout, grid, 0
        self.batch_dim = 0
        self._batch_sizes: set[int] = set()
        self._random = LocalRandomState(grid.whole, enabled=random)

    @property
    def is_sharded(self) -> bool:
        return self._is_open

    @property
    def sample_sharing_axis(self) -> Axis | None:
        return self.grid.hidden

    def select_region(self, x: Tensor) -> TpRegion | GridRegion:  # type: ignore[override]  # a block uses only common methods
        if current_graph_task_id() >= 0:
            self._is_open = True  # only forwards in training are recomputed
        return GridRegion(self.grid, self.width, self.batch_dim) if self._is_open else ReplicatedRegion(self.axis)

    def register(self, first: nn.Module, last: nn.Module) -> None:
        register_forward_hooks(first, HookOrder.STACK, self._enter_module, with_kwargs=True)
        register_forward_hooks(last, HookOrder.STACK, after=self._leave_module)

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_training = module.training or torch.is_grad_enabled()
        caches = caches_in((*args, *kwargs.values()))
        self._is_open = is_training or not (caches or kwargs.get("use_cache"))
        if is_training and any(map(holds_tokens, caches)) and current_graph_task_id() < 0:
            raise InputError(
                "A forward in training received cached keys and values, which a tensor grid does not support",
                remedy="Do not pass a cache in training. Prefix tuning needs tensor_parallel_mode='1d'",
            )
        return map_first_tensor(args, kwargs, lambda x: self.enter_stack(resolve_deferred(x), module.training))

    def enter_stack(self, x_BSH: Tensor, training: bool) -> Tensor:
        """Shard the stack's input (B, S, H) to (b, S, h). Backward: one all-gather over all ranks."""
        if not self._is_open:
            return x_BSH
        self.samples, self.width = x_BSH.shape[self.batch_dim], x_BSH.shape[-1]
        self._batch_sizes.add(self.samples)
        self._is_random = training
        self._random.enter(x_BSH, training)
        grid, dim, samples, width = self.grid, self.batch_dim, self.samples, self.width

        def shard(x: Tensor) -> Tensor:
            return _shard_samples_and_features(pad_with_last(x, -samples % grid.samples, dim), grid, dim)

        return with_backward(x_BSH, shard, lambda grad: _gather_samples_and_features(grad, grid, dim, samples, width))

    def leave_stack(self, x_bSh: Tensor) -> Tensor:
        """Gather the full output of the stack. Forward: one all-gather over all ranks; backward nothing.

        Also gathers in a recomputation, because a checkpoint may contain a module after the stack (patch merging in
        Swin).
        """
        if not self._is_open:
            return x_bSh
        if self._is_random:
            self._random.leave()
        samples = self.find_batch_size(x_bSh.shape[self.batch_dim])
        assert samples is not None  # the input of this forward was recorded
        grid, dim, width = self.grid, self.batch_dim, self.width

        def pad_and_shard(grad: Tensor) -> Tensor:
            if padding := -samples % grid.samples:
                shape = [padding if d == dim else n for d, n in enumerate(grad.shape)]
                grad = torch.cat((grad, grad.new_zeros(shape)), dim)
            return _shard_samples_and_features(grad, grid, dim)

        return with_backward(x_bSh, lambda x: _gather_samples_and_features(x, grid, dim, samples, width), pad_and_shard)

    def register_full_sequence(self, module: nn.Module, random: bool) -> GatherHiddenHook:
        """Gather all hidden features for ``module``. One all-gather in the forward, and one in the backward."""
        return GatherHiddenHook(self, module, random)

    def shard_samples(self, x: Tensor, dim: int, num_local: int) -> Tensor:
        """Return the local samples of a block argument, whose dim ``dim`` has a multiple of the batch size."""
        batch = self.find_batch_size(num_local)
        if batch is None or x.shape[dim] % batch:
            return x
        by_sample = x.unflatten(dim, (batch, -1))
        core = self.grid.core
        local: Tensor = pad_with_last(by_sample, -batch % self.grid.samples, dim).chunk(core.size, dim)[core.rank]
        return local.flatten(dim, dim + 1)

    def find_batch_size(self, num_local: int) -> int | None:
        """Return the batch size of the current or recomputed forward that has ``num_local`` local samples."""
        if current_graph_task_id() < 0 or self.num_local_samples(self.samples) == num_local:
            return self.samples
        return next((n for n in self._batch_sizes if self.num_local_samples(n) == num_local), None)

    def num_local_samples(self, batch_size: int) -> int:
        """Return how many samples of a batch this rank stores between the blocks."""
        return -(-batch_size // self.grid.samples) * self.grid.samples // self.grid.batch.size

    def __deepcopy__(self, memo: dict[int, Any]) -> GridStackActivations:
        memo[id(self)] = copy = GridStackActivations(self.layout, self.grid, random=self._random.is_enabled)
        copy.width, copy.samples, copy.batch_dim = self.width, self.samples, self.batch_dim
        return copy


class GatherHiddenHook(GatherHook):
    """Hooks that gather all hidden features before a module, such as a router, and shard its output."""

    def __init__(self, stream: GridStackActivations, module: nn.Module, random: bool) -> None:
        self._stream, self._axis = stream, stream.grid.hidden
        self._random = LocalRandomState(self._axis, aligned=True, enabled=random)
        register_forward_hooks(module, HookOrder.FULL_FEATURES, self._enter, self._leave, with_kwargs=True)

    def _split(self) -> Split:
        return Split.even(self._stream.width, self._axis.size)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def gather(x: Tensor) -> Tensor:
            self._stream.select_region(x)
            if not self._stream.is_sharded:
                return x
            self._random.enter(x, module.training)
            return gather_from_region(x, self._axis, -1, self._split())

        return map_first_tensor(args, kwargs, gather)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._stream.is_sharded:
            return output
        self.reset_after_error()
        return map_first_output(output, lambda x: scatter_to_region(x, self._axis, -1, self._split()))


def pad_with_last(x: Tensor, num_copies: int, dim: int = 0) -> Tensor:
    """Return x with ``num_copies`` copies of its last slice along ``dim`` appended."""
    if not num_copies:
        return x
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    return torch.cat((x, last.expand([num_copies if d == dim else n for d, n in enumerate(x.shape)])), dim)


def _shard_samples_and_features(x: Tensor, grid: TensorGrid, dim: int) -> Tensor:
    local = local_chunk(local_chunk(x, grid.batch, dim), grid.hidden, x.dim() - 1)
    return local.clone(memory_format=torch.contiguous_format)  # a view would keep all of x alive


def _gather_samples_and_features(x: Tensor, grid: TensorGrid, dim: int, samples: int, width: int) -> Tensor:
    return all_gather(all_gather(x, grid.hidden, -1, width), grid.batch, dim).narrow(dim, 0, samples)
