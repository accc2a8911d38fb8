"""Data sets for the tasks of ``shardformer train``, packing of documents, and collation of samples."""

from __future__ import annotations

import json
import os
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

from shardformer.errors import InputError
from shardformer.train_command.conversations import IGNORED, TokenizedSample
from shardformer.train_command.tokenizer import TextTokenizer

HALF = (0.5, 0.5, 0.5)
IMAGE_SIZE = 224
"""Image size in pixels if the config of the model does not specify one."""
FILE, PROCESSOR = "preprocessor_config.json", "ViTImageProcessor"
"""Config file of image processors in transformers, and the processor class equivalent to ``ImageTransform``."""
BICUBIC = 3
"""PIL's default for ``Image.resize``."""


@dataclass(frozen=True)
class ImageTransform:
    """Resizes an image to ``image_size`` x ``image_size`` pixels and normalizes its channels."""

    image_size: int
    mean: Sequence[float] = HALF
    std: Sequence[float] = HALF

    @classmethod
    def from_pretrained(cls, model_name: str, image_size: int | None) -> ImageTransform:
        """Create the transform of a model, with the mean and standard deviation from its preprocessor_config.json.

        ``image_size`` is the image size in pixels from the model's config, or None for the default of 224.
        """
        image_size = image_size or IMAGE_SIZE
        file = Path(model_name) / FILE
        if not file.is_file():
            return cls(image_size)
        settings = json.loads(file.read_text(encoding="utf-8"))
        return cls(image_size, settings.get("image_mean") or HALF, settings.get("image_std") or HALF)

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write a preprocessor_config.json, so that transformers preprocesses images in the same way as this class."""
        side = {"height": self.image_size, "width": self.image_size}
        settings = {
            "image_processor_type": PROCESSOR, "do_resize": True, "size": side, "resample": BICUBIC,
            "do_rescale": True, "rescale_factor": 1 / 255,
            "do_normalize": True, "image_mean": list(self.mean), "image_std": list(self.std),
        }  # fmt: skip
        Path(save_directory, FILE).write_text(json.dumps(settings, indent=2), encoding="utf-8")

    def __call__(self, image: Any) -> Tensor:
        """Convert a PIL image to a normalized tensor of shape (channels, height, width)."""
        pixels_HWC = (
            numpy.asarray(image.convert("RGB").resize((self.image_size, self.image_size)), dtype=numpy.float32) / 255
        )
        scaled_HWC = (pixels_HWC - numpy.asarray(self.mean, numpy.float32)) / numpy.asarray(self.std, numpy.float32)
        return torch.from_numpy(scaled_HWC.transpose(2, 0, 1).copy())


@dataclass(frozen=True, eq=False)
class ImageDataset(Dataset[dict[str, Any]]):
    """Data set of labeled images. Each image is a file or a PIL image, and each label is a class index."""

    images: Sequence[Any]
    labels: Sequence[int]
    transform: ImageTransform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        image = self.images[index]
        try:
            with Image.open(image) if isinstance(image, Path) else nullcontext(image) as opened:
                return {"pixel_values": self.transform(opened), "labels": self.labels[index]}
        except OSError as error:
            raise InputError(
                f"The image '{image}' cannot be read: {error}.",
                remedy="Replace the image, or remove it from the data.",
            ) from error


def tokenize_and_concatenate(texts: Sequence[str], tokenizer: TextTokenizer) -> list[int]:
    """Tokenize texts and concatenate them into one token sequence, separated by end-of-sequence tokens."""
    row: list[int] = []
    for number, text in enumerate(texts):
        if number and tokenizer.eos_token_id is not None:
            row.append(tokenizer.eos_token_id)
        row.extend(tokenizer.encode(text))
    return row


# B batch, S sequence

MASKED_SHARE, KEPT_SHARE, OTHER_SHARE = 0.15, 0.1, 0.1
"""Fraction of masked tokens, and fractions of these that are kept or replaced by random tokens, as in BERT."""


@dataclass(frozen=True, eq=False)
class TokenBlockDataset(Dataset[dict[str, Tensor]]):
    """Data set that splits one long token sequence into consecutive blocks of equal length.

    Args:
        token_ids: Token sequence. Tokens after the last full block are dropped.
        block_size: Number of tokens per block.
        task: "causal": the labels are the tokens, which the model shifts. "masked": 15 % of the tokens are masked at
            random whenever a block is read. "sequence_to_sequence": the first half of a block is the source, and the
            second half is the target.
        tokenizer: Tokenizer.
    """

    token_ids: Tensor
    block_size: int
    task: str
    tokenizer: TextTokenizer

    def __len__(self) -> int:
        return len(self.token_ids) // self.block_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids_S = self.token_ids[index * self.block_size : (index + 1) * self.block_size].long()
        if self.task == "masked":
            return mask_tokens(ids_S, self.tokenizer)
        half = self.block_size // 2
        is_causal = self.task == "causal"
        return {"input_ids": ids_S if is_causal else ids_S[:half], "labels": ids_S if is_causal else ids_S[half:]}


def mask_tokens(ids_S: Tensor, tokenizer: TextTokenizer) -> dict[str, Tensor]:
    """Mask at least one random token of a sequence as in BERT, and return the input ids and the labels."""
    assert tokenizer.mask_token_id is not None
    chosen_S = torch.rand(ids_S.shape) < MASKED_SHARE
    chosen_S[torch.randint(len(ids_S), ())] = True  # a sample without masked tokens would have no loss
    uniform_S = torch.rand(ids_S.shape)
    random_S = torch.randint(tokenizer.vocab_size, ids_S.shape)
    hidden_S = torch.where(uniform_S < 1 - KEPT_SHARE, random_S, ids_S)
    hidden_S = torch.where(uniform_S < 1 - KEPT_SHARE - OTHER_SHARE, tokenizer.mask_token_id, hidden_S)
    return {"input_ids": torch.where(chosen_S, hidden_S, ids_S), "labels": torch.where(chosen_S, ids_S, IGNORED)}


@dataclass(frozen=True, eq=False)
class TextDataset(Dataset[dict[str, Any]]):
    """Data set of labeled texts or text pairs.

    A label is a class index, a number, one number per class, or a target text.
    """

    texts: Sequence[str]
    labels: Sequence[Any]
    tokenizer: TextTokenizer
    max_length: int
    text_pairs: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels: Any = self.labels[index]
        if isinstance(labels, str):
            labels = self.tokenizer.encode_with_special_tokens(labels, None, self.max_length)["input_ids"]
        pair = self.text_pairs[index] if self.text_pairs is not None else None
        return {**self.tokenizer.encode_with_special_tokens(self.texts[index], pair, self.max_length), "labels": labels}


@dataclass(frozen=True, eq=False)
class TokenClassificationDataset(Dataset[dict[str, Any]]):
    """Data set for token classification, with lists of words and one class index per word.

    The first token of a word has the label of the word. The other tokens have no label.
    """

    words: Sequence[Sequence[str]]
    labels: Sequence[Sequence[int]]
    tokenizer: TextTokenizer
    max_length: int

    def __post_init__(self) -> None:
        for number, (words, labels) in enumerate(zip(self.words, self.labels, strict=True), start=1):
            if len(words) != len(labels):
                raise InputError(
                    f"Row {number} of the data has {len(words)} words, but {len(labels)} labels.",
                    remedy="Fix the data so that each word has exactly one label.",
                )

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids, words = self.tokenizer.encode_words_with_indices(self.words[index], self.max_length)
        before = [None, *words[:-1]]
        labels = [
            IGNORED if word is None or word == previous else self.labels[index][word]
            for word, previous in zip(words, before, strict=True)
        ]
        return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True, eq=False)
class TokenizedDataset(Dataset[dict[str, Tensor]]):
    """Data set of samples that are already tokenized."""

    samples: Sequence[TokenizedSample]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        return {"input_ids": sample.ids_S.long(), "labels": sample.labels_S.long()}


class MixedDataset(Dataset[Any]):
    """Data set that mixes samples of several data sets in proportion to their weights.

    An epoch ends when each data set has been read at least once. Samples of the other data sets are repeated.

    >>> mixed = MixedDataset([["a", "b"], ["x"]], [1.0, 1.0])
    >>> [mixed[index] for index in range(len(mixed))]
    ['a', 'x', 'b', 'x']
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float]) -> None:
        epochs = max(len(data) / weight for data, weight in zip(datasets, weights, strict=True))
        counts = [max(len(data), round(weight * epochs)) for data, weight in zip(datasets, weights, strict=True)]
        self._datasets = list(datasets)
        places = [(index + 0.5) / count for count in counts for index in range(count)]
        items = [(source, index) for source, count in enumerate(counts) for index in range(count)]
        self._items = [items[number] for number in sorted(range(len(items)), key=places.__getitem__)]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        source, number = self._items[index]
        data = self._datasets[source]
        return data[number % len(data)]


