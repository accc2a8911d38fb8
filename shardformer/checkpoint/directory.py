"""Manage a directory of checkpoints, which contains one complete folder for each saved step.

    checkpoints/
      step-00000100/          checkpoint.json, rank-00000.safetensors, ...
      step-00000200/
      latest                  one line: step-00000200
      .shardformer.lock       the process that saves into the directory

A checkpoint is written into a hidden folder and renamed once it is complete. Older checkpoints are deleted only after
the new one is on the disk, so that one of them survives a power failure. Checkpoints are numbered in the order of the
saves: the newest has the highest number, independent of the clocks of the hosts.

Only files that a save writes are deleted. Other files in the folder of a step are kept.
"""

from __future__ import annotations

import gc
import os
import platform
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import ref

from torch import nn

from shardformer.checkpoint.file_format import INDEX_FILE, CheckpointIndex, read_save_order
from shardformer.errors import ConfigError
from shardformer.filesystem.atomic_write import (
    DROPPED,
    SAVING,
    exchange,
    parse_temporary_name,
    remove,
    replace_text,
    temporary_path,
)
from shardformer.filesystem.lock import check_lock_is_held, hold

LATEST = "latest"
SEEN_WITHIN_S = 15.0
"""A network file system may show a new folder to other hosts after a delay."""
_STEP_NAME = re.compile(r"step-(\d{8,})")
_REPLACED_NAME = re.compile(r"\.replaced-step-\d{8,}.*")
_CHECKPOINT_FILE = re.compile(rf"{re.escape(INDEX_FILE)}|rank-\d{{5,}}\.safetensors")
"""Names of the files of a checkpoint."""
_RENAME_LOCK = threading.Lock()
"""Held while a checkpoint of this process is renamed to its final name."""
_SAVED: dict[str, ref[nn.Module]] = {}
"""Real path of a checkpoint -> the model in this process that saved it last or is saving it."""
SAVE = "_shardformer_saving"
"""Attribute of a model: its latest ``AsyncSave``, whose host buffers the next save reuses."""
_RESUMED_FROM = "_shardformer_goes_on"
"""Attribute of a model: real paths of the directories it was resumed from."""


@dataclass(frozen=True)
class CheckpointRetention:
    """Rule that decides which older checkpoints are kept after a save.

    Args:
        last: number of newest checkpoints to keep; None: all.
        every: also keep checkpoints whose step is a multiple of this number.
        younger_than: also keep checkpoints younger than this many seconds.
    """

    last: int | None = None
    every: int | None = None
    younger_than: float | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "younger_than"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ConfigError(
                    f"CheckpointRetention({name}={value!r}) is neither a number above 0 nor None",
                    remedy="Use retention=3 for the three newest, or CheckpointRetention(last=3, every=1000)",
                )

    @classmethod
    def of(cls, value: CheckpointRetention | int | None) -> CheckpointRetention:
        return value if isinstance(value, CheckpointRetention) else cls(value)


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return root / f"step-{step:08d}"


def hidden_folder(root: Path, step: int) -> Path:
    """Return a new hidden path into which a checkpoint is written before it is renamed."""
    return temporary_path(step_folder(root, step))


def lock_directory(root: Path, step: int, owner: nn.Module) -> bool:
    """Lock a checkpoint directory while the model ``owner`` exists, and delete unfinished saves of killed processes.

    Called on the first rank before a save.

    Returns:
        Whether ``owner`` did not have the lock before.

    Raises:
        OSError: the directory cannot be written.
        ConfigError: another process has the lock, another model of this process saved the step, or a file or symbolic
            link has the name of the checkpoint.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(f"The checkpoint directory {root} is a file", remedy="Pass the path of a directory")
    named = step_folder(root, step)
    if os.path.lexists(named) and (named.is_symlink() or not named.is_dir()):
        raise ConfigError(
            f"The checkpoint {named} is a {'symbolic link' if named.is_symlink() else 'file'}",
            rule="A save only replaces an older checkpoint of the same step",
            remedy="Move it, or save into another directory",
        )
    if _is_saved_by_another_model(named, owner):
        raise ConfigError(
            f"{named} was saved by another model of this process",
            remedy="Save each model into a directory of its own",
        )
    is_new = hold(root, owner)
    for path in root.glob(".*"):
        found = parse_temporary_name(path)
        if found is None or not (_STEP_NAME.fullmatch(found.name) or found.name == LATEST):
            continue
        if not (found.owner.is_dead or not found.owner.is_here):
            continue  # in use by this process; the lock excludes processes of other hosts
        if found.kind == SAVING:
            remove(path)
        elif found.kind == DROPPED:
            _delete_hidden_folder(path, root / found.name)
    _SAVED[os.path.realpath(named)] = ref(owner)
    return is_new


def _is_saved_by_another_model(named: Path, model: nn.Module) -> bool:
    """Return whether a different model that this process still uses saved the checkpoint ``named``."""
    saved = _SAVED.get(os.path.realpath(named), lambda: None)
    goes_on = os.path.realpath(named.parent) in model.__dict__.get(_RESUMED_FROM, ())
    other = saved()
    if other is None or other is model or goes_on:
        return False
    if (saving := other.__dict__.get(SAVE)) is not None:
        saving.join()  # its thread keeps a reference to the model
    del other, saving
    gc.collect()  # a deleted model is often in a reference cycle
    return saved() is not None and named.exists()


def directories_of_model(model: nn.Module) -> set[str]:
    """Return the directories into which the model was saved, or from which it was resumed."""
    own = {os.path.dirname(path) for path, saved in [*_SAVED.items()] if saved() is model}
    return own | set(model.__dict__.get(_RESUMED_FROM, ()))


def mark_resumed_from(model: nn.Module, roots: Iterable[str]) -> None:
    """Record that the model was resumed from checkpoints in ``roots``, so that its saves may replace them."""
    model.__dict__[_RESUMED_FROM] = {*model.__dict__.get(_RESUMED_FROM, ()), *map(os.path.realpath, roots)}


def check_folder_is_visible(hidden: Path) -> None:
    """Raise ConfigError if this process does not see the hidden folder that the first rank created."""
    end, wait_s = time.monotonic() + SEEN_WITHIN_S, 0.002
    while not hidden.is_dir():
        if time.monotonic() > end:
            raise ConfigError(
                f"{hidden.parent} on host {platform.node()} is not the directory that rank 0 writes to",
                remedy="Save into a directory on a file system that all hosts share",
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.1)


def publish_checkpoint(folder: Path, root: Path, index: CheckpointIndex, *, to_disk: bool) -> Path:
    """Assign a complete checkpoint its number, rename it to its final name, and update the file ``latest``.

    It replaces an older checkpoint of the same step. Raises OSError, and InputError if another process took the lock.
    """
    named = step_folder(root, index.step)
    with _RENAME_LOCK:
        check_lock_is_held(root)
        index.number = 1 + max((read_save_order(each)[0] for each in _list_checkpoint_folders(root)), default=0)
        index.write(folder, to_disk=to_disk)
        _move_user_files(exchange(folder, named), named)
        replace_text(root / LATEST, f"{named.name}\n", to_disk=to_disk)
    return named


def _list_user_files(folder: Path) -> list[Path]:
    found = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    return [
        path for path in found if not _CHECKPOINT_FILE.fullmatch(path.name) or not path.is_file() or path.is_symlink()
    ]


def _move_user_files(source: Path, target: Path) -> None:
    for path in _list_user_files(source):
        if not os.path.lexists(target / path.name):
            path.rename(target / path.name)


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, but keep user files in its folder and files that cannot be deleted."""
    hidden = temporary_path(folder.with_name(_step_folder_name(folder)), DROPPED)
    if not folder.is_symlink():
        with suppress(OSError):
            folder.rename(hidden)  # atomic: a reader sees a complete checkpoint or none
            _delete_hidden_folder(hidden, folder)


