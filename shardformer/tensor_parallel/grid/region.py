"""Communication where a block on a tensor grid begins and ends.

              2D, 2.5D                                3D
    entry     all-gather of hidden over columns       all-gather of samples over columns
    weights   all-gather of hidden over rows          the same; partial products reduce-scattered over depth
    exit      reduce-scatter of hidden over columns   all-gather of samples over depth, reduce-scatter over columns

Backward, each all-gather is a reduce-scatter and the other way round, and what was gathered is gathered again: saved is
what this rank holds. Rectangles beside squares: every axis has a size of its own (Xu et al. 2021, "An efficient 2D
method for training super-large deep learning models"; Wang et al. 2021, "2.5-dimensional distributed model training";
Bian et al. 2021, "Maximizing parallelism in distributed training for huge neural networks").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.autograd_collectives import gather_from_region, once_differentiable, scatter_to_region
from shardformer.comm.collectives import (
    PendingCollective,
    all_gather,
    local_chunk,
    reduce_scatter,
    start_all_gather,
)
from shardformer.comm.collectives import (
    start_reduce_scatter as start_scatter,
)
from shardformer.comm.deferred_tensor import DeferredTensor, resolve_deferred
from shardformer.errors import InputError
from shardformer.layout.activation_layout import ActivationLayout
from shardformer.layout.shard_spec import Split, even_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.tensor_parallel.block import TensorParallelBlock
from shardformer.tensor_parallel.region import (
    ColumnParallel,
    LocalRandomState,
    ReplicatedRegion,
    TpRegion,
    linear_matmul,
    projection_operands,
    weight_grad,
)
from shardformer.tensor_parallel.sequence_parallel import StackActivations, with_first_output, with_first_tensor
from shardformer.torch_compat import current_graph_task_id
from shardformer.transformers_compat import caches_in, holds_tokens

# B batch, b this rank's samples, S sequence, H hidden, h this rank's part of it


@dataclass(frozen=True)
class GridRegion:
    """Both edges of a block between which each rank has some samples, and some heads or features.

    Args:
        full: the hidden features of all ranks.
        batch_dim: the dim of the stream that counts samples; of one whose tokens lie in one dim it is the first.
    """

    grid: TensorGrid
    full: int
    batch_dim: int = 0

    @property
    def is_cube(self) -> bool:
        return self.grid.mode == "3d"

    @property
    def contracted(self) -> int:
        """The hidden features that the ranks of one row have together: all of them, or in 3D this layer's."""
        return even_length(self.full, self.grid.contraction.size, self.grid.contraction.rank)

    def samples_inside(self, x: Tensor) -> int:
        """Of the ranks' samples x, how many a rank has in a block."""
        return x.shape[self._dim(x)] * self.grid.batch.size // self.grid.core.size

    def _dim(self, x: Tensor) -> int:
        return self.batch_dim if x.dim() > 2 else 0

    def leading_shape(self, x: Tensor) -> tuple[int, ...]:
        """The dims before the last of the stream, of those of x in a block."""
        dim = self._dim(x)
        samples = x.shape[dim] * self.grid.core.size // self.grid.batch.size
        return (*x.shape[:dim], samples, *x.shape[dim + 1 : -1])

    def enter(self, x: Tensor) -> Tensor:
        """The block's input (b, S, H) of this rank's x, for a forward that reads more than its shape."""
        shape = (*x.shape[: self._dim(x)], self.samples_inside(x), *x.shape[self._dim(x) + 1 : -1], self.full)
        return DeferredTensor.make(x, shape, self.grid.column, None, self._whole, self._part)

    def _whole(self, x: Tensor) -> Tensor:
        if not self.is_cube:
            return all_gather(x, self.grid.column, -1, self.full)
        whole = all_gather(all_gather(x, self.grid.column, self._dim(x)), self.grid.depth, -1, self.full)
        return local_chunk(whole, self.grid.depth, self._dim(whole))

    def _part(self, grad: Tensor) -> Tensor:
        """Of the gradient of what ``_whole`` gives: ranks of a row have summands of it."""
        if not self.is_cube:
            return reduce_scatter(grad, self.grid.column, -1)
        whole = all_gather(grad, self.grid.depth, self._dim(grad))
        return reduce_scatter(local_chunk(whole, self.grid.depth, whole.dim() - 1), self.grid.column, self._dim(whole))

    # --- what the products of the columns and of the row begin and end with

    def start_gather(self, x: Tensor) -> PendingCollective:
        """What is multiplied, of the ranks' parts of the stream: (b, S, H), or in 3D (more samples, S, h)."""
        if self.is_cube:
            return start_all_gather(x, self.grid.column, self._dim(x))
        return start_all_gather(x, self.grid.column, -1, self.full)

    def start_scatter(self, x: Tensor) -> PendingCollective:
        """This rank's part of the sum over the ranks of a row."""
        return start_scatter(x, self.grid.column, self._dim(x) if self.is_cube else -1)

    def start_weight(self, weight: Tensor, dim: int) -> PendingCollective:
        """The weight that is multiplied with, of this rank's part of its hidden dim."""
        return start_all_gather(weight, self.grid.row, dim, self.contracted, purpose="weights")

    def start_weight_grad(self, grad: Tensor, dim: int) -> PendingCollective:
        return start_scatter(grad, self.grid.row, dim, purpose="weights")

    def inside(self, x: Tensor) -> Tensor:
        """Of partial products the sum for this rank's samples in a block. Communicates in 3D alone."""
        return reduce_scatter(x, self.grid.contraction, self._dim(x))

    def across(self, x: Tensor) -> Tensor:
        """The other way round: what is multiplied with a weight whose contraction is cut."""
        return all_gather(x, self.grid.contraction, self._dim(x))


