"""How a batch is shared out among data ranks and micro-batches, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.pipeline.microbatches import batch_size_of, sizes_of, split_batch
from shardformer.pipeline.targets import tensors_of


class _Micro(Protocol):
    @property
    def num_parts(self) -> int: ...


class Shares(Protocol):
    """What of a ``Job`` says how batches are made and shared out."""

    @property
    def batch_fn(self) -> Callable[[int], Mapping[str, Any]]: ...
    @property
    def data(self) -> int: ...
    @property
    def num_parts(self) -> int: ...
    @property
    def pipeline(self) -> _Micro | None: ...
    @property
    def ids(self) -> Mapping[str, int]: ...
    @property
    def computes_in(self) -> torch.dtype: ...


def check_batch(job: Shares) -> None:
    """Raises ConfigError for a first batch that data ranks and micro-batches cannot share.

    One that fails is left to the workers.
    """
    try:
        batch = job.batch_fn(0)
    except Exception:
        return
    _micro_batches(job, part_of(job, batch, 0, job.data))


def part_of(job: Shares, batch: Mapping[str, Any], rank: int, parts: int) -> dict[str, Any]:
    """What one of so many data ranks gets of a batch, in the precision of the models."""
    size = _batch_size(batch)
    if size % parts:
        raise ConfigError(
            f"A batch of {size} samples over data={parts}",
            rule="Every data rank gets the same number of samples",
            remedy=f"Let batch_fn give a multiple of {parts}",
        )
    part = split_batch(batch, [size // parts] * parts, ids=job.ids)[rank]
    floats = {name: x for name, x in part.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return {**part, **{name: x.to(job.computes_in) for name, x in floats.items()}}


def check_apart(job: Shares, model: nn.Module) -> None:
    """Raises ConfigError for a model that compares the samples of a batch, which is then cut, with each other."""
    whole = part_of(job, job.batch_fn(0), 0, job.num_parts)
    part = part_of(job, job.batch_fn(0), 0, job.data)
    for larger, smaller, remedy in (
        (whole, part, "Compare with the parts themselves (--reference parts), or use one data rank"),
        (part, _micro_batches(job, part)[0], "Use one micro-batch (--micro-batches 1), or data ranks (--data 2)"),
    ):
        if batch_size_of(smaller) < batch_size_of(larger):
            for name in _tables(model, larger, smaller):
                raise ConfigError(
                    f"{type(model).__name__} compares the samples of a batch with each other: {name} of "
                    f"{batch_size_of(larger)} samples is a table of as many rows and columns, and smaller of fewer",
                    rule="The loss of a batch that is cut is put together of the losses of its parts, each of which is "
                    "computed without the other samples",
                    remedy=remedy,
                )


def _tables(model: nn.Module, larger: Mapping[str, Any], smaller: Mapping[str, Any]) -> Iterator[str]:
    """What a model gives that has a row and a column for each sample."""
    try:
        with torch.no_grad():
            both = [model(**batch) for batch in (larger, smaller)]
    except Exception:  # called in another way, by a loss_fn
        return
    if all(isinstance(output, Mapping) for output in both):
        for name in both[0].keys() & both[1].keys():
            shapes = [tuple(x.shape) if isinstance(x := output[name], Tensor) else () for output in both]
            if shapes == [(batch_size_of(batch),) * 2 for batch in (larger, smaller)]:
                yield name


def _micro_batches(job: Shares, part: Mapping[str, Any]) -> list[dict[str, Any]]:
    if job.pipeline is None:
        return [dict(part)]
    return split_batch(part, sizes_of(batch_size_of(part), job.pipeline.num_parts, None), ids=job.ids)


def _batch_size(batch: Mapping[str, Any]) -> int:
    if not any(x.dim() for _, x in tensors_of(batch)):
        raise ConfigError(
            f"The batch holds {', '.join(batch) or 'nothing'} and no tensor",
            rule="A batch is a dict of tensors whose first dim is the batch",
            remedy="Let batch_fn return what the model's forward takes",
        )
    return batch_size_of(batch)
