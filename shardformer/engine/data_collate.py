"""Puts samples together to a batch, where the user says nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import default_collate

from shardformer.errors import InputError


def collated(samples: list[Any]) -> Any:
    """Samples as a batch: as torch does it, and of mappings as a model takes them.

    There numbers and lists of numbers become tensors of torch's default dtype, and words stay a list.

    >>> collated([{"ids": [5, 6], "score": 0.5, "text": "a"}, {"ids": [7, 8], "score": 1.0, "text": "b"}])
    {'ids': tensor([[5, 6],
            [7, 8]]), 'score': tensor([0.5000, 1.0000]), 'text': ['a', 'b']}

    Raises InputError for samples that do not fit together.
    """
    first = samples[0]
    if not isinstance(first, Mapping):
        return default_collate(samples)
    other = next((sample for sample in samples if sample.keys() != first.keys()), None)
    if other is not None:
        raise InputError(
            f"The samples of a batch have the keys {sorted(map(str, first))} and {sorted(map(str, other))}",
            rule="A batch holds each key of its samples once for every sample",
            remedy="Give all samples the same keys, or give collate_fn",
        )
    return {key: _column(str(key), [sample[key] for sample in samples]) for key in first}


def _column(key: str, values: list[Any]) -> Any:
    """The values of all samples under one key."""
    if all(isinstance(value, str) for value in values):
        return values
    if all(isinstance(value, (int, float)) and not isinstance(value, numpy.generic) for value in values):
        return torch.tensor(values)
    values = [_as_tensor(key, value) for value in values]
    sized = [value for value in values if isinstance(value, (Tensor, list, tuple))]
    shapes = {tuple(value.shape) if isinstance(value, Tensor) else (len(value),) for value in sized}
    if len(shapes) > 1:
        raise _of_other_lengths(key, " and ".join(map(str, sorted(shapes)[:2])))
    return default_collate(values)


def _as_tensor(key: str, value: Any) -> Any:
    """Numbers in lists or arrays as a tensor, those of numpy in their own dtype; anything else as it is."""
    leaf = _leaf(value)
    is_numpy = isinstance(leaf, (numpy.number, numpy.bool_, numpy.ndarray))
    if not isinstance(value, (list, tuple, numpy.ndarray)) or not (is_numpy or isinstance(leaf, (int, float, list))):
        return value
    try:
        return torch.as_tensor(numpy.asarray(value)) if is_numpy else torch.tensor(value)
    except ValueError as error:
        raise _of_other_lengths(key, f"that no tensor has: {error}") from error


def _leaf(value: Any) -> Any:
    """The first number in lists and arrays, or the first of them that is empty."""
    while (isinstance(value, (list, tuple)) and value) or (
        isinstance(value, numpy.ndarray) and value.ndim and value.size
    ):
        value = value[0]
    return value


def _of_other_lengths(key: str, shapes: str) -> InputError:
    return InputError(
        f"The samples of a batch have {key!r} of the shapes {shapes}",
        rule="What is put together into one tensor has one shape",
        remedy="Pad it in the data, or give collate_fn, such as transformers.DataCollatorWithPadding(tokenizer)",
    )
