"""Inputs whose rows are not the samples: the patches of all images one behind the other, beside a grid of each image.

    input_ids       (2, S)     two samples: the first has two images, the second one
    image_grid_thw  (3, 3)     a row for each image: [[1, 2, 4], [1, 4, 4], [1, 2, 2]] are 8, 16 and 4 patches
    pixel_values    (28, D)    the first 24 rows are of the first sample, the last 4 of the second

How many images a sample has is told by the tokens that stand for them: they are as many as an image has patches, or a
fixed share of that, so the images of a sample end where its tokens do. Nothing is guessed: where tokens do not tell, or
tell two things, the batch is refused.
"""

# P patches, I images, B samples

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardformer.comm.values import numbers_in
from shardformer.errors import InputError

TOKENS, KINDS = "input_ids", "mm_token_type_ids"
COUNTS = ("num", "count", "counts", "lengths")
"""In the names of inputs that say how many rows of another input each sample has."""
Ids = Mapping[str, int]
"""Field of a config -> the token that stands for images, videos or sounds."""
Ends = list[int]
"""Where the rows of each sample end, with a 0 before."""


def ids_of(config: Any) -> dict[str, int]:
    """The tokens that a config names.

    >>> from types import SimpleNamespace
    >>> ids_of(SimpleNamespace(image_token_id=7, video_token_index=8, hidden_size=9))
    {'image_token_id': 7, 'video_token_index': 8}
    """
    fields = vars(config) if hasattr(config, "__dict__") else {}
    return {n: x for n, x in fields.items() if n.endswith(("_token_id", "_token_index")) and type(x) is int}


def flat_names(batch: Mapping[Any, Any]) -> set[str]:
    """The grids of a batch, and the inputs that have a row for each of their patches."""
    names = set()
    for grid, units in _grids(batch):
        flat = [name for name in _of_length(batch, sum(units)) if name not in (grid, TOKENS)]
        names |= {grid, *flat} if flat else set()
    return names


def ends_of(batch: Mapping[Any, Any], samples: int, ids: Ids) -> dict[str, Ends]:
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
        for name in _beside(batch, grid, len(units), samples):
            found[name] = images
        for name, rows in found.items():
            if ends.setdefault(name, rows) != rows:
                raise _unclear(name, batch[name], samples, f"it fits {grid} and another of the batch's grids")
    return ends


def _grids(batch: Mapping[Any, Any]) -> Iterator[tuple[str, list[int]]]:
    """Grid -> the patches of each image."""
    for name, x in batch.items():
        if isinstance(name, str) and "grid" in name and _is_whole(x) and x.dim() == 2 and x.shape[1] <= 3:
            yield name, numbers_in(x.prod(-1))


def _counts(batch: Mapping[Any, Any], samples: int) -> Iterator[tuple[str, list[int]]]:
    """Input -> how many rows of another input belong to each sample."""
    for name, x in batch.items():
        words = set(name.split("_")) if isinstance(name, str) else set()
        if words & set(COUNTS) and _is_whole(x) and x.shape == (samples,):
            yield name, numbers_in(x)


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


def _beside(batch: Mapping[Any, Any], grid: str, images: int, samples: int) -> Iterator[str]:
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
    ways, known = _ways(batch, grid, ids)
    fitting = [ends for counts in ways if (ends := _division(counts, units)) is not None]
    if not ways and len(units) == samples:
        return list(range(samples + 1))  # nothing but images
    if fitting and all(ends == fitting[0] for ends in fitting):
        return fitting[0]
    why = "which tokens stand for it is not known, and several would fit"
    if not fitting:
        why = "the tokens of its samples do not fit its images" if known or ways else "the batch has no tokens"
    raise _unclear(grid, batch[grid], samples, why)


def _ways(batch: Mapping[Any, Any], grid: str, ids: Ids) -> tuple[list[list[int]], bool]:
    """How many tokens each sample has that may stand for the images; one way where it is known which do."""
    kinds, tokens = batch.get(KINDS), batch.get(TOKENS)
    of = "video" if "video" in grid else "audio" if "audio" in grid else "image"
    if isinstance(kinds, Tensor):
        return [_per_row(kinds, {"image": 1, "video": 2, "audio": 3}[of])], True
    if not isinstance(tokens, Tensor):
        return [], False
    known = [token for name, token in ids.items() if name.startswith(f"{of}_token")]
    named = [counts for token in known if sum(counts := _per_row(tokens, token))]
    if named:
        return named[:1], True
    return [_per_row(tokens, token) for token in numbers_in(tokens.unique())], False


def _per_row(tokens: Tensor, token: int) -> list[int]:
    found: list[int] = numbers_in((tokens == token).flatten(1).sum(-1))
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
