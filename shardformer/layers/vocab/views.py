"""Where the vocabulary goes when a view is taken of logits of which each rank holds some columns.

The function is tried on two stand-ins without values that differ in the number of columns alone. Where what it gives
differs in that alone too, the vocabulary has stayed whole, and the function may be called on the local part:

    of (2, 5, 127)      as it is     with 128 columns     so
    view(-1, 127)       (10, 127)    (10, 128)            whole, dim 1; view(-1, 64) on a rank that holds 64
    transpose(1, 2)     (2, 127, 5)  (2, 128, 5)          whole, dim 1
    [..., 0]            (2, 5)       (2, 5)               one column: the full logits are needed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardformer.comm.values import with_values

NAMES = """
    view reshape expand flatten unflatten squeeze unsqueeze transpose swapaxes swapdims permute select unbind narrow
    split chunk index_select __getitem__
    """
"""Functions under which the vocabulary may stay whole, methods of a tensor and functions of torch alike."""

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call: positional, by name."""


@with_values()
def follow(
    func: Callable[..., Any], shape: Sequence[int], vocab: int, given: Given, held: int
) -> tuple[int, Given] | None:
    """The dim of the vocabulary behind ``func``, and the arguments for a part of which ``held`` columns are here.

    None where the full logits are needed: on all ranks, as neither ``held`` nor a value has a say in it.
    """
    if func.__name__ == "squeeze":  # the dims that go are named: one column is no dim that goes
        given = _named_squeeze(shape, *given[0], **given[1]), {}
    columns, others = shape[vocab], max(shape) + 1
    is_view = func.__name__ not in ("index_select", "__getitem__")
    for named in (False, True):  # whether the arguments may say the number of columns
        whole = _tried(func, shape, vocab, columns, given)
        other = _tried(func, shape, vocab, others, _with_columns(given, columns, others) if named else given)
        dims = {_only_difference(a, b, columns, others, is_view) for a, b in zip(whole, other)}
        dim = dims.pop() if len(dims) == 1 and len(whole) == len(other) else None
        if dim is not None:
            return dim, _with_columns(given, columns, held) if named else given
    return None


def _tried(func: Callable[..., Any], shape: Sequence[int], vocab: int, columns: int, given: Given) -> list[Tensor]:
    """What the function gives of a tensor without values; nothing where it raises."""
    strides = torch.empty(shape, device="meta").stride()
    sizes = [columns if dim == vocab else size for dim, size in enumerate(shape)]
    args, kwargs = mapped(given, lambda x: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x)
    try:
        result = func(torch.empty_strided(sizes, strides, device="meta"), *args, **kwargs)
    except (RuntimeError, IndexError, TypeError):
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def _only_difference(x: Tensor, y: Tensor, columns: int, others: int, is_view: bool) -> int | None:
    """The dim that has all columns in both, where nothing else differs; None where there is none, or not that alone."""
    sizes = list(zip(x.shape, y.shape))
    differ = [dim for dim, (a, b) in enumerate(sizes) if a != b]
    if x.dim() != y.dim() or [sizes[dim] for dim in differ] != [(columns, others)]:
        return None
    # in a view each dim passes over as many numbers as before; what an index tensor takes is none
    moved = is_view and any(n > 1 and a != b for n, a, b in zip(x.shape, x.stride(), y.stride()))
    return None if moved else differ[0]


def _with_columns(given: Given, columns: int, new: int) -> Given:
    """The arguments with another number of columns wherever they say it."""
    changed: Given = mapped(given, lambda x: new if type(x) is int and x == columns else x)
    return changed


def mapped(value: Any, how: Callable[[Any], Any]) -> Any:
    """Nested arguments with ``how`` done to what is in them."""
    if isinstance(value, list):
        return [mapped(x, how) for x in value]
    if isinstance(value, tuple):
        return tuple(mapped(x, how) for x in value)
    if isinstance(value, dict):
        return {key: mapped(x, how) for key, x in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(x, how) for x in (value.start, value.stop, value.step)))
    return how(value)


def _named_squeeze(shape: Sequence[int], dim: int | Sequence[int] | None = None) -> tuple[Any, ...]:
    named = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    return (tuple({d % len(shape) for d in named if shape[d] == 1}),)
