"""Communication where a tensor-parallel block begins and ends, and the matrix products next to it.

    x --> entry --> columns (q, k, v; gate, up) --> local heads or features --> row (o; down) --> exit

    stream                    entry, forward | backward          exit, forward | backward
    whole on all ranks        nothing        | all-reduce        all-reduce      | nothing
    sequence cut              all-gather     | reduce-scatter    reduce-scatter  | all-gather

Each kind of stream is a class here. ``REGIONS_BY_DIM`` says which belongs to a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.autograd_collectives import CopyToTpRegion, copy_to_tp_region, once_differentiable
from shardformer.comm.collectives import (
    PendingCollective,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from shardformer.comm.deferred_tensor import DeferredTensor
from shardformer.errors import PolicyError
from shardformer.layout.activation_layout import Dim
from shardformer.mesh.parallel_context import Axis
from shardformer.random_state import SPLITMIX64, generators_of
from shardformer.tensor_parallel.comm_overlap import all_gather_matmul, matmul_reduce_scatter
from shardformer.tensor_parallel.parallel_module import is_wider, product_dtype
from shardformer.torch_compat import custom_function_of, to_list

SEQUENCE = Dim.SEQUENCE.position
Multiply = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class ReplicatedRegion:
    """Both edges of a block in one forward, and in the backward of that, where all ranks hold the stream alike.

    Those of a stream that is cut have the same methods.
    """

    axis: Axis

    def enter(self, x: Tensor) -> Tensor:
        """What the forward of the block is given: the full tensor, of which the block uses a part."""
        entered = copy_to_tp_region(x, self.axis)
        return x.view_as(x) if entered is x else entered

    def gather_then_matmul(
        self, x: Tensor, multiply: Multiply, known: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The full tensor of the ranks' x, ``known`` where it is given, and ``multiply`` of it."""
        return x, multiply(x)

    def start_reduce(self, x: Tensor) -> PendingCollective:
        """Starts the sum of the ranks' x, of which this rank gets what it holds of the stream."""
        return start_all_reduce(x, self.axis)

    def matmul_then_reduce(self, x: Tensor, multiply: Multiply) -> Tensor:
        """That of ``multiply(x)``, which has one result."""
        return self.start_reduce(multiply(x)[0]).wait()

    def leading_shape(self, x: Tensor) -> tuple[int, ...]:
        """The dims before the last of what this rank holds of a stream of which x is the whole."""
        return tuple(x.shape[:-1])


@dataclass(frozen=True)
class SequenceShardedRegion:
    """Each rank of the axis holds consecutive positions of a sequence of ``full``.

    Args:
        overlap: whether gathers and scatters go around a ring in steps, under the matmuls beside them.
    """

    axis: Axis
    full: int
    overlap: bool = False

    def enter(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:SEQUENCE], self.full, *x.shape[SEQUENCE + 1 :])
        return DeferredTensor.make(
            x,
            shape,
            self.axis,
            None,
            lambda x: all_gather(x, self.axis, SEQUENCE, self.full),
            lambda grad: reduce_scatter(grad, self.axis, SEQUENCE),
        )

    def gather_then_matmul(
        self, x: Tensor, multiply: Multiply, known: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        if known is not None or not self.overlap:
            joined = all_gather(x, self.axis, SEQUENCE, self.full) if known is None else known
            return joined, multiply(joined)
        products: dict[int, list[Tensor]] = {}

        def use(piece: Tensor, start: int, end: int) -> None:
            products[start] = multiply(piece)

        joined = all_gather_matmul(x, self.axis, self.full, use)
        columns = zip(*(products[start] for start in sorted(products)), strict=True)
        return joined, [torch.cat(pieces, SEQUENCE) for pieces in columns]

    def start_reduce(self, x: Tensor) -> PendingCollective:
        return start_reduce_scatter(x, self.axis, SEQUENCE)

    def matmul_then_reduce(self, x: Tensor, multiply: Multiply) -> Tensor:
        if not self.overlap:
            return self.start_reduce(multiply(x)[0]).wait()
        return matmul_reduce_scatter(lambda a, b: multiply(x[:, a:b])[0], self.axis, self.full)

    def leading_shape(self, x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:SEQUENCE], local_length(self.full, self.axis))


TpRegion = ReplicatedRegion | SequenceShardedRegion
REGIONS_BY_DIM: Mapping[Dim | None, type[TpRegion]] = {None: ReplicatedRegion, Dim.SEQUENCE: SequenceShardedRegion}
"""Which dim of the stream a stack cuts over the axis of its blocks -> the edges of these."""


