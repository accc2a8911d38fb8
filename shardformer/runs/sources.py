"""Reads what a run is trained on: texts, lines of JSON, data sets of the library ``datasets``, folders of images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardformer.errors import ConfigError, InputError, first_line, nearest
from shardformer.runs.config import DataTable

SUFFIXES = {".txt": "text", ".md": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
TABLES = {".csv", ".tsv", ".parquet", ".arrow", ".xlsx"}
_CONVERT = (
    "Convert it to JSON lines: pandas.read_csv(file).to_json('data.jsonl', orient='records', lines=True, "
    "force_ascii=False), or read_parquet"
)
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
Rows = Sequence[Mapping[str, Any]]


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
            rule="Files of text and of JSON are read as UTF-8",
            remedy="Convert it, for example with iconv --from-code LATIN1 --to-code UTF-8",
        ) from error
    except OSError as error:
        raise _unreadable(name, error.strerror or str(error)) from error


def read_rows(data: DataTable, kind: str, names: Sequence[str], split: str) -> Rows:
    """The rows of files of JSON, or of a data set."""
    return _read_files(names) if kind == "jsonl" else _read_datasets(names, split)


def column(rows: Rows, name: str, key: str) -> list[Any]:
    """The values under one name. Raises InputError for a row that has none; ``key`` of the config says the name."""
    for number, row in enumerate(rows):
        if row.get(name) is None:
            is_there = name in row
            raise InputError(
                f"Row {number + 1} of the data has {'nothing (null) as' if is_there else 'no'} {name!r}",
                rule=f"{key} = {name!r} says which field is read, and every row has it",
                remedy="Correct that row, or leave it out" if is_there else nearest(name, map(str, row)),
            )
    return [row[name] for row in rows]


def texts_in(rows: Rows, name: str, key: str) -> list[str]:
    """The texts under one name. Raises InputError for a row that has none, or something else."""
    values = column(rows, name, key)
    for number, value in enumerate(values):
        if not isinstance(value, str):
            raise InputError(
                f"Row {number + 1} of the data has {value!r:.60} as {name!r}, which is not a text",
                rule=f"{key} = {name!r} says which field holds the text, a string",
                remedy=f"Write such values as strings, or name another field with {key}",
            )
    return values


def labels_in(rows: Rows, name: str) -> tuple[list[Any], list[str]]:
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


def _read_datasets(names: Sequence[str], split: str) -> Rows:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"data.format = 'datasets' for {names[0]!r}, and the library datasets is not installed",
            rule="Data sets of the hub, and those that save_to_disk wrote, are read by it",
            remedy="pip install 'shardformer[data]', or give files",
        ) from error
    if len(names) > 1:
        raise ConfigError(
            f"data.train names {len(names)} data sets", rule="One is read", remedy="Join them, and give one"
        )
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
    rows: Rows = found
    if not len(rows):
        raise InputError(f"The data set {name!r} has no row", rule="Data has rows", remedy="Correct data.split")
    return rows


def _unreadable(name: str, why: str) -> InputError:
    folder = Path(name).absolute().parent
    others = [other.name for other in folder.glob("*") if other.name != Path(name).name] if folder.is_dir() else []
    near = nearest(Path(name).name, others)
    return InputError(
        f"The data {name!r} cannot be read: {why}",
        rule="data.train and data.validation name files that are there",
        remedy=near if near.startswith("Did") else "Correct the path",
    )
