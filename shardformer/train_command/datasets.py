"""The data sets of a run: text, JSON lines, ``datasets``, image folders; tokens, samples and batches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
TABLES = {".csv", ".tsv", ".parquet", ".arrow", ".xlsx"}
_CONVERT = (
    "Convert it to JSON lines: pandas.read_csv(file).to_json('data.jsonl', orient='records', lines=True, "
    "force_ascii=False), or read_parquet"
)
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
DatasetRows = Sequence[Mapping[str, Any]]


def names_of(data: DataTable, *, validation: bool = False) -> list[str]:
    """What is to be read."""
    said = data.validation if validation and data.validation is not None else data.train
    return [said] if isinstance(said, str) else list(said)


def format_of(data: DataTable, names: Sequence[str]) -> str:
    """As the config says, or as the names end. Raises ConfigError where that does not tell."""
    if data.format is not None:
        return data.format
    found = {"images" if Path(name).is_dir() else SUFFIXES.get(Path(name).suffix.lower(), "") for name in names}
    if len(found) == 1 and "" not in found:
        return found.pop()
    raise ConfigError(
        f"What is in {', '.join(map(repr, names))} cannot be told from the name{'s' * (len(names) > 1)}",
        rule=f"A name ends in {', '.join(SUFFIXES)}, or is a folder of images",
        remedy=_CONVERT
        if any(Path(name).suffix.lower() in TABLES for name in names)
        else "Write data.format = 'text', 'jsonl', 'datasets' or 'images'",
    )


def read_texts(names: Sequence[str]) -> list[str]:
    """The text of each file. Raises InputError for one that cannot be read, or is empty."""
    texts = [_read(name) for name in names]
    for name, text in zip(names, texts, strict=True):
        if not text.strip():
            raise InputError(f"{name!r} is empty", rule="A text has words", remedy="Give another file")
    return texts


def _read(name: str) -> str:
    """A file of text, without the byte order mark that some editors write in front."""
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"The data {name!r} is not in UTF-8: {error.reason} at byte {error.start}",
            remedy="Convert it, for example with iconv --from-code LATIN1 --to-code UTF-8",
        ) from error
    except OSError as error:
        raise _unreadable(name, error.strerror or str(error)) from error


def read_rows(data: DataTable, kind: str, names: Sequence[str], split: str) -> DatasetRows:
    """The rows of files of JSON, or of a data set."""
    return _read_files(names) if kind == "jsonl" else _read_datasets(names, split)


def column(rows: DatasetRows, name: str, key: str) -> list[Any]:
    """The values under one name. Raises InputError for a row that has none; ``key`` of the config says the name."""
    for number, row in enumerate(rows):
        if row.get(name) is None:
            is_there = name in row
            raise InputError(
                f"Row {number + 1} of the data has {'nothing (null) as' if is_there else 'no'} {name!r}",
                remedy="Correct that row, or leave it out" if is_there else did_you_mean(name, map(str, row)),
            )
    return [row[name] for row in rows]


def texts_in(rows: DatasetRows, name: str, key: str) -> list[str]:
    """The texts under one name. Raises InputError for a row that has none, or something else."""
    values = column(rows, name, key)
    for number, value in enumerate(values):
        if not isinstance(value, str):
            raise InputError(
                f"Row {number + 1} of the data has {value!r:.60} as {name!r}, which is not a text",
                remedy=f"Write such values as strings, or name another field with {key}",
            )
    return values


def labels_in(rows: DatasetRows, name: str) -> tuple[list[Any], list[str]]:
    """The labels of rows, and the names of all classes where the data set has them (``ClassLabel``): labels by name."""
    labels = column(rows, name, "data.label")
    names = getattr((getattr(rows, "features", None) or {}).get(name), "names", None)
    if names is None:
        return labels, []
    return [names[label] if isinstance(label, int) and 0 <= label < len(names) else label for label in labels], [*names]


def _read_files(names: Sequence[str]) -> list[Mapping[str, Any]]:
    rows = [row for name in names for row in _rows_of(name, _read(name))]
    if not rows:
        raise InputError(f"There is no row in {', '.join(names)}", rule="Data has rows", remedy="Give another file")
    return rows


def _rows_of(name: str, text: str) -> list[Mapping[str, Any]]:
    """One list of objects, or an object a line: other characters at which ``splitlines`` splits may be in a text."""
    with suppress(ValueError):
        found = json.loads(text) if text.lstrip().startswith("[") else None
        if isinstance(found, list) and all(isinstance(row, dict) for row in found):
            return found
    return [_row(name, number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _row(name: str, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _no_row(name, number, line, str(error)) from error
    if not isinstance(row, dict):
        raise _no_row(name, number, line, "it is no object")
    return row


def _no_row(name: str, number: int, line: str, why: str) -> InputError:
    return InputError(
        f"{name}, line {number}: {line!r:.60} is no row: {why}",
        rule='Each line is a JSON object, such as {"text": "words"}; or the file is one list of such objects',
        remedy="Correct the line, or set data.format if the file is of another form",
    )


def _read_datasets(names: Sequence[str], split: str) -> DatasetRows:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"data.format = 'datasets' for {names[0]!r}, and the library datasets is not installed",
            remedy="pip install 'shardformer[data]', or give files",
        ) from error
    if len(names) > 1:
        raise ConfigError(f"data.train names {len(names)} data sets", remedy="Join them, and give one")
    name = names[0]
    try:
        found: Any
        if (Path(name) / "dataset_info.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(name)
            found = found[split] if isinstance(found, dict) else found
        else:
            path, _, configuration = name.partition(":")
            found = datasets.load_dataset(path, configuration or None, split=split)
    except (OSError, ValueError, KeyError) as error:  # what the library raises for what it does not find
        raise ConfigError(
            f"The data set {name!r} cannot be read: {first_line(error)}",
            rule="It is a name on the hub, as imdb or glue:mrpc, or a folder that save_to_disk wrote; data.split says "
            "which part of it",
            remedy="Correct data.train or data.split",
        ) from error
    rows: DatasetRows = found
    if not len(rows):
        raise InputError(f"The data set {name!r} has no row", rule="Data has rows", remedy="Correct data.split")
    return rows


def _unreadable(name: str, why: str) -> InputError:
    folder = Path(name).absolute().parent
    others = [other.name for other in folder.glob("*") if other.name != Path(name).name] if folder.is_dir() else []
    near = did_you_mean(Path(name).name, others)
    return InputError(
        f"The data {name!r} cannot be read: {why}", remedy=near if near.startswith("Did") else "Correct the path"
    )


HALF = (0.5, 0.5, 0.5)
FILE, PROCESSOR = "preprocessor_config.json", "ViTImageProcessor"
"""What transformers reads an image processor from, and the class that does no more than ``ImageTransform``."""
BICUBIC = 3
"""As PIL resizes an image that is not told how."""


@dataclass(frozen=True)
class ImageTransform:
    """How an image becomes numbers: its side in pixels, and the mean and deviation that its colours are scaled by."""

    size: int
    mean: Sequence[float] = HALF
    std: Sequence[float] = HALF

    @classmethod
    def of(cls, model: str, size: int) -> ImageTransform:
        """As a model's folder says in its preprocessor_config.json, where there is one."""
        file = Path(model) / FILE
        if not file.is_file():
            return cls(size)
        said = json.loads(file.read_text(encoding="utf-8"))
        return cls(size, said.get("image_mean") or HALF, said.get("image_std") or HALF)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes it for an image processor of transformers: without the file, an exported model takes no image."""
        side = {"height": self.size, "width": self.size}
        said = {
            "image_processor_type": PROCESSOR, "do_resize": True, "size": side, "resample": BICUBIC,
            "do_rescale": True, "rescale_factor": 1 / 255,
            "do_normalize": True, "image_mean": list(self.mean), "image_std": list(self.std),
        }  # fmt: skip
        Path(folder, FILE).write_text(json.dumps(said, indent=2), encoding="utf-8")

    def __call__(self, image: Any) -> Tensor:
        """(channel, height, width) of an image of PIL."""
        pixels_HWC = numpy.asarray(image.convert("RGB").resize((self.size, self.size)), dtype=numpy.float32) / 255
        scaled_HWC = (pixels_HWC - numpy.asarray(self.mean, numpy.float32)) / numpy.asarray(self.std, numpy.float32)
        return torch.from_numpy(scaled_HWC.transpose(2, 0, 1).copy())


class ImageDataset(Dataset[dict[str, Any]]):
    """Images of files or of PIL, each with its class."""

    def __init__(self, images: Sequence[Any], labels: Sequence[int], look: ImageTransform) -> None:
        self._images, self._labels, self._look = images, labels, look

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self._images[index]
        if not isinstance(image, Path):
            return {"pixel_values": self._look(image), "labels": self._labels[index]}
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(image) as opened:
                pixels = self._look(opened)
        except (OSError, UnidentifiedImageError) as error:
            raise InputError(
                f"The image {str(image)!r} cannot be read: {error}",
                rule=f"A folder of images holds files of {', '.join(sorted(IMAGES))}",
                remedy="Take the file out of the folder",
            ) from error
        return {"pixel_values": pixels, "labels": self._labels[index]}


def as_image(value: Any) -> Any:
    """The image in a row: one of PIL, or the path of a file. Raises InputError for anything else."""
    if isinstance(value, str):
        return Path(value).expanduser()
    if not hasattr(value, "convert"):
        raise InputError(
            f"A row has {value!r:.60} as its image",
            rule="An image is a file, named by its path, or one that the library datasets has decoded",
            remedy="Correct data.image, or the rows",
        )
    return value


def list_images(names: Sequence[str]) -> tuple[list[Path], list[str]]:
    """(files, the class of each): a folder holds a folder for each class.

    Raises InputError where there is none.
    """
    files = sorted(
        file for name in names for file in Path(name).glob("*/*") if file.suffix.lower() in IMAGES and file.is_file()
    )
    if not files:
        raise InputError(
            f"There is no image in {', '.join(map(repr, names))}",
            rule="A folder of images holds a folder for each class, with its images",
            remedy="Correct data.train; or write data.format where it is of another form",
        )
    return files, [file.parent.name for file in files]


BYTES = "bytes"
PAD_TOKEN, MASK, NUM_BYTES = 256, 257, 258
"""Beside the 256 bytes: what stands for nothing (padding, the end of a text) and for what is masked."""
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer of transformers, or bytes where there is none.

    Args:
        name: for people.
        size: of the vocabulary.
        end, pad, mask: behind a text, beside it, and in the place of what is masked; None: there is no such token.
        tokenizer: None: bytes.
    """

    name: str = BYTES
    size: int = NUM_BYTES
    end: int | None = PAD_TOKEN
    pad: int = PAD_TOKEN
    mask: int | None = MASK
    tokenizer: Any = None

    def encode(self, text: str) -> list[int]:
        """A text as it is, however long."""
        if self.tokenizer is None:
            return list(text.encode())
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def encode_with_special_tokens(self, text: str, pair: str | None, most: int) -> dict[str, list[int]]:
        """A text, or two, as the model wants to see them: with tokens before and behind, and ``most`` in all."""
        if self.tokenizer is None:
            whole = text if pair is None else f"{text}\0{pair}"
            return {"input_ids": [*whole.encode()[: most - 1], PAD_TOKEN]}
        return dict(self.tokenizer(text, pair, truncation=True, max_length=most))

    @property
    def is_bytes(self) -> bool:
        return self.tokenizer is None