def enter_region(x: Tensor, axis: Axis) -> Tensor:
    """x enters blocks beside the hidden states: a tensor that all ranks hold, or the output of another stack.

    Backward: one all-reduce of the gradient of x, or one reduce-scatter of that of a stack's output.

    Raises PolicyError for one that has entered already, or is a view of such a one.
    """
    if isinstance(x, DeferredTensor):
        if x.is_pending and x.region is not None and x.axis is axis:
            entered: Tensor = x.region.enter(x.local)
            return entered
        x = x.full_tensor()
    node: Any = x.grad_fn
    while node is not None:
        if custom_function_of(node) is CopyToTpRegion:
            raise PolicyError(
                f"A tensor of shape {tuple(x.shape)} enters a block that has entered one already",
                remedy="Name it once: by the `cross_states` of its stack, or by the `inputs` of its attentions",
            )
        before = node.next_functions
        node = before[0][0] if len(before) == 1 else None  # a view has one
    return copy_to_tp_region(x, axis)


def deferred_all_reduce(x: Tensor, axis: Axis) -> DeferredTensor:
    """The sum of the ranks' x, as a tensor that is pending: who cuts it at once needs a reduce-scatter only."""
    return DeferredTensor.make(x, tuple(x.shape), axis, None, lambda x: all_reduce(x.clone(), axis), lambda grad: grad)


def local_length(full: int, axis: Axis) -> int:
    """How many positions of a sequence this rank holds."""
    base, more = divmod(full, axis.size)
    return base + (axis.rank < more)


# B batch, S sequence, H hidden, F features of one linear; lower case: this rank's part (f = F / tensor)


class ColumnParallel(Protocol):
    """What a block must know of a column-parallel linear."""

    axis: Axis
    transposed: bool

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def fused_bias(self) -> Tensor | None:
        """The bias that the matmul adds itself."""

    def multiply(self, x: Tensor) -> Tensor:
        """The local product, for an input that has entered the block already."""


