"""Cuts a batch into micro-batches, and joins what came out of them to what the batch would have given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor

from shardformer.errors import ConfigError, InputError
from shardformer.pipeline.flat import TOKENS, Ends, Ids, ends_of, flat_names
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

    What has a row for each patch of all images, beside their grid, does not count where anything else is there.
    Raises ConfigError for a batch without such a tensor.
    """
    named = _main_of(batch, main) if main in batch or flat_names(batch) else None
    for _, tensor in tensors_of([named, _by_sample(batch), *_grids_of(batch)]):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise ConfigError(
        f"a batch of {', '.join(sorted(map(str, batch))) or 'nothing'} holds no tensor with a first dim",
        rule="A batch is cut into micro-batches along the first dim of its tensors",
        remedy="Give the inputs as tensors whose first dim is the batch, as a data collator does",
    )


def _main_of(batch: Mapping[Any, Any], main: str | None) -> Any:
    flat = flat_names(batch)
    known = (name for name in (main, TOKENS, "inputs_embeds") if name in batch and name not in flat)
    return next((batch[name] for name in known), None)


def _by_sample(value: Any) -> Any:
    """Without what has rows of other things than samples."""
    if not isinstance(value, Mapping):
        return value
    flat = flat_names(value)
    return {name: _by_sample(inner) for name, inner in value.items() if name not in flat}


def _grids_of(batch: Mapping[Any, Any]) -> list[Any]:
    """What has a row for each image."""
    return [batch[name] for name in batch if name in flat_names(batch) and "grid" in name]


def split_batch(
    batch: Mapping[str, Any], sizes: Sequence[int], main: str | None = None, ids: Ids = MappingProxyType({})
) -> list[dict[str, Any]]:
    """The micro-batches, of ``sizes`` samples each.

    A tensor or an array whose first dim is the batch's size is cut, also inside lists, tuples and mappings. So is a
    list with an entry for each sample: of words, numbers, mappings, or tensors with other rows. Patches of images of
    different sizes are cut where the images of a sample end (``flat``), and a stack of what is like the main input,
    such as positions in three dims, along its second dim. A tensor with one row, or without a dim, and anything else,
    are handed to every micro-batch as they are.

    Args:
        main: the input that has a row for each sample.
        ids: fields of the model's config -> the tokens that stand for images.

    Raises ConfigError when ``sizes`` do not sum to the batch's size, and InputError for a tensor with other rows.
    """
    total = batch_size_of(batch, main)
    if sum(sizes) != total:
        raise ConfigError(
            f"micro-batches of {list(sizes)} samples, {sum(sizes)} together, for a batch of {total}",
            rule="Every sample is in exactly one micro-batch",
            remedy="Take the sizes from sizes_of, with the size of this batch",
        )
    if len(sizes) == 1:
        return [dict(batch)]
    cut = _Cut([0, *accumulate(sizes)], _main_of(batch, main), ids)
    parts = cut.of_mapping(batch)
    return [{name: column[i] for name, column in parts.items()} for i in range(len(sizes))]


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Where a batch is cut, in samples, and the input that it is known by."""

    ends: Ends
    main: Any
    ids: Ids

    def of_mapping(self, batch: Mapping[Any, Any], path: str = "") -> dict[Any, list[Any]]:
        """Each value's parts."""
        rows = ends_of(batch, self.ends[-1], self.ids)
        return {
            name: self._rows(value, [rows[name][end] for end in self.ends])
            if name in rows
            else self._parts(value, f"{path}{name}")
            for name, value in batch.items()
        }

    def _parts(self, value: Any, path: str) -> list[Any]:
        if isinstance(value, Tensor):
            return self._of_tensor(value, path)
        if has_entries(value, self.ends[-1]):
            return self._rows(value, self.ends)
        if isinstance(value, Mapping) and any(True for _ in tensors_of(value)):
            inner = self.of_mapping(value, f"{path}.")
            return [like(value, {name: column[i] for name, column in inner.items()}) for i in self._each]
        if isinstance(value, list | tuple) and any(True for _ in tensors_of(value)):
            columns = [self._parts(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
            return [like(value, [column[i] for column in columns]) for i in self._each]
        return [value for _ in self._each]

    @property
    def _each(self) -> range:
        return range(len(self.ends) - 1)

    def _of_tensor(self, x: Tensor, path: str) -> list[Tensor]:
        samples = self.ends[-1]
        is_like = isinstance(self.main, Tensor) and self.main.dim() > 1 and x.shape[1:] == self.main.shape[:2]
        is_stack = is_like and x.dim() == 3 and not x.is_floating_point()
        if is_stack and x.shape[0] == samples > 1:
            raise _no_samples(path, x, samples, "both of its first two dims could be them")
        if x.dim() > 0 and x.shape[0] == samples:
            return self._rows(x, self.ends)
        if is_stack:
            return [x[:, start:end] for start, end in pairwise(self.ends)]
        if x.dim() == 0 or x.shape[0] == 1:
            return [x for _ in self._each]
        raise _no_samples(path, x, samples, "it is known by no grid whose they could be")

    @staticmethod
    def _rows(value: Any, ends: Ends) -> list[Any]:
        return [value[start:end] for start, end in pairwise(ends)]


def has_entries(value: Any, samples: int) -> bool:
    """Whether a value of a batch that is no tensor has an entry for each sample.

    A list of tensors with a row for each sample has none: it is several inputs. Of tuples those of words have, as torch
    puts words together; one of numbers is a size.
    """
    if samples < 2:
        return False
    if isinstance(value, numpy.ndarray):
        return bool(value.ndim) and value.shape[0] == samples
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or len(value) != samples:
        return False
    if isinstance(value, tuple):
        return all(isinstance(each, (str, bytes)) for each in value)
    return not any(isinstance(each, Tensor) and each.dim() and each.shape[0] == samples for each in value)


def _no_samples(path: str, x: Tensor, samples: int, why: str) -> InputError:
    return InputError(
        f"{path}, a tensor of {tuple(x.shape)}, has {x.shape[0]} rows in a batch of {samples} samples; {why}",
        rule="A batch is cut into micro-batches, and over data ranks, along the first dim of its tensors, which is the "
        "samples; of patches of images it is cut by a grid with a row for each image (image_grid_thw)",
        remedy="Give it a row for each sample, or one row (x[None]) where all samples share it; or cut nothing: one "
        "micro-batch, and batches that each data rank makes of its own samples",
    )


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
        return like(first, {name: merge_outputs([part[name] for part in parts], sizes) for name in first})
    if isinstance(first, list | tuple):
        if any(len(part) != len(first) for part in parts):
            return None
        return like(first, [merge_outputs(column, sizes) for column in zip(*parts)])
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


def like(one: Any, content: Any) -> Any:
    """A container of the kind of ``one``: a named tuple stays one, and what cannot be built of its content is plain."""
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        return type(one)(*content)
    try:
        return type(one)(content)
    except TypeError:
        return content