def load_tokenizer(name: str | None, model: str, *, random: bool, trust: bool = False) -> TextTokenizer:
    """The tokenizer of this name; None: the model's own, and bytes where its weights are random.

    ``trust``: whether Python that lies beside the model may run, for its own tokenizer.

    Raises ConfigError where there is none.
    """
    if name == BYTES or (name is None and random):
        return TextTokenizer()
    where = model if name is None else name
    transformers = load_transformers()

    folder = Path(where)
    if folder.is_dir() and not any((folder / file).is_file() for file in FILES):
        raise ConfigError(
            f"{where!r} has no tokenizer",
            rule=f"A tokenizer is a folder with one of {', '.join(FILES)}, or a name on the hub",
            remedy="Save the tokenizer beside the model, or write data.tokenizer = 'bytes' or another folder",
        )
    try:
        found = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=trust and where == model)
    except Exception as error:  # a file may hold anything, and so may its code
        raise ConfigError(
            f"The tokenizer {where!r} cannot be loaded: {first_line(error)}",
            remedy=remote_code_hint("Correct data.tokenizer", error) if where == model else "Correct data.tokenizer",
        ) from error
    pad = next((t for t in (found.pad_token_id, found.eos_token_id, found.unk_token_id) if t is not None), 0)
    end = found.eos_token_id if found.eos_token_id is not None else found.sep_token_id
    return TextTokenizer(where, len(found), end, pad, found.mask_token_id, found)