def projection_operands(
    x: Tensor, columns: Sequence[ColumnParallel], known: Tensor | None
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """x, the known input, and the weights and biases of the columns, cast to the dtype of their products."""
    weights: list[Tensor | None] = [p for c in columns for p in (c.weight, c.fused_bias)]
    if (dtype := product_dtype(x, columns[0].weight)) is not None:
        x, known = x.to(dtype), known if known is None else known.to(dtype)
        weights = [None if w is None else w.to(dtype) for w in weights]
    return x, known, weights


def column_projections(
    x: Tensor, edges: TpRegion, columns: Sequence[ColumnParallel], known: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The tensor that the columns read, without history, and their outputs (B, S, f), for this rank's x of the stream.

    Under autocast, and where it is wider than 16-bit weights, x is cast before it is sent. Communicates what the entry
    does; in the backward the gradient of x is on its way while the gradients of the weights are computed.

    Args:
        known: the full tensor of x, where it was gathered before.
    """
    x, known, weights = projection_operands(x, columns, known)
    seen, *outputs = _ColumnProjections.apply(x, known, edges, [c.transposed for c in columns], *weights)
    return seen, outputs


def single_column_projection(column: ColumnParallel, x: Tensor) -> Tensor:
    """The output of a column-parallel linear that is a block's whole entry by itself.

    Backward: one all-reduce of x; of what leaves a stack that cuts it, one reduce-scatter.
    """
    if isinstance(x, DeferredTensor):
        if x.is_pending and x.region is not None and x.axis is column.axis:
            seen, (y,) = column_projections(x.local, x.region, [column], x.computed_value)
            if x.computed_value is None and seen.dtype == x.dtype:
                x.set_computed(seen)
            return y
        x = x.full_tensor()
    return column_projections(x, ReplicatedRegion(column.axis), [column])[1][0]


def linear_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x @ W^T + b for a weight stored (out, in), or x @ W + b for one stored (in, out)."""
    x = x.to(weight.dtype) if is_wider(x, weight) else x
    if not transposed:
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def weight_grad(x: Tensor, grad: Tensor, transposed: bool) -> Tensor:
    x2, g2 = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return x2.t() @ g2 if transposed else g2.t() @ x2


class _ColumnProjections(Function):
    """All column-parallel linears behind one entry. Returns the input they saw and their outputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, known: Tensor | None, edges: TpRegion, transposed: list[bool], *weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        # every linear has a weight
        pairs = cast("list[tuple[Tensor, Tensor | None]]", list(zip(weights[::2], weights[1::2], strict=True)))

        def multiply(piece: Tensor) -> list[Tensor]:
            return [linear_matmul(piece, w, b, t) for (w, b), t in zip(pairs, transposed, strict=True)]

        seen, outputs = edges.gather_then_matmul(x, multiply, known)
        ctx.edges, ctx.transposed = edges, transposed
        ctx.has_bias = [b is not None for _, b in pairs]
        ctx.save_for_backward(seen, *[w for w, _ in pairs])
        ctx.set_materialize_grads(False)
        visible = seen.detach()
        ctx.mark_non_differentiable(visible)
        return (visible, *outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        seen, *weights = ctx.saved_tensors
        pending = None
        if ctx.needs_input_grad[0]:
            pending = ctx.edges.start_reduce(_input_grad(seen, weights, ctx.transposed, grads))
        out: list[Tensor | None] = []
        for i, grad in enumerate(grads):
            needs_weight, needs_bias = ctx.needs_input_grad[4 + 2 * i], ctx.needs_input_grad[5 + 2 * i]
            out.append(weight_grad(seen, grad, ctx.transposed[i]) if needs_weight and grad is not None else None)
            has = needs_bias and ctx.has_bias[i] and grad is not None
            out.append(grad.reshape(-1, grad.shape[-1]).sum(0) if has and grad is not None else None)
        return (None if pending is None else pending.wait(), None, None, None, *out)


def _input_grad(
    seen: Tensor, weights: Sequence[Tensor], transposed: Sequence[bool], grads: Sequence[Tensor | None]
) -> Tensor:
    """The sum over the columns of the gradient of what they saw."""
    total = None
    for weight, t, grad in zip(weights, transposed, grads, strict=True):
        if grad is None:
            continue
        flat = grad.reshape(-1, grad.shape[-1])
        matrix = weight.t() if t else weight
        total = flat @ matrix if total is None else total.addmm_(flat, matrix)
    return torch.zeros_like(seen) if total is None else total.view(seen.shape)


class RowParallelMatmul(Function):
    """The row-parallel linear: this rank's partial product, summed over the ranks. The bias comes after.

    Communicates what the exit does, in the backward also where that is run in two halves, for the input first and for
    the weight later: once.
    """

    leaves_block = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool, edges: TpRegion) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.edges, ctx.gathered = transposed, edges, None
        return edges.matmul_then_reduce(x, lambda piece: [linear_matmul(piece, weight, None, transposed)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]

        def multiply(piece: Tensor) -> list[Tensor]:
            return [linear_matmul(piece, weight, None, not ctx.transposed)] if needs_x else []

        known, ctx.gathered = ctx.gathered, None
        full, x_grad = ctx.edges.gather_then_matmul(grad, multiply, known)
        if needs_x and not needs_weight:
            ctx.gathered = full
        w_grad = weight_grad(x, full, ctx.transposed) if needs_weight else None
        return x_grad[0] if needs_x else None, w_grad, None, None


class LocalRandomState:
    """Random numbers that differ by tensor rank from ``enter`` to ``leave``, and are the same on all ranks outside.

    With ``aligned`` the other way round: the same on all ranks between, where each has its own outside. Communicates
    one number then.

    The stream inside starts from a number drawn from the stream outside, so whoever restores the outer state, such as
    activation checkpointing, gets the same numbers inside again.
    """

    def __init__(self, axis: Axis, *, aligned: bool = False) -> None:
        self._axis, self._aligned = axis, aligned
        self._outer: list[tuple[torch.Generator, Tensor]] = []

    def enter(self, x: Tensor) -> None:
        seed, own = torch.randint(2**62, (), device="cpu"), SPLITMIX64[0] * (self._axis.rank + 1)
        if self._aligned:
            seed, own = broadcast(seed.to(x.device), self._axis), 0
        self._outer = [(g, g.get_state()) for g in generators_of(x.device)]
        for g, _ in self._outer:
            g.manual_seed((int(to_list(seed)) + own) % 2**63)

    def leave(self) -> None:
        for generator, state in self._outer:
            generator.set_state(state)
        self._outer = []


def same_random_in(axis: Axis, module: nn.Module) -> None:
    """A module's draws are the same on all ranks, though the stream around it is each rank's own.

    Stochastic depth between blocks drops whole samples, of which with sequence parallelism each rank has a part.
    The first rank's next number seeds what the module draws, in a recomputation under checkpointing again.

    Communicates: in training one broadcast of one number a call.
    """
    stream = LocalRandomState(axis, aligned=True)
    module.register_forward_pre_hook(lambda module, args: stream.enter(args[0]) if module.training else None)
    module.register_forward_hook(lambda *_: stream.leave(), always_call=True)
