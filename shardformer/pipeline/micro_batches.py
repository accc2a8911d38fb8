"""Splits a batch into micro-batches and joins their outputs.

Tensors whose rows are not samples are split by samples, too: patches of all images with a grid per image.

    input_ids       (2, S)     two samples: the first has two images, the second one
    image_grid_thw  (3, 3)     a row for each image: [[1, 2, 4], [1, 4, 4], [1, 2, 2]] are 8, 16 and 4 patches
    pixel_values    (28, D)    the first 24 rows are of the first sample, the last 4 of the second

How many images a sample has is told by the tokens that stand for them: they are as many as an image has patches, or a
fixed share of that, so the images of a sample end where its tokens do. Nothing is guessed: where tokens do not tell, or
tell two things, the batch is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor

from shardformer.errors import ConfigError, InputError
from shardformer.torch_compat import to_list

# P patches, I images, B samples

MEDIA_TOKEN_FIELDS, KINDS = "input_ids", "mm_token_type_ids"
COUNTS = ("num", "count", "counts", "lengths")
"""In the names of inputs that say how many rows of another input each sample has."""
Ids = Mapping[str, int]
"""Field of a config -> the token that stands for images, videos or sounds."""
Ends = list[int]
"""Where the rows of each sample end, with a 0 before."""


def special_token_ids(config: Any) -> dict[str, int]:
    """The tokens that a config names.

    >>> from types import SimpleNamespace
    >>> special_token_ids(SimpleNamespace(image_token_id=7, video_token_index=8, hidden_size=9))
    {'image_token_id': 7, 'video_token_index': 8}
    """
    fields = vars(config) if hasattr(config, "__dict__") else {}
    return {n: x for n, x in fields.items() if n.endswith(("_token_id", "_token_index")) and type(x) is int}


def flattened_inputs(batch: Mapping[Any, Any]) -> set[str]:
    """The grids of a batch, and the inputs that have a row for each of their patches."""
    names = set()
    for grid, units in _grids(batch):
        flat = [name for name in _of_length(batch, sum(units)) if name not in (grid, MEDIA_TOKEN_FIELDS)]
        names |= {grid, *flat} if flat else set()
    return names


def sample_ends(batch: Mapping[Any, Any], samples: int, ids: Ids) -> dict[str, Ends]:
    """Input -> where the rows of each sample end in it, of those that have not a row for each sample.

    Raises InputError where grids, tokens and inputs do not fit together, or several divisions would fit.
    """
    ends: dict[str, Ends] = {}
    for grid, units in [*_grids(batch), *_counts(batch, samples)]:
        names = _flat_of(batch, grid, sum(units), samples)
        if not names:
            continue
        images = _images_of(batch, grid, units, samples, ids)
        patches = [0, *accumulate(units)]
        found = {grid: images, **{name: [patches[i] for i in images] for name in names}}
        for name in _per_image_inputs(batch, grid, len(units), samples):
            found[name] = images
        for name, rows in found.items():
            if ends.setdefault(name, rows) != rows:
                raise _unclear(name, batch[name], samples, f"it fits {grid} and another of the batch's grids")
    return ends


def _grids(batch: Mapping[Any, Any]) -> Iterator[tuple[str, list[int]]]:
    """Grid -> the patches of each image."""
    for name, x in batch.items():
        if isinstance(name, str) and "grid" in name and _is_whole(x) and x.dim() == 2 and x.shape[1] <= 3:
            yield name, to_list(x.prod(-1))


def _counts(batch: Mapping[Any, Any], samples: int) -> Iterator[tuple[str, list[int]]]:
    """Input -> how many rows of another input belong to each sample."""
    for name, x in batch.items():
        words = set(name.split("_")) if isinstance(name, str) else set()
        if words & set(COUNTS) and _is_whole(x) and x.shape == (samples,):
            yield name, to_list(x)


def _is_whole(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool


def _of_length(batch: Mapping[Any, Any], length: int) -> list[str]:
    return [name for name, x in batch.items() if isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == length]


def _is_alike(name: str, grid: str) -> bool:
    """Whether both are of videos, or both are not."""
    return ("video" in name or "second" in name) == ("video" in grid)


def _flat_of(batch: Mapping[Any, Any], grid: str, length: int, samples: int) -> list[str]:
    """The inputs that have a row for each of all patches. Raises InputError where they might be samples as well."""
    names = [name for name in _of_length(batch, length) if name != grid]
    alike = [name for name in names if _is_alike(name, grid)]
    names = alike or names
    if names and length == samples and batch[grid].dim() == 1:
        return []  # a row for each sample, as is usual
    if names and length in (samples, 1):
        raise _unclear(names[-1], batch[names[-1]], samples, f"by {grid} all images together have {length} rows")
    return names


def _per_image_inputs(batch: Mapping[Any, Any], grid: str, images: int, samples: int) -> Iterator[str]:
    """Other inputs with a row, or a number in a list, for each image."""
    if batch[grid].dim() == 1:
        return
    for name, x in batch.items():
        numbers = isinstance(x, list | tuple) and all(isinstance(n, int | float) for n in x)
        length = len(x) if numbers else x.shape[0] if isinstance(x, Tensor) and x.dim() > 0 else -1
        is_named = "grid" in name and _is_alike(name, grid)
        if name != grid and length == images and (is_named or (not numbers and images not in (samples, 1))):
            yield name


def _images_of(batch: Mapping[Any, Any], grid: str, units: Sequence[int], samples: int, ids: Ids) -> Ends:
    """Where the images of each sample end."""
    if batch[grid].dim() == 1:
        return list(range(samples + 1))
    ways, known = _token_counts(batch, grid, ids)
    fitting = [ends for counts in ways if (ends := _division(counts, units)) is not None]
    if not ways and len(units) == samples:
        return list(range(samples + 1))  # nothing but images
    if fitting and all(ends == fitting[0] for ends in fitting):
        return fitting[0]
    why = "which tokens stand for it is not known, and several would fit"
    if not fitting:
        why = "the tokens of its samples do not fit its images" if known or ways else "the batch has no tokens"
    raise _unclear(grid, batch[grid], samples, why)


def _token_counts(batch: Mapping[Any, Any], grid: str, ids: Ids) -> tuple[list[list[int]], bool]:
    """How many tokens each sample has that may stand for the images; one way where it is known which do."""
    kinds, tokens = batch.get(KINDS), batch.get(MEDIA_TOKEN_FIELDS)
    of = "video" if "video" in grid else "audio" if "audio" in grid else "image"
    if isinstance(kinds, Tensor):
        return [_per_row(kinds, {"image": 1, "video": 2, "audio": 3}[of])], True
    if not isinstance(tokens, Tensor):
        return [], False
    known = [token for name, token in ids.items() if name.startswith(f"{of}_token")]
    named = [counts for token in known if sum(counts := _per_row(tokens, token))]
    if named:
        return named[:1], True
    return [_per_row(tokens, token) for token in to_list(tokens.unique())], False


def _per_row(tokens: Tensor, token: int) -> list[int]:
    found: list[int] = to_list((tokens == token).flatten(1).sum(-1))
    return found


def _division(tokens: Sequence[int], units: Sequence[int]) -> Ends | None:
    """Where the images of each sample end, if samples have so many tokens, and images so many patches; else None.

    >>> _division([6, 1], [8, 16, 4])  # a token for four patches
    [0, 2, 3]
    >>> _division([3, 4], [8, 16, 4]) is None
    True
    """
    if not sum(tokens) or sum(units) % sum(tokens):
        return None
    share = sum(units) // sum(tokens)
    places = {patches: image for image, patches in enumerate(accumulate(units, initial=0))}
    ends = [places.get(share * n) for n in accumulate(tokens, initial=0)]
    if any(n % share for n in units) or len(places) <= len(units):
        return None
    return [end for end in ends if end is not None] if None not in ends else None


def _unclear(name: str, value: Any, samples: int, why: str) -> InputError:
    return InputError(
        f"{name}, a tensor of {tuple(value.shape)}, cannot be shared out among {samples} samples: {why}",
        rule="What has a row for each image, or for each of its patches, is cut where the images of a sample end; how "
        "many it has is told by the tokens that stand for them, each for as many patches",
        remedy=f"Give {KINDS} in the batch, as a processor of transformers does, and check that the images are in the "
        "order of the samples; or use one data rank and one micro-batch",
    )


TensorPath = tuple[Any, ...]
"""Where a tensor is in a micro-batch: the key, and those within it."""

Tensors = Mapping[TensorPath, Tensor]


def named_tensors_in(value: Any, name: TensorPath = ()) -> Iterator[tuple[TensorPath, Tensor]]:
    """All tensors of a micro-batch, by where they are."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from named_tensors_in(part, (*name, key))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from named_tensors_in(part, (*name, i))