def even_length(full: int, ranks: int, rank: int) -> int:
    """How many of ``full`` a rank has, cut as even as can be."""
    bounds = even_bounds(full, ranks)
    return bounds[rank + 1] - bounds[rank]


# b samples of this rank, S sequence, H hidden, F features of one linear; lower case: this rank's part


def grid_column_projections(
    x: Tensor, edges: GridRegion, columns: Sequence[ColumnParallel], known: Tensor | None = None
) -> tuple[Tensor | None, list[Tensor]]:
    """What the columns read, without history, and their outputs, for this rank's x of the stream.

    In 3D no rank has all that they read: it is None then.

    Args:
        known: the input of the block, where it was gathered before.
    """
    x, known, weights = projection_operands(x, columns, known)
    seen, *outputs = _GridColumnProjections.apply(
        x, None if edges.is_cube else known, edges, [c.transposed for c in columns], *weights
    )
    return None if edges.is_cube else seen, outputs


class _GridColumnProjections(Function):
    """All column-parallel linears behind one entry. Saves what this rank holds of their input and weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, known: Tensor | None, edges: GridRegion, transposed: list[bool], *params: Tensor | None
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
            y = edges.inside(linear_matmul(seen, weight.wait(), None, t))
            outputs.append(y if bias is None else y + bias)
        visible = seen.detach()
        ctx.mark_non_differentiable(visible)
        return (visible, *outputs)

    @staticmethod
    @once_differentiable
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
                part = linear_matmul(grad, whole, None, not t)
                summed = part if summed is None else summed.add_(part)
        leaving = None if summed is None else edges.start_scatter(summed)
        seen = None if again is None else again.wait()
        pending: list[PendingCollective | None] = []
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


class GridRowParallelMatmul(Function):
    """The row-parallel linear: partial products, summed over the ranks of a row. The bias comes after.

    In a backward that is run in two halves, for the input first and for the weight later, the gradient that comes in is
    gathered once.
    """

    leaves_block = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool, edges: GridRegion) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.edges, ctx.gathered = transposed, edges, None
        arriving = edges.start_weight(weight, 1 - hidden_dim(transposed))
        wide = edges.across(x)
        return edges.start_scatter(linear_matmul(wide, arriving.wait(), None, transposed)).wait()

    @staticmethod
    @once_differentiable
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
        x_grad = None if arriving is None else edges.inside(linear_matmul(wide, arriving.wait(), None, not t))
        return x_grad, None if pending is None else pending.wait(), None, None


def hidden_dim(transposed: bool) -> int:
    """Which dim of a column-parallel linear's weight is hidden; of a row-parallel one's it is the other."""
    return 0 if transposed else 1


def _start_weights(
    edges: GridRegion, weights: Sequence[Tensor | None], transposed: Sequence[bool]
) -> list[PendingCollective]:
    return [edges.start_weight(w, hidden_dim(t)) for w, t in zip(weights, transposed, strict=True) if w is not None]


class GridTensorParallelBlock(TensorParallelBlock):
    """The edges of one block. Where what enters is whole, as in a module that is given it so, weights are gathered."""

    def _project_all(self, known: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        edges, source = self.edges, self._source
        assert source is not None
        if isinstance(edges, GridRegion):
            return grid_column_projections(source, edges, self.columns, known)
        entered = self._entered
        assert entered is not None
        return None, [column.multiply(entered) for column in self.columns]


# B batch, b this rank's samples, S sequence, H hidden, h this rank's part of it


class GridStackActivations(StackActivations):
    """The activations between the blocks of one stack.

    A batch that does not divide is padded with copies of its last sample, of whose outputs nothing is read. A forward
    that goes on with keys and values of another one, or keeps them to be gone on with, is computed whole on all ranks.
    """

    def __init__(self, layout: ActivationLayout, grid: TensorGrid, *, random: bool = False) -> None:
        super().__init__(ActivationLayout(), grid.column)
        self.layout, self.grid, self.width = layout, grid, 0
        self.batch_dim = 0
        self._known: set[int] = set()
        self._random = LocalRandomState(grid.whole) if random else None

    @property
    def is_cut(self) -> bool:
        return self._is_open

    @property
    def shares_samples(self) -> Axis | None:
        return self.grid.hidden

    def edges(self, x: Tensor) -> TpRegion | GridRegion:  # type: ignore[override]  # a block asks only for what both have
        if current_graph_task_id() >= 0:
            self._is_open = True  # what is recomputed was trained
        return GridRegion(self.grid, self.width, self.batch_dim) if self._is_open else ReplicatedRegion(self.axis)

    def register(self, first: nn.Module, last: nn.Module) -> None:
        first.register_forward_pre_hook(self._enter_module, with_kwargs=True)
        last.register_forward_hook(self._leave_module)

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_trained = module.training or torch.is_grad_enabled()
        caches = caches_in((*args, *kwargs.values()))
        self._is_open = is_trained or not (caches or kwargs.get("use_cache"))
        if is_trained and any(map(holds_tokens, caches)) and current_graph_task_id() < 0:
            raise InputError(
                "A forward that trains was given keys and values of another one",
                rule="On a tensor grid each rank has some samples, and what was kept is of all of them",
                remedy="Leave the cache out in training (prefix tuning needs tensor_parallel_mode='1d')",
            )
        return with_first_tensor(args, kwargs, lambda x: self.enter_stack(resolve_deferred(x), module.training))

    def enter_stack(self, x_BSH: Tensor, training: bool) -> Tensor:
        """The stack's input (B, S, H) becomes this rank's (b, S, h). Backward: one all-gather over all ranks."""
        if not self._is_open:
            return x_BSH
        self.samples, self.width = x_BSH.shape[self.batch_dim], x_BSH.shape[-1]
        self._known.add(self.samples)
        self._is_random = training
        if self._random is not None and training:
            self._random.enter(x_BSH)
        entered: Tensor = _Enter.apply(x_BSH, self.grid, self.batch_dim)
        return entered

    def leave_stack(self, x_bSh: Tensor) -> Tensor:
        """The stack's output is whole again. Forward: one all-gather over all ranks; backward nothing.

        In a recomputation, too: a checkpoint may hold what follows the stack (the merging of patches of Swin).
        """
        if not self._is_open:
            return x_bSh
        if self._random is not None and self._is_random:
            self._random.leave()
        samples = self.batch_of(x_bSh.shape[self.batch_dim])
        assert samples is not None  # of a forward that entered
        left: Tensor = _Leave.apply(x_bSh, self.grid, samples, self.width, self.batch_dim)
        return left

    def register_full_sequence(self, module: nn.Module, random: bool) -> GridFullHiddenModule:
        """Gives ``module`` all hidden features of this rank's samples. One all-gather, and backward one too."""
        return GridFullHiddenModule(self, module, random)

    def cut_argument(self, x: Tensor, dim: int, samples: int) -> Tensor:
        """This rank's samples of what a block is given for each, x, whose ``dim`` counts samples or a multiple."""
        batch = self.batch_of(samples)
        if batch is None or x.shape[dim] % batch:
            return x
        by_sample = x.unflatten(dim, (batch, -1))
        core = self.grid.core
        cut: Tensor = pad_with_last(by_sample, -batch % self.grid.samples, dim).chunk(core.size, dim)[core.rank]
        return cut.flatten(dim, dim + 1)

    def batch_of(self, samples: int) -> int | None:
        """The batch of the forward under way, or of that which is recomputed: by its samples on this rank."""
        if current_graph_task_id() < 0 or self.rows(self.samples) == samples:
            return self.samples
        return next((n for n in self._known if self.rows(n) == samples), None)

    def rows(self, batch: int) -> int:
        """How many samples of a batch a rank has between the blocks."""
        return -(-batch // self.grid.samples) * self.grid.samples // self.grid.batch.size

    def __deepcopy__(self, memo: dict[int, Any]) -> GridStackActivations:
        memo[id(self)] = twin = GridStackActivations(self.layout, self.grid, random=self._random is not None)
        twin.width, twin.samples, twin.batch_dim = self.width, self.samples, self.batch_dim
        return twin


class GridFullHiddenModule:
    """Around a module that reads all hidden features: a mixture of experts with its router."""

    def __init__(self, stream: GridStackActivations, module: nn.Module, random: bool) -> None:
        self._stream, hidden = stream, stream.grid.hidden
        self._random = LocalRandomState(hidden, aligned=True) if random else None
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)

    def _split(self) -> Split:
        return Split.even(self._stream.width, self._stream.grid.hidden.size)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def join(x: Tensor) -> Tensor:
            self._stream.edges(x)
            if not self._stream.is_cut:
                return x
            if self._random is not None and module.training:
                self._random.enter(x)
            return gather_from_region(x, self._stream.grid.hidden, -1, self._split())

        return with_first_tensor(args, kwargs, join)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._stream.is_cut:
            return output
        self.reset_after_error()
        return with_first_output(output, lambda x: scatter_to_region(x, self._stream.grid.hidden, -1, self._split()))

    def reset_after_error(self) -> None:
        """Behind the module, or after a forward that an error broke off: back to the random numbers outside."""
        if self._random is not None:
            self._random.leave()