def concatenate_texts(texts: Sequence[str], tokens: TextTokenizer) -> list[int]:
    """All texts in a row, with the token for an end behind each but the last."""
    row: list[int] = []
    for number, text in enumerate(texts):
        if number and tokens.end is not None:
            row.append(tokens.end)
        row.extend(tokens.encode(text))
    return row


# B batch, S sequence

MASKED_SHARE, KEPT_SHARE, OTHER_SHARE = 0.15, 0.1, 0.1
"""Of the tokens of a sample; and of these, how many stay as they are, and how many become any other token (BERT)."""
IGNORED = -100


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """Stretches of a long row of tokens, one behind the other; what is left at its end is not used.

    Args:
        row: of tokens.
        length: of a stretch.
        task: "causal": the labels are the stretch, which the model shifts. "masked": 15 % of the tokens are to be
            guessed; which, is drawn anew each time. "sequence_to_sequence": the second half is to be written from the
            first.

    Raises InputError for a row shorter than a stretch.
    """

    def __init__(self, row: Sequence[int], length: int, task: str, tokens: TextTokenizer) -> None:
        if len(row) < length:
            raise InputError(
                f"The text has {len(row)} tokens ({tokens.name}), and a sample has data.sequence_length = {length}",
                remedy="Give a longer text, or a smaller data.sequence_length",
            )
        self._row, self._length, self._task, self._tokens = torch.tensor(row, dtype=torch.int32), length, task, tokens

    def __len__(self) -> int:
        return len(self._row) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids_S = self._row[index * self._length : (index + 1) * self._length].long()
        if self._task == "masked":
            return mask_tokens(ids_S, self._tokens)
        if self._task == "sequence_to_sequence":
            half = self._length // 2
            return {"input_ids": ids_S[:half], "labels": ids_S[half:]}
        return {"input_ids": ids_S, "labels": ids_S}