def _delete_hidden_folder(hidden: Path, folder: Path) -> None:
    """Move user files from ``hidden`` back to ``folder``, then delete ``hidden``. Raises OSError."""
    for path in _list_user_files(hidden):
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    remove(hidden)


def delete_old_checkpoints(root: Path, keep: CheckpointRetention, newest: Path) -> None:
    """Delete replaced checkpoints and those that ``keep`` does not retain, once ``newest`` is on the disk."""
    for left in _list_replaced_folders(root):
        if (root / _step_folder_name(left)).exists():
            delete_checkpoint(left)
    if keep.last is None:
        return
    now = time.time()
    for place, (folder, at) in enumerate(list_checkpoints(root)):
        step = int(match[1]) if (match := _STEP_NAME.fullmatch(folder.name)) else None
        is_kept = keep.every is not None and step is not None and step % keep.every == 0
        is_young = keep.younger_than is not None and now - at < keep.younger_than
        if place >= keep.last and folder != newest and not is_kept and not is_young:
            delete_checkpoint(folder)


def list_checkpoints(root: Path) -> list[tuple[Path, float]]:
    """Return the folder and the save time of each checkpoint in a directory, newest first.

    Includes a replaced checkpoint of a step until it is deleted.
    """
    ordered = [(read_save_order(folder), folder) for folder in _list_checkpoint_folders(root)]
    ordered.sort(key=lambda pair: (*pair[0], _step_folder_name(pair[1])), reverse=True)
    return [(folder, at) for (_, at), folder in ordered]


def _list_checkpoint_folders(root: Path) -> list[Path]:
    named = [folder for folder in root.glob("step-*") if _STEP_NAME.fullmatch(folder.name)]
    return [folder for folder in (*named, *_list_replaced_folders(root)) if (folder / INDEX_FILE).exists()]


def _list_replaced_folders(root: Path) -> list[Path]:
    return [path for path in root.glob(".replaced-*") if _REPLACED_NAME.fullmatch(path.name) and not path.is_symlink()]


def _step_folder_name(folder: Path) -> str:
    found = _STEP_NAME.search(folder.name)
    return found[0] if found is not None else folder.name


def find_checkpoints(path: Path) -> Iterator[Path]:
    """Yield the checkpoint at ``path``, or all checkpoints in the directory ``path``, newest first.

    Raises ConfigError if there is none.
    """
    if (path / INDEX_FILE).exists() or _STEP_NAME.fullmatch(path.name):
        yield path
        return
    pairs = list_checkpoints(path) if path.is_dir() else []
    if not pairs:
        what = "does not exist" if not path.exists() else "is a file" if not path.is_dir() else "contains no checkpoint"
        raise ConfigError(
            f"No checkpoint can be loaded, because {path} {what}",
            rule="Pass the directory that save_checkpoint wrote to, or one of its step-... folders with a "
            f"{INDEX_FILE}",
            remedy=_suggest_path(path),
        )
    yield from (folder for folder, _ in pairs)


def _suggest_path(path: Path) -> str:
    above = next((p for p in path.parents if p.is_dir()), Path())
    inside = (
        sorted(p.parent for p in above.glob(f"*/{INDEX_FILE}"))[:4]
        + sorted(p.parent for p in above.glob(f"*/{LATEST}"))[:4]
    )
    return f"Did you mean {' or '.join(map(str, inside))}?" if inside else f"Check the path with ls -a {above}"
