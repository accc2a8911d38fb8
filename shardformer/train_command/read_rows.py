"""Reads training and validation data from files, Hugging Face data sets and image folders."""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any, cast

import torch

from shardformer.errors import (
    ConfigError,
    InputError,
    get_first_message_line,
    import_optional_module,
    suggest_similar_names,
)
from shardformer.train_command.config_schema import DataOptions, TrainConfig

SUFFIXES = {".txt": "text", ".md": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
SUFFIXES |= {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
TABLES = {".arrow", ".xlsx"}
_CONVERT = (
    "Convert the file to JSON lines, with pandas.read_excel(file) or pandas.read_feather(file), followed by "
    ".to_json('data.jsonl', orient='records', lines=True, force_ascii=False)"
)
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
CHECKED_BYTES = 2**20
"""Number of bytes at the start and the end of a file that its checksum covers."""
DatasetRows = Sequence[Mapping[str, Any]]


def get_data_source_names(data_options: DataOptions, *, is_validation: bool = False) -> list[str]:
    """Return the names of the files, folders or data sets that the configuration lists as training data.

    With ``is_validation``, return those of the validation data, if the configuration lists any.
    """
    settings = data_options.validation if is_validation and data_options.validation is not None else data_options.train
    return [settings] if isinstance(settings, str) else list(settings)


def expand_file_patterns(path_patterns: Sequence[str]) -> list[str]:
    """Replace file patterns such as ``data/*.parquet`` with the matching files in alphabetical order."""
    return [
        file
        for name in path_patterns
        for file in (not os.path.exists(name) and sorted(glob(name, recursive=True))) or [name]
    ]


def compute_file_checksums(data_options: DataOptions) -> dict[str, int]:
    """Return a checksum for each data file, computed from its size, its first and its last bytes."""
    found = {}
    names = [*get_data_source_names(data_options), *get_data_source_names(data_options, is_validation=True)]
    for name in dict.fromkeys(expand_file_patterns(names)):
        with suppress(OSError), open(name, "rb") as file:  # other names are folders and data sets
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            start = file.read(CHECKED_BYTES)
            file.seek(max(size - CHECKED_BYTES, 0))
            found[name] = zlib.crc32(start + file.read() + str(size).encode())
    return found


def read_data_sources(config: TrainConfig, *, is_validation: bool) -> list[DatasetRows]:
    """Read the training or validation data, and return a list with the rows of each data source.

    With ``data.weights``, each item of ``data.train`` is a source. Otherwise, all items together are one source. With
    ``data.validation_fraction``, the rows of each source are split into training and validation rows.

    Raises:
        ConfigError: The data does not exist, or the task does not support its format.
        InputError: The content of the data is invalid.
    """
    data = config.data
    names = get_data_source_names(data, is_validation=is_validation)
    is_weighted = data.weights is not None and (not is_validation or data.validation is None)
    groups = [[name] for name in names] if is_weighted else [names]
    found = [_read_rows(config, group, is_validation) for group in groups]
    if data.validation_fraction is None:
        return found
    return [split_rows(rows, data.validation_fraction, config.seed)[is_validation] for rows in found]


def _read_rows(config: TrainConfig, source_names: Sequence[str], is_validation: bool) -> DatasetRows:
    data, task = config.data, config.model.task
    data_format = infer_data_format(data, source_names)
    source_names = expand_file_patterns(source_names)
    if data.streaming and data_format in ("text", "images"):
        file_names = ", ".join(map(repr, source_names))
        raise ConfigError(
            f"data.streaming = true does not support {file_names}, which has the format {data_format}.",
            remedy="Remove data.streaming, or convert the data to JSON lines, csv, parquet or a Hugging Face data set.",
        )
    is_language_task = task in ("causal", "masked", "sequence_to_sequence")
    if (data_format == "text" and not is_language_task) or (data_format == "images" and task != "image_classification"):
        raise _make_unsupported_format_error(task, data_format, source_names)
    if data_format == "text":
        return [{data.text: text} for text in read_text_files(source_names)]
    if data_format == "images":
        files, classes = find_images_and_class_names(source_names)
        return [{data.image: str(file), data.label: name} for file, name in zip(files, classes, strict=True)]
    if data_format == "jsonl" and not data.streaming:
        return _read_json_rows(source_names)
    if data_format == "csv" and not data.streaming:
        rows = [row for name in source_names for row in _read_csv_rows(name, data.delimiter)]
        return _try_convert_column_to_numbers(rows, data.label, float if task == "regression" else int)
    split = data.validation_split or data.split if is_validation and data.validation_fraction is None else data.split
    if data_format == "datasets":
        return _load_hugging_face_dataset(data, source_names, split)
    return _load_data_files(data, data_format, source_names)


def split_rows(rows: DatasetRows, validation_fraction: float, seed: int) -> tuple[DatasetRows, DatasetRows]:
    """Split rows at random into training rows and validation rows, and keep the original order in both parts.

    ``validation_fraction`` is the share of validation rows. A single text is split at a line break or space, and its
    end is the validation text.
    """
    if len(rows) == 1 and [type(value) for value in rows[0].values()] == [str]:
        ((field, text),) = rows[0].items()
        end = int(len(text) * (1 - validation_fraction))
        end = max(text.rfind("\n", 0, end), text.rfind(" ", 0, end)) + 1 or end
        return [{field: text[:end]}], [{field: text[end:]}]
    count = max(1, round(len(rows) * validation_fraction))
    if count >= len(rows):
        raise InputError(
            f"data.validation_fraction = {validation_fraction} leaves none of the {len(rows)} rows for training.",
            remedy="Decrease data.validation_fraction, or use more data.",
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    return _select_rows(rows, sorted(order[count:])), _select_rows(rows, sorted(order[:count]))


def _select_rows(rows: DatasetRows, indices: Sequence[int]) -> DatasetRows:
    if hasattr(rows, "select"):  # a data set of the library keeps its features and reads rows when they are used
        selected: DatasetRows = rows.select(indices)
        return selected
    return [rows[index] for index in indices]


def infer_data_format(data_options: DataOptions, source_names: Sequence[str]) -> str:
    """Return the format of the data from the configuration, or infer it from the file names."""
    found_format = data_options.format or _infer_format_from_names(source_names)
    if data_options.delimiter is not None and found_format != "csv":
        raise ConfigError(
            f"data.delimiter = {data_options.delimiter!r} has no effect, because the data has the format "
            f"{found_format}.",
            remedy="Remove data.delimiter, or set data.format = 'csv'.",
        )
    return found_format


def _infer_format_from_names(source_names: Sequence[str]) -> str:
    found = {"images" if Path(name).is_dir() else SUFFIXES.get(Path(name).suffix.lower(), "") for name in source_names}
    if len(found) == 1 and "" not in found:
        return found.pop()
    file_names = ", ".join(map(repr, source_names))
    raise ConfigError(
        f"Cannot infer the data format of {file_names} from the file extension.",
        remedy=_CONVERT
        if any(Path(name).suffix.lower() in TABLES for name in source_names)
        else "Set data.format = 'text', 'jsonl', 'csv', 'parquet', 'datasets' or 'images'",
    )


def read_text_files(file_paths: Sequence[str]) -> list[str]:
    """Read text files, or raise InputError if a file is empty or cannot be read."""
    texts = [_read_text_file(name) for name in file_paths]
    for name, text in zip(file_paths, texts, strict=True):
        if not text.strip():
            raise InputError(f"The file {name!r} is empty.", remedy="Specify a file that contains text.")
    return texts


def _read_text_file(file_path: str) -> str:
    """Read a UTF-8 text file, and skip its byte order mark if it has one."""
    try:
        return Path(file_path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        code = "UTF-16" if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        raise InputError(
            f"The file {file_path!r} is not valid UTF-8: {error.reason} at byte {error.start}.",
            remedy=f"Convert the file, for example with iconv --from-code {code} --to-code UTF-8.",
        ) from error
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"The file {file_path!r} cannot be read: {reason}.", remedy=_suggest_similar_path(Path(file_path))
        ) from error


def _suggest_similar_path(path: Path) -> str:
    near = suggest_similar_names(path.name, (p.name for p in path.absolute().parent.glob("*") if p.name != path.name))
    return near if near.startswith("Did") else "Check the path"


def get_column_values(rows: DatasetRows, column_name: str) -> list[Any]:
    """Return the value of a field in each row, or raise InputError if a row does not have the field."""
    for index, row in enumerate(rows):
        if row.get(column_name) is None:
            if column_name in row:
                what = f"The field {column_name!r} is null in row {index + 1} of the data."
                raise InputError(what, remedy="Set a value in the field, or remove the row.")
            remedy = suggest_similar_names(column_name, map(str, row))
            raise InputError(f"Row {index + 1} of the data has no field {column_name!r}.", remedy=remedy)
    return [row[column_name] for row in rows]


def get_text_column(rows: DatasetRows, column_name: str, config_key: str) -> list[str]:
    """Return the value of a text field in each row, or raise InputError if a value is not a string.

    ``config_key`` is the configuration key that selects the field. The error mentions it.
    """
    values = get_column_values(rows, column_name)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise InputError(
                f"The field {column_name!r} must be a string, but row {index + 1} of the data has {value!r:.60}.",
                remedy=f"Convert the values to strings, or set {config_key} to another field.",
            )
    return values


def get_number_column(rows: DatasetRows, column_name: str, config_key: str) -> list[float]:
    """Return the value of a numeric field in each row, or raise InputError if a value is not a finite number."""
    values = get_column_values(rows, column_name)
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InputError(
                f"The field {column_name!r} must be a finite number, but row {index + 1} of the data has "
                f"{value!r:.60}.",
                remedy=f"Fix the data, or set {config_key} to another field.",
            )
    return [float(value) for value in values]


def get_word_list_column(rows: DatasetRows, column_name: str, config_key: str) -> list[list[str]]:
    """Return the list of words in each row, or raise InputError if a value is not a list of words."""
    values = get_column_values(rows, column_name)
    for index, value in enumerate(values):
        if not isinstance(value, (list, tuple)) or not value or not all(isinstance(word, str) for word in value):
            raise InputError(
                f"The field {column_name!r} must be a list of words, but row {index + 1} of the data has "
                f"{value!r:.60}.",
                remedy=f"Set {config_key} to the field that contains the words, such as 'tokens'.",
            )
    return [list(value) for value in values]


def get_label_column(rows: DatasetRows, column_name: str) -> tuple[list[Any], list[str]]:
    """Return the label of each row, and the class names if the data set defines them with ``ClassLabel``.

    Labels of the type ``ClassLabel``, or lists of such labels, are returned as class names.
    """
    labels = get_column_values(rows, column_name)
    if "" in labels:
        number = labels.index("") + 1
        raise InputError(
            f"Row {number} of the data has an empty label in the field {column_name!r}.",
            remedy="Set a label, or remove the row.",
        )
    feature = (getattr(rows, "features", None) or {}).get(column_name)
    names = getattr(getattr(feature, "feature", feature), "names", None)
    if names is None:
        return labels, []

    def get_class_name(label: Any) -> Any:
        if isinstance(label, (list, tuple)):
            return [get_class_name(each) for each in label]
        return names[label] if isinstance(label, int) and 0 <= label < len(names) else label

    return [get_class_name(label) for label in labels], [*names]


def _read_json_rows(file_paths: Sequence[str]) -> list[Mapping[str, Any]]:
    """Read rows from JSON files, which contain either one list of objects or one object per line."""
    rows: list[Mapping[str, Any]] = []
    for name in file_paths:
        text = _read_text_file(name)
        with suppress(ValueError):
            found = json.loads(text) if text.lstrip().startswith("[") else None
            if isinstance(found, list) and all(isinstance(row, dict) for row in found):
                rows += found
                continue
        # splitlines would also split at other characters, which a text may contain
        rows += [_parse_json_row(name, n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not rows:
        file_names = ", ".join(file_paths)
        raise InputError(f"The data {file_names} contains no rows.", remedy="Specify a file that contains rows.")
    return rows


def _parse_json_row(file_path: str, line_number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"expected an object, but got a {type(row).__name__}")
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"Line {line_number} of {file_path} is not a JSON object ({error}): {line!r:.60}.",
            remedy='Write one object per line, such as {"text": "words"}, or one list of objects in the whole file. If '
            "the file is not JSON, set data.format.",
        ) from error
    return row


def _try_convert_column_to_numbers(rows: list[dict[str, str]], column_name: str, number_type: type) -> DatasetRows:
    """Convert a field to ``number_type`` in all rows, or return the rows unchanged if a value is not a number."""
    try:
        return [{**row, column_name: number_type(row[column_name])} for row in rows]
    except (KeyError, ValueError):
        return rows


def _get_csv_delimiter(file_path: str, delimiter: str | None) -> str:
    return delimiter or ("\t" if file_path.lower().endswith(".tsv") else ",")


def _read_csv_rows(file_path: str, delimiter: str | None) -> list[dict[str, str]]:
    """Read a csv file, and return each row as a dict from field names to strings."""
    separator = _get_csv_delimiter(file_path, delimiter)
    csv.field_size_limit(2**30)
    lines = io.StringIO(_read_text_file(file_path), newline="")
    if separator == "\t":  # quotes are part of the text, as in most data sets
        found = list(csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_NONE))
    else:
        found = list(csv.reader(lines, delimiter=separator))
    fields, rows = (found[0], [row for row in found[1:] if row]) if found else ([], [])
    if not rows:
        raise InputError(
            f"The csv file {file_path!r} contains no rows.",
            remedy="Write the field names in the first line, and one row in each following line.",
        )
    duplicate = next((name for name in fields if fields.count(name) > 1), None)
    if duplicate is not None:
        raise InputError(
            f"The first line of {file_path!r} contains the field name {duplicate!r} more than once.",
            remedy="Rename or remove one of these fields.",
        )
    for number, row in enumerate(rows, start=1):
        if len(row) != len(fields):
            raise InputError(
                f"Row {number} of {file_path!r} has {len(row)} fields, but the first line has {len(fields)}: "
                f"{row!r:.60}.",
                remedy=f"Fix the row, or set data.delimiter if the fields are not separated by {separator!r}.",
            )
    return [dict(zip(fields, row, strict=True)) for row in rows]


def _load_hugging_face_dataset(data_options: DataOptions, dataset_names: Sequence[str], split: str) -> DatasetRows:
    """Load a Hugging Face data set from the hub, or from a folder that ``save_to_disk`` wrote."""
    datasets = _import_datasets_library("data.format = 'datasets'", dataset_names)
    if len(dataset_names) > 1:
        raise ConfigError(
            f"data.train contains {len(dataset_names)} data sets, but data.weights is not set.",
            remedy="Set data.weights, for example to [1, 1], or use only one data set.",
        )
    name = dataset_names[0]
    try:
        if any((Path(name) / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
            found: Any = datasets.load_from_disk(name)
            rows: Any = found[split] if isinstance(found, dict) else found
            rows = rows.to_iterable_dataset() if data_options.streaming else rows
        else:
            path, _, configuration = name.partition(":")
            rows = datasets.load_dataset(
                path, configuration or None, split=split, streaming=data_options.streaming, **data_options.options
            )
    except (OSError, ValueError, KeyError, TypeError) as error:  # errors of the library for missing data
        reason = get_first_message_line(error)
        raise ConfigError(
            f"The data set {name!r} cannot be loaded: {reason}.",
            remedy="Set data.train to a name on the Hugging Face hub, such as imdb or glue:mrpc, or to a folder that "
            "save_to_disk wrote. Also check data.split and data.options.",
        ) from error
    _check_has_rows(rows, f"The split {split!r} of the data set {name!r}", "data.split")
    return cast(DatasetRows, rows)


def _load_data_files(data_options: DataOptions, data_format: str, file_paths: Sequence[str]) -> DatasetRows:
    """Read parquet files, or stream csv and JSON Lines files, with the ``datasets`` library."""
    datasets = _import_datasets_library(f"The format {data_format!r}", file_paths)
    missing = next((name for name in file_paths if "://" not in name and not Path(name).is_file()), None)
    if missing is not None:
        raise InputError(f"The file {missing!r} does not exist.", remedy=_suggest_similar_path(Path(missing)))
    options = dict(data_options.options)
    if data_format == "csv":
        separator = _get_csv_delimiter(file_paths[0], data_options.delimiter)
        options |= {"sep": separator, **({"quoting": csv.QUOTE_NONE} if separator == "\t" else {})}
    builder = {"jsonl": "json"}.get(data_format, data_format)
    try:
        rows = datasets.load_dataset(
            builder, data_files=list(file_paths), split="train", streaming=data_options.streaming, **options
        )
        if data_options.streaming:
            rows = _RowStreamRaisingInputError(rows, file_paths, data_format)
            next(iter(rows), None)
    except InputError:
        raise
    except Exception as error:  # pandas, pyarrow and the library raise different errors
        raise _make_unreadable_data_error(file_paths, data_format, error) from error
    _check_has_rows(rows, f"The data {', '.join(file_paths)}", "data.train")
    return cast(DatasetRows, rows)


def _make_unreadable_data_error(source_names: Sequence[str], data_format: str, exception: Exception) -> InputError:
    files = [Path(name) for name in source_names]
    file_names, reason = ", ".join(map(repr, source_names)), get_first_message_line(exception.__cause__ or exception)
    if all(file.is_file() and not file.stat().st_size for file in files) or "BatchSize must be" in str(exception):
        return InputError(f"The data {file_names} contains no rows.", remedy="Specify a file that contains rows.")
    return InputError(
        f"The data {file_names} cannot be read as {data_format}: {reason}.",
        remedy="Fix the file, or set data.format, data.delimiter or data.options.",
    )


@dataclass
class _RowStreamRaisingInputError:
    """Stream of rows that raises InputError if the ``datasets`` library cannot read a row."""

    rows: Any
    source_names: Sequence[str]
    data_format: str

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.rows
        except Exception as error:
            raise _make_unreadable_data_error(self.source_names, self.data_format, error) from error

    def shuffle(self, seed: int) -> _RowStreamRaisingInputError:
        return replace(self, rows=self.rows.shuffle(seed=seed))

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)


def _import_datasets_library(purpose: str, source_names: Sequence[str]) -> Any:
    datasets = import_optional_module(
        "datasets", f"{purpose}, to read {source_names[0]!r},", "data", "convert the data to JSON lines"
    )
    datasets.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # its errors are raised too
    return datasets


def _check_has_rows(rows: Any, source_description: str, config_key: str) -> None:
    if hasattr(rows, "__len__") and not len(rows):
        raise InputError(
            f"{source_description} contains no rows.", remedy=f"Change {config_key} to select at least one row."
        )


def interleave_streams(streams: Sequence[Iterable[Any]], weights: Sequence[float], seed: int) -> Iterable[Any]:
    """Mix several streams by drawing each row from a random stream, with probabilities proportional to ``weights``."""
    import datasets

    total = sum(weights)
    mixed: Iterable[Any] = datasets.interleave_datasets(
        [getattr(stream, "rows", stream) for stream in streams],
        [weight / total for weight in weights],
        seed=seed,
        stopping_strategy="all_exhausted",
    )
    return mixed


def convert_image_to_path_or_pil(image: Any) -> Any:
    """Convert a file name to a path, and return a PIL image unchanged. Raises InputError for other types."""
    if isinstance(image, str):
        return Path(image).expanduser()
    if hasattr(image, "convert"):
        return image
    raise InputError(
        f"Each image must be a file path or a PIL image, but got {image!r:.60}.",
        remedy="Fix the rows, or set data.image to the field that contains the images.",
    )


def find_images_and_class_names(folders: Sequence[str]) -> tuple[list[Path], list[str]]:
    """List the images in folders with one subfolder per class, and return the class name of each image."""
    files = sorted(
        file for name in folders for file in Path(name).glob("*/*") if file.suffix.lower() in IMAGES and file.is_file()
    )
    if not files:
        folder_names = ", ".join(map(repr, folders))
        raise InputError(
            f"No images were found in the subfolders of {folder_names}.",
            remedy="Use one subfolder of images per class, or set data.format if the folder contains other data.",
        )
    return files, [file.parent.name for file in files]


def _make_unsupported_format_error(task: str, data_format: str, source_names: Sequence[str]) -> ConfigError:
    rule, file_names = "", ", ".join(map(repr, source_names))
    if data_format == "images":
        rule = "A folder is read as images unless data.format is set"
        remedy = (
            "Specify the files in the folder, or set data.format = 'datasets' for a folder that save_to_disk wrote, "
            "or model.task = 'image_classification' for images"
        )
    elif task == "image_classification":
        remedy = (
            "Specify a folder with one subfolder of images per class, or JSON lines or a data set with an image and a "
            "class in each row"
        )
    else:
        rule = "This task requires rows that contain a text and its class or target"
        remedy = "Specify JSON lines or a data set. To train on plain text, set model.task = 'causal' or 'masked'"
    return ConfigError(
        f"model.task = {task!r} does not support the data {file_names}, which has the format {data_format}.",
        rule=rule,
        remedy=remedy,
    )
