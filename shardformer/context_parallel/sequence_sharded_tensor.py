"""A tensor whose sequence is sharded over the ranks of an axis, and that behaves like the full tensor.

Gradients are those of data parallelism: each rank's count P times, and the P ranks' are averaged. So what is computed
of a gathered tensor, on all ranks alike, is right, and what each rank computes of its own positions is too.

What leaves a stack of layers under context parallelism is one of these, and so are the logits that a head makes of it:

    hidden = model.model(input_ids).last_hidden_state     # SequenceCut (B, S, H); this rank holds (B, s, H)
    logits = model.lm_head(hidden)                        # still: each position by itself
    F.cross_entropy(logits.view(-1, V), labels.view(-1))  # of this rank's positions, and one number is summed
    hidden[:, 0]                                          # a plain tensor: one all-gather of (B, S, H)

What functions of torch do with it is the table ``SEQUENCE_RULES`` at the end of this file; one that is not in it
gathers the
full tensor and goes on with a plain one, the same on all ranks.

Gradients are those of data parallelism: each rank's count P times, and the P ranks' are averaged. So what is computed
of a gathered tensor, on all ranks alike, is right, and what each rank computes of its own positions is too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from math import prod
from numbers import Number
from typing import Any, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_any, tree_map_only

from shardformer.comm.autograd_collectives import once_differentiable
from shardformer.comm.collectives import all_gather, all_reduce, start_all_to_all
from shardformer.comm.deferred_tensor import is_inplace
from shardformer.context_parallel.sequence_layout import IndexShards
from shardformer.errors import InputError
from shardformer.mesh.parallel_context import Axis
from shardformer.random_state import LocalRandomState
from shardformer.tensor_parallel.vocab_sharded_tensor import metadata_of_wrapper

# B batch, S sequence, H hidden, V vocabulary, P ranks; s: this rank's positions

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
TorchFunction = Callable[..., Any]

_INSIDE = threading.local()
"""Whether a model is in its forward: operands that need a gradient are then its own, on all ranks."""


def set_inside_model(is_now: bool) -> None:
    """Whether what is computed from here on is of a model whose gradients are averaged over the ranks."""
    _INSIDE.now = is_now


def is_inside() -> bool:
    """In a backward, too: what runs there is a part of the model that is computed again."""
    return getattr(_INSIDE, "now", False) or torch._C._current_graph_task_id() >= 0


class SequenceShardedTensorBase(Tensor):
    """Base of ``SequenceShardedTensor``, which says what functions of torch do with it: the full tensor, of which
    this rank holds
    some rows of one dim. Shape, dtype and device are the full ones.
    """

    local: Tensor
    rows: IndexShards
    cut_dim: int
    _full: Tensor | None

    @staticmethod
    def __new__(cls: type[Self], local: Tensor, rows: IndexShards, dim: int) -> Self:
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
        unsupported_sequence_op(f"{func} was called on a tensor whose sequence is cut over ranks")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # mypy drops the keyword's name
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, {len(self.rows.own)} of "
            f"{self.rows.full} rows held by {self.rows.axis}, values by .full_tensor() on all ranks)"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        unsupported_sequence_op("A tensor whose sequence is cut over ranks was to be copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        unsupported_sequence_op("A tensor whose sequence is cut over ranks was to be copied or pickled")


def unsupported_sequence_op(what: str) -> NoReturn:
    raise InputError(
        what,
        rule="Each rank holds some of its positions, and only functions of torch that are called by name know it",
        remedy="Call .full_tensor() on all ranks for a plain tensor, or .to_local() for this rank's positions",
    )


def to_full_tensors(value: Any) -> Any:
    """Nested values with full tensors in the place of cut ones."""
    return tree_map_only(SequenceShardedTensorBase, SequenceShardedTensorBase.full_tensor, value)


class _Gather(Function):
    """Backward: the sum of what all ranks found for the own rows, as the P ranks' gradients are averaged."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, rows: IndexShards, dim: int) -> Tensor:
        ctx.rows, ctx.dim = rows, dim
        lengths = [len(part) for part in rows.parts]
        joined = all_gather(local, rows.axis, dim, lengths=lengths, purpose="gather")
        order = torch.cat(rows.parts).argsort().to(local.device)
        return joined.index_select(dim, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows: IndexShards = ctx.rows
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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.axis, purpose="loss"), None


