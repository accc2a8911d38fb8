"""What is communicated where a block begins and ends, by how the stream between the blocks lies.

    x --> entry --> columns (q, k, v; gate, up) --> local heads or features --> row (o; down) --> exit

    stream                    entry, forward | backward          exit, forward | backward
    whole on all ranks        nothing        | all-reduce        all-reduce      | nothing
    sequence cut              all-gather     | reduce-scatter    reduce-scatter  | all-gather

Each kind of stream is a class here. ``EDGES`` says which belongs to a cut.
"""

# B batch, S sequence, H hidden; s: this rank's slice of the sequence

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardformer.comm.collectives import (
    Pending,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from shardformer.comm.conjugates import enter_block
from shardformer.comm.ring import ring_gather, ring_scatter
from shardformer.errors import PolicyError
from shardformer.layers.tensor.pending import PendingTensor
from shardformer.layout.stream import Dim
from shardformer.mesh.axis import Axis

SEQUENCE = Dim.SEQUENCE.position
Multiply = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class WholeEdges:
    """Both edges of a block in one forward, and in the backward of that, where all ranks hold the stream alike.

    Those of a stream that is cut have the same methods.
    """

    axis: Axis

    def enter(self, x: Tensor) -> Tensor:
        """What the forward of the block is given: the full tensor, of which the block uses a part."""
        entered = enter_block(x, self.axis)
        return x.view_as(x) if entered is x else entered

    def gathered(self, x: Tensor, multiply: Multiply, known: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """The full tensor of the ranks' x, ``known`` where it is given, and ``multiply`` of it."""
        return x, multiply(x)

    def start_summed(self, x: Tensor) -> Pending:
        """Starts the sum of the ranks' x, of which this rank gets what it holds of the stream."""
        return start_all_reduce(x, self.axis)

    def summed(self, x: Tensor, multiply: Multiply) -> Tensor:
        """That of ``multiply(x)``, which has one result."""
        return self.start_summed(multiply(x)[0]).wait()

    def leading(self, x: Tensor) -> tuple[int, ...]:
        """The dims before the last of what this rank holds of a stream of which x is the whole."""
        return tuple(x.shape[:-1])


@dataclass(frozen=True)
class SequenceEdges:
    """Each rank of the axis holds consecutive positions of a sequence of ``full``.

    Args:
        overlap: whether gathers and scatters go around a ring in steps, under the matmuls beside them.
    """

    axis: Axis
    full: int
    overlap: bool = False

    def enter(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:SEQUENCE], self.full, *x.shape[SEQUENCE + 1 :])
        return PendingTensor.make(
            x,
            shape,
            self.axis,
            None,
            lambda x: all_gather(x, self.axis, SEQUENCE, self.full),
            lambda grad: reduce_scatter(grad, self.axis, SEQUENCE),
        )

    def gathered(self, x: Tensor, multiply: Multiply, known: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        if known is not None or not self.overlap:
            joined = all_gather(x, self.axis, SEQUENCE, self.full) if known is None else known
            return joined, multiply(joined)
        products: dict[int, list[Tensor]] = {}

        def use(piece: Tensor, start: int, end: int) -> None:
            products[start] = multiply(piece)

        joined = ring_gather(x, self.axis, self.full, use)
        columns = zip(*(products[start] for start in sorted(products)), strict=True)
        return joined, [torch.cat(pieces, SEQUENCE) for pieces in columns]

    def start_summed(self, x: Tensor) -> Pending:
        return start_reduce_scatter(x, self.axis, SEQUENCE)

    def summed(self, x: Tensor, multiply: Multiply) -> Tensor:
        if not self.overlap:
            return self.start_summed(multiply(x)[0]).wait()
        return ring_scatter(lambda a, b: multiply(x[:, a:b])[0], self.axis, self.full)

    def leading(self, x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:SEQUENCE], own_length(self.full, self.axis))


Edges = WholeEdges | SequenceEdges
EDGES: Mapping[Dim | None, type[Edges]] = {None: WholeEdges, Dim.SEQUENCE: SequenceEdges}
"""Which dim of the stream a stack cuts over the axis of its blocks -> the edges of these."""


def enter(x: Tensor, axis: Axis) -> Tensor:
    """x enters blocks beside the hidden states: a tensor that all ranks hold, or the output of another stack.

    Backward: one all-reduce of the gradient of x, or one reduce-scatter of that of a stack's output.

    Raises PolicyError for one that has entered already, or is a view of such a one.
    """
    if isinstance(x, PendingTensor):
        if x.is_pending and x.edges is not None and x.axis is axis:
            entered: Tensor = x.edges.enter(x.local)
            return entered
        x = x.value()
    node: Any = x.grad_fn
    while node is not None:
        if type(node).__name__ == "_EnterBlockBackward":
            raise PolicyError(
                f"A tensor of shape {tuple(x.shape)} enters a block that has entered one already",
                rule="The gradients of what enters are summed over the ranks once",
                remedy="Name it once: by the `context` of its stack, or by the `inputs` of its attentions",
            )
        before = node.next_functions
        node = before[0][0] if len(before) == 1 else None  # a view has one
    return enter_block(x, axis)


def summed_later(x: Tensor, axis: Axis) -> PendingTensor:
    """The sum of the ranks' x, as a tensor that is pending: who cuts it at once needs a reduce-scatter only."""
    return PendingTensor.make(x, tuple(x.shape), axis, None, lambda x: all_reduce(x.clone(), axis), lambda grad: grad)


def own_length(full: int, axis: Axis) -> int:
    """How many positions of a sequence this rank holds."""
    base, more = divmod(full, axis.size)
    return base + (axis.rank < more)
