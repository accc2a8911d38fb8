"""Random batches that fit a head class: tokens, images, sounds, and the labels that the head takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardformer.testing.zoo.heads import FAMILY_OF, sees_alone, settings_of
from shardformer.testing.zoo.images import blip_batch, image_batch, sam_batch
from shardformer.testing.zoo.sounds import sound_batch

FIRST_TOKEN = 5
"""Those before mean something: padding, a start, an end, an image."""


@dataclass(frozen=True)
class Batches:
    """Random batches for a head class: call it with a step. Different samples in every row, padding, ignored labels.

    Every row counts equally many labels, so the loss of a batch is the mean of the losses of its parts.

    Args:
        head: a class of transformers. One that is not in ``HEADS`` is taken to read tokens.
        vocab_size, num_labels, eos: of the model.
        batch, sequence: rows, and tokens in a row.
        changes: fields of the head's own config that differ from the small model's; they say the sizes of images and
            sounds.
    """

    head: str
    vocab_size: int = 127
    batch: int = 4
    sequence: int = 13
    num_labels: int = 3
    eos: int = 2
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        family = FAMILY_OF.get(self.head, "")
        if self.head == "SamModel":
            return sam_batch(generator, self._settings, self.batch)
        if sees_alone(self.head):
            return image_batch(self.head, generator, self._settings, self.batch, self.num_labels)
        ids = self._tokens(generator, self.batch, self.sequence)
        mask = torch.ones_like(ids)
        mask[:, -2:] = 0
        if "T5" in self.head:
            ids[:, -3] = self.eos
        batch = {"input_ids": ids, "attention_mask": mask}
        if family == "whisper":
            return sound_batch(self.head, generator, self._settings, batch, self.num_labels)
        if family == "blip-2":
            return blip_batch(self.head, generator, self._settings, batch)
        return {**batch, **self._labels(generator, ids)}

    @property
    def _settings(self) -> dict[str, Any]:
        return settings_of(self.head, self.changes)

    def _tokens(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randint(FIRST_TOKEN, self.vocab_size, shape, generator=generator)

    def _labels(self, generator: torch.Generator, ids: Tensor) -> dict[str, Tensor]:
        classes = torch.randint(self.num_labels, (self.batch,), generator=generator)
        per_token = self._tokens(generator, self.batch, self.sequence)
        per_token[:, :3] = -100
        starts = torch.randint(self.sequence - 2, (self.batch,), generator=generator)
        head = self.head
        if head == "AlbertForPreTraining":
            return {"labels": per_token, "sentence_order_label": classes % 2}
        if head.endswith("ForPreTraining"):
            return {"labels": per_token, "next_sentence_label": classes % 2}
        if head.endswith("ForNextSentencePrediction"):
            return {"labels": classes % 2}
        if head.endswith("ForSequenceClassification"):
            return {"labels": classes}
        if head.endswith("ForTokenClassification"):
            return {"labels": torch.where(per_token == -100, -100, per_token % self.num_labels)}
        if head.endswith("ForQuestionAnswering"):
            return {"start_positions": starts, "end_positions": (starts + 1).clamp(max=self.sequence - 1)}
        if head.endswith(("ForMultipleChoice", "DoubleHeadsModel")):
            return self._choices(generator, classes % 2)
        if head == "T5Model":
            return {"decoder_input_ids": self._tokens(generator, self.batch, self.sequence - 4)}
        if head == "T5ForConditionalGeneration":
            return {"labels": per_token[:, : self.sequence - 4].contiguous()}
        return {} if head.endswith(("Model", "EncoderModel")) and "LMHead" not in head else {"labels": per_token}

    def _choices(self, generator: torch.Generator, choice: Tensor) -> dict[str, Tensor]:
        ids = self._tokens(generator, self.batch, 2, self.sequence)
        if self.head.endswith("ForMultipleChoice"):
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": choice}
        labels = ids.clone()
        labels[..., :3] = -100
        ends = torch.full((self.batch, 2), self.sequence - 1)
        return {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "mc_token_ids": ends,
            "mc_labels": choice,
        }  # fmt: skip