class _Take(Function):
    """This rank's rows of a full tensor. Backward: theirs alone, as the P ranks' gradients are averaged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: IndexShards, dim: int) -> Tensor:
        ctx.rows, ctx.dim, ctx.shape = rows, dim, x.shape
        return rows.take(x, dim)

    @staticmethod
    @once_differentiable
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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.axis, purpose="input") / ctx.axis.size, None


def shared_input(x: Tensor, axis: Axis) -> Tensor:
    """An input of the model that all ranks hold, with the same gradient on all of them.

    What is computed before it, of the model's own parameters too, has the whole gradient on each rank, which the mean
    over the ranks leaves as it is. Communicates nothing forward, and in the backward one all-reduce of x.
    """
    out: Tensor = _Input.apply(x, axis)
    return out


def all_reduce_sum(local: Tensor, axis: Axis) -> Tensor:
    """The sum of what each rank has, the same on all. Communicates one all-reduce, in the backward another."""
    out: Tensor = _Sum.apply(local, axis)
    return out


def gather_rows(local: Tensor, rows: IndexShards, dim: int) -> Tensor:
    """All rows, of this rank's. Communicates one all-gather, and in the backward of floats one reduce-scatter."""
    out: Tensor = _Gather.apply(local, rows, dim % local.dim())
    return out


def local_rows(x: Tensor, rows: IndexShards, dim: int) -> Tensor:
    """This rank's rows of a tensor that all ranks hold alike. Communicates nothing, in the backward neither."""
    out: Tensor = _Take.apply(x, rows, dim % x.dim())
    return out


# B batch, S sequence, H hidden, V vocabulary, P ranks; s: this rank's positions


class SequenceShardedTensor(SequenceShardedTensorBase):
    """The full tensor, of which this rank holds some positions.

    Communicates nothing: views and slices, casts, arithmetic, linears and norms of each position by itself, sums over
    features, printing. Communicates one number: ``F.cross_entropy`` with class indices, sums of everything.
    Communicates one all-gather of the full tensor, once: everything else, which then gives plain tensors.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        return SEQUENCE_RULES.get(func, _gathered)(func, args, kwargs or {})


def _gathered(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Anything without a rule: the full tensor, gathered once, as a plain one."""
    first = args[0] if args else None
    if is_inplace(func, kwargs) and isinstance(first, SequenceShardedTensor):
        unsupported_sequence_op(
            f"{getattr(func, '__name__', func)} was to write into a tensor whose sequence is cut over ranks"
        )
    args, kwargs = to_full_tensors((args, dict(kwargs)))
    return func(*args, **kwargs)