def mask_tokens(ids_S: Tensor, tokens: TextTokenizer) -> dict[str, Tensor]:
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


class TextDataset(Dataset[dict[str, Any]]):
    """Texts, or pairs of texts, each with its class or with the target text."""

    def __init__(
        self,
        texts: Sequence[str],
        labels: Sequence[int] | Sequence[str],
        tokens: TextTokenizer,
        most: int,
        pairs: Sequence[str] | None = None,
    ) -> None:
        self._texts, self._labels, self._tokens, self._most, self._pairs = texts, labels, tokens, most, pairs

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        label, pair = self._labels[index], self._pairs[index] if self._pairs is not None else None
        labels = (
            self._tokens.encode_with_special_tokens(label, None, self._most)["input_ids"]
            if isinstance(label, str)
            else label
        )
        return {**self._tokens.encode_with_special_tokens(self._texts[index], pair, self._most), "labels": labels}


@dataclass(frozen=True)
class PaddingCollator:
    """Samples of unlike lengths as a batch: ids with ``pad``, their mask with 0, labels with what does not count."""

    pad: int

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        fill = {"input_ids": self.pad, "labels": IGNORED}
        batch = {key: _pad_column([sample[key] for sample in samples], fill.get(key, 0)) for key in samples[0]}
        batch.setdefault("attention_mask", _pad_column([[1] * len(sample["input_ids"]) for sample in samples], 0))
        return batch


