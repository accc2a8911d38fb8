"""Small random models of the registered families, every head class of each, and batches that fit them.

For ``verify``, the demo and the tests: sizes are odd on purpose (vocabulary 127, six heads, MLPs that do not divide).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, nearest

SMALL: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "bert": dict(
            vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=70,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
        ),
        "gpt2": dict(
            vocab_size=127, n_embd=48, n_layer=2, n_head=6, n_inner=70, n_positions=64, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        ),
        "llama": dict(
            vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
            intermediate_size=70, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        ),
        "t5": dict(
            vocab_size=127, d_model=48, d_kv=8, num_layers=2, num_heads=6, d_ff=70, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=2, classifier_dropout=0.0,
        ),
    }
)  # fmt: skip

HEADS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bert": (
            "BertModel", "BertForPreTraining", "BertLMHeadModel", "BertForMaskedLM", "BertForNextSentencePrediction",
            "BertForSequenceClassification", "BertForMultipleChoice", "BertForTokenClassification",
            "BertForQuestionAnswering",
        ),
        "gpt2": (
            "GPT2Model", "GPT2LMHeadModel", "GPT2DoubleHeadsModel", "GPT2ForSequenceClassification",
            "GPT2ForTokenClassification", "GPT2ForQuestionAnswering",
        ),
        "llama": (
            "LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaForQuestionAnswering",
            "LlamaForTokenClassification",
        ),
        "t5": (
            "T5Model", "T5ForConditionalGeneration", "T5EncoderModel", "T5ForSequenceClassification",
            "T5ForTokenClassification", "T5ForQuestionAnswering",
        ),
    }
)  # fmt: skip

LANGUAGE_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "bert": "BertForMaskedLM",
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "t5": "T5ForConditionalGeneration",
    }
)


@dataclass(frozen=True)
class Sample:
    """A small model of a family: call it to build the model. Picklable.

    Args:
        family: a registered family.
        head: a class of transformers; by default the family's language model.
        changes: fields of the config that differ from ``SMALL``.
    """

    family: str
    head: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.family not in SMALL:
            raise ConfigError(
                f"There is no small model of {self.family!r}",
                rule=f"The families are {', '.join(SMALL)}",
                remedy=nearest(self.family, SMALL),
            )

    @property
    def head_class(self) -> str:
        return self.head or LANGUAGE_MODEL[self.family]

    def config(self) -> Any:
        import transformers

        num_labels = 2 if self.head_class.endswith("ForQuestionAnswering") else 3
        settings = {**SMALL[self.family], "num_labels": num_labels, **self.changes}
        if self.head_class == "BertLMHeadModel":
            settings.setdefault("is_decoder", True)
        return transformers.AutoConfig.for_model(self.family, **settings)

    def __call__(self) -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, self.head_class)(self.config())
        return model


@dataclass(frozen=True)
class Batches:
    """Random batches for a head class: call it with a step. Different samples in every row, padding, ignored labels.

    Every row counts equally many labels, so the loss of a batch is the mean of the losses of its parts.
    """

    head: str
    vocab_size: int = 127
    batch: int = 4
    sequence: int = 13
    num_labels: int = 3
    eos: int = 2

    def __call__(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        ids = self._tokens(generator, self.batch, self.sequence)
        mask = torch.ones_like(ids)
        mask[:, -2:] = 0
        if "T5" in self.head:
            ids[:, -3] = self.eos
        batch = {"input_ids": ids, "attention_mask": mask}
        return {**batch, **self._labels(generator, ids)}

    def _tokens(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randint(5, self.vocab_size, shape, generator=generator)

    def _labels(self, generator: torch.Generator, ids: Tensor) -> dict[str, Tensor]:
        classes = torch.randint(self.num_labels, (self.batch,), generator=generator)
        per_token = self._tokens(generator, self.batch, self.sequence)
        per_token[:, :3] = -100
        starts = torch.randint(self.sequence - 2, (self.batch,), generator=generator)
        head = self.head
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


def sample_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The head's own loss, or its losses added up; of a model without a head, a mean square of what it gives."""
    output = model(**batch)
    losses = [x for x in (getattr(output, "loss", None), getattr(output, "mc_loss", None)) if x is not None]
    if losses:
        return torch.stack([x.double() for x in losses]).sum()
    hidden: Tensor = output.last_hidden_state
    loss = hidden.double().square().mean()
    pooled = getattr(output, "pooler_output", None)
    return loss if pooled is None else loss + pooled.double().square().mean()