def micro_batch_sizes(batch_size: int, micro_batches: int | None, micro_batch_size: int | None) -> list[int]:
    """How many samples each micro-batch has, by their number or by the size of all but the last.

    >>> micro_batch_sizes(7, micro_batches=4, micro_batch_size=None)
    [2, 2, 2, 1]
    >>> micro_batch_sizes(7, micro_batches=None, micro_batch_size=3)
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


MAX_MICRO_BATCHES = 2**14
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
    if micro_batches is not None and micro_batches > MAX_MICRO_BATCHES:
        raise ConfigError(
            f"micro_batches={micro_batches}",
            rule=f"A schedule names each of them on each stage: {MAX_MICRO_BATCHES} at the most",
            remedy="Use no more than a batch has samples",
        )


def batch_size_of(batch: Mapping[str, Any], main: str | None = None) -> int:
    """The first dim of ``batch[main]`` where that is a tensor that has one, else of the first tensor that has one.

    What has a row for each patch of all images, beside their grid, does not count where anything else is there.
    Raises ConfigError for a batch without such a tensor.
    """
    named = _main_of(batch, main) if main in batch or flattened_inputs(batch) else None
    for _, tensor in named_tensors_in([named, _by_sample(batch), *_grids_of(batch)]):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise ConfigError(
        f"a batch of {', '.join(sorted(map(str, batch))) or 'nothing'} holds no tensor with a first dim",
        rule="A batch is cut into micro-batches along the first dim of its tensors",
        remedy="Give the inputs as tensors whose first dim is the batch, as a data collator does",
    )


def _main_of(batch: Mapping[Any, Any], main: str | None) -> Any:
    flat = flattened_inputs(batch)
    known = (name for name in (main, MEDIA_TOKEN_FIELDS, "inputs_embeds") if name in batch and name not in flat)
    return next((batch[name] for name in known), None)


def _by_sample(value: Any) -> Any:
    """Without what has rows of other things than samples."""
    if not isinstance(value, Mapping):
        return value
    flat = flattened_inputs(value)
    return {name: _by_sample(inner) for name, inner in value.items() if name not in flat}


def _grids_of(batch: Mapping[Any, Any]) -> list[Any]:
    """What has a row for each image."""
    return [batch[name] for name in batch if name in flattened_inputs(batch) and "grid" in name]


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
    cut = _BatchSplit([0, *accumulate(sizes)], _main_of(batch, main), ids)
    parts = cut.of_mapping(batch)
    return [{name: column[i] for name, column in parts.items()} for i in range(len(sizes))]


@dataclasses.dataclass(frozen=True)
class _BatchSplit:
    """Where a batch is cut, in samples, and the input that it is known by."""

    ends: Ends
    main: Any
    ids: Ids

    def of_mapping(self, batch: Mapping[Any, Any], path: str = "") -> dict[Any, list[Any]]:
        """Each value's parts."""
        rows = sample_ends(batch, self.ends[-1], self.ids)
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
        if isinstance(value, Mapping) and any(True for _ in named_tensors_in(value)):
            inner = self.of_mapping(value, f"{path}.")
            return [rebuild_container(value, {name: column[i] for name, column in inner.items()}) for i in self._each]
        if isinstance(value, list | tuple) and any(True for _ in named_tensors_in(value)):
            columns = [self._parts(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
            return [rebuild_container(value, [column[i] for column in columns]) for i in self._each]
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
        return rebuild_container(first, {name: merge_outputs([part[name] for part in parts], sizes) for name in first})
    if isinstance(first, list | tuple):
        if any(len(part) != len(first) for part in parts):
            return None
        return rebuild_container(first, [merge_outputs(column, sizes) for column in zip(*parts)])
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


def rebuild_container(one: Any, content: Any) -> Any:
    """A container of the kind of ``one``: a named tuple stays one, and what cannot be built of its content is plain."""
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        return type(one)(*content)
    try:
        return type(one)(content)
    except TypeError:
        return content


TARGET_KEY = "target of the loss"
"""The name, in a batch, of what the loss function alone reads."""
