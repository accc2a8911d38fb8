"""Collectives at the input and the output of a tensor-parallel block, and the matmuls that overlap with them.

    x --> entry --> column-parallel (q, k, v; gate, up) --> local heads or features --> row-parallel (o; down) --> exit

    activations               entry, forward | backward          exit, forward | backward
    replicated                nothing        | all-reduce        all-reduce      | nothing
    sequence sharded          all-gather     | reduce-scatter    reduce-scatter  | all-gather

Each row of this table is a class. ``REGIONS_BY_DIM`` maps the sharded dim to the class.

To overlap with a matmul, an all-gather or a reduce-scatter is split into ring steps. On R ranks, each chunk takes R-1
steps; while one chunk is sent, the matmul of another runs (Wang et al. 2023, "Overlap communication with dependent
computation via decomposition"). Timeline for R = 2:

    rank 0   | send x0, multiply x0 | multiply x1 |        rank 0   | multiply for 1, send | multiply for 0, add |
    rank 1   | send x1, multiply x1 | multiply x0 |        rank 1   | multiply for 0, send | multiply for 1, add |

                all-gather, then matmul                            matmul, then reduce-scatter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.collectives import (
    CopyToTpRegion,
    PendingCollective,
    all_gather,
    all_reduce,
    broadcast,
    copy_to_tp_region,
    gather_from_sp_region,
    once_differentiable,
    reduce_from_tp_region,
    reduce_scatter,
    reduce_scatter_to_sp_region,
    start_all_reduce,
    start_reduce_scatter,
)
from shardformer.comm.deferred_tensor import DeferredTensor
from shardformer.comm.recorder import do_not_record_wait, get_num_bytes, record_collective_start
from shardformer.errors import PolicyError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.layout.activation_layout import Dim
from shardformer.layout.shard_spec import get_even_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.transport import Work
from shardformer.random_state import LocalRandomState
from shardformer.tensor_parallel.parallel_module import has_wider_dtype, select_matmul_dtype
from shardformer.torch_compat import get_autograd_function_class


def all_gather_matmul(
    x_BsH: Tensor, axis: Axis, full_length: int, process_chunk: Callable[[Tensor, int, int], None]
) -> Tensor:
    """All-gather a tensor along dim 1 in ring steps, and process each chunk while the next one arrives.

    Calls ``process_chunk(chunk, start, end)`` for each chunk. Returns the gathered tensor (B, full_length, H).
    Communicates one all-gather of this tensor, in R-1 steps that overlap with ``process_chunk``.
    """
    bounds = get_even_bounds(full_length, axis.size)
    joined = x_BsH.new_empty((x_BsH.shape[0], full_length, *x_BsH.shape[2:]))
    record_end = record_collective_start("all_gather", axis, get_num_bytes(joined), "block")
    next_rank, previous_rank = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    current = x_BsH.contiguous()
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        start, end = bounds[source], bounds[source + 1]
        works: Sequence[Work] = ()
        arriving = current
        if step < axis.size - 1:
            following = (source - 1) % axis.size
            shape = (x_BsH.shape[0], bounds[following + 1] - bounds[following], *x_BsH.shape[2:])
            arriving = x_BsH.new_empty(shape)
            works = axis.transport.exchange({next_rank: current}, {previous_rank: arriving})
        joined[:, start:end] = current
        if end > start:
            process_chunk(current, start, end)
        for work in works:
            work.wait()
        current = arriving
    record_end()
    return joined


def matmul_reduce_scatter(compute_chunk: Callable[[int, int], Tensor], axis: Axis, full_length: int) -> Tensor:
    """Compute a tensor in chunks along dim 1, and reduce-scatter each chunk while the next one is computed.

    ``compute_chunk(start, end)`` computes the summand of this rank for one chunk. Returns the chunk of this rank,
    summed over the ranks. Communicates one reduce-scatter of the full tensor, in R-1 steps.
    """
    bounds = get_even_bounds(full_length, axis.size)
    next_rank, previous_rank = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    works: Sequence[Work] = ()
    record_end = do_not_record_wait
    arriving: Tensor | None = None
    kept: list[Tensor] = []
    for step in range(axis.size):
        owner = (axis.rank - 1 - step) % axis.size
        summand = compute_chunk(bounds[owner], bounds[owner + 1])
        if step == 0:
            per_index = get_num_bytes(summand) // max(summand.shape[1], 1)
            record_end = record_collective_start("reduce_scatter", axis, per_index * full_length, "block")
        for work in works:
            work.wait()
        if arriving is not None:
            summand = summand + arriving
        if step == axis.size - 1:
            record_end()
            return summand
        following = (owner - 1) % axis.size
        shape = (summand.shape[0], bounds[following + 1] - bounds[following], *summand.shape[2:])
        arriving = summand.new_empty(shape)
        kept = [summand.contiguous()]
        works = axis.transport.exchange({next_rank: kept[0]}, {previous_rank: arriving})
    raise AssertionError(f"The axis must have at least one rank, but has {axis.size}.")


# B batch, S sequence, H hidden; s: local slice of the sequence


SEQUENCE = Dim.SEQUENCE.position
Map = Callable[[Tensor], Tensor]
Multiply = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class ReplicatedRegion:
    """Collectives at the input and the output of a tensor-parallel block whose input is replicated."""

    axis: Axis

    def enter(self, x: Tensor) -> Tensor:
        """Return the full input of a tensor-parallel block, given this rank's activations x."""
        entered = copy_to_tp_region(x, self.axis)
        return x.view_as(x) if entered is x else entered

    def gather_then_matmul(
        self, x: Tensor, multiply: Multiply, gathered_x: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """All-gather x unless ``gathered_x`` is passed, and return the full x and ``multiply(x)``."""
        return x, multiply(x)

    def get_full_block_input(self, x: Tensor) -> Tensor:
        """Return the full input of a block under torch.compile, given this rank's activations x."""
        return copy_to_tp_region(x, self.axis)

    def reduce(self, x: Tensor) -> Tensor:
        """Sum the output x of a block over the ranks under torch.compile, and return this rank's activations."""
        return reduce_from_tp_region(x, self.axis)

    def start_reduce(self, x: Tensor) -> PendingCollective:
        """Start an all-reduce or a reduce-scatter that sums x over the ranks."""
        return start_all_reduce(x, self.axis)

    def matmul_then_reduce(self, x: Tensor, multiply: Multiply) -> Tensor:
        """Multiply x by a weight, sum the product over the ranks, and return this rank's activations."""
        return self.start_reduce(multiply(x)[0]).wait()

    def get_local_leading_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of this rank's shard of the full activations x, without the hidden dim."""
        return tuple(x.shape[:-1])


@dataclass(frozen=True)
class SequenceShardedRegion:
    """Collectives at the input and the output of a tensor-parallel block whose input is sequence-sharded."""

    axis: Axis
    full: int  # the length of the full sequence
    overlap: bool = False  # run all-gathers and reduce-scatters in ring steps that overlap with the adjacent matmuls

    def enter(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:SEQUENCE], self.full, *x.shape[SEQUENCE + 1 :])
        gather = partial(all_gather, axis=self.axis, dim=SEQUENCE, full=self.full)
        scatter = partial(reduce_scatter, axis=self.axis, dim=SEQUENCE)
        return DeferredTensor.from_local(x, shape, self.axis, None, gather, scatter)

    def gather_then_matmul(
        self, x: Tensor, multiply: Multiply, gathered_x: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        if gathered_x is not None or not self.overlap:
            joined = all_gather(x, self.axis, SEQUENCE, self.full) if gathered_x is None else gathered_x
            return joined, multiply(joined)
        products: dict[int, list[Tensor]] = {}

        def multiply_chunk(chunk: Tensor, start: int, end: int) -> None:
            products[start] = multiply(chunk)

        joined = all_gather_matmul(x, self.axis, self.full, multiply_chunk)
        columns = zip(*(products[start] for start in sorted(products)), strict=True)
        return joined, [torch.cat(chunks, SEQUENCE) for chunks in columns]

    def get_full_block_input(self, x: Tensor) -> Tensor:
        return gather_from_sp_region(x, self.axis, SEQUENCE, self.full)

    def reduce(self, x: Tensor) -> Tensor:
        return reduce_scatter_to_sp_region(x, self.axis, SEQUENCE)

    def start_reduce(self, x: Tensor) -> PendingCollective:
        return start_reduce_scatter(x, self.axis, SEQUENCE)

    def matmul_then_reduce(self, x: Tensor, multiply: Multiply) -> Tensor:
        if not self.overlap:
            return self.start_reduce(multiply(x)[0]).wait()
        return matmul_reduce_scatter(lambda a, b: multiply(x[:, a:b])[0], self.axis, self.full)

    def get_local_leading_shape(self, x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:SEQUENCE], get_even_split_length(self.full, self.axis))


