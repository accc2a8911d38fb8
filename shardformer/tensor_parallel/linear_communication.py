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
from shardformer.comm.recorder import get_num_bytes, record_collective_start, skip_wait_recording
from shardformer.errors import PolicyError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.layout.activation_layout import Dim
from shardformer.layout.shard_spec import get_even_split_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.transport import Work
from shardformer.random_state import LocalRNGState
from shardformer.tensor_parallel.parallel_module import has_wider_dtype, select_matmul_dtype
from shardformer.torch_compat import get_autograd_function_class


def all_gather_matmul(
    local_hidden_states: Tensor, axis: Axis, sequence_length: int, process_chunk_fn: Callable[[Tensor, int, int], None]
) -> Tensor:
    """All-gather a tensor along dim 1 in ring steps, and process each chunk while the next one arrives.

    Calls ``process_chunk_fn(chunk, start, end)`` for each chunk. Returns the gathered tensor (B, ``sequence_length``,
    H). Communicates one all-gather of this tensor, in R-1 steps that overlap with ``process_chunk_fn``.
    """
    bounds = get_even_split_bounds(sequence_length, axis.size)
    joined = local_hidden_states.new_empty(
        (local_hidden_states.shape[0], sequence_length, *local_hidden_states.shape[2:])
    )
    record_end = record_collective_start("all_gather", axis, get_num_bytes(joined), "block")
    next_rank, previous_rank = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    current = local_hidden_states.contiguous()
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        start, end = bounds[source], bounds[source + 1]
        works: Sequence[Work] = ()
        arriving = current
        if step < axis.size - 1:
            following = (source - 1) % axis.size
            shape = (
                local_hidden_states.shape[0],
                bounds[following + 1] - bounds[following],
                *local_hidden_states.shape[2:],
            )
            arriving = local_hidden_states.new_empty(shape)
            works = axis.transport.exchange({next_rank: current}, {previous_rank: arriving})
        joined[:, start:end] = current
        if end > start:
            process_chunk_fn(current, start, end)
        for work in works:
            work.wait()
        current = arriving
    record_end()
    return joined


