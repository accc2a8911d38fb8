"""Blocks enter the tensor-parallel region once and leave it once.

A ``Block`` stands at both edges (``edges``). At the entry one tensor x becomes the input of all the block's
column-parallel linears; its gradient is summed over them first and over the ranks then, in one collective. The
row-parallel linear at the exit gives the sum.

    x --> entry --> q, k, v (columns) --> attention of the local heads --> o (row) --> exit

The unmodified forward calls its linears one by one with what the entry handed it, or with what it was given itself. The
first of them that sees one of those very tensors computes all, and the others take their result; one that is given
anything else computes by itself.
"""

# B batch, S sequence, H hidden, F features of one linear; lower case: this rank's part (s = S / tensor, f = F / tensor)

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardformer.errors import PolicyError
from shardformer.layers.random_stream import RandomStream
from shardformer.layers.tensor.edges import Edges, SequenceEdges, WholeEdges
from shardformer.layers.tensor.local_width import LocalWidth
from shardformer.layers.tensor.pending import PendingTensor
from shardformer.layers.tensor.projection import Column, project
from shardformer.layers.tensor.stream import Stream, with_first_tensor
from shardformer.mesh.axis import Axis

EXITS = ("RowExitBackward", "GridRowExitBackward", "_LeaveBlockBackward")
"""The functions by which something leaves a block, as autograd names them."""


@dataclass(eq=False)
class Block:
    """The two edges of one block, shared by its entry hook, its column-parallel linears and its row-parallel linear.

    Args:
        stream: what flows between the blocks.
        random: whether the model draws random numbers when it trains: inside, each rank draws its own.
        width: what the forward is to read as the last dim of what entered, where it takes the heads' width from there.
    """

    stream: Stream
    random: bool = False
    width: int | None = None
    columns: list[Column] = field(default_factory=list)
    is_flat: bool = False  # what entered last had lost the dim of the sequence, which the exit takes away again
    _edges: Edges | None = None
    _source: Tensor | None = None
    _entered: Tensor | None = None
    _pending: PendingTensor | None = None
    _outputs: dict[int, Tensor] = field(default_factory=dict)
    _node: Any = None
    _is_watched: bool = False
    _entry: str = "module"

    def __post_init__(self) -> None:
        self._random = RandomStream(self.axis)

    @property
    def axis(self) -> Axis:
        return self.stream.axis

    @property
    def is_open(self) -> bool:
        """Whether the forward is between the entry and the exit."""
        return self._source is not None

    @property
    def edges(self) -> Edges:
        """Those of the forward that is under way; of one that never entered, those of a stream that nobody cuts."""
        return self._edges or WholeEdges(self.axis)

    def enter(self, x: Tensor, training: bool) -> Tensor:
        """This rank's x of the stream becomes the block's input (B, S, H). Communicates what ``edges`` says."""
        self._outputs = {}
        if isinstance(x, PendingTensor):
            x = x.value()
        self._edges = edges = self.stream.edges(x)
        self.is_flat = isinstance(edges, SequenceEdges) and x.dim() == 2
        if self.is_flat:
            x = self.stream.unflatten(x)
        if isinstance(edges, SequenceEdges):
            self.stream.check(x)
        self._source = x
        entered = edges.enter(x)
        self._pending = entered if isinstance(entered, PendingTensor) else None
        self._node = entered if self._is_watched else None
        if self.width is not None:
            entered = LocalWidth.of(entered if self._pending is None else self._pending.value(), self)
        self._entered = entered
        if training and self.random:
            self._random.enter(x)
        return entered

    def register_entry(self, module: nn.Module, *, holds_exit: bool = False) -> None:
        """Makes ``module`` the entry: its first tensor argument enters before its forward runs."""
        self._entry = type(module).__name__
        module.register_forward_pre_hook(self._enter_module, with_kwargs=True)
        if holds_exit:
            self._is_watched = True
            module.register_forward_hook(self.check_closed)

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_first_tensor(args, kwargs, lambda x: self.enter(x, module.training))

    def project(self, column: Column, x: Tensor) -> Tensor:
        """The output (B, S, f) of one of the block's columns for what it was called with.

        Raises PolicyError when the module at the entry was passed by: its gradient would not be summed.
        """
        if self._source is None and torch._C._current_graph_task_id() < 0:  # a recomputation may begin inside
            self._refuse_replaced(column)
        if self._source is None or (x is not self._entered and x is not self._source):
            return column.multiply(x)
        if id(column) not in self._outputs:
            if x is self._entered and all(own is not column for own in self.columns):
                return column.multiply(x)  # one that reads other states too, which have entered by themselves
            pending = self._pending
            known = pending.known if pending is not None and pending.is_pending else None
            seen, outputs = self._project_all(known)
            if pending is not None and pending.known is None and seen is not None and seen.dtype == pending.dtype:
                pending.offer(seen)
            self._outputs = {id(c): y for c, y in zip(self.columns, outputs, strict=True)}
        return self._outputs.pop(id(column))

    def _project_all(self, known: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        """What the columns see, without history, and their outputs."""
        assert self._source is not None
        return project(self._source, self.edges, self.columns, known)

    def _refuse_replaced(self, column: Column) -> None:
        if any(own is column for own in self.columns):
            raise PolicyError(
                f"The first linears of a block were called without the {self._entry}, which is its entry: another "
                "module has come into its place since the model was sharded",
                rule="A block is entered by the module that stood there then; its heads and features are cut with it",
                remedy="Put the module there before the model is sharded; where a model does it itself (BigBird, for "
                "a batch shorter than its blocks of attention), choose it in the config or feed longer batches",
            )

    def project_by_weight(self, weight: Tensor, x: Tensor) -> Tensor | None:
        """The same for a forward that multiplies with a column's weight itself; None where no column has it."""
        column = next((c for c in self.columns if c.weight is weight and c.bias is None), None)
        return None if column is None else self.project(column, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        """Without what a forward left here: a recomputation under checkpointing stops before the exit."""
        memo[id(self)] = twin = type(self)(deepcopy(self.stream, memo), self.random, self.width, is_flat=self.is_flat)
        twin.columns = deepcopy(self.columns, memo)
        return twin

    def check_closed(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After the first forward with gradients of an entry module that holds the exit too.

        Raises PolicyError when what entered goes around the exit: a residual inside the module. Every rank would have
        its whole gradient, and the entry would add them up.
        """
        out = next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn is not None), None)
        entered, self._node = self._node, None
        if entered is None or entered.grad_fn is None or out is None:
            return
        self._is_watched = False
        reached, seen = [out.grad_fn], set()
        while reached:
            node: Any = reached.pop()
            if node is None or node in seen or type(node).__name__ in EXITS:
                continue
            if node is entered.grad_fn or (isinstance(entered, PendingTensor) and entered.is_made_by(node)):
                raise PolicyError(
                    f"The {type(module).__name__} hands on what entered a block beside the block's exit",
                    rule="All that enters a block leaves by its row-parallel linear; a residual is added outside of it",
                    remedy="Say where it enters instead: Attention(..., inputs=Inputs(entry=<its first projection>))",
                )
            seen.add(node)
            reached += [following for following, _ in node.next_functions]

    def abandon(self) -> None:
        """Forgets a forward that an error broke off inside, and goes back to the random numbers outside."""
        self._source = self._entered = self._pending = self._edges = None
        self._outputs = {}
        self._random.leave()

    def leave(self, training: bool) -> None:
        """The row-parallel linear has been reached: what follows is outside of the block."""
        self._source = self._entered = self._pending = self._edges = None
        self._outputs = {}
        if training and self.random:
            self._random.leave()