def _blank(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """new_zeros, zeros_like and the like: they read no values."""
    x = args[0]
    if not isinstance(x, SequenceShardedTensor):
        return _gathered(func, args, kwargs)
    return func(x.local.new_empty((), dtype=x.dtype).expand(x.shape), *args[1:], **kwargs)


def _elementwise(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Functions of each number by itself, or of each row: casts, arithmetic, activations."""
    if is_inplace(func, kwargs) or "out" in kwargs:
        return _gathered(func, args, kwargs)
    cut = [a for a in (*args, *kwargs.values()) if isinstance(a, SequenceShardedTensor)]
    x = max(cut, key=lambda a: a.dim())
    operands = [_operand(a, x) for a in (*args, *kwargs.values())]
    if any(a is NotImplemented for a in operands):
        return _gathered(func, args, kwargs)
    local = func(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
    return (
        SequenceShardedTensor(local, x.rows, x.cut_dim - x.dim() + local.dim()) if isinstance(local, Tensor) else local
    )


def _operand(value: Any, x: SequenceShardedTensor) -> Any:
    """This rank's part of an operand; NotImplemented where the full tensors are needed."""
    if not isinstance(value, Tensor):
        known = value is None or isinstance(value, Number | str | torch.dtype | torch.device | torch.memory_format)
        return value if known else NotImplemented
    back = x.cut_dim - x.dim()
    if isinstance(value, SequenceShardedTensor):
        return value.local if value.cut_dim - value.dim() == back and x.rows.is_like(value.rows) else NotImplemented
    if value.requires_grad and torch.is_grad_enabled() and not is_inside():
        return NotImplemented  # nobody would add up what the ranks found for it
    if value.dim() > x.dim():
        return NotImplemented
    if value.dim() < -back or value.shape[back] == 1:
        return value
    return local_rows(value, x.rows, back) if value.shape[back] == x.rows.full else NotImplemented


def _of_row(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Functions of the last dim, with weights: linear, norms. Of the cut dim they know nothing."""
    x = args[0]
    tensors = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
    trains = any(t.requires_grad for t in tensors) and torch.is_grad_enabled()
    if (
        not isinstance(x, SequenceShardedTensor)
        or any(isinstance(t, SequenceShardedTensor) for t in tensors)
        or (trains and not is_inside())
        or x.cut_dim >= x.dim() - len(args[1] if func in _NORMS and len(args) > 1 else (1,))
    ):
        return _gathered(func, args, kwargs)
    return SequenceShardedTensor(func(x.local, *args[1:], **kwargs), x.rows, x.cut_dim)


def _along(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Softmax, sums, maxima along other dims than the cut one; sums of everything."""
    x = args[0]
    if not isinstance(x, SequenceShardedTensor) or tree_any(
        lambda a: isinstance(a, SequenceShardedTensor), (args[1:], dict(kwargs))
    ):
        return _gathered(func, args, kwargs)
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    name = getattr(func, "__name__", "")
    if dims is None:
        if name not in ("sum", "mean") or set(kwargs) - {"dtype"} or len(args) > 1:
            return _gathered(func, args, kwargs)
        total: Tensor = all_reduce_sum(x.local.sum(**kwargs), x.rows.axis)
        return total / x.numel() if name == "mean" else total
    named = [dims] if isinstance(dims, int) else dims
    if not isinstance(named, tuple | list) or not all(isinstance(dim, int) for dim in named):
        return _gathered(func, args, kwargs)
    gone = {dim % x.dim() for dim in named}
    if x.cut_dim in gone:
        return _gathered(func, args, kwargs)
    found = func(x.local, *args[1:], **kwargs)
    first = found if isinstance(found, Tensor) else found[0]
    left = x.cut_dim if first.dim() == x.dim() else x.cut_dim - sum(dim < x.cut_dim for dim in gone)
    return tree_map_only(Tensor, lambda t: SequenceShardedTensor(t, x.rows, left), found)


def _dropout(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Each rank draws its own numbers, and the stream of all goes on alike."""
    x = args[0]
    if not isinstance(x, SequenceShardedTensor) or is_inplace(func, kwargs):
        return _gathered(func, args, kwargs)
    stream = LocalRandomState(x.rows.axis)
    stream.enter(x.local)
    try:
        return SequenceShardedTensor(func(x.local, *args[1:], **kwargs), x.rows, x.cut_dim)
    finally:
        stream.leave()


def _same_layout(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """clone, contiguous, detach."""
    x = args[0]
    return SequenceShardedTensor(func(x.local, *args[1:], **kwargs), x.rows, x.cut_dim)


def _query_local(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """What is asked of the local part."""
    return func(args[0].local, *args[1:], **kwargs)


def _reshape(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """view, reshape and flatten that merge the cut dim with those before it, or leave it."""
    x = args[0]
    if not isinstance(x, SequenceShardedTensor):
        return _gathered(func, args, kwargs)
    try:
        shape = func(torch.empty(x.shape, device="meta"), *to_full_tensors(args[1:]), **kwargs).shape
    except RuntimeError:
        return _gathered(func, args, kwargs)  # which raises with the sizes that the caller knows
    old = [1, *accumulate(x.shape, lambda a, b: a * b)]
    new = [1, *accumulate(shape, lambda a, b: a * b)]
    end = x.cut_dim + 1
    for at in range(len(shape)):
        if new[at + 1] == old[end] and new[at] in old[:end] and prod(shape[at + 1 :]) == prod(x.shape[end:]):
            first = max(d for d in range(end) if old[d] == new[at])
            rows = x.rows.within(prod(x.shape[first : x.cut_dim]))
            sizes = [len(rows.own) if d == at else size for d, size in enumerate(shape)]
            return SequenceShardedTensor(x.local.reshape(sizes), rows, at)
    return _gathered(func, args, kwargs)


def _permute(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """transpose, permute, unsqueeze, squeeze: where the cut dim goes is seen on its stride."""
    x = args[0]
    if not isinstance(x, SequenceShardedTensor):
        return _gathered(func, args, kwargs)
    sizes = [2 if size == 1 and d == x.cut_dim else size for d, size in enumerate(x.shape)]
    strides = [1 if d == x.cut_dim else 0 for d in range(x.dim())]
    seen = func(torch.empty(2, device="meta").as_strided(sizes, strides), *args[1:], **kwargs)
    found = [d for d, stride in enumerate(seen.stride()) if stride == 1 and seen.shape[d] == sizes[x.cut_dim]]
    if len(found) != 1 or (len(x.rows.own) == 1 and func in (Tensor.squeeze, torch.squeeze) and len(args) == 1):
        return _gathered(func, args, kwargs)
    return SequenceShardedTensor(func(x.local, *args[1:], **kwargs), x.rows, found[0])


def _getitem(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Numbers, slices, None and ``...``: of the cut dim slices."""
    x, key = args
    keys = key if isinstance(key, tuple) else (key,)
    if not isinstance(x, SequenceShardedTensor) or any(not _is_simple(k) for k in keys):
        return _gathered(func, args, kwargs)
    used = sum(isinstance(k, slice | int) for k in keys)
    if not any(k is Ellipsis for k in keys):
        keys = (*keys, Ellipsis)
    at = after = 0
    rows, where, kept, local_keys = x.rows, -1, None, list[Any]()
    for k in keys:
        count = x.dim() - used if k is Ellipsis else int(k is not None)
        if at <= x.cut_dim < at + count:
            if isinstance(k, int):
                return _gathered(func, args, kwargs)
            where = after + x.cut_dim - at
            if isinstance(k, slice) and k.indices(x.rows.full) != (0, x.rows.full, 1):
                rows, kept = x.rows.sliced(k)
            k = slice(None) if isinstance(k, slice) else k
        at += count
        after += count if k is Ellipsis else int(not isinstance(k, int))
        local_keys.append(k)
    local = func(x.local, tuple(local_keys))
    if kept is not None:
        local = local.index_select(where, kept.to(local.device))
    return SequenceShardedTensor(local, rows, where)


def _setitem(func: TorchFunction, args: Args, kwargs: Kwargs) -> None:
    """``x[mask] = rows`` and ``x[mask, :] = rows``: of the positions that a mask of the first dims picks, each rank
    writes its own. The rows of all positions are the same on all ranks."""
    x, key, value = args
    mask, *rest = key if isinstance(key, tuple) else (key,)
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and not isinstance(mask, SequenceShardedTensor)
    if (
        not isinstance(x, SequenceShardedTensor)
        or not is_mask
        or any(k is not Ellipsis and not (isinstance(k, slice) and k == slice(None)) for k in rest)
        or not x.cut_dim < mask.dim() <= x.dim()
        or mask.shape != x.shape[: mask.dim()]
    ):
        unsupported_sequence_op("__setitem__ was to write into a tensor whose sequence is cut over ranks")
    value, own = to_full_tensors(value), x.rows.take(mask, x.cut_dim)
    if isinstance(value, Tensor) and value.dim() > x.dim() - mask.dim() and value.shape[0] != 1:
        numbers = (mask.flatten().cumsum(0) - 1).view(mask.shape)  # of each position that is picked, its row
        value = value.index_select(0, x.rows.take(numbers, x.cut_dim)[own])
    x.local[own] = value
    x._full = None


def _is_simple(key: Any) -> bool:
    is_number = isinstance(key, int) and not isinstance(key, bool)
    return key is None or key is Ellipsis or is_number or (isinstance(key, slice) and (key.step or 1) > 0)


def _parts(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """split and chunk along another dim."""
    x = args[0]
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if not isinstance(x, SequenceShardedTensor) or dim % x.dim() == x.cut_dim:
        return _gathered(func, args, kwargs)
    return tuple(SequenceShardedTensor(part, x.rows, x.cut_dim) for part in func(x.local, *args[1:], **kwargs))


def _cross_entropy(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """F.cross_entropy and F.nll_loss with class indices: of this rank's rows, and one number is summed."""
    x, target = args[0], args[1] if len(args) == 2 else None
    if (
        not isinstance(x, SequenceShardedTensor)
        or not isinstance(target, Tensor)
        or x.dim() < 2
        or x.cut_dim == 1
        or target.is_floating_point()
        or target.shape != (x.shape[0], *x.shape[2:])
        or any(kwargs.get(name) is not None for name in ("size_average", "reduce"))
    ):
        return _gathered(func, args, kwargs)
    dim = x.cut_dim - (x.cut_dim > 1)
    target = to_full_tensors(target)
    reduction = kwargs.get("reduction", "mean")
    options = {**kwargs, "reduction": "none" if reduction == "none" else "sum"}
    loss = func(x.local, x.rows.take(target, dim), **options)
    if reduction == "none":
        return SequenceShardedTensor(loss, x.rows, dim)
    total: Tensor = all_reduce_sum(loss, x.rows.axis)
    if reduction == "sum":
        return total
    counted = target != kwargs.get("ignore_index", -100)
    weight = kwargs.get("weight")
    return total / (counted.sum() if weight is None else weight[target[counted]].sum())


_NORMS = (F.layer_norm, F.rms_norm)

# Methods and attributes of a tensor, and functions of torch and torch.nn.functional, by name.
_NAMES: Mapping[Callable[[TorchFunction, Args, Kwargs], Any], str] = {
    metadata_of_wrapper: """
        shape size dim ndim ndimension numel nelement __len__ dtype element_size itemsize nbytes is_floating_point
        is_complex is_signed device get_device is_cuda is_cpu is_meta layout is_sparse is_leaf grad_fn __hash__
        """,
    _blank: """
        new_empty new_zeros new_ones new_full new_tensor empty_like zeros_like ones_like full_like rand_like randn_like
        """,
    _elementwise: """
        to type type_as cpu cuda float double half bfloat16 add sub subtract rsub mul multiply div divide true_divide
        pow square sqrt rsqrt neg negative abs clamp clamp_min clamp_max exp log tanh sigmoid relu gelu silu softplus
        masked_fill erf where __pow__ __rpow__ __rsub__ __rdiv__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ eq ne lt le
        gt ge logical_not logical_and
        """,
    _of_row: "linear layer_norm rms_norm",
    _along: "softmax log_softmax sum mean amax amin max min argmax argmin var logsumexp",
    _dropout: "dropout",
    _same_layout: "clone contiguous detach",
    _query_local: "requires_grad is_contiguous is_inference",
    _reshape: "view reshape flatten unflatten",
    _permute: "transpose swapaxes permute unsqueeze squeeze",
    _getitem: "__getitem__",
    _setitem: "__setitem__",
    _parts: "split chunk",
    _cross_entropy: "cross_entropy nll_loss",
}


def _rules() -> Iterator[tuple[Any, Callable[[TorchFunction, Args, Kwargs], Any]]]:
    tensor: Any = Tensor
    for rule, names in _NAMES.items():
        for name in names.split():
            for home in (tensor, torch, F):
                function: Any = getattr(home, name, None)
                if hasattr(function, "__set__"):  # an attribute of a tensor, which torch names by its getter
                    yield function.__get__, rule
                elif callable(function) and not isinstance(function, type):
                    yield function, rule


SEQUENCE_RULES: Mapping[Any, Callable[[TorchFunction, Args, Kwargs], Any]] = dict(_rules())
"""What is called, for each function of torch that does not simply gather."""


def map_local_positions(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``change`` of each position by itself: of a cut tensor, of this rank's."""
    return (
        SequenceShardedTensor(change(x.local), x.rows, x.cut_dim)
        if isinstance(x, SequenceShardedTensorBase)
        else change(x)
    )


def to_local(x: Tensor) -> Tensor:
    """This rank's part of a cut tensor; any other as it is."""
    return x.local if isinstance(x, SequenceShardedTensorBase) else x


def shard_like(local: Tensor, x: Any) -> Tensor:
    """A part that another stage made, as the tensor in whose place it comes."""
    return SequenceShardedTensor(local, x.rows, x.cut_dim) if isinstance(x, SequenceShardedTensorBase) else local
