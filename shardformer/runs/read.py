"""Reads the file of a run, and says in four parts what cannot be in it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from shardformer.errors import ConfigError, nearest
from shardformer.runs.config import RunConfig

OF_TRAINER = {
    "adam_beta1": ["optimizer.betas"],
    "adam_beta2": ["optimizer.betas"],
    "adam_epsilon": ["optimizer.eps"],
    "bf16": ["parallel.precision = 'bf16'"],
    "dataloader_drop_last": ["data.drop_last"],
    "dataloader_num_workers": ["data.workers"],
    "eval_steps": ["training.validate_every"],
    "fp16": ["parallel.precision = 'fp16'"],
    "gradient_accumulation_steps": ["parallel.micro_batches", "parallel.micro_batch_size"],
    "gradient_checkpointing": ["parallel.checkpoint_layers, with parallel.pipe = 2 or more"],
    "learning_rate": ["optimizer.lr"],
    "lr_scheduler_type": ["schedule.name"],
    "max_length": ["data.sequence"],
    "max_seq_length": ["data.sequence"],
    "max_steps": ["training.steps"],
    "num_train_epochs": ["training.epochs"],
    "optim": ["optimizer.name"],
    "output_dir": ["folder, above all tables"],
    "per_device_train_batch_size": ["data.batch_size, which counts the samples of all processes"],
    "save_steps": ["hooks.checkpoint.every_steps"],
    "save_total_limit": ["hooks.checkpoint.keep"],
    "warmup_ratio": ["schedule.warmup, below 1"],
    "warmup_steps": ["schedule.warmup"],
}
"""What ``TrainingArguments`` of transformers calls a key -> what it is here."""


def read_config(file: str | Path, changes: Sequence[str] = ()) -> RunConfig:
    """The run that a TOML file says.

    Args:
        changes: keys that are to have another value, as ``parallel.tensor=2``; the value is written as in TOML, and
            what is not TOML is a word. ``training.epochs=`` removes a key.

    Raises ConfigError for a file that cannot be read, and for what cannot be in it.
    """
    path = Path(file)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe: each process reads it, and would wait
            raise OSError("it is no regular file")
        said = tomllib.loads(path.read_text(encoding="utf-8-sig"))
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
    if text.strip():
        table[name] = value
    else:
        table.pop(name, None)


def _in_four_parts(error: ValidationError, where: str) -> ConfigError:
    """The first of what pydantic found, with the key as it stands in the file, and the names that there are."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    table, name = _table_at(place), place[-1]
    key = ".".join(_without_unions(place))
    if first["type"] == "extra_forbidden":
        return ConfigError(
            f"{where} has {key} = {first['input']!r:.80}",
            rule=f"There is no such key in {'the file' if len(place) == 1 else f'[{place[-2]}]'}",
            remedy=_meant(name, table),
        )
    if first["type"] == "missing":
        return ConfigError(
            f"{where} does not say {key}",
            rule=_said_of(table, name) or "Every run says it",
            remedy=f"Write {name} in [{'.'.join(place[:-1])}]" if len(place) > 1 else f"Write a table [{name}]",
        )
    found = first["input"]
    here = [
        e["msg"].removeprefix("Value error, ")
        for e in error.errors()
        if _without_unions(map(str, e["loc"])) == _without_unions(place)
    ]
    known = str(first.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
    said = _said_of(table, name)
    return ConfigError(
        f"{where} has {key} = {found!r:.80}",
        rule="; or ".join(dict.fromkeys(here)) + (f". {said}" if said else ""),
        remedy=nearest(str(found), known) if first["type"] == "literal_error" else _value_for(first),
    )


def _value_for(error: Mapping[str, Any]) -> str:
    """What to write in the place of a value that pydantic refuses."""
    limits = error.get("ctx", {})
    for name, words in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if name in limits:
            return f"Write a number of {words} {limits[name]}"
    of_type = {
        "int_type": "Write a whole number, without quotes and without a point",
        "float_type": "Write a number, without quotes",
        "bool_type": "Write true or false, without quotes",
        "string_type": "Write it in quotes",
    }
    return of_type.get(error["type"], "Correct the value")


def _meant(name: str, table: type[BaseModel] | None) -> str:
    """Where a key is that stands in the wrong table, or that the Trainer of transformers calls so."""
    tables = {key: _table_at([key, ""]) for key in RunConfig.model_fields}
    every = [f"{key}.{field}" for key, each in tables.items() if each is not None for field in each.model_fields]
    places = OF_TRAINER.get(name, [key for key in (*RunConfig.model_fields, *every) if key.rpartition(".")[2] == name])
    if places:
        return f"Write it as {' or '.join(places)}"
    if table is RunConfig:
        near = nearest(name, [*RunConfig.model_fields, *every])
        return f"{near} A key is under the name of its table, as [data] or data.batch_size"
    return nearest(name, table.model_fields if table is not None else ())


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
