"""A folder is written beside and takes its place at once: it holds what was there before or what is new, never both."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from shardformer.disk.writing import REPLACED, exchange, private_in, private_path, remove, remove_left
from shardformer.errors import ConfigError

CONFIG = "config.json"
"""Without it transformers loads nothing of a folder."""
_OF_A_MODEL = re.compile(
    r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)|(pytorch_)?model\.(safetensors|bin)\.index\.json"
    r"|adapter_model\.(safetensors|bin)|(generation_|adapter_)?config\.json"
)
"""What would be loaded together with, or instead of, a model that is saved into the folder."""


def replace_folder(folder: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a folder that then takes the place of ``folder``; what else was in there is kept.

    Raises what ``write`` raises, and OSError; then the folder is as it was. Where a process dies in between, it is as
    it was, or whole and new, or it is not there, or has no config: then nothing of it loads.
    """
    target = Path(os.path.realpath(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = private_path(target if _can_be_renamed(target) else target / target.name)
    _mend(target, hidden.parent)
    try:
        hidden.mkdir()
        write(hidden)
        put_in_place(hidden, target)
    finally:
        remove(hidden)


def put_in_place(new: Path, target: Path) -> None:
    """Lets a folder that is complete take the place of ``target``; what else was in there is kept.

    The folder is exchanged, unless other folders are in it, which other processes may write into, or this process works
    in it, or it cannot be renamed: then its files are replaced one after the other. Raises OSError.
    """
    kept = kept_of(target, new)
    is_current = target.exists() and os.path.samefile(target, os.curdir)
    if is_current or new.parent != target.parent or any(path.is_dir() and not path.is_symlink() for path in kept):
        _move_into(new, target)
        return
    _link(kept, new)
    _remove_replaced(exchange(new, target), target)


def _mend(target: Path, folder: Path) -> None:
    """Undoes, or ends, what a process did that was killed while it replaced ``target``."""
    remove_left(folder, target.name)
    for path, found in private_in(folder, target.name):
        if found.kind == REPLACED and found.owner.is_dead:
            _remove_replaced(path, target) if target.exists() else path.rename(target)


def _remove_replaced(replaced: Path, target: Path) -> None:
    """Removes what ``target`` was before, after what came into it while it was exchanged is in its place."""
    for path in kept_of(replaced, target):
        path.rename(target / path.name)
    remove(replaced)


def _can_be_renamed(target: Path) -> bool:
    """Not a disk of its own, nor in a folder that this process may not write to."""
    return os.access(target.parent, os.W_OK) and not os.path.ismount(target)


def kept_of(target: Path, new: Path) -> list[Path]:
    """What was in a folder in addition to an older model: a tokenizer, a log."""
    there = sorted(target.iterdir()) if target.is_dir() else []
    written = {path.name for path in new.iterdir()}
    return [path for path in there if path.name not in written and not _OF_A_MODEL.fullmatch(path.name)]


def _link(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        if path.is_symlink():
            (folder / path.name).symlink_to(os.readlink(path))
        elif path.is_file():
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
