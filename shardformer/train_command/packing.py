"""Packs several documents into one token sequence, and groups samples of similar length into the same batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from shardformer.train_command.conversations import IGNORED, TokenizedSample

# S sequence


def pack_documents(document_lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Pack documents into rows of at most ``row_length`` tokens, and return the indices of the documents in each row.

    The longest documents are placed first. Each document is added to the fullest row that has enough space for it. The
    rows are ordered by their first document.

    >>> pack_documents([3, 6, 2, 5, 4], 8)
    [[0, 3], [1, 2], [4]]
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # free space and number of each row, sorted
    for index in sorted(range(len(document_lengths)), key=lambda index: -document_lengths[index]):
        place = bisect_left(free, (document_lengths[index], -1))
        if place == len(free):
            rows.append([index])
            space, row = row_length, len(rows) - 1
        else:
            space, row = free.pop(place)
            rows[row].append(index)
        insort(free, (space - document_lengths[index], row))
    return sorted(sorted(row) for row in rows)


@dataclass(frozen=True, eq=False)
class PackedDataset(Dataset[dict[str, Tensor]]):
    """Data set whose samples contain several documents each, to avoid padding.

    ``position_ids`` restart at 0 for each document, so that the model masks attention between documents. The first
    token of a document has no label, as if the document were in a row of its own.
    """

    samples: Sequence[TokenizedSample]
    rows: Sequence[Sequence[int]]

    @classmethod
    def from_samples(cls, samples: Sequence[TokenizedSample], row_length: int) -> PackedDataset:
        return cls(samples, pack_documents([len(sample.ids_S) for sample in samples], row_length))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        documents = [self.samples[number] for number in self.rows[index]]
        labels = [torch.cat([torch.tensor([IGNORED]), document.labels_S[1:].long()]) for document in documents]
        return {
            "input_ids": torch.cat([document.ids_S.long() for document in documents]),
            "labels": torch.cat(labels),
            "position_ids": torch.cat([torch.arange(len(document.ids_S)) for document in documents]),
        }


class LengthGroupedSampler(Sampler[int]):
    """Sampler that puts samples of similar length into the same batch, as in transformers' ``Trainer``.

    The random order depends on torch's global generator, which the data loader seeds for each epoch.

    Args:
        lengths: Number of tokens of each sample.
        batch_size: Global batch size.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self.lengths, self.batch_size = list(lengths), batch_size

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        from transformers.trainer_pt_utils import get_length_grouped_indices

        return iter(get_length_grouped_indices(self.lengths, self.batch_size))
