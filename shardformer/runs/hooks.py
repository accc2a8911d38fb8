"""The hooks that a run's config names."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import traceback
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from shardformer.errors import ConfigError, first_line, nearest
from shardformer.runs.config import RunConfig
from shardformer.runs.updates import check_arguments
from shardformer.trainer import hooks as included
from shardformer.trainer.hook import Hook

DEFAULTS = ("throughput", "progress", "json_lines", "checkpoint")
LAST = ("progress", "json_lines", "tensor_board", "checkpoint")
"""Those that write what others have measured."""
FOLDERS = {"json_lines": ".", "checkpoint": "checkpoints"}
"""Inside of the run's folder; of any other hook with a folder it has the name of the hook."""


def key_of(name: str) -> str:
    """``EarlyStopping`` as ``early_stopping``, as the config has it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


KNOWN = {key_of(name): getattr(included, name) for name in included.__all__}


def hooks_of(config: RunConfig) -> list[Hook]:
    """Those that measure before those that write.

    Raises ConfigError for a hook that there is not, and for an argument that it does not take.
    """
    said: dict[str, Any] = {**dict.fromkeys(DEFAULTS, True), **config.hooks}
    wanted = {name: arguments for name, arguments in said.items() if arguments is not False}
    order = sorted(wanted, key=lambda name: LAST.index(name) if name in LAST else -1)
    return [_made(config, name, {} if wanted[name] is True else wanted[name]) for name in order]


def _made(config: RunConfig, name: str, arguments: dict[str, Any]) -> Hook:
    kind = _kind(name)
    if "folder" in inspect.signature(kind).parameters:
        arguments = {"folder": str(config.path / FOLDERS.get(name, name)), **arguments}
    check_arguments(kind, arguments, f"hooks.{name}")
    _check_types(kind, arguments, f"hooks.{name}")
    arguments = dict(arguments)
    if isinstance(folder := arguments.get("folder"), str):
        arguments["folder"] = os.path.expanduser(folder)
    several = [p.name for p in inspect.signature(kind).parameters.values() if p.kind is p.VAR_POSITIONAL]
    given = [value for name in several for value in arguments.pop(name, ())]
    hook: Hook = kind(*given, **arguments)
    return hook


def _check_types(kind: Any, arguments: dict[str, Any], where: str) -> None:
    """Raises ConfigError for a value that is not of the type that the class declares, where it declares one."""
    parameters = inspect.signature(kind).parameters
    for argument, value in arguments.items():
        try:
            adapter = TypeAdapter(get_type_hints(kind.__init__)[argument])
        except Exception:  # no type, one that only a type checker knows, or a class that is not plain data
            continue
        if parameters[argument].kind is inspect.Parameter.VAR_POSITIONAL:
            continue  # a type for each of them
        try:
            adapter.validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            raise ConfigError(
                f"{where}.{argument} = {value!r:.80}",
                rule="; or ".join(dict.fromkeys(each["msg"] for each in error.errors())),
                remedy="Correct the value",
            ) from error


def _kind(name: str) -> Any:
    file, colon, attribute = name.rpartition(":")
    if not colon:
        if name not in KNOWN:
            raise ConfigError(
                f"hooks.{name}",
                rule='A hook is one of those that come with the trainer, or of your own as "my_hooks.py:MyHook"',
                remedy=nearest(name, KNOWN),
            )
        return KNOWN[name]
    found = getattr(_module(file, name), attribute, None)
    if not (isinstance(found, type) and issubclass(found, Hook)):
        raise ConfigError(
            f"hooks.{name!r}: {file} has no hook {attribute!r}",
            rule="It is a class that is derived from shardformer.Hook",
            remedy="Correct the name",
        )
    return found


def _module(file: str, name: str) -> Any:
    file = os.path.expanduser(file)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file) if Path(file).is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"hooks.{name!r}: there is no file {file!r}",
            rule='A hook of your own is named by its file and its class, as "my_hooks.py:MyHook"',
            remedy="Correct the path",
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(
            f"hooks.{name!r}: {file}{where}: {type(error).__name__}: {first_line(error)}",
            rule="The file of a hook is imported before the run begins",
            remedy="Correct the file",
        ) from error
    return module
