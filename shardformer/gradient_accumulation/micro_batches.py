"""Split a batch into micro-batches, and merge their outputs.

Image patches and other tensors that do not have one row per sample are also split by sample. Example:

    input_ids       (2, S)     two samples: the first has two images, the second one
    image_grid_thw  (3, 3)     a row per image: [[1, 2, 4], [1, 4, 4], [1, 2, 2]] are 8, 16 and 4 patches
    pixel_values    (28, D)    the first 24 rows belong to the first sample, the last 4 to the second

The placeholder tokens of a sample determine its images: each token represents the same number of patches. If the
tokens are missing or ambiguous, an InputError is raised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor

from shardformer.errors import ConfigError, InputError, check_int
from shardformer.torch_compat import tolist_or_ones

# P patches, I images, B samples

MEDIA_TOKEN_FIELDS, KINDS = "input_ids", "mm_token_type_ids"
COUNTS = ("num", "count", "counts", "lengths")
"""Words in the names of inputs that contain the number of rows of another input for each sample."""
Ids = Mapping[str, int]
"""Name of a config field -> id of the placeholder token of images, videos or audio."""
Ends = list[int]
"""The index of the row after each sample's last row, preceded by 0."""


def get_special_token_ids(config: Any) -> dict[str, int]:
    """Return the fields of a model config that contain special token ids.

    >>> from types import SimpleNamespace
    >>> get_special_token_ids(SimpleNamespace(image_token_id=7, video_token_index=8, hidden_size=9))
    {'image_token_id': 7, 'video_token_index': 8}
    """
    fields = vars(config) if hasattr(config, "__dict__") else {}
    return {n: x for n, x in fields.items() if n.endswith(("_token_id", "_token_index")) and type(x) is int}


def find_patch_input_names(batch: Mapping[Any, Any]) -> set[str]:
    """Find the inputs with one row per image patch, and their grid inputs such as ``image_grid_thw``."""
    names = set()
    for grid, patch_counts in _iter_grid_names_and_patch_counts(batch):
        flat = [
            name
            for name in _find_input_names_with_num_rows(batch, sum(patch_counts))
            if name not in (grid, MEDIA_TOKEN_FIELDS)
        ]
        names |= {grid, *flat} if flat else set()
    return names


def find_sample_row_ends(batch: Mapping[Any, Any], num_samples: int, media_token_ids: Ids) -> dict[str, Ends]:
    """Find the rows of each sample in inputs such as image patches, which have several rows per sample.

    Raises InputError if grids, tokens and inputs do not match, or match in several ways.
    """
    ends: dict[str, Ends] = {}
    for grid, patch_counts in [
        *_iter_grid_names_and_patch_counts(batch),
        *_iter_inputs_with_row_counts(batch, num_samples),
    ]:
        names = _find_per_patch_input_names(batch, grid, sum(patch_counts), num_samples)
        if not names:
            continue
        images = _find_sample_image_ends(batch, grid, patch_counts, num_samples, media_token_ids)
        patches = [0, *accumulate(patch_counts)]
        found = {grid: images, **{name: [patches[i] for i in images] for name in names}}
        found |= dict.fromkeys(_iter_per_image_input_names(batch, grid, len(patch_counts), num_samples), images)
        for name, rows in found.items():
            if ends.setdefault(name, rows) != rows:
                why = f"The input {name} matches both {grid} and another grid."
                raise _make_ambiguous_rows_error(batch, name, num_samples, why)
    return ends


def _iter_grid_names_and_patch_counts(batch: Mapping[Any, Any]) -> Iterator[tuple[str, list[int]]]:
    """Yield the name of each grid input, such as ``image_grid_thw``, and the number of patches of each image."""
    for name, x in batch.items():
        if isinstance(name, str) and "grid" in name and _is_integer_tensor(x) and x.dim() == 2 and x.shape[1] <= 3:
            yield name, tolist_or_ones(x.prod(-1))


