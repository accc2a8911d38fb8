"""Reads the file of a run, and says in four parts what cannot be in it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from shardformer.errors import ConfigError, nearest
from shardformer.runs.config import RunConfig


def read_config(file: str | Path, changes: Sequence[str] = ()) -> RunConfig:
    """The run that a TOML file says.

    Args:
        changes: keys that are to have another value, as ``parallel.tensor=2``; the value is written as in TOML, and
            what is not TOML is a word.

    Raises ConfigError for a file that cannot be read, and for what cannot be in it.
    """
    path = Path(file)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe: each process reads it, and would wait
            raise OSError("it is no regular file")
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        near = nearest(path.name, (other.name for other in path.absolute().parent.glob("*.toml")))
        raise ConfigError(
            f"The config {str(file)!r} cannot be read: {error.strerror or error}",
            rule="A run is said by a file in TOML",
            remedy=near if near.startswith("Did") else "Correct the path",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"The config {str(file)!r} is no TOML: {error}",
            rule='A table begins with its name in brackets, and holds lines such as steps = 100 or name = "gpt2"',
            remedy="Correct the line",
        ) from error
    for change in changes:
        _change(said, change)
    return config_of(said, str(file))


def config_of(said: dict[str, Any], where: str) -> RunConfig:
    """The run that these tables say; ``where`` they stand is for errors."""
    try:
        return RunConfig.model_validate(said)
    except ValidationError as error:
        raise _in_four_parts(error, where) from error


def _change(said: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    *tables, name = (part.strip() for part in key.split("."))
    if not equals or not name or not all(tables):
        raise ConfigError(
            f"--set {change}", rule="A change is a key and its value", remedy="Write it as --set parallel.tensor=2"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = said
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"--set {change}", rule=f"{part} is no table in the file", remedy=f"Write [{part}] in the file"
            )
    table[name] = value


def _in_four_parts(error: ValidationError, where: str) -> ConfigError:
    """The first of what pydantic found, with the key as it stands in the file, and the names that there are."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    table, name = _table_at(place), place[-1]
    key = ".".join(_without_unions(place))
    if first["type"] == "extra_forbidden":
        return ConfigError(
            f"{where} has {key} = {first['input']!r:.80}",
            rule=f"There is no such key in {'the file' if len(place) == 1 else place[-2]}",
            remedy=nearest(name, table.model_fields if table is not None else ()),
        )
    if first["type"] == "missing":
        return ConfigError(
            f"{where} does not say {key}",
            rule=_said_of(table, name) or "Every run says it",
            remedy=f"Write {name} in [{'.'.join(place[:-1])}]" if len(place) > 1 else f"Write a table [{name}]",
        )
    found = first["input"]
    here = [e["msg"] for e in error.errors() if _without_unions(map(str, e["loc"])) == _without_unions(place)]
    known = str(first.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
    said = _said_of(table, name)
    return ConfigError(
        f"{where} has {key} = {found!r:.80}",
        rule="; or ".join(dict.fromkeys(here)) + (f". {said}" if said else ""),
        remedy=nearest(str(found), known) if first["type"] == "literal_error" else "Correct the value",
    )


def _without_unions(place: Iterable[str]) -> list[str]:
    """A place without the names of types, which pydantic puts behind the key of a union."""
    return [part for part in place if part.replace("_", "").isalnum() and part not in ("str", "int", "bool", "float")]


def _table_at(place: Sequence[str]) -> type[BaseModel] | None:
    table: Any = RunConfig
    for part in place[:-1]:
        field = getattr(table, "model_fields", {}).get(part)
        if field is None:
            return None
        kinds: list[Any] = [field.annotation, *get_args(field.annotation)]
        table = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return table  # type: ignore[no-any-return]


def _said_of(table: type[BaseModel] | None, name: str) -> str:
    field = table.model_fields.get(name) if table is not None else None
    return (field.description or "").replace("`", "'").rstrip(".") if field is not None else ""
