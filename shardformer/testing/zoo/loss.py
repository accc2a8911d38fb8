"""One number to train on, whatever a model gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.values import has_values
from shardformer.errors import ConfigError


def sample_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The head's own loss, or its losses added up; of a model without a loss, how far all that it gives is from a wave.

    The wave is the same in every row, so the loss of a batch is the mean of those of its parts; and it is no constant,
    whose distance from what a norm gives would be one too, without a gradient.

    Raises ConfigError where a model gives neither a loss nor tensors by name.
    """
    output = model(**batch)
    losses = [x for x in (getattr(output, "loss", None), getattr(output, "mc_loss", None)) if x is not None]
    given = _floats(output) if isinstance(output, Mapping) else iter(())
    distances = losses or [_distance(x) for x in _different(given)]
    if not distances:
        raise ConfigError(
            f"{type(model).__name__} gave no loss: its output, a {type(output).__name__}, has none",
            rule="A model of transformers gives a ModelOutput, with a loss or with tensors",
            remedy="Give loss_fn=, a function (model, batch) -> loss",
        )
    return torch.stack([x.double() for x in distances]).sum()


def counts_by_sample(head: str) -> bool:
    """Whether what ``sample_loss`` gives of a head is no mean that torch's own losses compute.

    Over micro-batches such a loss is weighed by their numbers of samples: ``num_samples``.
    """
    if head.endswith(("LMHeadModel", "DoubleHeadsModel")) or head in ("BeitForMaskedImageModeling", "Blip2Model"):
        return False
    return head.endswith(("Model", "Backbone", "WithProjection", "TextRetrieval", "MaskedImageModeling"))


def num_samples(batch: Mapping[str, Any]) -> float:
    """How many samples a batch, or a micro-batch, has."""
    return float(next(v.shape[0] for v in batch.values() if isinstance(v, Tensor) and v.dim() > 0))


def _floats(output: Any) -> Iterator[Tensor]:
    """All tensors that float; a cache of keys and values is no such container, and is left out."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _floats(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _floats(value)


def _different(tensors: Iterator[Tensor]) -> list[Tensor]:
    """Without what is given twice, such as logits and their transpose."""
    found: dict[tuple[int, int], Tensor] = {}
    for tensor in tensors:
        place = tensor.data_ptr() if has_values(tensor) else tensor.untyped_storage()._cdata
        found.setdefault((place, tensor.numel()), tensor)
    return list(found.values())


def _distance(x: Tensor) -> Tensor:
    row = x.shape[1:]
    wave = torch.arange(row.numel(), dtype=torch.float64, device=x.device).cos().view(row)
    return (x.double() - wave).square().mean()
