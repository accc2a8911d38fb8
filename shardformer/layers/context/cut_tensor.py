"""A tensor of which each rank of an axis holds some rows: how it is placed, gathered and seen by autograd.

Gradients are those of data parallelism: each rank's count P times, and the P ranks' are averaged. So what is computed
of a gathered tensor, on all ranks alike, is right, and what each rank computes of its own positions is too.
"""

# B batch, S sequence, H hidden, V vocabulary, P ranks; s: this rank's positions

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map_only

from shardformer.comm.collectives import all_gather, all_reduce, start_all_to_all
from shardformer.comm.conjugates import first_order_only
from shardformer.errors import InputError
from shardformer.layout.positions import Positions
from shardformer.mesh.axis import Axis

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Torch = Callable[..., Any]

_INSIDE = threading.local()
"""Whether a model is in its forward: operands that need a gradient are then its own, on all ranks."""


def enter_model(is_now: bool) -> None:
    """Whether what is computed from here on is of a model whose gradients are averaged over the ranks."""
    _INSIDE.now = is_now


def is_inside() -> bool:
    """In a backward, too: what runs there is a part of the model that is computed again."""
    return getattr(_INSIDE, "now", False) or torch._C._current_graph_task_id() >= 0


@dataclass(frozen=True, eq=False)
class Rows:
    """Which indices of a dim each rank of an axis has.

    Args:
        parts: of each rank, the indices in its order.
        full: length of the whole dim.
    """

    axis: Axis
    parts: tuple[Tensor, ...]
    full: int

    @classmethod
    def of(cls, positions: Positions, axis: Axis) -> Rows:
        return cls(axis, tuple(positions.indices(rank) for rank in range(axis.size)), positions.length)

    @property
    def own(self) -> Tensor:
        return self.parts[self.axis.rank]

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a full tensor."""
        return x.index_select(dim, self.own.to(x.device))

    def within(self, lead: int) -> Rows:
        """Of a dim that is ``lead`` times as long: the rows of several samples behind each other."""
        if lead == 1:
            return self
        offsets = torch.arange(lead)[:, None] * self.full
        return Rows(self.axis, tuple((offsets + part).flatten() for part in self.parts), lead * self.full)

    def sliced(self, taken: slice) -> tuple[Rows, Tensor]:
        """Of a slice of the dim: its rows, and which of this rank's own they are."""
        start, stop, step = taken.indices(self.full)
        full = len(range(start, stop, step))
        kept = [(part >= start) & (part < stop) & ((part - start) % step == 0) for part in self.parts]
        parts = tuple((part[keep] - start) // step for part, keep in zip(self.parts, kept, strict=True))
        return Rows(self.axis, parts, full), kept[self.axis.rank].nonzero()[:, 0]

    def is_like(self, other: Rows) -> bool:
        if self is other:
            return True
        alike = zip(self.parts, other.parts, strict=True)
        return self.axis is other.axis and self.full == other.full and all(torch.equal(a, b) for a, b in alike)


class CutTensor(Tensor):
    """Base of ``SequenceCut``, which says what functions of torch do with it: the full tensor, of which this rank holds
    some rows of one dim. Shape, dtype and device are the full ones.
    """

    local: Tensor
    rows: Rows
    cut_dim: int
    _full: Tensor | None

    @staticmethod
    def __new__(cls: type[Self], local: Tensor, rows: Rows, dim: int) -> Self:
        shape = [rows.full if d == dim else size for d, size in enumerate(local.shape)]
        make: Callable[..., Self] = torch.Tensor._make_wrapper_subclass
        self = make(cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad)
        self.local, self.rows, self.cut_dim, self._full = local, rows, dim, None
        return self

    def __init__(self, *args: Any) -> None:
        """Everything is done by ``__new__``."""

    def full_tensor(self) -> Tensor:
        """The full tensor, the same on all ranks, with its gradient. Communicates one all-gather of it, once."""
        wants = torch.is_grad_enabled() and self.local.requires_grad
        if self._full is None or (wants and not self._full.requires_grad):
            local = getattr(self.local, "full_tensor", lambda: self.local)()  # logits whose vocabulary is cut too
            self._full = gather_rows(local, self.rows, self.cut_dim)
        return self._full

    def to_local(self) -> Tensor:
        """This rank's rows, with their gradient. Communicates nothing."""
        return self.local

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes func for self
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """What gets here was not called by name: autograd itself, or code written in C++."""
        refuse(f"{func} was called on a tensor whose sequence is cut over ranks")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # mypy drops the keyword's name
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, {len(self.rows.own)} of "
            f"{self.rows.full} rows held by {self.rows.axis}, values by .full_tensor() on all ranks)"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse("A tensor whose sequence is cut over ranks was to be copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse("A tensor whose sequence is cut over ranks was to be copied or pickled")


def refuse(what: str) -> NoReturn:
    raise InputError(
        what,
        rule="Each rank holds some of its positions, and only functions of torch that are called by name know it",
        remedy="Call .full_tensor() on all ranks for a plain tensor, or .to_local() for this rank's positions",
    )


def plain(value: Any) -> Any:
    """Nested values with full tensors in the place of cut ones."""
    return tree_map_only(CutTensor, CutTensor.full_tensor, value)


class _Gather(Function):
    """Backward: the sum of what all ranks found for the own rows, as the P ranks' gradients are averaged."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, rows: Rows, dim: int) -> Tensor:
        ctx.rows, ctx.dim = rows, dim
        lengths = [len(part) for part in rows.parts]
        joined = all_gather(local, rows.axis, dim, lengths=lengths, purpose="gather")
        order = torch.cat(rows.parts).argsort().to(local.device)
        return joined.index_select(dim, order)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows: Rows = ctx.rows
        parts = [grad.index_select(ctx.dim, part.to(grad.device)) for part in rows.parts]
        own = parts[rows.axis.rank]
        sizes = [own.numel()] * rows.axis.size
        found = start_all_to_all([part.reshape(-1) for part in parts], sizes, rows.axis, "gather").wait()
        return found.view(rows.axis.size, *own.shape).sum(0), None, None


class _Sum(Function):
    """The sum of what each rank has. Backward: that of the gradients, as the P ranks' are averaged."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_reduce(local.clone(), axis, purpose="loss")

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.axis, purpose="loss"), None


class _Take(Function):
    """This rank's rows of a full tensor. Backward: theirs alone, as the P ranks' gradients are averaged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, dim: int) -> Tensor:
        ctx.rows, ctx.dim, ctx.shape = rows, dim, x.shape
        return rows.take(x, dim)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        full = grad.new_zeros(ctx.shape)
        return full.index_copy_(ctx.dim, ctx.rows.own.to(grad.device), grad), None, None


class _Input(Function):
    """A tensor from outside of the model. Backward: the mean over the ranks, each of whose gradients counts P times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.axis, purpose="input") / ctx.axis.size, None


def shared_input(x: Tensor, axis: Axis) -> Tensor:
    """An input of the model that all ranks hold, with the same gradient on all of them.

    What is computed before it, of the model's own parameters too, has the whole gradient on each rank, which the mean
    over the ranks leaves as it is. Communicates nothing forward, and in the backward one all-reduce of x.
    """
    out: Tensor = _Input.apply(x, axis)
    return out


def sum_over(local: Tensor, axis: Axis) -> Tensor:
    """The sum of what each rank has, the same on all. Communicates one all-reduce, in the backward another."""
    out: Tensor = _Sum.apply(local, axis)
    return out


def gather_rows(local: Tensor, rows: Rows, dim: int) -> Tensor:
    """All rows, of this rank's. Communicates one all-gather, and in the backward of floats one reduce-scatter."""
    out: Tensor = _Gather.apply(local, rows, dim % local.dim())
    return out


def take_rows(x: Tensor, rows: Rows, dim: int) -> Tensor:
    """This rank's rows of a tensor that all ranks hold alike. Communicates nothing, in the backward neither."""
    out: Tensor = _Take.apply(x, rows, dim % x.dim())
    return out
