"""Blocks enter the tensor-parallel region once and leave it once.

A ``Block`` stands at both edges. At the entry one tensor x becomes the input of all the block's column-parallel
linears; its gradient is summed over them first and over the ranks then, in one collective that runs while their weight
gradients are computed. The row-parallel linear at the exit gives the sum. In a ``SequenceRegion`` the entry gathers
the sequence and the exit scatters it; between blocks each rank holds a stretch of it.

    x --> entry --> q, k, v (columns) --> attention of the local heads --> o (row) --> exit

The unmodified forward calls its linears one by one with what the entry handed it, or with what it was given itself. The
first of them that sees one of those very tensors computes all, and the others take their result; one that is given
anything else computes by itself.
"""

# B batch, S sequence, H hidden, F features of one linear; lower case: this rank's part (s = S / tensor, f = F / tensor)

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from shardformer.comm.collectives import Pending, all_gather, start_all_reduce, start_reduce_scatter
from shardformer.comm.conjugates import enter_block
from shardformer.comm.ring import ring_gather, ring_scatter
from shardformer.errors import PolicyError
from shardformer.layers.random_stream import RandomStream
from shardformer.layers.tensor.local_width import LocalWidth
from shardformer.layers.tensor.sequence import SEQUENCE_DIM, SequenceRegion, with_first_tensor
from shardformer.mesh.axis import Axis


class Column(Protocol):
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

    @property
    def local_out(self) -> int:
        """Output features of this rank."""

    def multiply(self, x: Tensor) -> Tensor:
        """The local product, for an input that has entered the block already."""