def _pad_column(values: Sequence[Any], fill: int) -> Tensor:
    if not isinstance(values[0], (list, Tensor)):
        return torch.tensor(values)
    rows = [torch.as_tensor(value) for value in values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def label_classes(labels: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
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


def encode_labels(labels: Sequence[Any], classes: Sequence[Any], is_validation: bool) -> list[int]:
    """Each label's place among the classes. Raises InputError for one that is not among them."""
    place = {name: number for number, name in enumerate(classes)}
    strange = next((label for label in labels if label not in place), None)
    if strange is not None:
        raise InputError(
            f"The {'validation' if is_validation else 'training'} data has the label {strange!r}",
            rule=f"The classes are those of the training data: {', '.join(map(str, classes[:8]))}",
            remedy="Leave such rows out, or add some to the training data",
        )
    return [place[label] for label in labels]


def check_mask(task: str, tokens: TextTokenizer) -> None:
    if task == "masked" and tokens.mask is None:
        raise ConfigError(
            f"model.task = 'masked' with the tokenizer {tokens.name!r}, which has no token for what is masked",
            remedy="Use the tokenizer of a masked language model, or 'bytes', or another task",
        )


IMAGE_SIZE = 224
"""Of a model whose config does not say."""


@dataclass(frozen=True, eq=False)
class TrainingData:
    """What a run is trained on.

    Args:
        title: for people.
        collate: samples -> batch; None: as ``ShardedDataLoader`` does it.
        tokens: None for images.
        classes: their names, where there are some.
        look: of images.
    """

    title: str
    train: Any
    validation: Any = None
    collate: Callable[[Sequence[Any]], Any] | None = None
    tokens: TextTokenizer | None = None
    classes: Sequence[Any] | None = None
    look: ImageTransform | None = None

    @property
    def beside(self) -> Any:
        """What an export has beside the model, to turn texts or images into its inputs; None for bytes."""
        return self.look if self.tokens is None else self.tokens.tokenizer


def load_data(config: TrainConfig, image_size: int | None = None, names: Sequence[str] = ()) -> TrainingData:
    """Reads the data that a config names.

    Args:
        image_size: the side of an image, if the model's config has it.
        names: of the model's classes, in its order. If the data has no others, they keep their numbers.

    Raises ConfigError and InputError for data that there are not, or that do not fit the task.
    """
    if config.model.task == "image_classification":
        return _image_data(config, image_size or IMAGE_SIZE, names)
    model = config.model
    tokens = load_tokenizer(config.data.tokenizer, model.name, random=model.random, trust=model.trust_remote_code)
    check_mask(config.model.task, tokens)
    if config.model.task == "classification":
        return _classified(config, tokens, names)
    made = [_language_modeling_data(config, tokens, validation=which) for which in _parts(config)]
    collate = PaddingCollator(tokens.pad) if isinstance(made[0], TextDataset) else None
    return TrainingData(_title(config), *_both(made), collate, tokens)


def _parts(config: TrainConfig) -> list[bool]:
    """Training data, and validation data where there are some."""
    has_validation = config.data.validation is not None or config.data.validation_split is not None
    return [False, True] if has_validation else [False]


def _title(config: TrainConfig) -> str:
    return ", ".join(names_of(config.data))


def _rows(config: TrainConfig, validation: bool) -> Any:
    data = config.data
    names = names_of(data, validation=validation)
    split = data.validation_split or data.split if validation else data.split
    kind = format_of(data, names)
    if kind in ("text", "images") and not (kind == "images" and config.model.task == "image_classification"):
        raise _no_rows(config.model.task, kind, names)
    return read_rows(data, kind, names, split)


def _no_rows(task: str, kind: str, names: Sequence[str]) -> ConfigError:
    what = f"model.task = {task!r} with {', '.join(map(repr, names))}, which is read as {kind}"
    if kind == "images":
        return ConfigError(
            what,
            rule="A folder is read as images, unless data.format says otherwise",
            remedy="Name the files in it, or write data.format = 'datasets' for a folder that save_to_disk wrote, or "
            "model.task = 'image_classification'",
        )
    if task == "image_classification":
        return ConfigError(
            what,
            rule="Images are in a folder with a folder for each class, or in rows that name their files and classes",
            remedy="Give such a folder, or rows in JSON lines or a data set",
        )
    return ConfigError(
        what,
        rule="This task needs rows with fields: a text and its class, or a text and its target",
        remedy="Give JSON lines or a data set; or, for plain text, use model.task = 'causal' or 'masked'",
    )


def _language_modeling_data(config: TrainConfig, tokens: TextTokenizer, *, validation: bool) -> Any:
    data, task = config.data, config.model.task
    names = names_of(data, validation=validation)
    if format_of(data, names) == "text":
        texts = read_texts(names)
    else:
        rows = _rows(config, validation)
        texts = texts_in(rows, data.text, "data.text")
        if task == "sequence_to_sequence":
            return TextDataset(texts, texts_in(rows, data.target, "data.target"), tokens, data.sequence_length)
    return TokenBlocks(concatenate_texts(texts, tokens), data.sequence_length, task, tokens)


def _classified(config: TrainConfig, tokens: TextTokenizer, names: Sequence[str]) -> TrainingData:
    data = config.data
    made: list[TextDataset] = []
    classes: list[Any] = []
    for validation in _parts(config):
        rows = _rows(config, validation)
        labels, own = labels_in(rows, data.label)
        classes = classes or label_classes(labels, _order(own, names))
        pairs = texts_in(rows, data.pair, "data.pair") if data.pair is not None else None
        numbers = encode_labels(labels, classes, validation)
        made.append(TextDataset(texts_in(rows, data.text, "data.text"), numbers, tokens, data.sequence_length, pairs))
    return TrainingData(_title(config), *_both(made), PaddingCollator(tokens.pad), tokens, classes)


def _both(made: Sequence[Any]) -> tuple[Any, Any]:
    """The training data, and the validation data or None."""
    return made[0], made[1] if len(made) > 1 else None


def _order(own: Sequence[str], names: Sequence[str]) -> Sequence[str]:
    """That of the data set's own classes, unless all of them are classes of the model, whose outputs have an order."""
    return names if not own or set(own) <= set(names) else own


def _image_data(config: TrainConfig, size: int, known: Sequence[str]) -> TrainingData:
    data, look = config.data, ImageTransform.of(config.model.name, size)
    made: list[ImageDataset] = []
    classes: list[Any] = []
    for validation in _parts(config):
        names = names_of(data, validation=validation)
        if data.format == "datasets" or not Path(names[0]).is_dir():
            rows = _rows(config, validation)
            images: Sequence[Any] = [as_image(each) for each in column(rows, data.image, "data.image")]
            labels, own = labels_in(rows, data.label)
        else:
            images, labels = list_images(names)
            own = []
        classes = classes or label_classes(labels, _order(own, known))
        made.append(ImageDataset(images, encode_labels(labels, classes, validation), look))
    return TrainingData(_title(config), *_both(made), None, None, classes, look)
