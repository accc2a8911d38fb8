"""Small models deep enough for a pipeline, and batches of whose micro-batches no two count alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardformer.samples import HEADS, NEEDS, SMALL, Batches, Sample

IGNORED = -100
PIXEL_IGNORED = 255
DEPTH: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"n_layer": 4},
    "t5": {"num_layers": 3},
    "bloom": {"n_layer": 4},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "gptj": {"n_layer": 4},
    "whisper": {"encoder_layers": 3, "decoder_layers": 3},
    "swin": {"depths": [2, 2]},
    "swinv2": {"depths": [2, 2]},
    "chatglm": {"num_layers": 4},
    "sam": {"vision_config": {**SMALL["sam"]["vision_config"], "num_hidden_layers": 4}},
    "blip-2": {},  # two layers each of the image encoder, the Q-Former and the language model
}


def deep(family: str, head: str = "", **changes: Any) -> Sample:
    """The small model with four layers, or six over all its stacks."""
    parts = {"Blip2VisionModel": "vision_config", "Blip2QFormerModel": "qformer_config"}
    depth = dict(DEPTH.get(family, {"num_hidden_layers": 4}))
    if head in parts:
        settings = {**SMALL[family], **NEEDS.get(head, {})}
        depth = {parts[head]: {**settings[parts[head]], "num_hidden_layers": 4}}
    return Sample(family, head, {**depth, **changes})


@dataclass(frozen=True)
class Uneven:
    """The batches of a head, in which each row has a number of labels and of padding of its own.

    Args:
        head: a class of transformers.
        batch: rows. Over three or four micro-batches five are cut unevenly, and the last row is alone.
        all_ignored: whether the last row counts nothing at all, where its labels are tokens.
    """

    head: str
    batch: int = 5
    all_ignored: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, step: int) -> dict[str, Tensor]:
        batch = Batches(self.head, batch=self.batch, changes=self.changes)(step)
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


def samples_in(batch: Mapping[str, Any]) -> float:
    """How many samples a micro-batch has: what a loss counts that is a distance."""
    return float(next(iter(batch.values())).shape[0])


EVERY_HEAD = [(family, head) for family in SMALL for head in HEADS[family]]