@dataclass(frozen=True, eq=False)
class StreamedDataset(IterableDataset[Any]):
    """Iterable data set that converts the rows of a stream to training samples."""

    rows: Any
    make: Callable[[Iterable[Any]], Iterable[Any]]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the rows if the stream is shuffled."""
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make(self.rows))


def stream_token_blocks(
    rows: Iterable[Mapping[str, Any]], *, field: str, length: int, task: str, tokens: TextTokenizer
) -> Iterator[dict[str, Tensor]]:
    """Tokenize a stream of texts, and yield consecutive token blocks of equal length.

    Each text is followed by an end-of-sequence token, if the tokenizer has one.
    """
    rest: list[int] = []
    for number, row in enumerate(rows, start=1):
        text = row.get(field)
        if not isinstance(text, str):
            raise InputError(
                f"The field {field!r} must be a string, but row {number} of the data has {text!r:.60}.",
                remedy="Fix or remove the row, or set data.text to another field.",
            )
        rest += tokens.encode(text) + ([] if tokens.eos_token_id is None else [tokens.eos_token_id])
        count = len(rest) // length
        blocks = TokenBlockDataset(torch.tensor(rest[: count * length], dtype=torch.int32), length, task, tokens)
        yield from (blocks[index] for index in range(count))
        rest = rest[count * length :]


@dataclass(frozen=True)
class PaddingCollator:
    """Collate function that pads token ids with ``pad_token_id``, attention masks with 0, and labels with -100.

    Rows of several documents have ``position_ids`` instead of an attention mask. The key-value cache is disabled for
    them, because with a cache transformers does not mask attention between documents.
    """

    pad_token_id: int

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        fill = {"input_ids": self.pad_token_id, "labels": IGNORED}
        batch = {key: _pad_column([sample[key] for sample in samples], fill.get(key, 0)) for key in samples[0]}
        if "position_ids" in batch:
            return {**batch, "use_cache": False}
        batch.setdefault("attention_mask", _pad_column([[1] * len(sample["input_ids"]) for sample in samples], 0))
        return batch


def _pad_column(column_values: Sequence[Any], padding_value: int) -> Tensor:
    if not isinstance(column_values[0], (list, Tensor)):
        return torch.tensor(column_values)
    rows = [torch.as_tensor(value) for value in column_values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding_value)


TASKS_OF_LABELS = {
    float: "Fix the labels, or set model.task = 'regression' to predict numbers",
    list: "Set model.task = 'multi_label_classification', or 'token_classification' for one label per word",
}
"""Type of the labels -> remedy, if they are not classes."""


def infer_label_classes(labels: Sequence[Any], class_names: Sequence[str] = ()) -> list[Any]:
    """Return the sorted list of classes that occur in the labels.

    ``class_names`` are the class names of the model or data set. If they include all labels, they are the classes, in
    the same order. If all labels are indices into them, all of these indices are the classes.
    """
    types = {type(label) for label in labels}
    if len(types) != 1 or not types <= {int, str, bool}:
        names = ", ".join(sorted(kind.__name__ for kind in types))
        raise InputError(
            f"The labels must be all integers or all strings, but got the types {names}.",
            remedy=TASKS_OF_LABELS.get(next(iter(types)), "Fix the labels, or set data.label to another field"),
        )
    found = set(labels)
    classes: list[Any] = sorted(found)
    if types == {str} and found <= set(class_names):
        classes = list(class_names)
    elif types == {int} and found <= set(range(len(class_names))):
        classes = list(range(len(class_names)))
    if len(classes) < 2:
        raise InputError(
            f"Classification requires at least two classes, but the training data has only {classes}.",
            remedy="Add rows with other labels, or set data.label to the field that contains the labels.",
        )
    return classes


def encode_labels(labels: Sequence[Any], classes: Sequence[Any], is_validation: bool) -> list[int]:
    """Convert each label to its index in ``classes``, or raise InputError for an unknown label."""
    index_of_class = {name: number for number, name in enumerate(classes)}
    unknown = next((label for label in labels if label not in index_of_class), None)
    if unknown is not None:
        source, known = "validation" if is_validation else "training", ", ".join(map(str, classes[:8]))
        raise InputError(
            f"The {source} data has the label {unknown!r}, which is not one of the classes {known}.",
            remedy="Remove the rows with this label, or add rows with this label to the training data.",
        )
    return [index_of_class[label] for label in labels]


def encode_label_lists(
    label_lists: Sequence[Sequence[Any]], classes: Sequence[Any], is_validation: bool
) -> list[list[int]]:
    """Convert the labels of each sample to their indices in ``classes``, for samples with several labels."""
    return [encode_labels(row, classes, is_validation) for row in label_lists]


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
        sample_lengths: Number of tokens of each sample.
        batch_size: Global batch size.
    """

    def __init__(self, sample_lengths: Sequence[int], batch_size: int) -> None:
        self.lengths, self.batch_size = list(sample_lengths), batch_size

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        from transformers.trainer_pt_utils import get_length_grouped_indices

        return iter(get_length_grouped_indices(self.lengths, self.batch_size))
