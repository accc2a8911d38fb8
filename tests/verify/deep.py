"""Small models deep enough for a pipeline, and batches whose micro-batches have different label counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from shardformer.verify.small_models import HEAD_CLASSES, SMALL_CONFIGS, STACKS, RandomBatchFactory, SmallModelFactory

IGNORED = -100
PIXEL_IGNORED = 255


def deep(family: str, head: str = "", **changes: Any) -> SmallModelFactory:
    """Return the small model with four layers, or six if it has several stacks."""
    sample = SmallModelFactory(family, head)
    deeper = sample.with_min_layers(6 if STACKS.get(sample.head_class, 1) > 1 else 4)
    return replace(deeper, changes={**deeper.changes, **changes})


@dataclass(frozen=True)
class Uneven:
    """Batches of a head in which each row has a different number of labels and of padding tokens.

    Args:
        head: a class of transformers.
        batch: rows. Five rows do not divide into three or four micro-batches, and the last one has a single row.
        all_ignored: whether the last row has no labels, for labels per token.
    """

    head: str
    batch: int = 5
    all_ignored: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, step: int) -> dict[str, Tensor]:
        batch = RandomBatchFactory(self.head, batch_size=self.batch, changes=self.changes)(step)
        labels = batch.get("labels")
        if labels is not None and labels.dim() > 1:
            ignored = PIXEL_IGNORED if self.head.endswith("ForSemanticSegmentation") else IGNORED
            for row in range(self.batch):
                labels[row, ..., : 3 + (row + step) % 4] = ignored
            if self.all_ignored:
                labels[-1] = ignored
        mask = batch.get("attention_mask")
        if mask is not None and mask.dim() == 2 and mask.shape == batch.get("input_ids", mask).shape:
            for row in range(self.batch):
                mask[row, mask.shape[1] - (row + step) % 3 :] = 0
        return batch


EVERY_HEAD = [(family, head) for family in SMALL_CONFIGS for head in HEAD_CLASSES[family]]
