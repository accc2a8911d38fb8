"""Cuts a batch into micro-batches, and joins what came out of them to what the batch would have given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from shardformer.errors import ConfigError
from shardformer.pipeline.targets import tensors_of


def sizes_of(batch_size: int, micro_batches: int | None, micro_batch_size: int | None) -> list[int]:
    """How many samples each micro-batch has, by their number or by the size of all but the last.

    >>> sizes_of(7, micro_batches=4, micro_batch_size=None)
    [2, 2, 2, 1]
    >>> sizes_of(7, micro_batches=None, micro_batch_size=3)
    [3, 3, 1]

    Raises ConfigError unless exactly one is given, a positive int, and there is a sample for each micro-batch.
    """
    check_sizes(micro_batches, micro_batch_size)
    if micro_batch_size is not None:
        full, rest = divmod(batch_size, micro_batch_size)
        return [micro_batch_size] * full + [rest] * (rest > 0)
    assert micro_batches is not None
    if micro_batches > batch_size:
        raise ConfigError(
            f"micro_batches={micro_batches} for a batch of {batch_size}",
            rule="Every micro-batch has at least one sample",
            remedy=f"Use at most {batch_size} micro-batches, or a batch of {micro_batches} samples or more",
        )
    each, extra = divmod(batch_size, micro_batches)
    return [each + (i < extra) for i in range(micro_batches)]


MOST = 2**14
"""Micro-batches of a batch."""


def check_sizes(micro_batches: int | None, micro_batch_size: int | None) -> None:
    """Raises ConfigError unless exactly one is given, a positive int."""
    if (micro_batches is None) == (micro_batch_size is None):
        raise ConfigError(
            f"micro_batches={micro_batches} with micro_batch_size={micro_batch_size}",
            rule="A batch is cut by the number of its micro-batches or by their size",
            remedy="Give one of the two",
        )
    name, value = (
        ("micro_batches", micro_batches) if micro_batch_size is None else ("micro_batch_size", micro_batch_size)
    )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{name}={value!r}",
            rule=f"{name} is a whole number of at least 1",
            remedy="Use 1 or more, and no more than a batch has samples",
        )
    if micro_batches is not None and micro_batches > MOST:
        raise ConfigError(
            f"micro_batches={micro_batches}",
            rule=f"A schedule names each of them on each stage: {MOST} at the most",
            remedy="Use no more than a batch has samples",
        )


def batch_size_of(batch: Mapping[str, Any], main: str | None = None) -> int:
    """The first dim of ``batch[main]`` where that is a tensor that has one, else of the first tensor that has one.

    Raises ConfigError for a batch without such a tensor.
    """
    named = batch[main] if main is not None and main in batch else None
    for _, tensor in tensors_of([named, batch]):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise ConfigError(
        f"a batch of {', '.join(sorted(map(str, batch))) or 'nothing'} holds no tensor with a first dim",
        rule="A batch is cut into micro-batches along the first dim of its tensors",
        remedy="Give the inputs as tensors whose first dim is the batch, as a data collator does",
    )


def split_batch(batch: Mapping[str, Any], sizes: Sequence[int], main: str | None = None) -> list[dict[str, Any]]:
    """The micro-batches, of ``sizes`` samples each.

    A tensor whose first dim is the batch's size is cut, also inside lists, tuples and mappings; all else is handed to
    every micro-batch as it is.

    Raises ConfigError when ``sizes`` do not sum to the batch's size.
    """
    total = batch_size_of(batch, main)
    if sum(sizes) != total:
        raise ConfigError(
            f"micro-batches of {list(sizes)} samples, {sum(sizes)} together, for a batch of {total}",
            rule="Every sample is in exactly one micro-batch",
            remedy="Take the sizes from sizes_of, with the size of this batch",
        )
    return [
        {name: _stretch(value, start, end, total) for name, value in batch.items()}
        for start, end in pairwise([0, *accumulate(sizes)])
    ]


def merge_outputs(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """What came out of micro-batches of ``sizes`` samples, as the whole batch would have given it.

    Tensors whose first dim is their micro-batch's size are joined along it, also inside lists, tuples, mappings and
    dataclasses, which are built anew. A number in a tensor, a loss, becomes None: how it sums up is the caller's to
    know. Anything else stays if it is equal in all of them, and becomes None otherwise.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return None
    if isinstance(first, Tensor):
        return _merge_tensors(parts, sizes)
    if dataclasses.is_dataclass(first):
        names = [f.name for f in dataclasses.fields(first) if f.init]
        kind: Any = type(first)
        return kind(**{name: merge_outputs([getattr(part, name) for part in parts], sizes) for name in names})
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            return None
        return _like(first, {name: merge_outputs([part[name] for part in parts], sizes) for name in first})
    if isinstance(first, list | tuple):
        if any(len(part) != len(first) for part in parts):
            return None
        return _like(first, [merge_outputs(column, sizes) for column in zip(*parts)])
    return first if all(_is_equal(part, first) for part in parts) else None


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (ValueError, RuntimeError):  # an array of several numbers is neither
        return False


def _merge_tensors(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
    first = parts[0]
    if any(part.dim() == 0 for part in parts):
        return None
    if all(part.shape[0] == size for part, size in zip(parts, sizes, strict=True)):
        return torch.cat(list(parts)) if len(parts) > 1 else first
    return first if all(torch.equal(part, first) for part in parts) else None


def _stretch(value: Any, start: int, end: int, total: int) -> Any:
    """The samples from ``start`` up to ``end``."""
    if isinstance(value, Tensor):
        return value[start:end] if value.dim() > 0 and value.shape[0] == total else value
    if isinstance(value, Mapping) and any(True for _ in tensors_of(value)):
        return _like(value, {name: _stretch(inner, start, end, total) for name, inner in value.items()})
    if isinstance(value, list | tuple) and any(True for _ in tensors_of(value)):
        return _like(value, [_stretch(inner, start, end, total) for inner in value])
    return value


def _like(one: Any, content: Any) -> Any:
    """A container of the kind of ``one``: a named tuple stays one, and what cannot be built of its content is plain."""
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        return type(one)(*content)
    try:
        return type(one)(content)
    except TypeError:
        return content
