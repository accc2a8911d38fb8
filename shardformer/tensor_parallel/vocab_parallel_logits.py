"""Logits whose vocabulary is sharded over the ranks of an axis, and that behave like the full logits.

Each rule looks at one of torch's view functions as it is called on the full logits, and gives

    the dim that the vocabulary is after it, and the arguments that do the same to the local part

or None where the vocabulary does not stay whole, so that the full logits are needed. No rule sees a tensor's values.

>>> reshape((2, 5, 127), 2, (-1, 127), {}, local=64)
(1, ((-1, 64),))
>>> transpose((2, 5, 127), 2, (1, 2), {}, local=64)
(1, (1, 2))
>>> select((2, 5, 127), 2, (2, 0), {}, local=64) is None     # one column
True

A head that hands out ``shard_logits(local, axis, bounds)`` needs no other loss and no other forward:

    logits = model.lm_head(hidden)                      # VocabParallelLogits (B, S, V); this rank holds (B, S, v)
    logits.float().view(-1, V)                          # still: views and casts touch the local part alone
    F.cross_entropy(logits.view(-1, V), labels)         # the vocabulary-parallel loss sends three numbers a token
    logits[:, -1].argmax(-1)                            # a plain tensor: one all-gather of (B, V)

What functions of torch do with them is the table ``RULES`` at the end of this file; one that is not in it gathers the
full logits and goes on with a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from numbers import Number
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.comm.deferred_tensor import is_inplace
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.vocab_parallel_loss import vocab_parallel_cross_entropy
from shardformer.tensor_parallel.vocab_sharded_tensor import (
    VocabShardedTensor,
    local_shard,
    local_slice,
    local_slice_like,
    make_view,
    metadata_of_wrapper,
    unsupported_vocab_op,
    wrap_like,
    wrap_local,
    write_full,
)

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Placed = tuple[int, Args] | None


def reshape(shape: Sequence[int], vocab: int, args: Args, kwargs: Kwargs, *, local: int) -> Placed:
    """view and reshape: the vocabulary is last and stays last."""
    sizes = _sizes(args)
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    if vocab != len(shape) - 1:
        return (vocab, (_with(shape, vocab, local),)) if sizes == tuple(shape) else None
    is_last = sizes[-1] == shape[vocab] or (sizes[-1] == -1 and prod(sizes[:-1]) == prod(shape[:-1]))
    return (len(sizes) - 1, ((*sizes[:-1], local),)) if is_last else None


def expand(shape: Sequence[int], vocab: int, args: Args, kwargs: Kwargs, *, local: int) -> Placed:
    sizes = _sizes(args)
    after = vocab + len(sizes) - len(shape)
    if kwargs or after < 0 or sizes[after] not in (-1, shape[vocab]):
        return None
    return after, (_with(sizes, after, -1),)


def flatten(shape: Sequence[int], vocab: int, args: Args, kwargs: Kwargs, *, local: int) -> Placed:
    start = _dim(args, kwargs, 0, "start_dim", 0) % len(shape)
    end = _dim(args, kwargs, 1, "end_dim", -1) % len(shape)
    if start <= vocab <= end and start != end:
        return None
    return vocab - (end - start if vocab > end else 0), args


def unflatten(shape: Sequence[int], vocab: int, args: Args, kwargs: Kwargs, *, local: int) -> Placed:
    dim = _dim(args, kwargs, 0, "dim", 0) % len(shape)
    sizes = args[1] if len(args) > 1 else kwargs["sizes"]
    return None if dim == vocab else (vocab + (len(sizes) - 1 if dim < vocab else 0), args)


def squeeze(shape: Sequence[int], vocab: int, args: Args, kwargs: Kwargs, *, local: int) -> Placed:
    """The dims that go are named, because a vocabulary of which one column is here looks as if it could go."""
    named = args[0] if args else kwargs.get("dim", range(len(shape)))
    dims = {dim % len(shape) for dim in ([named] if isinstance(named, int) else named)}
    gone = tuple(sorted(dim for dim in dims if shape[dim] == 1))
    if vocab in gone or kwargs:
        return None
    return vocab - sum(dim < vocab for dim in gone), (gone,)


def unsqueeze(shape: Sequence[int], vocab: int, args: Args, kwargs: Kwargs, *, local: int) -> Placed:
    return vocab + (_dim(args, kwargs, 0, "dim", 0) % (len(shape) + 1) <= vocab), args


def transpose(shape: Sequence[int], vocab: int, args: Args, kwargs: Kwargs, *, local: int) -> Placed:
    if len(args) != 2:
        return None
    a, b = (dim % len(shape) for dim in args)
    return {a: b, b: a}.get(vocab, vocab), args


def permute(shape: Sequence[int], vocab: int, args: Args, kwargs: Kwargs, *, local: int) -> Placed:
    return None if kwargs else ([dim % len(shape) for dim in _sizes(args)].index(vocab), args)


def _along(position: int, default: int, drops_dim: bool = False) -> Callable[..., Placed]:
    """A function that takes something along one dim: fine along every other one than the vocabulary."""

    def rule(shape: Sequence[int], vocab: int, args: Args, kwargs: Kwargs, *, local: int) -> Placed:
        dim = _dim(args, kwargs, position, "dim", default)
        if not isinstance(dim, int) or dim % len(shape) == vocab:
            return None
        return vocab - (drops_dim and dim % len(shape) < vocab), args

    return rule


select = _along(0, 0, drops_dim=True)
unbind = _along(0, 0, drops_dim=True)
narrow = _along(0, 0)
split = _along(1, 0)


def getitem(shape: Sequence[int], vocab: int, args: Args, kwargs: Kwargs, *, local: int) -> Placed:
    """Numbers, slices, None, ``...`` and index tensors, on other dims than the vocabulary."""
    keys: Args = args[0] if isinstance(args[0], tuple) else args
    used = [_dims_used(key) for key in keys]
    if any(count is None for count in used):
        return None
    rest = len(shape) - sum(count or 0 for count in used)
    before = after = 0  # dims of the full logits passed so far, and dims that they became
    where = -1
    for key in keys if any(key is Ellipsis for key in keys) else (*keys, Ellipsis):
        taken = rest if key is Ellipsis else _dims_used(key) or 0
        if before <= vocab < before + taken:
            if key is not Ellipsis and not (
                isinstance(key, slice) and key.indices(shape[vocab]) == (0, shape[vocab], 1)
            ):
                return None
            where = after + vocab - before
        before += taken
        after += taken if key is Ellipsis else isinstance(key, slice) or key is None
    if any(isinstance(key, Tensor) for key in keys):
        # Index tensors put their dims where they stand or in front, never behind a vocabulary that is last.
        return (-1, args) if vocab == len(shape) - 1 else None
    return where, args


def _dims_used(key: Any) -> int | None:
    if key is None or isinstance(key, EllipsisType):
        return 0
    if isinstance(key, slice) or (isinstance(key, int) and not isinstance(key, bool)):
        return 1
    if isinstance(key, Tensor):
        return key.dim() if key.dtype in (torch.bool, torch.uint8) else 1
    return None


def _sizes(args: Args) -> tuple[Any, ...]:
    """``view(2, 3)`` and ``view((2, 3))``."""
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else args


def _dim(args: Args, kwargs: Kwargs, position: int, name: str, default: int) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _with(sizes: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return tuple(size if d == dim else n for d, n in enumerate(sizes))


VIEW_RULES: Mapping[str, Callable[..., Placed]] = {
    "view": reshape,
    "reshape": reshape,
    "expand": expand,
    "flatten": flatten,
    "unflatten": unflatten,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "transpose": transpose,
    "swapaxes": transpose,
    "swapdims": transpose,
    "permute": permute,
    "select": select,
    "unbind": unbind,
    "narrow": narrow,
    "index_select": narrow,
    "split": split,
    "chunk": split,
    "__getitem__": getitem,
}
"""Functions under which the vocabulary may stay whole, methods of a tensor and functions of torch alike."""
# B batch, S sequence, V vocabulary; lower case: this rank's part (v columns of V)
TorchFunction = Callable[..., Any]
Rule = Callable[[TorchFunction, Args, Kwargs], Any]


def shard_logits(local: Tensor, axis: Axis, bounds: Sequence[int]) -> Tensor:
    """This rank's columns (..., v) as the full logits (..., V). Communicates nothing; ``local`` itself on an axis of 1.

    Args:
        bounds: R + 1 numbers; rank r holds columns ``bounds[r]`` to ``bounds[r + 1]``, and ``bounds[R]`` is V.
    """
    if axis.size == 1:
        return local
    assert local.shape[-1] == bounds[axis.rank + 1] - bounds[axis.rank], (tuple(local.shape), bounds, axis.rank)
    return wrap_local(VocabParallelLogits, local, axis, tuple(bounds), local.dim() - 1, local.dtype)


class VocabParallelLogits(VocabShardedTensor):
    """The full logits, of which this rank holds a slice of the vocabulary. Made by ``shard_logits``.

    Shape, dtype, device and ``requires_grad`` are those of the full logits. All ranks of the axis do the same with
    them, as with every tensor that they hold alike, so that a gather finds all ranks.

    Communicates nothing: views, slices and transposes that leave the vocabulary whole; casts; arithmetic with numbers
    and with tensors that need no gradient; elementwise functions such as tanh; printing. A cast from 16 bit to fp32
    waits until values are needed, so that the loss computes in fp32 without an fp32 copy.
    Communicates three numbers a token: ``F.cross_entropy`` with class indices.
    Communicates one all-gather of the full logits, once: everything else, which then gives plain tensors. Backward
    takes the own slice. Writing into the logits, or into a view of them, does so too, and keeps the own slice.

    Gradients are those of the local part: ``retain_grad()`` keeps it, ``grad`` shows it as VocabParallelLogits, and a
    hook is called with one. To copy, pickle or hand them to code that is not torch's, use ``full_tensor()``.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        return LOGITS_RULES.get(func, _gathered)(func, args, kwargs or {})


