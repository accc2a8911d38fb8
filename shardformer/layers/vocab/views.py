"""Where the vocabulary goes when a view is taken of logits of which each rank holds some columns.

Each rule looks at one of torch's view functions as it is called on the full logits, and gives

    the dim that the vocabulary is after it, and the arguments that do the same to the local part

or None where the vocabulary does not stay whole, so that the full logits are needed. No rule sees a tensor's values.

>>> reshape((2, 5, 127), 2, (-1, 127), {}, local=64)
(1, ((-1, 64),))
>>> transpose((2, 5, 127), 2, (1, 2), {}, local=64)
(1, (1, 2))
>>> select((2, 5, 127), 2, (2, 0), {}, local=64) is None     # one column
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

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


RULES: Mapping[str, Callable[..., Placed]] = {
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