TpRegion = ReplicatedRegion | SequenceShardedRegion
REGIONS_BY_DIM: Mapping[Dim | None, type[TpRegion]] = {None: ReplicatedRegion, Dim.SEQUENCE: SequenceShardedRegion}
"""Activation dim that a stack of layers shards over the tensor axis -> region of its blocks."""


def prepare_extra_block_input(x: Tensor, axis: Axis) -> Tensor:
    """Prepare x as an additional input of tensor-parallel blocks, such as the encoder output for cross-attention.

    x is a replicated tensor, or the output of another stack of layers. Backward: one all-reduce of the gradient of x,
    or one reduce-scatter of the gradient of a stack's output.

    Raises PolicyError if x, or the tensor that it is a view of, already entered a block.
    """
    if isinstance(x, DeferredTensor):
        if x.is_pending and x.region is not None and x.axis is axis:
            entered: Tensor = x.region.enter(x.local)
            return entered
        x = x.full_tensor()
    node: Any = None if torch.compiler.is_compiling() else x.grad_fn
    while node is not None:
        if get_autograd_function_class(node) is CopyToTpRegion:
            raise PolicyError(
                f"A tensor of shape {tuple(x.shape)} is an input of the tensor-parallel blocks twice.",
                remedy="Name this tensor only once in the policy: in `cross_states` of the LayerStack, or in `inputs` "
                "of the attention modules.",
            )
        before = node.next_functions
        node = before[0][0] if len(before) == 1 else None  # follows views, which have one input
    return copy_to_tp_region(x, axis)