def matmul_reduce_scatter(compute_chunk_fn: Callable[[int, int], Tensor], axis: Axis, sequence_length: int) -> Tensor:
    """Compute a tensor in chunks along dim 1, and reduce-scatter each chunk while the next one is computed.

    ``compute_chunk_fn(start, end)`` computes the summand of this rank for one chunk. Returns the chunk of this rank,
    summed over the ranks. Communicates one reduce-scatter of the full tensor, in R-1 steps.
    """
    bounds = get_even_split_bounds(sequence_length, axis.size)
    next_rank, previous_rank = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    works: Sequence[Work] = ()
    record_end = skip_wait_recording
    arriving: Tensor | None = None
    kept: list[Tensor] = []
    for step in range(axis.size):
        owner = (axis.rank - 1 - step) % axis.size
        summand = compute_chunk_fn(bounds[owner], bounds[owner + 1])
        if step == 0:
            per_index = get_num_bytes(summand) // max(summand.shape[1], 1)
            record_end = record_collective_start("reduce_scatter", axis, per_index * sequence_length, "block")
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
class ReplicatedInputRegion:
    """Collectives at the input and the output of a tensor-parallel block whose input is replicated."""

    axis: Axis

    def enter(self, hidden_states: Tensor) -> Tensor:
        """Convert this rank's activations into the full input of a tensor-parallel block."""
        entered = copy_to_tp_region(hidden_states, self.axis)
        return hidden_states.view_as(hidden_states) if entered is hidden_states else entered

    def gather_then_matmul(
        self, hidden_states: Tensor, matmul_fn: Multiply, gathered_input: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """All-gather the input, if needed, and apply ``matmul_fn``. Returns the full input and the products."""
        return hidden_states, matmul_fn(hidden_states)

    def get_full_block_input(self, hidden_states: Tensor) -> Tensor:
        """Convert this rank's activations into the full input of a block that is compiled with torch.compile."""
        return copy_to_tp_region(hidden_states, self.axis)

    def reduce_output(self, partial_output: Tensor) -> Tensor:
        """Sum the output of a compiled block over the ranks, and return this rank's activations."""
        return reduce_from_tp_region(partial_output, self.axis)

    def start_output_reduction(self, partial_output: Tensor) -> PendingCollective:
        """Start an all-reduce or a reduce-scatter that sums ``partial_output`` over the ranks."""
        return start_all_reduce(partial_output, self.axis)

    def matmul_then_reduce(self, hidden_states: Tensor, matmul_fn: Multiply) -> Tensor:
        """Multiply by a weight, sum the product over the ranks, and return this rank's activations."""
        return self.start_output_reduction(matmul_fn(hidden_states)[0]).wait()

    def get_local_leading_shape(self, hidden_states: Tensor) -> tuple[int, ...]:
        """Compute the shape of this rank's shard of the full activations, without the hidden dim."""
        return tuple(hidden_states.shape[:-1])


@dataclass(frozen=True)
class SequenceShardedRegion:
    """Collectives at the input and the output of a tensor-parallel block whose input is sequence-sharded."""

    axis: Axis
    sequence_length: int  # the length of the full sequence
    overlap: bool = False  # run all-gathers and reduce-scatters in ring steps that overlap with the adjacent matmuls

    def enter(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:SEQUENCE], self.sequence_length, *hidden_states.shape[SEQUENCE + 1 :])
        gather = partial(all_gather, axis=self.axis, dim=SEQUENCE, full_length=self.sequence_length)
        scatter = partial(reduce_scatter, axis=self.axis, dim=SEQUENCE)
        return DeferredTensor.from_local(hidden_states, shape, self.axis, None, gather, scatter)

    def gather_then_matmul(
        self, hidden_states: Tensor, matmul_fn: Multiply, gathered_input: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        if gathered_input is not None or not self.overlap:
            joined = (
                all_gather(hidden_states, self.axis, SEQUENCE, self.sequence_length)
                if gathered_input is None
                else gathered_input
            )
            return joined, matmul_fn(joined)
        products: dict[int, list[Tensor]] = {}

        def matmul_chunk(chunk: Tensor, start: int, end: int) -> None:
            products[start] = matmul_fn(chunk)

        joined = all_gather_matmul(hidden_states, self.axis, self.sequence_length, matmul_chunk)
        columns = zip(*(products[start] for start in sorted(products)), strict=True)
        return joined, [torch.cat(chunks, SEQUENCE) for chunks in columns]

    def get_full_block_input(self, hidden_states: Tensor) -> Tensor:
        return gather_from_sp_region(hidden_states, self.axis, SEQUENCE, self.sequence_length)

    def reduce_output(self, partial_output: Tensor) -> Tensor:
        return reduce_scatter_to_sp_region(partial_output, self.axis, SEQUENCE)

    def start_output_reduction(self, partial_output: Tensor) -> PendingCollective:
        return start_reduce_scatter(partial_output, self.axis, SEQUENCE)

    def matmul_then_reduce(self, hidden_states: Tensor, matmul_fn: Multiply) -> Tensor:
        if not self.overlap:
            return self.start_output_reduction(matmul_fn(hidden_states)[0]).wait()
        return matmul_reduce_scatter(lambda a, b: matmul_fn(hidden_states[:, a:b])[0], self.axis, self.sequence_length)

    def get_local_leading_shape(self, hidden_states: Tensor) -> tuple[int, ...]:
        return (*hidden_states.shape[:SEQUENCE], get_even_shard_length(self.sequence_length, self.axis))


TpRegion = ReplicatedInputRegion | SequenceShardedRegion
REGIONS_BY_DIM: Mapping[Dim | None, type[TpRegion]] = {None: ReplicatedInputRegion, Dim.SEQUENCE: SequenceShardedRegion}
"""Activation dim that a stack of layers shards over the tensor axis -> region of its blocks."""


def prepare_extra_block_input(hidden_states: Tensor, axis: Axis) -> Tensor:
    """Prepare an additional input of tensor-parallel blocks, such as the encoder output for cross-attention.

    ``hidden_states`` is a replicated tensor, or the output of another stack of layers. Backward: one all-reduce of the
    gradient of ``hidden_states``, or one reduce-scatter of the gradient of a stack's output.

    Raises PolicyError if ``hidden_states``, or the tensor that it is a view of, already entered a block.
    """
    if isinstance(hidden_states, DeferredTensor):
        if hidden_states.is_pending and hidden_states.region is not None and hidden_states.axis is axis:
            entered: Tensor = hidden_states.region.enter(hidden_states.local)
            return entered
        hidden_states = hidden_states.full_tensor()
    node: Any = None if torch.compiler.is_compiling() else hidden_states.grad_fn
    while node is not None:
        if get_autograd_function_class(node) is CopyToTpRegion:
            raise PolicyError(
                f"The policy declares a tensor of shape {tuple(hidden_states.shape)} twice as an input of attention "
                "modules or MLPs, so its gradient would be summed twice.",
                remedy="Declare the tensor only once in the policy: in `cross_states` of the LayerStack, or in "
                "`inputs` of the attention modules.",
            )
        before = node.next_functions
        node = before[0][0] if len(before) == 1 else None  # follows views, which have one input
    return copy_to_tp_region(hidden_states, axis)


def defer_all_reduce(tensor: Tensor, axis: Axis) -> DeferredTensor:
    """Delay the all-reduce of ``tensor`` until it is needed, so that a reduce-scatter can replace it."""
    return DeferredTensor.from_local(
        tensor, tuple(tensor.shape), axis, None, lambda x: all_reduce(x.clone(), axis), lambda grad: grad
    )


def get_even_shard_length(full_length: int, axis: Axis) -> int:
    """Compute the length of this rank's shard if ``full_length`` elements are split evenly over the ranks."""
    return (full_length + axis.size - 1 - axis.rank) // axis.size  # without a condition, for symbolic lengths


# B batch, S sequence, H hidden, F features of one linear layer; lower case: local shard (f = F / tensor)


class ColumnParallelLinear(Protocol):
    """Interface of the column-parallel linear layers that a ``TensorParallelBlock`` calls."""

    axis: Axis
    transposed: bool

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def fused_bias(self) -> Tensor | None: ...
    def multiply(self, hidden_states: Tensor) -> Tensor: ...


def cast_matmul_operands(
    hidden_states: Tensor, column_linears: Sequence[ColumnParallelLinear], gathered_input: Tensor | None
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Cast the inputs and the parameters of the column-parallel layers to the dtype of the matmul."""
    weights: list[Tensor | None] = [p for c in column_linears for p in (c.weight, c.fused_bias)]
    if (dtype := select_matmul_dtype(hidden_states, column_linears[0].weight)) is not None:
        hidden_states, gathered_input = (
            hidden_states.to(dtype),
            gathered_input if gathered_input is None else gathered_input.to(dtype),
        )
        weights = [None if w is None else w.to(dtype) for w in weights]
    return hidden_states, gathered_input, weights


def compute_column_linears(
    hidden_states: Tensor,
    region: TpRegion,
    column_linears: Sequence[ColumnParallelLinear],
    gathered_input: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Compute all column-parallel linear layers of a block. Returns the detached full input and the outputs.

    ``hidden_states`` is cast before the communication under autocast and for 16-bit weights. Communicates as the entry
    of the region. The backward pass overlaps the communication of the input gradient with the weight gradients.
    ``gathered_input`` is the full tensor of ``hidden_states``, if it is already gathered.
    """
    hidden_states, gathered_input, weights = cast_matmul_operands(hidden_states, column_linears, gathered_input)
    full_x, *outputs = _ColumnParallelLinears.apply(
        hidden_states, gathered_input, region, [c.transposed for c in column_linears], *weights
    )
    return full_x, outputs


def cache_full_input(deferred_input: DeferredTensor, full_input: Tensor) -> None:
    if deferred_input.cached_full_tensor is None and full_input.dtype == deferred_input.dtype:
        deferred_input.cache_full_tensor(full_input)


def compute_single_column_linear(column_linear: ColumnParallelLinear, hidden_states: Tensor) -> Tensor:
    """Compute a column-parallel linear layer that is not part of a tensor-parallel block.

    Backward: one all-reduce of ``hidden_states``, or one reduce-scatter if ``hidden_states`` is the sharded output of a
    stack of layers.
    """
    if isinstance(hidden_states, DeferredTensor):
        if hidden_states.is_pending and hidden_states.region is not None and hidden_states.axis is column_linear.axis:
            full_x, (y,) = compute_column_linears(
                hidden_states.local, hidden_states.region, [column_linear], hidden_states.cached_full_tensor
            )
            cache_full_input(hidden_states, full_x)
            return y
        hidden_states = hidden_states.full_tensor()
    return compute_column_linears(hidden_states, ReplicatedInputRegion(column_linear.axis), [column_linear])[1][0]


def linear_matmul(inputs: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Apply a linear layer whose weight has the shape (out, in), or (in, out) if ``transposed``."""
    inputs = inputs.to(weight.dtype) if has_wider_dtype(inputs, weight) else inputs
    if not transposed:
        return F.linear(inputs, weight, bias)
    flat = inputs.reshape(-1, inputs.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*inputs.shape[:-1], weight.shape[1])


def compute_weight_grad(inputs: Tensor, grad_output: Tensor, transposed: bool) -> Tensor:
    x2, g2 = inputs.reshape(-1, inputs.shape[-1]), grad_output.reshape(-1, grad_output.shape[-1])
    return x2.t() @ g2 if transposed else g2.t() @ x2


class _ColumnParallelLinears(Function):
    """Autograd function that gathers the input of a block and computes its column-parallel linear layers.

    Also returns the gathered input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        gathered_input: Tensor | None,
        region: TpRegion,
        transposed: list[bool],
        *weights_and_biases: Tensor | None,
    ) -> tuple[Tensor, ...]:
        matrices, biases = cast("tuple[Tensor, ...]", weights_and_biases[::2]), weights_and_biases[1::2]

        def matmul_chunk(chunk: Tensor) -> list[Tensor]:
            return [linear_matmul(chunk, w, b, t) for w, b, t in zip(matrices, biases, transposed, strict=True)]

        full_x, outputs = region.gather_then_matmul(hidden_states, matmul_chunk, gathered_input)
        ctx.region, ctx.transposed = region, transposed
        ctx.save_for_backward(full_x, *matrices)
        ctx.set_materialize_grads(False)
        visible = full_x.detach()
        ctx.mark_non_differentiable(visible)
        return (visible, *outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        full_x, *weights = ctx.saved_tensors
        pending = None
        if ctx.needs_input_grad[0]:
            pending = ctx.region.start_output_reduction(
                _compute_input_grad(full_x, weights, ctx.transposed, grad_outputs)
            )
        out: list[Tensor | None] = []
        for i, grad in enumerate(grad_outputs):
            needs_weight, needs_bias = ctx.needs_input_grad[4 + 2 * i : 6 + 2 * i]
            out.append(
                compute_weight_grad(full_x, grad, ctx.transposed[i]) if needs_weight and grad is not None else None
            )
            out.append(compute_bias_grad(grad) if needs_bias else None)
        return (None if pending is None else pending.wait(), None, None, None, *out)


def compute_bias_grad(grad_output: Tensor | None) -> Tensor | None:
    return None if grad_output is None else grad_output.reshape(-1, grad_output.shape[-1]).sum(0)


def _compute_input_grad(
    full_input: Tensor,
    weights: Sequence[Tensor],
    transposed_flags: Sequence[bool],
    grad_outputs: Sequence[Tensor | None],
) -> Tensor:
    total = None
    for weight, t, grad in zip(weights, transposed_flags, grad_outputs, strict=True):
        if grad is None:
            continue
        flat = grad.reshape(-1, grad.shape[-1])
        matrix = weight.t() if t else weight
        total = flat @ matrix if total is None else total.addmm_(flat, matrix)
    return torch.zeros_like(full_input) if total is None else total.view(full_input.shape)


class RowParallelMatmul(Function):
    """Autograd function that computes a row-parallel linear layer without its bias, summed over the ranks.

    Communicates as the exit of the region. If the backward pass runs separately for the input and for the weight (as
    some pipeline schedules do), it gathers the gradient only once.
    """

    leaves_block = True

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, transposed: bool, region: TpRegion) -> Tensor:
        ctx.save_for_backward(hidden_states, weight)
        ctx.transposed, ctx.region, ctx.gathered = transposed, region, None
        return region.matmul_then_reduce(hidden_states, lambda chunk: [linear_matmul(chunk, weight, None, transposed)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]

        def matmul_grad_chunk(grad_chunk: Tensor) -> list[Tensor]:
            return [linear_matmul(grad_chunk, weight, None, not ctx.transposed)] if needs_x else []

        gathered_x, ctx.gathered = ctx.gathered, None
        full, x_grad = ctx.region.gather_then_matmul(grad_output, matmul_grad_chunk, gathered_x)
        if needs_x and not needs_weight:
            ctx.gathered = full
        w_grad = compute_weight_grad(x, full, ctx.transposed) if needs_weight else None
        return x_grad[0] if needs_x else None, w_grad, None, None


class ReducePartialOutputs(Function):
    """Autograd function that sums the partial outputs of a tensor-parallel block over the ranks."""

    leaves_block = True

    @staticmethod
    def forward(ctx: Any, partial_output: Tensor, region: TpRegion) -> Tensor:
        ctx.region = region
        return region.start_output_reduction(partial_output.clone(memory_format=torch.contiguous_format)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.region.gather_then_matmul(grad_output, lambda _: [])[0], None


class _ApplyWithCustomBackward(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_fn: Map, backward_fn: Map) -> Tensor:
        ctx.backward_of = backward_fn
        return forward_fn(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(grad_output), None, None


def apply_with_custom_backward(tensor: Tensor, forward_fn: Map, backward_fn: Map) -> Tensor:
    """Apply ``forward_fn`` to a tensor, and use ``backward_fn`` to compute its gradient."""
    out: Tensor = _ApplyWithCustomBackward.apply(tensor, forward_fn, backward_fn)
    return out


def register_random_state_sync_hooks(axis: Axis, module: nn.Module) -> None:
    """Make ``module`` draw the same random numbers on all ranks, although their random states differ.

    With sequence parallelism, stochastic depth between blocks needs this, because it drops full samples. A number drawn
    by the first rank seeds the module, including in a recomputation under checkpointing.

    Communicates: in training one broadcast of one number per call.
    """
    random = LocalRNGState(axis.rank, partial(broadcast, axis=axis))

    def sync_random_state_pre_hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        random.enter_local_rng_state(args[0], module.training)

    def restore_random_state_hook(*_: Any) -> None:
        random.exit_local_rng_state()

    register_forward_hooks(
        module, HookOrder.RANDOM_STATE, sync_random_state_pre_hook, restore_random_state_hook, always_call=True
    )
