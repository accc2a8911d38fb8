"""TensorParallelBlock: activations enter the tensor-parallel region once and leave it once.

A forward may take the width of its heads from its input:

    B, N, C = x.shape                                  # C: of all heads, on one device
    qkv = F.linear(x, self.qkv.weight, bias)           # the projection's module is not called
    ...
    return self.proj(x.transpose(1, 2).reshape(B, N, C))

There C has to be the width of this rank's heads. ``LocalWidthTensor`` says so when it is asked for its shape, and
hands a
product with the weight of one of the block's columns to the block. Turned, with its last dim where it was, it still
says so (a forward that works on (N, B, C)). For anything else it is the plain tensor.

A ``TensorParallelBlock`` stands at both edges (``edges``). At the entry one tensor x becomes the input of all the
block's
column-parallel linears; its gradient is summed over them first and over the ranks then, in one collective. The
row-parallel linear at the exit gives the sum.

    x --> entry --> q, k, v (columns) --> attention of the local heads --> o (row) --> exit

The unmodified forward calls its linears one by one with what the entry handed it, or with what it was given itself. The
first of them that sees one of those very tensors computes all, and the others take their result; one that is given
anything else computes by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.comm.autograd_collectives import reduce_from_tp_region, reduce_scatter_to_sp_region
from shardformer.comm.deferred_tensor import DeferredTensor
from shardformer.comm.sharded_tensor import Args, Kwargs
from shardformer.errors import ConfigError, PolicyError
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.region import (
    SEQUENCE,
    ColumnParallel,
    LocalRandomState,
    ReplicatedRegion,
    SequenceShardedRegion,
    TpRegion,
    column_projections,
    enter_region,
)
from shardformer.tensor_parallel.sequence_parallel import StackActivations, with_first_tensor
from shardformer.torch_compat import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    custom_function_of,
    has_data,
    tree_leaves,
)

# B batch, N sequence, C width of the heads


class LocalWidthBlock(Protocol):
    """The block that a tensor entered."""

    width: int | None

    def project_by_weight(self, weight: Tensor, x: Tensor) -> Tensor | None:
        """The output of the block's column with this weight; None where it has none."""


SHAPE: Any = getattr_static(Tensor, "shape").__get__
PERMUTING_FUNCTIONS = (Tensor.transpose, Tensor.permute, torch.transpose, torch.permute)


class LocalWidthTensor(Tensor):
    """A tensor (B, N, H) that says of its last dim that it is ``block.width``, and is H otherwise."""

    block: LocalWidthBlock

    @staticmethod
    def of(x: Tensor, block: LocalWidthBlock) -> LocalWidthTensor:
        if not has_data(x):
            raise ConfigError(
                "A step is traced whose block asks its input for the width of the heads",
                rule="Fake tensors cannot be tensors of another class, which this block is given",
                remedy="Count its collectives in a real step, with shardformer.local_ranks.threads.run_as_threads",
            )
        entered = x.as_subclass(LocalWidthTensor)
        entered.block = block
        return entered

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        given = dict(kwargs or {})
        with DisableTorchFunctionSubclass():
            if isinstance(args[0] if args else None, LocalWidthTensor):
                if func == SHAPE or func is Tensor.size:
                    return _local_size(func(*args, **given), args[0], *args[1:], **given)
                if func is F.linear:
                    return _linear(*args, **given)
                if func in PERMUTING_FUNCTIONS:
                    return _permuted(func(*args, **given), args[0])
            return func(*args, **given)


def _local_size(said: torch.Size | int, x: LocalWidthTensor, dim: int | None = None) -> torch.Size | int:
    width = x.block.width
    assert width is not None
    if isinstance(said, torch.Size):
        return torch.Size((*said[:-1], width))
    return width if dim in (-1, x.dim() - 1) else said


def _permuted(y: Tensor, x: LocalWidthTensor) -> Tensor:
    """y, which is x with its dims in another order."""
    stays = y.shape[-1] == x.shape[-1] and y.stride(-1) == x.stride(-1)
    return LocalWidthTensor.of(y, x.block) if stays else y