def defer_all_reduce(x: Tensor, axis: Axis) -> DeferredTensor:
    """Delay the all-reduce of x until it is needed, so that a reduce-scatter can replace it."""
    return DeferredTensor.from_local(
        x, tuple(x.shape), axis, None, lambda x: all_reduce(x.clone(), axis), lambda grad: grad
    )


def get_even_split_length(full_length: int, axis: Axis) -> int:
    """Return the length of this rank's shard if ``full_length`` elements are split evenly over the ranks."""
    return (full_length + axis.size - 1 - axis.rank) // axis.size  # without a condition, for symbolic lengths


# B batch, S sequence, H hidden, F features of one linear layer; lower case: local shard (f = F / tensor)


class ColumnParallel(Protocol):
    """Interface of the column-parallel linear layers that a ``TensorParallelBlock`` calls."""

    axis: Axis
    transposed: bool

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def fused_bias(self) -> Tensor | None: ...
    def multiply(self, x: Tensor) -> Tensor: ...


def cast_projection_operands(
    x: Tensor, columns: Sequence[ColumnParallel], gathered_x: Tensor | None
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Cast x, ``gathered_x`` and the parameters of the column-parallel layers to the dtype of the matmul."""
    weights: list[Tensor | None] = [p for c in columns for p in (c.weight, c.fused_bias)]
    if (dtype := select_matmul_dtype(x, columns[0].weight)) is not None:
        x, gathered_x = x.to(dtype), gathered_x if gathered_x is None else gathered_x.to(dtype)
        weights = [None if w is None else w.to(dtype) for w in weights]
    return x, gathered_x, weights


def compute_column_linears(
    x: Tensor, region: TpRegion, columns: Sequence[ColumnParallel], gathered_x: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Compute all column-parallel linear layers of a block. Return the detached full input and the outputs (B, S, f).

    x is cast before the communication under autocast and for 16-bit weights. Communicates as the entry of the region.
    The backward pass overlaps the communication of the input gradient with the weight gradients. ``gathered_x`` is the
    full tensor of x, if it is already gathered.
    """
    x, gathered_x, weights = cast_projection_operands(x, columns, gathered_x)
    full_x, *outputs = _ColumnProjections.apply(x, gathered_x, region, [c.transposed for c in columns], *weights)
    return full_x, outputs


def cache_gathered_input(x: DeferredTensor, full: Tensor) -> None:
    if x.computed_value is None and full.dtype == x.dtype:
        x.cache_full_tensor(full)


def compute_single_column_linear(column: ColumnParallel, x: Tensor) -> Tensor:
    """Compute a column-parallel linear layer that is not part of a tensor-parallel block.

    Backward: one all-reduce of x, or one reduce-scatter if x is the sharded output of a stack of layers.
    """
    if isinstance(x, DeferredTensor):
        if x.is_pending and x.region is not None and x.axis is column.axis:
            full_x, (y,) = compute_column_linears(x.local, x.region, [column], x.computed_value)
            cache_gathered_input(x, full_x)
            return y
        x = x.full_tensor()
    return compute_column_linears(x, ReplicatedRegion(column.axis), [column])[1][0]


def linear_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return x @ W^T + b for a weight W of shape (out, in), or x @ W + b for a transposed one of shape (in, out)."""
    x = x.to(weight.dtype) if has_wider_dtype(x, weight) else x
    if not transposed:
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def compute_weight_grad(x: Tensor, grad: Tensor, transposed: bool) -> Tensor:
    x2, g2 = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return x2.t() @ g2 if transposed else g2.t() @ x2


class _ColumnProjections(Function):
    """Autograd function that gathers the input of a block and computes its column-parallel linear layers.

    Also returns the gathered input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gathered_x: Tensor | None,
        region: TpRegion,
        transposed: list[bool],
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        matrices, biases = cast("tuple[Tensor, ...]", weights[::2]), weights[1::2]

        def multiply(chunk: Tensor) -> list[Tensor]:
            return [linear_matmul(chunk, w, b, t) for w, b, t in zip(matrices, biases, transposed, strict=True)]

        full_x, outputs = region.gather_then_matmul(x, multiply, gathered_x)
        ctx.region, ctx.transposed = region, transposed
        ctx.save_for_backward(full_x, *matrices)
        ctx.set_materialize_grads(False)
        visible = full_x.detach()
        ctx.mark_non_differentiable(visible)
        return (visible, *outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        full_x, *weights = ctx.saved_tensors
        pending = None
        if ctx.needs_input_grad[0]:
            pending = ctx.region.start_reduce(_compute_input_grad(full_x, weights, ctx.transposed, grads))
        out: list[Tensor | None] = []
        for i, grad in enumerate(grads):
            needs_weight, needs_bias = ctx.needs_input_grad[4 + 2 * i : 6 + 2 * i]
            out.append(
                compute_weight_grad(full_x, grad, ctx.transposed[i]) if needs_weight and grad is not None else None
            )
            out.append(compute_bias_grad(grad) if needs_bias else None)
        return (None if pending is None else pending.wait(), None, None, None, *out)


def compute_bias_grad(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.reshape(-1, grad.shape[-1]).sum(0)


def _compute_input_grad(
    full_x: Tensor, weights: Sequence[Tensor], transposed: Sequence[bool], grads: Sequence[Tensor | None]
) -> Tensor:
    """Return the gradient of the block input, which is the sum over all column-parallel linear layers."""
    total = None
    for weight, t, grad in zip(weights, transposed, grads, strict=True):
        if grad is None:
            continue
        flat = grad.reshape(-1, grad.shape[-1])
        matrix = weight.t() if t else weight
        total = flat @ matrix if total is None else total.addmm_(flat, matrix)
    return torch.zeros_like(full_x) if total is None else total.view(full_x.shape)


class RowParallelMatmul(Function):
    """Autograd function that computes a row-parallel linear layer without its bias, summed over the ranks.

    Communicates as the exit of the region. If the backward pass runs separately for the input and for the weight (as
    some pipeline schedules do), it gathers the gradient only once.
    """

    leaves_block = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool, region: TpRegion) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.region, ctx.gathered = transposed, region, None
        return region.matmul_then_reduce(x, lambda chunk: [linear_matmul(chunk, weight, None, transposed)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]

        def multiply(chunk: Tensor) -> list[Tensor]:
            return [linear_matmul(chunk, weight, None, not ctx.transposed)] if needs_x else []

        gathered_x, ctx.gathered = ctx.gathered, None
        full, x_grad = ctx.region.gather_then_matmul(grad, multiply, gathered_x)
        if needs_x and not needs_weight:
            ctx.gathered = full
        w_grad = compute_weight_grad(x, full, ctx.transposed) if needs_weight else None
        return x_grad[0] if needs_x else None, w_grad, None, None


class SumPartialOutputs(Function):
    """Autograd function that sums the partial outputs of a tensor-parallel block over the ranks."""

    leaves_block = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TpRegion) -> Tensor:
        ctx.region = region
        return region.start_reduce(x.clone(memory_format=torch.contiguous_format)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.region.gather_then_matmul(grad, lambda _: [])[0], None


class _ApplyWithCustomBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.backward_of = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(grad), None, None


def apply_with_custom_backward(x: Tensor, forward_fn: Map, backward_fn: Map) -> Tensor:
    """Return ``forward_fn(x)``, and use ``backward_fn(grad)`` as the gradient of x."""
    out: Tensor = _ApplyWithCustomBackward.apply(x, forward_fn, backward_fn)
    return out


def register_random_state_sync(axis: Axis, module: nn.Module) -> None:
    """Make ``module`` draw the same random numbers on all ranks, although their random states differ.

    With sequence parallelism, stochastic depth between blocks needs this, because it drops full samples. A number drawn
    by the first rank seeds the module, including in a recomputation under checkpointing.

    Communicates: in training one broadcast of one number per call.
    """
    random = LocalRandomState(axis.rank, partial(broadcast, axis=axis))

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        random.enter_local_state(args[0], module.training)

    def leave(*_: Any) -> None:
        random.leave_local_state()

    register_forward_hooks(module, HookOrder.RANDOM_STATE, enter, leave, always_call=True)