@dataclass(eq=False)
class Block:
    """The two edges of one block, shared by its entry hook, its column-parallel linears and its row-parallel linear.

    Args:
        width: what the forward is to read as the last dim of what entered, where it takes the heads' width from there.
        is_flat: whether what entered last had lost the dim of the sequence, which the exit takes away again.
    """

    axis: Axis
    sequence: SequenceRegion | None = None
    random: bool = False
    width: int | None = None
    is_flat: bool = False
    columns: list[Column] = field(default_factory=list)
    _source: Tensor | None = None
    _node: Any = None
    _is_watched: bool = False
    _entered: Tensor | None = None
    _outputs: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stream = RandomStream(self.axis)

    @property
    def is_open(self) -> bool:
        """Whether the forward is between the entry and the exit."""
        return self._source is not None

    @property
    def _gathers(self) -> bool:
        return self.sequence is not None and self.sequence.active

    def enter(self, x: Tensor, training: bool) -> Tensor:
        """x (B, S, H), or its stretch (B, s, H), becomes the block's input (B, S, H).

        Without sequence parallelism: backward one all-reduce of B*S*H. With it: forward one all-gather, backward one
        reduce-scatter of B*S*H.
        """
        self._outputs = {}
        if self.sequence is not None and x.dim() != 2:  # a layer's MLP that is given (B*s, H) follows its attention
            self.sequence.recall(x)
        self.is_flat = self._gathers and x.dim() == 2
        if self.is_flat:
            assert self.sequence is not None
            x = self.sequence.unflatten(x)
        self._source = x
        if not self._gathers:
            self._entered = enter_block(x, self.axis)
            if self._entered is x:
                self._entered = x.view_as(x)
        else:
            assert self.sequence is not None
            self._entered = self._gather(x, self.sequence)
        if self.width is not None:
            self._entered = LocalWidth.of(self._entered, self)
        self._node = self._entered.grad_fn if self._is_watched else None
        if training and self.random:
            self._stream.enter(x)
        return self._entered

    def enter_module(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a module's forward: its first tensor argument enters."""
        return with_first_tensor(args, kwargs, lambda x: self.enter(x, module.training))

    def _gather(self, x: Tensor, sequence: SequenceRegion) -> Tensor:
        sequence.check(x)
        if sequence.overlap and torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
            joined, *outputs = _ColumnGroup.apply(
                x, None, _How(self.axis, sequence, self.columns, ring=True), *_weights(self.columns)
            )
            self._keep(outputs)
        else:
            joined = all_gather(x.detach(), self.axis, SEQUENCE_DIM, sequence.full)
        gathered: Tensor = _Gathered.apply(x, joined, self.axis)
        return gathered

    def project(self, column: Column, x: Tensor) -> Tensor:
        """The output (B, S, f) of one of the block's columns for what it was called with."""
        if self._source is None or (x is not self._entered and x is not self._source):
            return column.multiply(x)
        if id(column) not in self._outputs:
            if x is self._entered and all(own is not column for own in self.columns):
                return column.multiply(x)  # one that reads other states too, which have entered by themselves
            joined = x.detach() if self._gathers else None
            how = _How(self.axis, self.sequence if self._gathers else None, self.columns)
            self._keep(_project(self._source, joined, how))
        return self._outputs.pop(id(column))

    def project_by_weight(self, weight: Tensor, x: Tensor) -> Tensor | None:
        """The same for a forward that multiplies with a column's weight itself; None where no column has it."""
        column = next((c for c in self.columns if c.weight is weight and c.bias is None), None)
        return None if column is None else self.project(column, x)

    def _keep(self, outputs: Sequence[Tensor]) -> None:
        self._outputs = {id(c): y for c, y in zip(self.columns, outputs, strict=True)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        """Without what a forward left here: a recomputation under checkpointing stops before the exit."""
        memo[id(self)] = twin = Block(self.axis, deepcopy(self.sequence, memo), self.random, self.width, self.is_flat)
        twin.columns = deepcopy(self.columns, memo)
        return twin

    def watch(self, module: nn.Module) -> None:
        """Checks the first forward of ``module``, the entry and the exit's holder: see ``check_closed``."""
        self._is_watched = True
        module.register_forward_hook(self.check_closed)

    def check_closed(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After the first forward with gradients of an entry module that holds the exit too.

        Raises PolicyError when what entered goes around the exit: a residual inside the module. Every rank would have
        its whole gradient, and the entry would add them up.
        """
        out = next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn is not None), None)
        entered, self._node = self._node, None
        if entered is None or out is None:
            return
        self._is_watched = False
        reached, seen = [out.grad_fn], set()
        while reached:
            node: Any = reached.pop()
            if node is None or node in seen or type(node).__name__ == "RowExitBackward":
                continue
            if node is entered:
                raise PolicyError(
                    f"The {type(module).__name__} hands on what entered a block beside the block's exit",
                    rule="All that enters a block leaves by its row-parallel linear; a residual is added outside of it",
                    remedy="Say where it enters instead: Attention(..., entry=<its first projection>)",
                )
            seen.add(node)
            reached += [following for following, _ in node.next_functions]

    def abandon(self) -> None:
        """Forgets a forward that an error broke off inside, and goes back to the random numbers outside."""
        self._source = self._entered = None
        self._outputs = {}
        self._stream.leave()

    def leave(self, training: bool) -> None:
        """The row-parallel linear has been reached: what follows is outside of the block."""
        self._source = self._entered = None
        self._outputs = {}
        if training and self.random:
            self._stream.leave()


def project_alone(column: Column, x: Tensor) -> Tensor:
    """The output of a column-parallel linear that is a block's whole entry by itself. Backward: one all-reduce of x."""
    return _project(x, None, _How(column.axis, None, [column]))[0]


@dataclass(frozen=True)
class _How:
    axis: Axis
    sequence: SequenceRegion | None
    columns: Sequence[Column]
    ring: bool = False


def _weights(columns: Sequence[Column]) -> list[Tensor | None]:
    return [p for c in columns for p in (c.weight, c.fused_bias)]


def _project(x: Tensor, joined: Tensor | None, how: _How) -> tuple[Tensor, ...]:
    weights = _weights(how.columns)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, joined = x.to(dtype), None if joined is None else joined.to(dtype)
        weights = [None if w is None else w.to(dtype) for w in weights]
    outputs: tuple[Tensor, ...] = _ColumnGroup.apply(x, joined, how, *weights)
    return outputs[1:]


def matmul_in(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x @ W^T + b for a weight stored (out, in), or x @ W + b for one stored (in, out)."""
    if not transposed:
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def weight_grad(x: Tensor, grad: Tensor, transposed: bool) -> Tensor:
    x2, g2 = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return x2.t() @ g2 if transposed else g2.t() @ x2


class _Gathered(Function):
    """Hands out the gathered sequence as a function of this rank's stretch, for uses beside the columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return joined.view_as(joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_reduce_scatter(grad, ctx.axis, SEQUENCE_DIM).wait(), None, None


class _ColumnGroup(Function):
    """All column-parallel linears behind one entry. Returns the input they saw and their outputs.

    Backward starts the collective of the input's gradient, computes the weights' gradients under it, and waits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: Tensor | None, how: _How, *weights: Tensor | None) -> tuple[Tensor, ...]:
        # every linear has a weight
        pairs = cast("list[tuple[Tensor, Tensor | None]]", list(zip(weights[::2], weights[1::2], strict=True)))
        transposed = [c.transposed for c in how.columns]
        if how.ring:
            assert how.sequence is not None
            seen, outputs = _multiply_in_ring(x, how, pairs)
        else:
            seen = x if joined is None else joined
            outputs = [matmul_in(seen, w, b, t) for (w, b), t in zip(pairs, transposed, strict=True)]
        ctx.how, ctx.transposed = how, transposed
        ctx.has_bias = [b is not None for _, b in pairs]
        ctx.save_for_backward(seen, *[w for w, _ in pairs])
        ctx.set_materialize_grads(False)
        visible = seen.detach() if how.ring else x.new_empty(0)
        ctx.mark_non_differentiable(visible)
        return (visible, *outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        seen, *weights = ctx.saved_tensors
        pending = None
        if ctx.needs_input_grad[0]:
            pending = _start_input_grad(ctx.how, seen, weights, ctx.transposed, grads)
        out: list[Tensor | None] = []
        for i, grad in enumerate(grads):
            needs_weight, needs_bias = ctx.needs_input_grad[3 + 2 * i], ctx.needs_input_grad[4 + 2 * i]
            out.append(weight_grad(seen, grad, ctx.transposed[i]) if needs_weight and grad is not None else None)
            has = needs_bias and ctx.has_bias[i] and grad is not None
            out.append(grad.reshape(-1, grad.shape[-1]).sum(0) if has and grad is not None else None)
        return (None if pending is None else pending.wait(), None, None, *out)


def _start_input_grad(
    how: _How, seen: Tensor, weights: Sequence[Tensor], transposed: Sequence[bool], grads: Sequence[Tensor | None]
) -> Pending:
    total = None
    for weight, t, grad in zip(weights, transposed, grads, strict=True):
        if grad is None:
            continue
        flat = grad.reshape(-1, grad.shape[-1])
        matrix = weight.t() if t else weight
        total = flat @ matrix if total is None else total.addmm_(flat, matrix)
    whole = torch.zeros_like(seen) if total is None else total.view(seen.shape)
    if how.sequence is None:
        return start_all_reduce(whole, how.axis)
    return start_reduce_scatter(whole, how.axis, SEQUENCE_DIM)


def _multiply_in_ring(
    x: Tensor, how: _How, pairs: Sequence[tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, list[Tensor]]:
    assert how.sequence is not None
    full = how.sequence.full
    widths = [c.local_out for c in how.columns]
    outputs = [x.new_empty((x.shape[0], full, width)) for width in widths]

    def multiply(stretch: Tensor, start: int, end: int) -> None:
        for (w, b), out, column in zip(pairs, outputs, how.columns, strict=True):
            out[:, start:end] = matmul_in(stretch, w, b, column.transposed)

    return ring_gather(x, how.axis, full, multiply), outputs


class RowExit(Function):
    """The row-parallel linear: this rank's partial product, summed over the ranks. The bias comes after.

    Plain: forward one all-reduce of B*S*H. With sequence parallelism: forward one reduce-scatter, backward one
    all-gather of B*S*H, also where it is run in two halves, for the input first and for the weight later.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, transposed: bool, axis: Axis, sequence: SequenceRegion | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.axis, ctx.sequence, ctx.gathered = transposed, axis, sequence, None
        if sequence is None:
            return start_all_reduce(matmul_in(x, weight, None, transposed), axis).wait()
        ctx.full = sequence.full
        if sequence.overlap:
            return ring_scatter(lambda a, b: matmul_in(x[:, a:b], weight, None, transposed), axis, ctx.full)
        return start_reduce_scatter(matmul_in(x, weight, None, transposed), axis, SEQUENCE_DIM).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        transposed, x_grad = ctx.transposed, None
        if ctx.sequence is not None and ctx.sequence.overlap and ctx.needs_input_grad[0]:
            x_grad = parts = torch.empty_like(x)

            def multiply(stretch: Tensor, start: int, end: int) -> None:
                parts[:, start:end] = matmul_in(stretch, weight, None, not transposed)

            grad = ring_gather(grad, ctx.axis, ctx.full, multiply)
        else:
            if ctx.gathered is not None:
                grad = ctx.gathered
            elif ctx.sequence is not None:
                grad = all_gather(grad, ctx.axis, SEQUENCE_DIM, ctx.full)
            if ctx.needs_input_grad[0]:
                x_grad = matmul_in(grad, weight, None, not transposed)
        is_half = ctx.sequence is not None and ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        ctx.gathered = grad if is_half else None
        w_grad = weight_grad(x, grad, transposed) if ctx.needs_input_grad[1] else None
        return x_grad, w_grad, None, None, None


def register_entry(module: nn.Module, block: Block, *, holds_exit: bool = False) -> None:
    """Makes ``module`` the entry of ``block``: its first tensor argument enters before its forward runs."""
    module.register_forward_pre_hook(block.enter_module, with_kwargs=True)
    if holds_exit:
        block.watch(module)
