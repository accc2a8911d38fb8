"""A folder is written beside and takes its place at once: it holds what was there before or what is new, never both."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from shardformer.errors import ConfigError

_SAVING, _REPLACED = ".saving-", ".replaced-"
CONFIG = "config.json"
"""Without it transformers loads nothing of a folder."""
_OF_A_MODEL = re.compile(
    r"(adapter_)?(pytorch_)?model.*\.(safetensors|bin|index\.json)|(generation_|adapter_)?config\.json"
)


def replace_folder(folder: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a folder that then stands where ``folder`` stood; what else was in there is kept.

    Raises what ``write`` raises, and OSError; then the folder is as it was. Where a process dies between, it is as it
    was, or whole and new, or it is not there, or has no config: then nothing of it loads.
    """
    target = Path(os.path.realpath(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = _can_be_renamed(target)
    hidden = target.with_name(f"{_SAVING}{target.name}") if beside else target / f"{_SAVING}model"
    replaced = target.with_name(f"{_REPLACED}{target.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    if beside and not target.exists() and replaced.exists():
        replaced.rename(target)  # a process died between the two renames
    try:
        hidden.mkdir()
        write(hidden)
        if beside:
            _link(kept_of(target, hidden), hidden)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    if not beside:
        _move_into(hidden, target)
        return
    shutil.rmtree(replaced, ignore_errors=True)
    is_there = target.exists()
    if is_there:
        target.rename(replaced)
    try:
        hidden.rename(target)
    except BaseException:
        if is_there:
            replaced.rename(target)
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _can_be_renamed(target: Path) -> bool:
    """Not a disk of its own, nor in a folder that this process may not write to."""
    return os.access(target.parent, os.W_OK) and not os.path.ismount(target)


def kept_of(target: Path, new: Path) -> Iterable[Path]:
    """What was in a folder beside an older model: a tokenizer, a log."""
    there = sorted(target.iterdir()) if target.is_dir() else []
    written = {path.name for path in new.iterdir()}
    return [path for path in there if path.name not in written and not _OF_A_MODEL.fullmatch(path.name)]


def _link(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            (folder / path.name).symlink_to(os.readlink(path)) if path.is_symlink() else None
        elif path.is_dir():
            shutil.copytree(path, folder / path.name, copy_function=_link_or_copy, symlinks=True)
        else:
            _link_or_copy(str(path), str(folder / path.name))


def _link_or_copy(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # a file system without links
        shutil.copy2(source, to)


def _move_into(hidden: Path, target: Path) -> None:
    """One file after the other, while there is no config: the config goes first, and comes last."""
    new = {path.name for path in hidden.iterdir()}
    (target / CONFIG).unlink(missing_ok=True)
    for path in sorted(target.iterdir()):
        if path.is_file() and _OF_A_MODEL.fullmatch(path.name) and path.name not in new:
            path.unlink()
    for name in sorted(new, key=lambda name: name == CONFIG):
        (hidden / name).replace(target / name)
    hidden.rmdir()


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Raises ConfigError for a path that is a file."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(
            f"save_pretrained({os.fspath(folder)!r}), which is a file",
            rule="A model is saved into a folder, which is made where there is none",
            remedy="Give the path of a folder",
        )
