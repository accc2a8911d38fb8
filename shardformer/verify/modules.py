"""The modules and files of Python that commands are given."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from shardformer.errors import TRACEBACK_VARIABLE, ConfigError, ShardFormerError

FORMS = (
    "MODEL is a family, a model type of transformers, a folder, a config.json, a name on the Hugging Face hub, or "
    "module:function"
)


MOST_SAID = 600
"""Characters of an error of the user's."""


def module_of(where: str) -> ModuleType:
    """The module of a name, or of a file. Raises ConfigError where it is not there, or fails."""
    return _module_from_file(Path(where)) if where.endswith(".py") else _module(where)


def _module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with _alone():
            return import_module(name)
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if name and (missing is None or not f"{name}.".startswith(f"{missing}.")):
            raise _not_imported(f"The module {name!r}", error) from error  # it is there, and fails
        raise ConfigError(
            f"There is no module {name!r}: {error}",
            rule=f"{FORMS}; modules are looked for in {str(Path.cwd())!r} and among what is installed",
            remedy="Correct the name, or give the file: path/to/file.py:function",
        ) from error


def called(function: Callable[[], Any], name: str) -> Any:
    """What a user's function returns. Raises ConfigError where it fails, ends the process, or asks for input."""
    try:
        with _alone():
            return function()
    except ShardFormerError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{name} failed: {_said(error)}",
            rule="The function is called without arguments and without input, in every process",
            remedy=f"Mend it: `python -c 'import ...'` shows where it fails, and {TRACEBACK_VARIABLE}=1 here",
        ) from error


@contextmanager
def _alone() -> Iterator[None]:
    """In here nobody is asked: what reads from the terminal finds its end."""
    before = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


def _said(error: BaseException) -> str:
    """The error, and the line of the user's file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else None)
    ends = f"it ends the process: {type(error).__name__}" if isinstance(error, SystemExit) else type(error).__name__
    return f"{ends}: {error}"[:MOST_SAID] + (f" (line {line})" if line else "")


def _not_imported(what: str, error: BaseException) -> ConfigError:
    return ConfigError(
        f"{what} cannot be imported: {_said(error)}",
        rule="What a command is given as a file or a module of Python is imported, in every process",
        remedy="Mend it: `python -c 'import ...'` shows where it fails",
    )


def _module_from_file(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"There is no file {str(path)!r}", rule=FORMS, remedy="Correct the path before the colon")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(path):
        spec = spec_from_file_location(f"{path.stem}_of_the_user", path)
        assert spec is not None and spec.loader is not None
    # what the file imports from beside it, here and in the workers
    sys.path.insert(0, str(path.resolve().parent))
    module = sys.modules[spec.name] = module_from_spec(spec)
    assert spec.loader is not None
    try:
        with _alone():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise _not_imported(str(path), error) from error
    return module