def _linear(x: LocalWidthTensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.block.project_by_weight(weight, x)
    if y is None:
        return F.linear(x, weight, bias)
    return y if bias is None else y + bias


# B batch, S sequence, H hidden, F features of one linear; lower case: this rank's part (s = S / tensor, f = F / tensor)


@dataclass(eq=False)
class TensorParallelBlock:
    """The two edges of one block, shared by its entry hook, its column-parallel linears and its row-parallel linear.

    Args:
        stream: what flows between the blocks.
        random: whether the model draws random numbers when it trains: inside, each rank draws its own.
        width: what the forward is to read as the last dim of what entered, where it takes the heads' width from there.
    """

    stream: StackActivations
    random: bool = False
    width: int | None = None
    columns: list[ColumnParallel] = field(default_factory=list)
    is_flat: bool = False  # what entered last had lost the dim of the sequence, which the exit takes away again
    _edges: TpRegion | None = None
    _source: Tensor | None = None
    _entered: Tensor | None = None
    _pending: DeferredTensor | None = None
    _outputs: dict[int, Tensor] = field(default_factory=dict)
    _node: Any = None
    _is_watched: bool = False
    _entry: str = "module"

    def __post_init__(self) -> None:
        self._random = LocalRandomState(self.axis)

    @property
    def axis(self) -> Axis:
        return self.stream.axis

    @property
    def is_open(self) -> bool:
        """Whether the forward is between the entry and the exit."""
        return self._source is not None

    @property
    def edges(self) -> TpRegion:
        """Those of the forward that is under way; of one that never entered, those of a stream that nobody cuts."""
        return self._edges or ReplicatedRegion(self.axis)

    def enter(self, x: Tensor, training: bool) -> Tensor:
        """This rank's x of the stream becomes the block's input (B, S, H). Communicates what ``edges`` says."""
        self._outputs = {}
        if isinstance(x, DeferredTensor):
            x = x.full_tensor()
        self._edges = edges = self.stream.edges(x)
        self.is_flat = isinstance(edges, SequenceShardedRegion) and x.dim() == 2
        if self.is_flat:
            x = self.stream.unflatten(x)
        if isinstance(edges, SequenceShardedRegion):
            self.stream.check(x)
        self._source = x
        entered = edges.enter(x)
        self._pending = entered if isinstance(entered, DeferredTensor) else None
        self._node = entered if self._is_watched else None
        if self.width is not None:
            entered = LocalWidthTensor.of(entered if self._pending is None else self._pending.full_tensor(), self)
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

    def project(self, column: ColumnParallel, x: Tensor) -> Tensor:
        """The output (B, S, f) of one of the block's columns for what it was called with.

        Raises PolicyError when the module at the entry was passed by: its gradient would not be summed.
        """
        if self._source is None and current_graph_task_id() < 0:  # a recomputation may begin inside
            self._refuse_replaced(column)
        if self._source is None or (x is not self._entered and x is not self._source):
            return column.multiply(x)
        if id(column) not in self._outputs:
            if x is self._entered and all(own is not column for own in self.columns):
                return column.multiply(x)  # one that reads other states too, which have entered by themselves
            pending = self._pending
            known = pending.computed_value if pending is not None and pending.is_pending else None
            seen, outputs = self._project_all(known)
            if (
                pending is not None
                and pending.computed_value is None
                and seen is not None
                and seen.dtype == pending.dtype
            ):
                pending.set_computed(seen)
            self._outputs = {id(c): y for c, y in zip(self.columns, outputs, strict=True)}
        return self._outputs.pop(id(column))

    def _project_all(self, known: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        """What the columns see, without history, and their outputs."""
        assert self._source is not None
        return column_projections(self._source, self.edges, self.columns, known)

    def _refuse_replaced(self, column: ColumnParallel) -> None:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelBlock:
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
            if node is None or node in seen or getattr(custom_function_of(node), "leaves_block", False):
                continue
            if node is entered.grad_fn or (isinstance(entered, DeferredTensor) and entered.is_made_by(node)):
                raise PolicyError(
                    f"The {type(module).__name__} hands on what entered a block beside the block's exit",
                    rule="All that enters a block leaves by its row-parallel linear; a residual is added outside of it",
                    remedy="Say where it enters instead: inputs=AttentionInputs(entry=<its first projection>)",
                )
            seen.add(node)
            reached += [following for following, _ in node.next_functions]

    def reset_after_error(self) -> None:
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


HeadRange = tuple[int, int, int]
"""How many heads there are, and from which to which this rank has."""


def change_argument(module: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Before each forward of ``module`` its argument ``name``, where it is a tensor, becomes ``change`` of it.

    Raises PolicyError when its forward names no such argument.
    """
    names = list(inspect.signature(module.forward).parameters)
    if name not in names and "kwargs" not in names:
        raise PolicyError(
            f"{type(module).__name__}.forward has no argument {name!r}",
            rule="What enters beside the hidden states is named by the module and the argument that bring it",
            remedy=f"Its arguments are {', '.join(names)}",
        )
    position = names.index(name) if name in names else len(names)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(kwargs.get(name), Tensor):
            return args, {**kwargs, name: change(kwargs[name])}
        if len(args) > position and isinstance(args[position], Tensor):
            return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs
        return args, kwargs

    module.register_forward_pre_hook(enter, with_kwargs=True)


def select_local_heads(x: Tensor, dim: int, bounds: HeadRange, axis: Axis) -> Tensor:
    """The part of this rank's heads: of a dim that counts heads, or samples times heads.

    Backward, where x needs a gradient: one all-reduce of x.
    """
    heads, start, end = bounds
    if x.shape[dim] % heads:
        return x  # one for all heads
    entered = enter_region(x, axis) if x.requires_grad else x
    by_head: Tensor = entered.unflatten(dim, (-1, heads))
    return by_head.narrow(dim + 1, start, end - start).flatten(dim, dim + 1)


def wrap_as_block(module: nn.Module, stream: StackActivations, summands: Sequence[str] = ()) -> None:
    """Makes ``module`` a block by itself: every tensor that it is given enters, and its output is the ranks' sum.

    Where the stream is cut, what it is given for each token is gathered first, and each rank keeps its tokens' sums:
    what comes before, as a router, sees this rank's tokens alone.

    Communicates: forward one all-reduce of the output, backward one of the gradient of each tensor that needs one;
    where the stream is cut an all-gather of each tensor and a reduce-scatter of the output, and backward the other way
    round.

    Args:
        summands: what every rank has whole and adds to what the module gives: its own parameters (a bias behind the
            experts), and modules in it (an identity among them). Each rank adds an equal part, so that the gradients of
            all ranks add up to the whole one.
    """
    axis = stream.axis
    own = [name for name in summands if name in module._parameters]

    def entered(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        tokens = stream.per_token(x)
        if tokens is not None:
            return stream.gathered(tokens).view(-1, *x.shape[1:]) if x.dim() == tokens.dim() - 1 else stream.gathered(x)
        return enter_region(x, axis) if x.is_floating_point() and x.requires_grad else x

    def left(output: Tensor) -> Tensor:
        if not stream.is_cut:
            return reduce_from_tp_region(output, axis)
        whole = output if output.dim() == 3 else output.view(-1, stream.full, *output.shape[1:])
        part = reduce_scatter_to_sp_region(whole, axis, SEQUENCE)
        return part if output.dim() == 3 else part.reshape(-1, *output.shape[1:])

    def enter_all(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return tuple(entered(x) for x in args), {name: entered(x) for name, x in kwargs.items()}

    def share(module: nn.Module, args: tuple[Any, ...]) -> None:
        # an attribute of the module's own is found before its parameter
        vars(module).update({name: module.get_parameter(name) / axis.size for name in own})

    def end_share(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for name in own:
            vars(module).pop(name, None)

    module.register_forward_pre_hook(enter_all, with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: left(output))
    if own:
        module.register_forward_pre_hook(share)
        module.register_forward_hook(end_share, always_call=True)
    for name in set(summands) - set(own):
        module.get_submodule(name).register_forward_hook(lambda _, __, output: output / axis.size)