def _gathered(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Anything without a rule: the full logits, gathered once, as a plain tensor."""
    name = getattr(func, "__name__", "")
    if name in _RECEIVES or is_inplace(func, kwargs):
        return _written(func, args, kwargs)
    if name in ("__set__", "__delete__") or isinstance(kwargs.get("out"), VocabShardedTensor):
        unsupported_vocab_op("Vocabulary-parallel logits were to be written to by an attribute or as out=")
    return func(*_plain(args), **{key: _plain(value) for key, value in kwargs.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, VocabShardedTensor):
        return value.full_tensor()
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def _written(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Writes into the full logits, and goes on with the own slice of them."""
    x = args[0]
    if not isinstance(x, VocabShardedTensor):
        return func(*_plain(args), **kwargs)
    full, result = write_full(x, lambda full: func(full, *_plain(args[1:]), **kwargs))
    return x if result is full else result


def _factory(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """new_zeros, zeros_like and the like: they read no values, so a tensor without any stands in."""
    x = args[0]
    if not isinstance(x, VocabShardedTensor):
        return _gathered(func, args, kwargs)
    return func(_blank(x), *args[1:], **kwargs)


def _blank(x: VocabShardedTensor) -> Tensor:
    return x._local.new_empty((), dtype=x.full_dtype).expand(x.full_shape)


def _view(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if not isinstance(x, VocabShardedTensor):
        return _gathered(func, args, kwargs)
    local = local_shard(x)
    placed = VIEW_RULES[func.__name__](x.full_shape, x.vocab_dim, args[1:], kwargs, local=local.shape[x.vocab_dim])
    if placed is None:
        return _gathered(func, args, kwargs)
    dim, local_args = placed
    try:
        result = func(local, *local_args, **kwargs)
    except (RuntimeError, IndexError):
        return _gathered(func, args, kwargs)  # which raises with the sizes that the caller knows
    if isinstance(result, Tensor):
        return make_view(x, result, dim % result.dim(), lambda full: func(full, *args[1:], **kwargs))

    def replay(full: Tensor, number: int) -> Tensor:
        part: Tensor = func(full, *args[1:], **kwargs)[number]
        return part

    return type(result)(make_view(x, part, dim, partial(replay, number=i)) for i, part in enumerate(result))


def _copied(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """clone and contiguous."""
    before = local_shard(args[0])
    local = func(before, *args[1:], **kwargs)
    return args[0] if local is before else wrap_like(args[0], local)


def _detached(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """detach and data."""
    x = args[0]
    return make_view(x, local_shard(x).detach(), x.vocab_dim, func)


def _cast(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Casts and moves. One from 16 bit to fp32 waits; one that changes nothing gives the logits themselves."""
    x = args[0]
    others = [_blank(a) if isinstance(a, VocabShardedTensor) else a for a in args[1:]]
    if not isinstance(x, VocabShardedTensor):  # another tensor is cast to what the logits are
        return func(x, *others, **kwargs)
    local = local_shard(x)
    target = func(local.new_empty(0, dtype=x.full_dtype), *others, **kwargs)  # torch reads the arguments
    if not isinstance(target, Tensor):
        return target  # type() gives a name
    flags = [a for a in others if isinstance(a, bool)]
    if target.device == local.device and not kwargs.get("copy", len(flags) > 1 and flags[1]):
        if target.dtype == x.full_dtype:
            return x
        was_written = x._writes[0] > 0  # then the part is a view of what may be written into again
        if target.dtype in (local.dtype, torch.float32) and local.element_size() == 2 and not was_written:
            return wrap_like(x, local, dtype=target.dtype)
    return wrap_like(x, func(local, *others, **kwargs), dtype=target.dtype)


def _elementwise(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Functions of each number by itself, of the logits and of operands that need no gradient."""
    x = next((a for a in args if isinstance(a, VocabShardedTensor)), None)
    if x is None or kwargs.get("inplace") or "out" in kwargs:
        return _gathered(func, args, kwargs)
    operands = [_operand(a, x) for a in (*args, *kwargs.values())]
    if any(a is NotImplemented for a in operands):
        return _gathered(func, args, kwargs)
    named = dict(zip(kwargs, operands[len(args) :], strict=True))
    local = func(*operands[: len(args)], **named)
    return wrap_like(x, local, x.vocab_dim - x._local.dim() + local.dim(), local.dtype)


def _operand(value: Any, x: VocabShardedTensor) -> Any:
    """This rank's part of an operand; NotImplemented where the full logits are needed."""
    if not isinstance(value, Tensor):
        return value if value is None or isinstance(value, Number | str) else NotImplemented
    if isinstance(value, VocabShardedTensor):
        is_alike = (value.axis, value.bounds, value.vocab_dim) == (x.axis, x.bounds, x.vocab_dim)
        return value.to_local() if is_alike and value.full_shape == x.full_shape else NotImplemented
    if value.requires_grad and torch.is_grad_enabled():
        return NotImplemented  # each rank would add its own part of the gradient
    back = x.vocab_dim - x._local.dim()
    if value.dim() < -back or value.shape[back] == 1:
        return value
    return local_slice(value, x.axis, x.bounds, back) if value.shape[back] == x.bounds[-1] else NotImplemented


def _cross_entropy(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """F.cross_entropy with class indices, over dim 1 as torch has it, or dim 0 of a single token's logits."""
    x, target = args[0], args[1] if len(args) == 2 else None
    if (
        not isinstance(x, VocabShardedTensor)
        or not isinstance(target, Tensor)
        or isinstance(target, VocabShardedTensor)
        or x.vocab_dim != min(x._local.dim() - 1, 1)
        or target.is_floating_point()
        or target.shape != (*x.full_shape[: x.vocab_dim], *x.full_shape[x.vocab_dim + 1 :])
        or any(kwargs.get(name) is not None for name in ("weight", "size_average", "reduce"))
    ):
        return _gathered(func, args, kwargs)
    local = local_shard(x)
    if local.dim() != 2:
        local = local.movedim(x.vocab_dim, -1)
        local = local.reshape(-1, local.shape[-1])
    loss = vocab_parallel_cross_entropy(
        local,
        target.reshape(-1),
        x.axis,
        x.bounds,
        ignore_index=kwargs.get("ignore_index", -100),
        reduction=kwargs.get("reduction", "mean"),
        label_smoothing=kwargs.get("label_smoothing", 0.0),
        upcast=x.full_dtype == torch.float32 or torch.is_autocast_enabled(local.device.type),
    )
    return loss.view(target.shape) if loss.dim() else loss


def _hooked(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """register_hook: the hook sees, and may replace, the gradient of the logits."""
    x, hook = (*args, *kwargs.values())
    local = local_shard(x)
    # the hook knows how the logits are placed, not the logits: they hold the graph, which would hold them for good
    placed = wrap_like(x, local.new_empty([0] * local.dim()))

    def on_local(grad: Tensor) -> Tensor | None:
        replaced = hook(wrap_like(placed, grad, dtype=grad.dtype))
        return None if replaced is None else local_slice_like(replaced, placed)

    return local.register_hook(on_local)


def _query_local(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """What is asked of, or told to, the local part: requires_grad, retain_grad, is_contiguous and the like."""
    result = func(local_shard(args[0]), *args[1:], **kwargs)
    return args[0] if isinstance(result, Tensor) else result


def _get_grad(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    grad = local_shard(args[0]).grad
    return None if grad is None else wrap_like(args[0], grad, dtype=grad.dtype)


def _set_grad(func: TorchFunction, args: Args, kwargs: Kwargs) -> None:
    x, grad = args
    local_shard(x).grad = None if grad is None else local_slice_like(grad, x)


def _backward(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """Tensor.backward, from a given gradient of the logits."""
    x, gradient = args[0], args[1] if len(args) > 1 else kwargs.get("gradient")
    if gradient is None or not isinstance(x, VocabShardedTensor):
        return _gathered(func, args, kwargs)
    named = {key: value for key, value in kwargs.items() if key != "gradient"}
    return func(*_start(x, gradient), *args[2:], **named)


def _autograd_backward(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    """torch.autograd.backward, from several tensors and perhaps to some."""
    tensors, given, inputs = args[0], kwargs.get("grad_tensors"), kwargs.get("inputs")
    gradients = [given] if isinstance(given, Tensor) else given or [None] * len(tensors)
    starts, gradients = zip(*map(_start, tensors, gradients), strict=True)
    ends = inputs and [local_shard(x) if isinstance(x, VocabShardedTensor) else x for x in inputs]
    return func(starts, **{**kwargs, "grad_tensors": gradients, "inputs": ends})


def _start(x: Tensor, gradient: Any) -> tuple[Tensor, Any]:
    """The tensor and the gradient that backward starts from."""
    if not isinstance(x, VocabShardedTensor) or gradient is None:
        return _plain(x), _plain(gradient)
    with torch.enable_grad():  # torch.autograd.backward may be called by a backward
        local = local_shard(x)
    return local, local_slice_like(gradient, x).to(local.dtype)


def _autograd_grad(func: TorchFunction, args: Args, kwargs: Kwargs) -> Any:
    outputs, inputs = args[:2]
    locals_ = [local_shard(x) if isinstance(x, VocabShardedTensor) else x for x in inputs]
    grads = func(_plain(outputs), locals_, *_plain(args[2:]), **{key: _plain(value) for key, value in kwargs.items()})
    return tuple(
        wrap_like(x, grad, dtype=grad.dtype) if isinstance(x, VocabShardedTensor) and grad is not None else grad
        for x, grad in zip(inputs, grads, strict=True)
    )


_RECEIVES = {"all_reduce", "broadcast", "reduce", "recv", "irecv"}
"""Functions of torch.distributed that write into their first argument."""

# Methods and attributes of a tensor, and functions of torch and torch.nn.functional, by name.
_NAMES: Mapping[Rule, str] = {
    _view: " ".join(VIEW_RULES),
    _copied: "clone contiguous",
    _detached: "detach data",
    _cast: "to type type_as cpu cuda float double half bfloat16",
    _elementwise: """
        add sub subtract rsub mul multiply div divide true_divide pow neg negative abs clamp clamp_min clamp_max exp
        tanh sigmoid relu softplus masked_fill where __pow__ __rpow__ __rsub__ __rdiv__
        """,
    _cross_entropy: "cross_entropy",
    metadata_of_wrapper: """
        shape size dim ndim ndimension numel nelement __len__ dtype element_size itemsize nbytes is_floating_point
        is_complex is_signed device get_device is_cuda is_cpu is_meta layout is_sparse is_leaf grad_fn
        """,
    _factory: """
        new_empty new_zeros new_ones new_full new_tensor empty_like zeros_like ones_like full_like rand_like randn_like
        """,
    _query_local: "requires_grad requires_grad_ retain_grad retains_grad is_contiguous is_inference",
    _hooked: "register_hook",
    _backward: "backward",
}


def _rules() -> Iterator[tuple[Any, Rule]]:
    tensor: Any = Tensor
    for rule, names in _NAMES.items():
        for name in names.split():
            for home in (tensor, torch, F):
                function: Any = getattr(home, name, None)
                if hasattr(function, "__set__"):  # an attribute of a tensor, which torch names by its getter
                    yield function.__get__, rule
                elif callable(function) and not isinstance(function, type):
                    yield function, rule
    yield tensor.requires_grad.__set__, _query_local
    yield tensor.grad.__get__, _get_grad
    yield tensor.grad.__set__, _set_grad
    yield torch.autograd.grad, _autograd_grad
    yield torch.autograd.backward, _autograd_backward


LOGITS_RULES: Mapping[Any, Rule] = dict(_rules())
"""What is called, for each function of torch that does not simply gather."""
