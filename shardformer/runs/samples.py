"""What a model is given for a task: samples of tokens with what is to be learnt, and batches of them."""

# B batch, S sequence

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardformer.errors import ConfigError, InputError
from shardformer.runs.tokens import Tokens

MASKED_SHARE, KEPT_SHARE, OTHER_SHARE = 0.15, 0.1, 0.1
"""Of the tokens of a sample; and of these, how many stay as they are, and how many become any other token (BERT)."""
IGNORED = -100


class Stretches(Dataset[dict[str, Tensor]]):
    """Stretches of a long row of tokens, one behind the other; what is left at its end is not used.

    Args:
        row: of tokens.
        length: of a stretch.
        task: "causal": the labels are the stretch, which the model shifts. "masked": 15 % of the tokens are to be
            guessed; which, is drawn anew each time. "sequence_to_sequence": the second half is to be written from the
            first.

    Raises InputError for a row shorter than a stretch.
    """

    def __init__(self, row: Sequence[int], length: int, task: str, tokens: Tokens) -> None:
        if len(row) < length:
            raise InputError(
                f"The text has {len(row)} tokens ({tokens.name})",
                rule=f"A sample is a stretch of data.sequence = {length} tokens",
                remedy="Give a longer text, or a smaller data.sequence",
            )
        self._row, self._length, self._task, self._tokens = torch.tensor(row, dtype=torch.int32), length, task, tokens

    def __len__(self) -> int:
        return len(self._row) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids_S = self._row[index * self._length : (index + 1) * self._length].long()
        if self._task == "masked":
            return masked(ids_S, self._tokens)
        if self._task == "sequence_to_sequence":
            half = self._length // 2
            return {"input_ids": ids_S[:half], "labels": ids_S[half:]}
        return {"input_ids": ids_S, "labels": ids_S}


def masked(ids_S: Tensor, tokens: Tokens) -> dict[str, Tensor]:
    """A sample of which some tokens are to be guessed, the first of those drawn in any case."""
    assert tokens.mask is not None
    chosen_S = torch.rand(ids_S.shape) < MASKED_SHARE
    chosen_S[torch.randint(len(ids_S), ())] = True  # a sample without any would have no loss
    fate_S = torch.rand(ids_S.shape)
    other_S = torch.randint(tokens.size, ids_S.shape)
    hidden_S = torch.where(fate_S < 1 - KEPT_SHARE, other_S, ids_S)
    hidden_S = torch.where(fate_S < 1 - KEPT_SHARE - OTHER_SHARE, tokens.mask, hidden_S)
    return {
        "input_ids": torch.where(chosen_S, hidden_S, ids_S),
        "labels": torch.where(chosen_S, ids_S, IGNORED),
    }


class Classified(Dataset[dict[str, Any]]):
    """Texts, or pairs of them, each with its class."""

    def __init__(
        self, texts: Sequence[str], pairs: Sequence[str] | None, labels: Sequence[int], tokens: Tokens, most: int
    ) -> None:
        self._texts, self._pairs, self._labels, self._tokens, self._most = texts, pairs, labels, tokens, most

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pair = self._pairs[index] if self._pairs is not None else None
        return {**self._tokens.marked(self._texts[index], pair, self._most), "labels": self._labels[index]}


class Written(Dataset[dict[str, Any]]):
    """Texts, and those that are to be written from them."""

    def __init__(self, texts: Sequence[str], targets: Sequence[str], tokens: Tokens, most: int) -> None:
        self._texts, self._targets, self._tokens, self._most = texts, targets, tokens, most

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        target = self._tokens.marked(self._targets[index], None, self._most)["input_ids"]
        return {**self._tokens.marked(self._texts[index], None, self._most), "labels": target}


@dataclass(frozen=True)
class Padded:
    """Samples of unlike lengths as a batch: ids with ``pad``, their mask with 0, labels with what does not count."""

    pad: int

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        fill = {"input_ids": self.pad, "labels": IGNORED}
        batch = {key: _column([sample[key] for sample in samples], fill.get(key, 0)) for key in samples[0]}
        batch.setdefault("attention_mask", _column([[1] * len(sample["input_ids"]) for sample in samples], 0))
        return batch


def _column(values: Sequence[Any], fill: int) -> Tensor:
    if not isinstance(values[0], (list, Tensor)):
        return torch.tensor(values)
    rows = [torch.as_tensor(value) for value in values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def classes_of(labels: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
    """The classes, in order: those of numbers by their size, those of words by the alphabet.

    Args:
        names: of classes that are there, in their order: those of the model, or of the data set. If they include all
            labels, or a name for each number, they are the classes.

    Raises InputError for labels that are no classes.
    """
    kinds = {type(label) for label in labels}
    if len(kinds) != 1 or not kinds <= {int, str, bool}:
        raise InputError(
            f"The labels are of {', '.join(sorted(kind.__name__ for kind in kinds))}",
            rule="A label is a whole number or a word, and all are of one kind",
            remedy="Correct the data, or data.label",
        )
    found = set(labels)
    classes: list[Any] = sorted(found)
    if kinds == {str} and found <= set(names):
        classes = list(names)
    elif kinds == {int} and found <= set(range(len(names))):
        classes = list(range(len(names)))
    if len(classes) < 2:
        raise InputError(
            f"All labels are {classes[0]!r}",
            rule="A classification has two classes or more: with one, transformers trains a regression",
            remedy="Correct the data, or data.label",
        )
    return classes


def as_numbers(labels: Sequence[Any], classes: Sequence[Any], which: str) -> list[int]:
    """Each label's place among the classes. Raises InputError for one that is not among them."""
    place = {name: number for number, name in enumerate(classes)}
    strange = next((label for label in labels if label not in place), None)
    if strange is not None:
        raise InputError(
            f"The {which} data has the label {strange!r}",
            rule=f"The classes are those of the training data: {', '.join(map(str, classes[:8]))}",
            remedy="Leave such rows out, or add some to the training data",
        )
    return [place[label] for label in labels]


def check_mask(task: str, tokens: Tokens) -> None:
    if task == "masked" and tokens.mask is None:
        raise ConfigError(
            f"model.task = 'masked' with the tokenizer {tokens.name!r}, which has no token for what is masked",
            rule="Tokens that are to be guessed are replaced by it",
            remedy="Use the tokenizer of a masked language model, or 'bytes', or another task",
        )