def pad_with_last(x: Tensor, more: int, dim: int = 0) -> Tensor:
    """x with so many copies of the last of a dim behind it."""
    if not more:
        return x
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    return torch.cat((x, last.expand([more if d == dim else n for d, n in enumerate(x.shape)])), dim)


def _local_samples(x: Tensor, grid: TensorGrid, dim: int) -> Tensor:
    mine = local_chunk(local_chunk(x, grid.batch, dim), grid.hidden, x.dim() - 1)
    return mine.clone(memory_format=torch.contiguous_format)  # a view would keep all of x


def _all_samples(x: Tensor, grid: TensorGrid, dim: int, samples: int, width: int) -> Tensor:
    return all_gather(all_gather(x, grid.hidden, -1, width), grid.batch, dim).narrow(dim, 0, samples)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: TensorGrid, dim: int) -> Tensor:
        ctx.grid, ctx.dim, ctx.samples, ctx.width = grid, dim, x.shape[dim], x.shape[-1]
        return _local_samples(pad_with_last(x, -x.shape[dim] % grid.samples, dim), grid, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_samples(grad, ctx.grid, ctx.dim, ctx.samples, ctx.width), None, None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: TensorGrid, samples: int, width: int, dim: int) -> Tensor:
        ctx.grid, ctx.dim = grid, dim
        return _all_samples(x, grid, dim, samples, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        more = -grad.shape[ctx.dim] % ctx.grid.samples
        shape = [more if d == ctx.dim else n for d, n in enumerate(grad.shape)]
        whole = torch.cat((grad, grad.new_zeros(shape)), ctx.dim) if more else grad
        return _local_samples(whole, ctx.grid, ctx.dim), None, None, None, None
