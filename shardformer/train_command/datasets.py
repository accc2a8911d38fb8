"""Loads the training data of a run from text files, JSON lines, Hugging Face data sets or image folders."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardformer.errors import ConfigError, InputError, did_you_mean, first_line
from shardformer.train_command.config_schema import DataTable, TrainConfig, remote_code_hint
from shardformer.transformers_compat import load_transformers

SUFFIXES = {".txt": "text", ".md": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
SUFFIXES |= {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
TABLES = {".arrow", ".xlsx"}
_CONVERT = (
    "Convert it to JSON lines: pandas.read_excel(file).to_json('data.jsonl', orient='records', lines=True, "
    "force_ascii=False), or read_feather"
)
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
DatasetRows = Sequence[Mapping[str, Any]]


def data_sources_of(data: DataTable, *, validation: bool = False) -> list[str]:
    """Return the files, folders or data set names that the configuration lists as training or validation data."""
    settings = data.validation if validation and data.validation is not None else data.train
    return [settings] if isinstance(settings, str) else list(settings)


def infer_format(data: DataTable, names: Sequence[str]) -> str:
    """Return the format of the data from the configuration, or infer it from the file names."""
    found_format = data.format or _infer_format_from_names(names)
    if data.delimiter is not None and found_format != "csv":
        raise ConfigError(
            f"data.delimiter = {data.delimiter!r} has no effect, because the format is {found_format}",
            remedy="Remove it, or set data.format = 'csv'",
        )
    return found_format


def _infer_format_from_names(names: Sequence[str]) -> str:
    found = {"images" if Path(name).is_dir() else SUFFIXES.get(Path(name).suffix.lower(), "") for name in names}
    if len(found) == 1 and "" not in found:
        return found.pop()
    raise ConfigError(
        f"The format of {', '.join(map(repr, names))} cannot be inferred from the name{'s' * (len(names) > 1)}",
        rule=f"A file name ends in {', '.join(SUFFIXES)}, and a folder contains images",
        remedy=_CONVERT
        if any(Path(name).suffix.lower() in TABLES for name in names)
        else "Set data.format = 'text', 'jsonl', 'csv', 'parquet', 'datasets' or 'images'",
    )


def read_texts(names: Sequence[str]) -> list[str]:
    """Read text files, or raise InputError if a file is empty or cannot be read."""
    texts = [_read_text_file(name) for name in names]
    for name, text in zip(names, texts, strict=True):
        if not text.strip():
            raise InputError(f"The file {name!r} is empty", remedy="Pass a file with text")
    return texts


def _read_text_file(file: str) -> str:
    """Read a UTF-8 text file without its byte order mark."""
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"The file {file!r} is not valid UTF-8: {error.reason} at byte {error.start}",
            remedy="Convert it, for example with iconv --from-code LATIN1 --to-code UTF-8",
        ) from error
    except OSError as error:
        path = Path(file)
        near = did_you_mean(path.name, (p.name for p in path.absolute().parent.glob("*") if p.name != path.name))
        raise InputError(
            f"The file {file!r} cannot be read: {error.strerror or error}",
            remedy=near if near.startswith("Did") else "Correct the path",
        ) from error


def read_field(rows: DatasetRows, field: str) -> list[Any]:
    """Return the values of a field in all rows, or raise InputError for a row without this field."""
    for index, row in enumerate(rows):
        if row.get(field) is None:
            is_there = field in row
            raise InputError(
                f"Row {index + 1} of the data has {'null in the field' if is_there else 'no field'} {field!r}",
                remedy="Correct or remove that row" if is_there else did_you_mean(field, map(str, row)),
            )
    return [row[field] for row in rows]


def read_text_field(rows: DatasetRows, field: str, config_key: str) -> list[str]:
    """Return the strings of a field in all rows, or raise InputError for a row whose value is not a string.

    ``config_key`` is the configuration key of the field, for the error.
    """
    values = read_field(rows, field)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise InputError(
                f"Row {index + 1} of the data has {value!r:.60} in the field {field!r}, which is not a string",
                remedy=f"Write such values as strings, or specify another field with {config_key}",
            )
    return values


def read_label_field(rows: DatasetRows, field: str) -> tuple[list[Any], list[str]]:
    """Return the labels of all rows, and the class names of the data set if the field is a ``ClassLabel``.

    Labels of a ``ClassLabel`` are returned as class names.
    """
    labels = read_field(rows, field)
    names = getattr((getattr(rows, "features", None) or {}).get(field), "names", None)
    if names is None:
        return labels, []
    return [names[label] if isinstance(label, int) and 0 <= label < len(names) else label for label in labels], [*names]


def _read_json_rows(names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Read rows from JSON files that contain one list of objects or one object per line."""
    rows: list[Mapping[str, Any]] = []
    for name in names:
        text = _read_text_file(name)
        with suppress(ValueError):
            found = json.loads(text) if text.lstrip().startswith("[") else None
            if isinstance(found, list) and all(isinstance(row, dict) for row in found):
                rows += found
                continue
        # splitlines would also split at other characters, which a text may contain
        rows += [_parse_json_row(name, n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not rows:
        raise InputError(f"{', '.join(names)} contains no rows", remedy="Pass a file with rows")
    return rows


def _parse_json_row(file: str, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"Line {number} of {file} is not a JSON object: {error}. The line is {line!r:.60}",
            rule='A file contains one object per line, such as {"text": "words"}, or one list of objects',
            remedy="Correct the line, or set data.format if the file has another format",
        ) from error
    return row


def _read_csv_rows(file: str, delimiter: str | None) -> list[dict[str, str]]:
    """Read the rows of a table as strings by field."""
    separator = delimiter or ("\t" if file.lower().endswith(".tsv") else ",")
    csv.field_size_limit(2**30)
    lines = io.StringIO(_read_text_file(file), newline="")
    if separator == "\t":  # quotes are part of the text, as in most data sets
        found = list(csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_NONE))
    else:
        found = list(csv.reader(lines, delimiter=separator))
    fields, rows = (found[0], [row for row in found[1:] if row]) if found else ([], [])
    if not rows:
        raise InputError(
            f"The file {file!r} contains no rows", rule="Its first line has the names of the fields", remedy="Add rows"
        )
    for number, row in enumerate(rows, start=1):
        if len(row) != len(fields):
            raise InputError(
                f"Row {number} of {file!r} has {len(row)} fields, but its first line has {len(fields)}: {row!r:.60}",
                remedy=f"Correct the row, or set data.delimiter, which is {separator!r}",
            )
    return [dict(zip(fields, row, strict=True)) for row in rows]


def _load_hub_dataset(names: Sequence[str], split: str, builder: str = "") -> DatasetRows:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"data.format = {builder or 'datasets'!r} requires the library datasets to read {names[0]!r}, which is not "
            "installed",
            remedy="Run pip install 'shardformer[data]', or pass files",
        ) from error
    if len(names) > 1 and not builder:
        raise ConfigError(f"data.train has {len(names)} data sets", remedy="Merge them, and specify one")
    name = names[0]
    try:
        if builder:
            rows: DatasetRows = datasets.load_dataset(builder, data_files=list(names), split=split)
        elif any((Path(name) / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
            found: Any = datasets.load_from_disk(name)
            rows = found[split] if isinstance(found, dict) else found
        else:
            path, _, configuration = name.partition(":")
            rows = datasets.load_dataset(path, configuration or None, split=split)
    except (OSError, ValueError, KeyError) as error:  # errors of the library for missing data
        raise ConfigError(
            f"The data set {name!r} cannot be read: {first_line(error)}",
            rule="A data set is a name on the hub, such as imdb or glue:mrpc, or a folder that save_to_disk wrote",
            remedy="Correct data.train or data.split",
        ) from error
    if not len(rows):
        raise InputError(f"The split {split!r} of the data set {name!r} has no rows", remedy="Correct data.split")
    return rows


HALF = (0.5, 0.5, 0.5)
IMAGE_SIZE = 224
FILE, PROCESSOR = "preprocessor_config.json", "ViTImageProcessor"
"""Config file of image processors in transformers, and the processor class equivalent to ``ImageTransform``."""
BICUBIC = 3
"""PIL's default for ``Image.resize``."""


@dataclass(frozen=True)
class ImageTransform:
    """Resizes an image to ``size`` x ``size`` pixels and normalizes its channels."""

    size: int
    mean: Sequence[float] = HALF
    std: Sequence[float] = HALF

    @classmethod
    def of(cls, model: str, size: int | None) -> ImageTransform:
        """Create the transform of a model with mean and standard deviation from its preprocessor_config.json.

        ``size`` is the image size in pixels of the model's config, or None for 224.
        """
        size = size or IMAGE_SIZE
        file = Path(model) / FILE
        if not file.is_file():
            return cls(size)
        settings = json.loads(file.read_text(encoding="utf-8"))
        return cls(size, settings.get("image_mean") or HALF, settings.get("image_std") or HALF)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write preprocessor_config.json, with which transformers processes images for an exported model."""
        side = {"height": self.size, "width": self.size}
        settings = {
            "image_processor_type": PROCESSOR, "do_resize": True, "size": side, "resample": BICUBIC,
            "do_rescale": True, "rescale_factor": 1 / 255,
            "do_normalize": True, "image_mean": list(self.mean), "image_std": list(self.std),
        }  # fmt: skip
        Path(folder, FILE).write_text(json.dumps(settings, indent=2), encoding="utf-8")

    def __call__(self, image: Any) -> Tensor:
        """Convert a PIL image to a tensor (channel, height, width)."""
        pixels_HWC = numpy.asarray(image.convert("RGB").resize((self.size, self.size)), dtype=numpy.float32) / 255
        scaled_HWC = (pixels_HWC - numpy.asarray(self.mean, numpy.float32)) / numpy.asarray(self.std, numpy.float32)
        return torch.from_numpy(scaled_HWC.transpose(2, 0, 1).copy())


@dataclass(frozen=True, eq=False)
class ImageDataset(Dataset[dict[str, Any]]):
    """Data set of images, which are files or PIL images, with their class indices."""

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
                f"The image {str(image)!r} cannot be read: {error}",
                remedy="Replace the file, or remove it from the folder",
            ) from error


def to_image_source(value: Any) -> Any:
    """Return the image of a row as a path or PIL image, or raise InputError for other types."""
    if isinstance(value, str):
        return Path(value).expanduser()
    if hasattr(value, "convert"):
        return value
    raise InputError(
        f"A row has {value!r:.60} in the field of its image, which is not a path or a decoded image",
        remedy="Correct data.image or the rows",
    )


def list_images(names: Sequence[str]) -> tuple[list[Path], list[str]]:
    """List the image files in folders with one subfolder per class, and the class name of each file."""
    files = sorted(
        file for name in names for file in Path(name).glob("*/*") if file.suffix.lower() in IMAGES and file.is_file()
    )
    if not files:
        raise InputError(
            f"{', '.join(map(repr, names))} contains no images in subfolders",
            rule="A folder of images has one subfolder per class",
            remedy="Correct data.train, or set data.format if the data has another format",
        )
    return files, [file.parent.name for file in files]


BYTES = "bytes"
PAD_TOKEN, MASK, NUM_BYTES = 256, 257, 258
"""Token ids that follow the 256 byte tokens: padding, which also ends a text, and mask."""
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")

GPT2_FILES = ("encoder.json", "vocab.bpe")
"""Names of OpenAI for vocab.json and merges.txt of GPT-2."""


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """Wraps a tokenizer of transformers, or tokenizes text as bytes if ``tokenizer`` is None.

    ``end``, ``pad`` and ``mask`` are token ids.
    """

    name: str = BYTES
    size: int = NUM_BYTES
    end: int | None = PAD_TOKEN
    pad: int = PAD_TOKEN
    mask: int | None = MASK
    tokenizer: Any = None

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without special tokens and without truncation."""
        if self.tokenizer is None:
            return list(text.encode())
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def encode_with_special_tokens(self, text: str, pair: str | None, max_length: int) -> dict[str, list[int]]:
        """Tokenize a text or a pair of texts with special tokens, truncated to ``max_length`` tokens."""
        if self.tokenizer is None:
            joined = text if pair is None else f"{text}\0{pair}"
            return {"input_ids": [*joined.encode()[: max_length - 1], PAD_TOKEN]}
        return dict(self.tokenizer(text, pair, truncation=True, max_length=max_length))

    @property
    def is_bytes(self) -> bool:
        return self.tokenizer is None

    def export(self, *, adds_end: bool) -> Any:
        """Return a tokenizer of transformers with the same tokens, to save with the model.

        ``adds_end`` is whether ``encode_with_special_tokens`` tokenizes the texts of the run.
        """
        return make_byte_tokenizer(adds_end=adds_end) if self.tokenizer is None else self.tokenizer


def make_byte_tokenizer(*, adds_end: bool) -> Any:
    """Create a tokenizer of transformers whose tokens are the bytes of a text, with the ids of ``TextTokenizer``.

    Args:
        adds_end: Whether it ends a text with the padding token, and joins pairs of texts with a zero byte.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()  # of each byte, because the vocabulary of a file consists of letters
    end, mask = "<|end|>", "<|mask|>"
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(end, normalized=False), AddedToken(mask, normalized=False)])
    if adds_end:
        made.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A {letters[0]} $B {end}", special_tokens=[(end, PAD_TOKEN), (letters[0], 0)]
        )
    names = {"pad_token": end, "eos_token": end, "mask_token": mask}
    return load_transformers().PreTrainedTokenizerFast(tokenizer_object=made, **names)


def adds_end_token(config: TrainConfig) -> bool:
    """Return whether the texts of a run are tokenized one by one with special tokens, and not joined to blocks."""
    names, task = data_sources_of(config.data), config.model.task
    is_row = task == "sequence_to_sequence" and infer_format(config.data, names) != "text"
    return is_row or task == "classification"


def load_tokenizer(name: str | None, model: str, *, random: bool, trust_remote_code: bool = False) -> TextTokenizer:
    """Load a tokenizer by name. Without a name, load the tokenizer of the model, or use bytes for random weights."""
    if name == BYTES or (name is None and random):
        return TextTokenizer()
    source = model if name is None else name
    transformers = load_transformers()

    folder = Path(source)
    files = [folder / name for name in GPT2_FILES]
    original = files if all(file.is_file() for file in files) else None
    if original is None and folder.is_dir() and not any((folder / file).is_file() for file in FILES):
        raise ConfigError(
            f"The folder {source!r} contains no tokenizer",
            rule=f"A tokenizer has one of the files {', '.join(FILES)}",
            remedy="Save the tokenizer in the folder of the model, or set data.tokenizer to another folder or 'bytes'",
        )
    try:
        if original is None:
            found = transformers.AutoTokenizer.from_pretrained(
                source, trust_remote_code=trust_remote_code and source == model
            )
        else:
            found = transformers.GPT2Tokenizer(*map(str, original))
    except Exception as error:  # files and their code may raise any error
        raise ConfigError(
            f"The tokenizer {source!r} cannot be loaded: {first_line(error)}",
            remedy=remote_code_hint("Correct data.tokenizer", error) if source == model else "Correct data.tokenizer",
        ) from error
    pad = next((t for t in (found.pad_token_id, found.eos_token_id, found.unk_token_id) if t is not None), 0)
    end = found.eos_token_id if found.eos_token_id is not None else found.sep_token_id
    return TextTokenizer(source, len(found), end, pad, found.mask_token_id, found)


def concatenate_texts(texts: Sequence[str], tokenizer: TextTokenizer) -> list[int]:
    """Tokenize texts and concatenate them to one token sequence, separated by end tokens."""
    row: list[int] = []
    for number, text in enumerate(texts):
        if number and tokenizer.end is not None:
            row.append(tokenizer.end)
        row.extend(tokenizer.encode(text))
    return row


# B batch, S sequence

MASKED_SHARE, KEPT_SHARE, OTHER_SHARE = 0.15, 0.1, 0.1
"""Fraction of masked tokens, and fractions of these that are kept or replaced by random tokens, as in BERT."""
IGNORED = -100


@dataclass(frozen=True, eq=False)
class TokenBlocks(Dataset[dict[str, Tensor]]):
    """Data set of consecutive token blocks of equal length, taken from one long token sequence.

    Args:
        row: Token sequence. Tokens after the last full block are dropped.
        length: Number of tokens per block.
        task: "causal": the labels are the tokens, which the model shifts. "masked": 15 % of the tokens are masked at
            random each time. "sequence_to_sequence": the first half is the source, and the second half is the target.
        tokens: Tokenizer.
    """

    row: Tensor
    length: int
    task: str
    tokens: TextTokenizer

    def __len__(self) -> int:
        return len(self.row) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids_S = self.row[index * self.length : (index + 1) * self.length].long()
        if self.task == "masked":
            return mask_tokens(ids_S, self.tokens)
        half = self.length // 2
        is_causal = self.task == "causal"
        return {"input_ids": ids_S if is_causal else ids_S[:half], "labels": ids_S if is_causal else ids_S[half:]}


def mask_tokens(ids_S: Tensor, tokenizer: TextTokenizer) -> dict[str, Tensor]:
    """Mask random tokens of a sequence, at least one, and return the input ids and labels as in BERT."""
    assert tokenizer.mask is not None
    chosen_S = torch.rand(ids_S.shape) < MASKED_SHARE
    chosen_S[torch.randint(len(ids_S), ())] = True  # a sample without masked tokens would have no loss
    uniform_S = torch.rand(ids_S.shape)
    random_S = torch.randint(tokenizer.size, ids_S.shape)
    hidden_S = torch.where(uniform_S < 1 - KEPT_SHARE, random_S, ids_S)
    hidden_S = torch.where(uniform_S < 1 - KEPT_SHARE - OTHER_SHARE, tokenizer.mask, hidden_S)
    return {"input_ids": torch.where(chosen_S, hidden_S, ids_S), "labels": torch.where(chosen_S, ids_S, IGNORED)}


@dataclass(frozen=True, eq=False)
class TextDataset(Dataset[dict[str, Any]]):
    """Data set of texts or text pairs, each with a class index or a target text as its label."""

    texts: Sequence[str]
    labels: Sequence[int] | Sequence[str]
    tokens: TextTokenizer
    max_length: int
    pairs: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels: Any = self.labels[index]
        if isinstance(labels, str):
            labels = self.tokens.encode_with_special_tokens(labels, None, self.max_length)["input_ids"]
        pair = self.pairs[index] if self.pairs is not None else None
        return {**self.tokens.encode_with_special_tokens(self.texts[index], pair, self.max_length), "labels": labels}


@dataclass(frozen=True)
class PaddingCollator:
    """Collate function that pads token ids with ``pad``, attention masks with 0, and labels with -100."""

    pad: int

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        fill = {"input_ids": self.pad, "labels": IGNORED}
        batch = {key: _pad_column([sample[key] for sample in samples], fill.get(key, 0)) for key in samples[0]}
        batch.setdefault("attention_mask", _pad_column([[1] * len(sample["input_ids"]) for sample in samples], 0))
        return batch


def _pad_column(values: Sequence[Any], padding_value: int) -> Tensor:
    if not isinstance(values[0], (list, Tensor)):
        return torch.tensor(values)
    rows = [torch.as_tensor(value) for value in values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding_value)


def list_classes(labels: Sequence[Any], class_names: Sequence[str] = ()) -> list[Any]:
    """Return the classes that occur in the labels: integers sorted by value, strings sorted alphabetically.

    ``class_names`` are the class names of the model or data set. If they include all labels, all of them are the
    classes, in their order. If all labels are indices into them, all their indices are the classes.
    """
    types = {type(label) for label in labels}
    if len(types) != 1 or not types <= {int, str, bool}:
        raise InputError(
            f"The labels have the types {', '.join(sorted(kind.__name__ for kind in types))}",
            rule="All labels must be integers, or all must be strings",
            remedy="Correct the data or data.label",
        )
    found = set(labels)
    classes: list[Any] = sorted(found)
    if types == {str} and found <= set(class_names):
        classes = list(class_names)
    elif types == {int} and found <= set(range(len(class_names))):
        classes = list(range(len(class_names)))
    if len(classes) < 2:
        raise InputError(
            f"All labels of the training data are {classes[0]!r}",
            rule="A classification requires two classes or more; with one, transformers trains a regression",
            remedy="Correct the data or data.label",
        )
    return classes


def encode_labels(labels: Sequence[Any], classes: Sequence[Any], is_validation: bool) -> list[int]:
    """Convert labels to their indices in ``classes``, or raise InputError for an unknown label."""
    index_of_class = {name: number for number, name in enumerate(classes)}
    unknown = next((label for label in labels if label not in index_of_class), None)
    if unknown is not None:
        raise InputError(
            f"The {'validation' if is_validation else 'training'} data has the unknown label {unknown!r}",
            rule=f"The classes of the training data are {', '.join(map(str, classes[:8]))}",
            remedy="Remove such rows, or add some to the training data",
        )
    return [index_of_class[label] for label in labels]


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Training and validation data of a run, with the tokenizer or image transform that prepares it.

    Args:
        title: Description for reports.
        collate: Function from samples to a batch, or None for the default of ``ShardedDataLoader``.
        tokens: Tokenizer, or None for images.
        classes: Class names, or None.
    """

    title: str
    train: Any
    validation: Any = None
    collate: Callable[[Sequence[Any]], Any] | None = None
    tokens: TextTokenizer | None = None
    classes: Sequence[Any] | None = None
    transform: ImageTransform | None = None

    @property
    def processor(self) -> Any:
        """Tokenizer or image transform to export with the model."""
        return self.transform if self.tokens is None else self.tokens.export(adds_end=self.collate is not None)


def load_data(config: TrainConfig, image_size: int | None = None, model_classes: Sequence[str] = ()) -> TrainingData:
    """Load the training and validation data that a run configuration specifies.

    Args:
        config: Run configuration.
        image_size: Height and width of an image in the model's config, or None.
        model_classes: Class names of the model in order. Labels keep these indices if the data has no other classes.

    Raises:
        ConfigError: The data does not exist, or does not fit the task.
        InputError: The content of the data is invalid.
    """
    model, data = config.model, config.data
    tokens = transform = None
    if model.task == "image_classification":
        transform = ImageTransform.of(model.name, image_size)
    else:
        tokens = load_tokenizer(
            data.tokenizer, model.name, random=model.random, trust_remote_code=model.trust_remote_code
        )
        if model.task == "masked" and tokens.mask is None:
            raise ConfigError(
                f"model.task = 'masked' requires a mask token, which the tokenizer {tokens.name!r} does not have",
                remedy="Use the tokenizer of a masked language model, 'bytes', or another task",
            )
    loaded: list[Any] = []
    classes: list[Any] = []
    has_validation = data.validation is not None or data.validation_split is not None
    for validation in [False, True] if has_validation else [False]:
        if tokens is not None and not model.task.endswith("classification"):
            loaded.append(_load_language_modeling_dataset(config, tokens, validation))
            continue
        inputs, labels, data_classes = (
            _load_labeled_images(config, validation)
            if transform is not None
            else _load_labeled_texts(config, validation)
        )
        classes = classes or list_classes(
            labels, model_classes if set(data_classes) <= set(model_classes) else data_classes
        )
        indices = encode_labels(labels, classes, validation)
        if transform is not None:
            loaded.append(ImageDataset(inputs, indices, transform))
        elif tokens is not None:
            loaded.append(TextDataset(inputs[0], indices, tokens, data.sequence_length, inputs[1]))
    collate = PaddingCollator(tokens.pad) if tokens is not None and isinstance(loaded[0], TextDataset) else None
    train, validation_data = [*loaded, None][:2]
    title = ", ".join(data_sources_of(data))
    return TrainingData(title, train, validation_data, collate, tokens, classes or None, transform)


def _load_rows(config: TrainConfig, validation: bool) -> Any:
    data, task = config.data, config.model.task
    names = data_sources_of(data, validation=validation)
    data_format = infer_format(data, names)
    if data_format == "text" or (data_format == "images" and task != "image_classification"):
        raise _unsupported_format_error(task, data_format, names)
    if data_format == "jsonl":
        return _read_json_rows(names)
    if data_format == "csv":
        rows = [row for name in names for row in _read_csv_rows(name, data.delimiter)]
        has_numbers = all(re.fullmatch(r"-?\d+", row.get(data.label, "")) for row in rows)
        return [{**row, data.label: int(row[data.label])} for row in rows] if has_numbers else rows
    if data_format == "parquet":
        return _load_hub_dataset(names, "train", builder="parquet")
    return _load_hub_dataset(names, data.validation_split or data.split if validation else data.split)


def _unsupported_format_error(task: str, data_format: str, names: Sequence[str]) -> ConfigError:
    rule = ""
    if data_format == "images":
        rule = "A folder is read as images unless data.format is set"
        remedy = (
            "Specify files in the folder, data.format = 'datasets' for a folder that save_to_disk wrote, or model.task "
            "= 'image_classification'"
        )
    elif task == "image_classification":
        remedy = (
            "Specify a folder with one subfolder of images per class, or JSON lines or a data set with an image and a "
            "class in each row"
        )
    else:
        rule = "This task requires rows with a text and its class or target"
        remedy = "Specify JSON lines or a data set, or for plain text set model.task = 'causal' or 'masked'"
    return ConfigError(
        f"model.task = {task!r} does not support {', '.join(map(repr, names))}, which is read as {data_format}",
        rule=rule,
        remedy=remedy,
    )


def _load_language_modeling_dataset(config: TrainConfig, tokenizer: TextTokenizer, validation: bool) -> Any:
    data, task = config.data, config.model.task
    names = data_sources_of(data, validation=validation)
    if infer_format(data, names) == "text":
        texts = read_texts(names)
    else:
        rows = _load_rows(config, validation)
        texts = read_text_field(rows, data.text, "data.text")
        if task == "sequence_to_sequence":
            return TextDataset(
                texts, read_text_field(rows, data.target, "data.target"), tokenizer, data.sequence_length
            )
    row = concatenate_texts(texts, tokenizer)
    if len(row) < data.sequence_length:
        raise InputError(
            f"The text has {len(row)} tokens (tokenizer {tokenizer.name}), fewer than data.sequence_length = "
            f"{data.sequence_length}",
            remedy="Use a longer text or a smaller data.sequence_length",
        )
    return TokenBlocks(torch.tensor(row, dtype=torch.int32), data.sequence_length, task, tokenizer)


def _load_labeled_texts(config: TrainConfig, validation: bool) -> tuple[Any, list[Any], list[str]]:
    """Load texts or text pairs for classification, their labels, and the class names of the data set."""
    data, rows = config.data, _load_rows(config, validation)
    labels, class_names = read_label_field(rows, data.label)
    pairs = read_text_field(rows, data.pair, "data.pair") if data.pair is not None else None
    return (read_text_field(rows, data.text, "data.text"), pairs), labels, class_names


def _load_labeled_images(config: TrainConfig, validation: bool) -> tuple[Any, list[Any], list[str]]:
    """Load images or image paths for classification, their labels, and the class names of the data set."""
    data = config.data
    names = data_sources_of(data, validation=validation)
    if data.format != "datasets" and Path(names[0]).is_dir():
        return *list_images(names), []
    rows = _load_rows(config, validation)
    return [to_image_source(each) for each in read_field(rows, data.image)], *read_label_field(rows, data.label)
