"""Implements direct preference optimization (DPO): its data set, reference log-probabilities and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from shardformer.comm.collectives import all_gather_objects
from shardformer.errors import InputError
from shardformer.train_command.config_schema import DataOptions, PreferenceOptions
from shardformer.train_command.conversations import (
    IGNORED,
    ConversationTokenizer,
    TokenizedSample,
    drop_none_fields,
    extract_prompt_with_answer,
    get_chat_template_kwargs,
)
from shardformer.train_command.datasets import PaddingCollator
from shardformer.training.engine import Engine

# B batch, S sequence, V vocabulary

ANSWER_IDS, REJECTED_FROM, REFERENCE = "answer_ids", "rejected_from", "reference_logps"


@dataclass(eq=False)
class PreferenceDataset(Dataset[dict[str, Any]]):
    """DPO data set of prompts, each with a chosen and a rejected answer.

    ``position_ids`` restart at the second prompt, so that the model masks attention between the answers.

    Args:
        pairs: Chosen and rejected answer of each sample.
        reference_N2: Log-probabilities of both answers under the initial model.
    """

    pairs: Sequence[tuple[TokenizedSample, TokenizedSample]]
    reference_N2: Tensor

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pair = self.pairs[index]
        return {
            "input_ids": torch.cat([answer.ids_S.long() for answer in pair]),
            "position_ids": torch.cat([torch.arange(len(answer.ids_S)) for answer in pair]),
            ANSWER_IDS: torch.cat([answer.labels_S.long() for answer in pair]),
            REJECTED_FROM: len(pair[0].ids_S),
            REFERENCE: self.reference_N2[index],
        }


def build_preference_dataset(
    rows: Sequence[Mapping[str, Any]], data_options: DataOptions, conversation_tokenizer: ConversationTokenizer
) -> PreferenceDataset:
    """Tokenize the chosen and the rejected answer of each row. Leave out rows whose answers are cut off.

    Raises:
        InputError: A row has no answers, or no row has both answers within ``data_options.sequence_length`` tokens.
    """
    last = replace(conversation_tokenizer, train_on="last")
    pairs = []
    for number, row in enumerate(drop_none_fields(rows), start=1):
        try:
            options = get_chat_template_kwargs(row)
            both = [
                last.encode_with_labels(extract_prompt_with_answer(row, field, data_options), **options)
                for field in (data_options.chosen, data_options.rejected)
            ]
        except InputError as error:
            raise InputError(
                f"Row {number} of the data is invalid: {error.what}.", rule=error.rule, remedy=error.remedy
            ) from error
        if all(any(label != IGNORED for label in labels[1:]) for _, labels in both):
            chosen, rejected = (TokenizedSample(torch.tensor(ids), torch.tensor(labels)) for ids, labels in both)
            rejected.labels_S[0] = IGNORED  # the last token of the chosen answer does not predict it
            pairs.append((chosen, rejected))
    if not pairs:
        raise InputError(
            f"No row has both answers within its first {data_options.sequence_length} tokens.",
            remedy="Increase data.sequence_length, or shorten the prompts and answers.",
        )
    return PreferenceDataset(pairs, torch.zeros(len(pairs), 2))


@dataclass(frozen=True)
class PreferenceCollator(PaddingCollator):
    """Collate function that pads the samples of a ``PreferenceDataset`` to the same length."""

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        renamed = [{"labels" if name == ANSWER_IDS else name: x for name, x in each.items()} for each in samples]
        batch = super().__call__(renamed)
        return {**batch, ANSWER_IDS: batch.pop("labels"), REFERENCE: torch.stack([each[REFERENCE] for each in samples])}


def compute_answer_logps(logits_BSV: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Sum the token log-probabilities of each chosen and rejected answer. The shape is (batch size, 2)."""
    labels_BS = batch[ANSWER_IDS][:, 1:].to(logits_BSV.device)
    logits_TV = logits_BSV[:, :-1].float().flatten(0, 1)
    losses = F.cross_entropy(logits_TV, labels_BS.flatten(), ignore_index=IGNORED, reduction="none")
    logps_BS = -losses.view(labels_BS.shape)
    positions_S = torch.arange(1, labels_BS.shape[1] + 1, device=labels_BS.device)
    is_rejected_BS = positions_S >= batch[REJECTED_FROM].to(labels_BS.device)[:, None]
    zeros_BS = torch.zeros_like(logps_BS)
    return torch.stack(
        [
            torch.where(is_rejected_BS, zeros_BS, logps_BS).sum(1),
            torch.where(is_rejected_BS, logps_BS, zeros_BS).sum(1),
        ],
        dim=1,
    )


@dataclass(frozen=True)
class DPOLoss:
    """Computes the DPO loss (Rafailov et al., 2023), with label smoothing as in conservative DPO."""

    options: PreferenceOptions

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss over the pairs of answers in a micro-batch."""
        logits_BSV = _get_logits(output)
        gains_B2 = compute_answer_logps(logits_BSV, batch) - batch[REFERENCE].to(logits_BSV.device)
        margins_B = self.options.beta * (gains_B2[:, 0] - gains_B2[:, 1])
        smoothing = self.options.label_smoothing
        return -((1 - smoothing) * F.logsigmoid(margins_B) + smoothing * F.logsigmoid(-margins_B)).mean()


def count_batch_samples(batch: Mapping[str, Tensor]) -> float:
    """Return the number of samples in a micro-batch, which is the weight of its mean loss."""
    return float(len(batch["input_ids"]))


def precompute_reference_logps(
    engine: Engine, preference_dataset: PreferenceDataset, collator: PreferenceCollator, batch_size: int
) -> None:
    """Compute the reference log-probabilities of all answers, and store them in the data set.

    Each data-parallel rank computes an equal share of the rows. Communicates the values over the data axis.
    """
    axis = engine.context.data
    count = -(-len(preference_dataset) // axis.size)
    rows = [min(axis.rank * count + number, len(preference_dataset) - 1) for number in range(count)]
    size = max(1, batch_size // axis.size)
    found = []
    for start in range(0, count, size):
        batch = collator([preference_dataset[row] for row in rows[start : start + size]])
        found.append(compute_answer_logps(_get_logits(engine.predict(batch)), batch).cpu())
    preference_dataset.reference_N2 = torch.cat(all_gather_objects(torch.cat(found), axis))[: len(preference_dataset)]


def _get_logits(model_output: Any) -> Tensor:
    logits: Tensor = model_output["logits"] if isinstance(model_output, Mapping) else model_output.logits
    return logits