def _iter_inputs_with_row_counts(batch: Mapping[Any, Any], num_samples: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and values of inputs with row counts, such as the number of images per sample."""
    for name, x in batch.items():
        words = set(name.split("_")) if isinstance(name, str) else set()
        if words & set(COUNTS) and _is_integer_tensor(x) and x.shape == (num_samples,):
            yield name, tolist_or_ones(x)


def _is_integer_tensor(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not tensor.is_floating_point() and tensor.dtype != torch.bool


def _find_input_names_with_num_rows(batch: Mapping[Any, Any], num_rows: int) -> list[str]:
    return [name for name, x in batch.items() if isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == num_rows]


def _has_same_modality(input_name: str, grid_name: str) -> bool:
    return ("video" in input_name or "second" in input_name) == ("video" in grid_name)


def _find_per_patch_input_names(
    batch: Mapping[Any, Any], grid_name: str, num_patches: int, num_samples: int
) -> list[str]:
    """Find the names of the inputs with one row per patch. Raises InputError if the rows might be samples."""
    names = [name for name in _find_input_names_with_num_rows(batch, num_patches) if name != grid_name]
    names = [name for name in names if _has_same_modality(name, grid_name)] or names
    if names and num_patches == num_samples and batch[grid_name].dim() == 1:
        return []  # one row per sample
    if names and num_patches in (num_samples, 1):
        why = f"{grid_name} describes {num_patches} rows in total, so a row could be a sample or a patch."
        raise _make_ambiguous_rows_error(batch, names[-1], num_samples, why)
    return names


def _iter_per_image_input_names(
    batch: Mapping[Any, Any], grid_name: str, num_images: int, num_samples: int
) -> Iterator[str]:
    """Yield the names of inputs with one row or number per image, except for the patch grid ``grid_name``."""
    if batch[grid_name].dim() == 1:
        return
    for name, x in batch.items():
        numbers = isinstance(x, list | tuple) and all(isinstance(n, int | float) for n in x)
        length = len(x) if numbers else x.shape[0] if isinstance(x, Tensor) and x.dim() > 0 else -1
        is_named = "grid" in name and _has_same_modality(name, grid_name)
        if (
            name != grid_name
            and length == num_images
            and (is_named or (not numbers and num_images not in (num_samples, 1)))
        ):
            yield name


def _find_sample_image_ends(
    batch: Mapping[Any, Any], grid_name: str, patch_counts: Sequence[int], num_samples: int, media_token_ids: Ids
) -> Ends:
    if batch[grid_name].dim() == 1:
        return list(range(num_samples + 1))
    candidates, known = _count_media_tokens(batch, grid_name, media_token_ids)
    matches = [ends for counts in candidates if (ends := _assign_images_to_samples(counts, patch_counts)) is not None]
    if not candidates and len(patch_counts) == num_samples:
        return list(range(num_samples + 1))  # the batch contains only images
    if matches and all(ends == matches[0] for ends in matches):
        return matches[0]
    why = "Several tokens could be the placeholders of the images."
    if not matches:
        why = "The placeholder tokens do not match the images." if known or candidates else "The batch has no tokens."
    raise _make_ambiguous_rows_error(batch, grid_name, num_samples, why)


def _count_media_tokens(batch: Mapping[Any, Any], grid_name: str, media_token_ids: Ids) -> tuple[list[list[int]], bool]:
    """Count each sample's image placeholder tokens, for every possible placeholder token id.

    Also returns whether the id of the placeholder is known. Works for videos and audio, too.
    """
    kinds, tokens = batch.get(KINDS), batch.get(MEDIA_TOKEN_FIELDS)
    of = "video" if "video" in grid_name else "audio" if "audio" in grid_name else "image"
    if isinstance(kinds, Tensor):
        return [_count_token_per_sample(kinds, {"image": 1, "video": 2, "audio": 3}[of])], True
    if not isinstance(tokens, Tensor):
        return [], False
    known = [token for name, token in media_token_ids.items() if name.startswith(f"{of}_token")]
    named = [counts for token in known if sum(counts := _count_token_per_sample(tokens, token))]
    if named:
        return named[:1], True
    return [_count_token_per_sample(tokens, token) for token in tolist_or_ones(tokens.unique())], False


def _count_token_per_sample(token_ids: Tensor, token_id: int) -> list[int]:
    return list(tolist_or_ones((token_ids == token_id).flatten(1).sum(-1)))


def _assign_images_to_samples(token_counts: Sequence[int], patch_counts: Sequence[int]) -> Ends | None:
    """Assign images to samples by counting placeholder tokens, or return None if the counts do not match.

    Args:
        token_counts: number of placeholder tokens in each sample.
        patch_counts: number of patches in each image.

    >>> _assign_images_to_samples([6, 1], [8, 16, 4])  # one token for four patches
    [0, 2, 3]
    >>> _assign_images_to_samples([3, 4], [8, 16, 4]) is None
    True
    """
    if not sum(token_counts) or sum(patch_counts) % sum(token_counts):
        return None
    share = sum(patch_counts) // sum(token_counts)
    places = {patches: image for image, patches in enumerate(accumulate(patch_counts, initial=0))}
    ends = [places.get(share * n) for n in accumulate(token_counts, initial=0)]
    if any(n % share for n in patch_counts) or len(places) <= len(patch_counts):
        return None
    return [end for end in ends if end is not None] if None not in ends else None


def _make_ambiguous_rows_error(batch: Mapping[Any, Any], input_name: str, num_samples: int, reason: str) -> InputError:
    return InputError(
        f"The rows of the input {input_name} of shape {tuple(batch[input_name].shape)} cannot be divided among "
        f"{num_samples} samples.",
        rule=reason,
        remedy=f"Add {KINDS} to the batch and pass the images in the order of the samples, or use one data-parallel "
        "rank and one micro-batch.",
    )


TensorPath = tuple[Any, ...]
"""The path of a tensor in a micro-batch: its key, followed by nested keys and indices."""

Tensors = Mapping[TensorPath, Tensor]


def iter_named_tensors(nested: Any, path_prefix: TensorPath = ()) -> Iterator[tuple[TensorPath, Tensor]]:
    """Yield the path and value of every tensor in a micro-batch, including those in nested containers."""
    if isinstance(nested, Tensor):
        yield path_prefix, nested
    elif isinstance(nested, Mapping):
        for key, part in nested.items():
            yield from iter_named_tensors(part, (*path_prefix, key))
    elif isinstance(nested, list | tuple):
        for i, part in enumerate(nested):
            yield from iter_named_tensors(part, (*path_prefix, i))


def compute_micro_batch_sizes(batch_size: int, micro_batches: int | None, micro_batch_size: int | None) -> list[int]:
    """Compute the number of samples in each micro-batch.

    >>> compute_micro_batch_sizes(7, micro_batches=4, micro_batch_size=None)
    [2, 2, 2, 1]
    >>> compute_micro_batch_sizes(7, micro_batches=None, micro_batch_size=3)
    [3, 3, 1]

    Raises ConfigError if the arguments are invalid, or if there are more micro-batches than samples.
    """
    check_micro_batch_arguments(micro_batches, micro_batch_size)
    if micro_batch_size is not None:
        full, remainder = divmod(batch_size, micro_batch_size)
        return [micro_batch_size] * full + [remainder] * (remainder > 0)
    assert micro_batches is not None
    if micro_batches > batch_size:
        raise ConfigError(
            f"micro_batches={micro_batches} is larger than the batch size {batch_size}.",
            remedy=f"Use at most {batch_size} micro-batches, or a batch of at least {micro_batches} samples.",
        )
    each, extra = divmod(batch_size, micro_batches)
    return [each + (i < extra) for i in range(micro_batches)]


MAX_MICRO_BATCHES = 2**14


def check_micro_batch_arguments(micro_batches: int | None, micro_batch_size: int | None) -> None:
    """Raise ConfigError unless exactly one of the arguments is a positive int and the other is None."""
    if (micro_batches is None) == (micro_batch_size is None):
        raise ConfigError(
            f"Got micro_batches={micro_batches} and micro_batch_size={micro_batch_size}, but exactly one must be set.",
            remedy="Pass either micro_batches or micro_batch_size.",
        )
    if micro_batches is None:
        check_int("micro_batch_size", micro_batch_size)
        return
    check_int("micro_batches", micro_batches)
    if micro_batches > MAX_MICRO_BATCHES:
        raise ConfigError(
            f"micro_batches={micro_batches} is larger than the maximum of {MAX_MICRO_BATCHES}.",
            remedy=f"Use at most {MAX_MICRO_BATCHES} micro-batches, or set micro_batch_size.",
        )


def get_batch_size(batch: Mapping[str, Any], main_input_name: str | None = None) -> int:
    """Return the number of samples in a batch.

    This is the size of the first dimension of ``batch[main]``, or of the first tensor that does not contain patches.
    Raises ConfigError if the batch contains no tensor with a batch dimension.
    """
    named = (
        _find_main_input(batch, main_input_name) if main_input_name in batch or find_patch_input_names(batch) else None
    )
    for _, tensor in iter_named_tensors([named, _drop_patch_inputs(batch), *_get_patch_grids(batch)]):
        if tensor.dim() > 0:
            return tensor.shape[0]
    names = ", ".join(sorted(map(str, batch))) or "empty"
    raise ConfigError(
        f"The batch ({names}) contains no tensor with a batch dimension.",
        remedy="Pass the inputs as tensors whose first dimension is the batch size.",
    )


def _find_main_input(batch: Mapping[Any, Any], main_input_name: str | None) -> Any:
    flat = find_patch_input_names(batch)
    known = (
        name for name in (main_input_name, MEDIA_TOKEN_FIELDS, "inputs_embeds") if name in batch and name not in flat
    )
    return next((batch[name] for name in known), None)


def _drop_patch_inputs(batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        return batch
    flat = find_patch_input_names(batch)
    return {name: _drop_patch_inputs(inner) for name, inner in batch.items() if name not in flat}


def _get_patch_grids(batch: Mapping[Any, Any]) -> list[Any]:
    return [batch[name] for name in batch if name in find_patch_input_names(batch) and "grid" in name]


def split_batch(
    batch: Mapping[str, Any],
    micro_batch_sizes: Sequence[int],
    main_input_name: str | None = None,
    media_token_ids: Ids = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Split a batch into micro-batches of ``micro_batch_sizes`` samples.

    Tensors and arrays whose first dimension is the batch size are split along it, including those in nested containers.
    Lists with one entry per sample are split, too. Image patches are split where the images of a sample end. Integer
    tensors of shape (n, B, S) for a main input of shape (B, S), such as 3D positions, are split along the second
    dimension. Tensors with one row or no dimensions, and all other values, are passed to every micro-batch.

    Args:
        main_input_name: name of the input that has one row per sample.
        media_token_ids: name of a field in the model's config -> id of a placeholder token of images.

    Raises:
        ConfigError: ``micro_batch_sizes`` do not sum to the batch size.
        InputError: a tensor has a different number of rows.
    """
    total = get_batch_size(batch, main_input_name)
    if (found := sum(micro_batch_sizes)) != total:
        raise ConfigError(
            f"micro_batch_sizes={micro_batch_sizes} must sum to the batch size {total}, but sum to {found}.",
            remedy="Compute the sizes with compute_micro_batch_sizes.",
        )
    if len(micro_batch_sizes) == 1:
        return [dict(batch)]
    splitter = _BatchSplitter(
        [0, *accumulate(micro_batch_sizes)], _find_main_input(batch, main_input_name), media_token_ids
    )
    parts = splitter.split_mapping(batch)
    return [{name: column[i] for name, column in parts.items()} for i in range(len(micro_batch_sizes))]


@dataclasses.dataclass(frozen=True)
class _BatchSplitter:
    """Splits all inputs of a batch into micro-batches. ``sample_ends`` is the end index of the samples in each."""

    sample_ends: Ends
    main_input: Any
    media_token_ids: Ids

    def split_mapping(self, batch: Mapping[Any, Any], path_prefix: str = "") -> dict[Any, list[Any]]:
        """Split each input of a batch, and return the list of slices for each input name."""
        rows = find_sample_row_ends(batch, self.sample_ends[-1], self.media_token_ids)
        return {
            name: self._split_at_boundaries(value, [rows[name][end] for end in self.sample_ends])
            if name in rows
            else self._split_input(value, f"{path_prefix}{name}")
            for name, value in batch.items()
        }

    def _split_input(self, batch_input: Any, input_path: str) -> list[Any]:
        if isinstance(batch_input, Tensor):
            return self._split_tensor(batch_input, input_path)
        if has_entry_per_sample(batch_input, self.sample_ends[-1]):
            return self._split_at_boundaries(batch_input, self.sample_ends)
        if isinstance(batch_input, Mapping) and any(True for _ in iter_named_tensors(batch_input)):
            inner = self.split_mapping(batch_input, f"{input_path}.")
            return [
                rebuild_container(batch_input, {name: column[i] for name, column in inner.items()})
                for i in self._micro_batch_indices
            ]
        if isinstance(batch_input, list | tuple) and any(True for _ in iter_named_tensors(batch_input)):
            columns = [self._split_input(inner, f"{input_path}[{i}]") for i, inner in enumerate(batch_input)]
            return [
                rebuild_container(batch_input, [column[i] for column in columns]) for i in self._micro_batch_indices
            ]
        return [batch_input for _ in self._micro_batch_indices]

    @property
    def _micro_batch_indices(self) -> range:
        return range(len(self.sample_ends) - 1)

    def _split_tensor(self, tensor: Tensor, input_path: str) -> list[Tensor]:
        samples = self.sample_ends[-1]
        is_like = (
            isinstance(self.main_input, Tensor)
            and self.main_input.dim() > 1
            and tensor.shape[1:] == self.main_input.shape[:2]
        )
        is_stack = is_like and tensor.dim() == 3 and not tensor.is_floating_point()
        if is_stack and tensor.shape[0] == samples > 1:
            raise InputError(
                f"The batch dimension of the input {input_path} of shape {tuple(tensor.shape)} is ambiguous, because "
                f"its first two dimensions have the batch size {samples}.",
                remedy="Use another batch size.",
            )
        if tensor.dim() > 0 and tensor.shape[0] == samples:
            return self._split_at_boundaries(tensor, self.sample_ends)
        if is_stack:
            return [tensor[:, start:end] for start, end in pairwise(self.sample_ends)]
        if tensor.dim() == 0 or tensor.shape[0] == 1:
            return [tensor for _ in self._micro_batch_indices]
        raise _make_row_count_error(
            f"The input {input_path} of shape {tuple(tensor.shape)} has {len(tensor)} rows, but the batch has "
            f"{samples} samples."
        )

    @staticmethod
    def _split_at_boundaries(batch_input: Any, boundaries: Ends) -> list[Any]:
        return [batch_input[start:end] for start, end in pairwise(boundaries)]


def has_entry_per_sample(container: Any, num_samples: int) -> bool:
    """Return whether a list, tuple or array contains one entry per sample.

    A list of tensors with one row per sample is a list of inputs. A tuple has one entry per sample only if it contains
    strings, as torch collates them. A tuple of numbers is a size.
    """
    if num_samples < 2:
        return False
    if isinstance(container, numpy.ndarray):
        return bool(container.ndim) and container.shape[0] == num_samples
    if not isinstance(container, (list, tuple)) or hasattr(container, "_fields") or len(container) != num_samples:
        return False
    if isinstance(container, tuple):
        return all(isinstance(each, (str, bytes)) for each in container)
    return not any(isinstance(each, Tensor) and each.dim() and each.shape[0] == num_samples for each in container)


def _make_row_count_error(problem: str) -> InputError:
    return InputError(
        problem,
        remedy="Pass one row per sample, or one row (x[None]) for all samples. For image patches, also pass a grid "
        "such as image_grid_thw.",
    )


def merge_micro_batch_outputs(outputs: Sequence[Any], micro_batch_sizes: Sequence[int]) -> Any:
    """Merge the outputs of micro-batches into the output of the full batch.

    Tensors whose first dimension is the micro-batch size are concatenated, including those in nested containers and
    dataclasses. Scalar tensors (losses) become None, because only the caller knows how to reduce them. Other values are
    kept if they are equal in all micro-batches, and become None otherwise.
    """
    first = outputs[0]
    if any(type(part) is not type(first) for part in outputs):
        return None
    if isinstance(first, Tensor):
        return _merge_output_tensors(outputs, micro_batch_sizes)
    if dataclasses.is_dataclass(first):
        names = [f.name for f in dataclasses.fields(first) if f.init]
        kind: Any = type(first)
        return kind(
            **{
                name: merge_micro_batch_outputs([getattr(part, name) for part in outputs], micro_batch_sizes)
                for name in names
            }
        )
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in outputs):
            return None
        return rebuild_container(
            first,
            {name: merge_micro_batch_outputs([part[name] for part in outputs], micro_batch_sizes) for name in first},
        )
    if isinstance(first, list | tuple):
        if any(len(part) != len(first) for part in outputs):
            return None
        return rebuild_container(
            first, [merge_micro_batch_outputs(column, micro_batch_sizes) for column in zip(*outputs)]
        )
    return first if all(_is_equal(part, first) for part in outputs) else None


def _is_equal(left: Any, right: Any) -> bool:
    try:
        return left is right or bool(left == right)
    except (ValueError, RuntimeError):  # an array without a truth value
        return False


def _merge_output_tensors(tensors: Sequence[Tensor], micro_batch_sizes: Sequence[int]) -> Tensor | None:
    first = tensors[0]
    if any(part.dim() == 0 for part in tensors):
        return None
    if all(part.shape[0] == size for part, size in zip(tensors, micro_batch_sizes, strict=True)):
        return torch.cat(list(tensors)) if len(tensors) > 1 else first
    return first if all(torch.equal(part, first) for part in tensors) else None


def rebuild_container(template: Any, elements: Iterable[Any]) -> Any:
    """Convert ``elements`` to the container type of ``template``, or return them unchanged if that is not possible."""
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(*elements)
    try:
        return type(template)(elements)
    except TypeError:
        return elements


TARGET_KEY = "target of the loss"
"""Key of a batch entry that only the loss function reads."""
