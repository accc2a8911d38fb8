"""Manage a checkpoint directory: lock it, add new checkpoints, find existing ones, and delete old ones.

    checkpoints/
      step-00000100/          checkpoint.json, rank-00000.safetensors, ...
      step-00000200/
      latest                  one line: step-00000200
      .shardformer.lock       the process that saves into the directory

A checkpoint is written into a hidden folder, which is renamed once the checkpoint is complete. Checkpoints are numbered
in the order of the saves. The newest has the highest number, even if the clocks of the hosts differ.

Older checkpoints are deleted only after the new one is on the disk, so that one of them survives a power failure. Only
files that a save writes are deleted. Other files in the folder of a step are kept.
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

from shardformer.checkpoint.file_format import INDEX_FILE, CheckpointIndex, read_save_number_and_time
from shardformer.errors import ConfigError
from shardformer.filesystem import (
    DROPPED,
    SAVING,
    acquire_folder_lock,
    check_folder_lock_is_held,
    make_temporary_path,
    move_into_place,
    parse_temporary_name,
    remove_file_or_folder,
    replace_text_atomically,
)

LATEST = "latest"
SEEN_WITHIN_S = 15.0
"""A network file system may show a new folder to other hosts after a delay."""
_RENAME_LOCK = threading.Lock()
"""Held while a checkpoint of this process is renamed to its final name."""
_SAVED: dict[str, ref[nn.Module]] = {}
"""Real path of a checkpoint -> the model in this process that saved it last or is saving it."""
SAVE = "_shardformer_saving"
"""Attribute of a model: its latest ``AsyncSave``, whose host buffers the next save reuses."""
_RESUMED_FROM = "_shardformer_goes_on"
"""Attribute of a model: real paths of the directories it was resumed from."""


def get_step_folder(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of a training step, such as ``root/step-00000100``."""
    return root / f"step-{step:08d}"


def make_hidden_checkpoint_path(root: Path, step: int) -> Path:
    """Return a new hidden path at which a checkpoint is stored until it is complete."""
    return make_temporary_path(get_step_folder(root, step))


def lock_checkpoint_directory(root: Path, step: int, model: nn.Module) -> bool:
    """Lock a checkpoint directory for one model, and delete unfinished checkpoints of killed processes.

    Called on the first rank before a save. The lock is released when ``model`` is deleted.

    Returns:
        True if the lock is new, False if ``model`` already had it.

    Raises:
        OSError: the process cannot write to the directory.
        ConfigError: another process has the lock, another model of this process saved the step, or a file or symbolic
            link has the name of the checkpoint.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(
            f"Cannot save a checkpoint to {root}, because it is a file.", remedy="Pass the path of a directory."
        )
    named = get_step_folder(root, step)
    if os.path.lexists(named) and (named.is_symlink() or not named.is_dir()):
        kind = "symbolic link" if named.is_symlink() else "file"
        raise ConfigError(
            f"Cannot save the checkpoint {named}, because a {kind} with this name exists.",
            remedy="Rename or delete it, or save to another directory.",
        )
    if _is_saved_by_another_model(named, model):
        raise ConfigError(
            f"Cannot replace the checkpoint {named}, because another model of this process saved it.",
            remedy="Save each model to its own directory.",
        )
    is_new = acquire_folder_lock(root, model)
    for path in root.glob(".*"):
        found = parse_temporary_name(path)
        if found is None or not (STEP_NAME.fullmatch(found.name) or found.name == LATEST):
            continue
        if not (found.owner.is_dead or not found.owner.is_on_this_machine):
            continue  # in use by this process; the lock excludes processes of other hosts
        if found.kind == SAVING:
            remove_file_or_folder(path)
        elif found.kind == DROPPED:
            delete_hidden_folder(path, root / found.name)
    _SAVED[os.path.realpath(named)] = ref(model)
    return is_new


def _is_saved_by_another_model(path: Path, model: nn.Module) -> bool:
    """Return whether another model in this process saved the checkpoint at ``path``."""
    saved = _SAVED.get(os.path.realpath(path), lambda: None)
    goes_on = os.path.realpath(path.parent) in model.__dict__.get(_RESUMED_FROM, ())
    other = saved()
    if other is None or other is model or goes_on:
        return False
    if (saving := other.__dict__.get(SAVE)) is not None:
        saving.join()  # its thread keeps a reference to the model
    del other, saving
    gc.collect()  # a deleted model is often in a reference cycle
    return saved() is not None and path.exists()


def get_model_directories(model: nn.Module) -> set[str]:
    """Return the checkpoint directories that the model was saved to or resumed from."""
    own = {os.path.dirname(path) for path, saved in [*_SAVED.items()] if saved() is model}
    return own | set(model.__dict__.get(_RESUMED_FROM, ()))


def mark_resumed_from(model: nn.Module, directories: Iterable[str]) -> None:
    """Allow the model to replace checkpoints in the directories from which it was resumed."""
    model.__dict__[_RESUMED_FROM] = {*model.__dict__.get(_RESUMED_FROM, ()), *map(os.path.realpath, directories)}


def wait_for_hidden_folder(hidden: Path) -> None:
    """Wait until this host sees the folder that rank 0 created. Raises ConfigError if it never appears."""
    end, wait_s = time.monotonic() + SEEN_WITHIN_S, 0.002
    while not hidden.is_dir():
        if time.monotonic() > end:
            raise ConfigError(
                f"Host {platform.node()} cannot see the checkpoint directory {hidden.parent} of rank 0.",
                remedy="Save to a directory on a file system that all hosts share.",
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.1)


def publish_checkpoint(folder: Path, root: Path, index: CheckpointIndex, *, to_disk: bool) -> Path:
    """Rename a complete checkpoint to its final name, and write this name to the file ``latest``.

    The checkpoint gets the next save number and replaces an older checkpoint of the same step. Raises OSError, and
    InputError if another process took the lock.
    """
    named = get_step_folder(root, index.step)
    with _RENAME_LOCK:
        check_folder_lock_is_held(root)
        index.number = 1 + max(
            (read_save_number_and_time(each)[0] for each in list_checkpoint_folders(root)), default=0
        )
        index.write(folder, to_disk=to_disk)
        move_user_files(move_into_place(folder, named), named)
        replace_text_atomically(root / LATEST, f"{named.name}\n", sync_to_disk=to_disk)
    return named


def find_checkpoints(path: Path) -> Iterator[Path]:
    """Yield the checkpoint at ``path``, or all checkpoints in the directory ``path``, newest first.

    Raises ConfigError if there is none.
    """
    if (path / INDEX_FILE).exists() or STEP_NAME.fullmatch(path.name):
        yield path
        return
    pairs = list_checkpoints_with_save_times(path) if path.is_dir() else []
    if not pairs:
        problem = "does not exist" if not path.exists() else "is a file" if path.is_file() else "contains no checkpoint"
        hint = _suggest_checkpoint_path(path)
        raise ConfigError(
            f"Cannot load a checkpoint, because the path {path} {problem}.",
            remedy=f"{hint} Pass the directory that you passed to save_checkpoint, or one of its step-... folders.",
        )
    yield from (folder for folder, _ in pairs)


def _suggest_checkpoint_path(path: Path) -> str:
    above = next((p for p in path.parents if p.is_dir()), Path())
    inside = (
        sorted(p.parent for p in above.glob(f"*/{INDEX_FILE}"))[:4]
        + sorted(p.parent for p in above.glob(f"*/{LATEST}"))[:4]
    )
    return f"Did you mean {' or '.join(map(str, inside))}?" if inside else f"Check the path with ls -a {above}."


STEP_NAME = re.compile(r"step-(\d{8,})")
_REPLACED_NAME = re.compile(r"\.replaced-step-\d{8,}.*")
_CHECKPOINT_FILE = re.compile(rf"{re.escape(INDEX_FILE)}|rank-\d{{5,}}\.safetensors")
"""Names of the files of a checkpoint."""


@dataclass(frozen=True)
class CheckpointRetention:
    """A rule that decides which older checkpoints are kept after each save.

    Args:
        last: number of newest checkpoints to keep, or None to keep all.
        every: also keep checkpoints whose step is a multiple of this number.
        younger_than: also keep checkpoints younger than this many seconds.
        steps: also keep the checkpoints of these steps.
    """

    last: int | None = None
    every: int | None = None
    younger_than: float | None = None
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("last", "every", "younger_than"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ConfigError(
                    f"CheckpointRetention.{name} must be a positive number or None, but got {value!r}.",
                    remedy="To keep the three newest checkpoints, pass retention=3 or CheckpointRetention(last=3).",
                )

    @classmethod
    def from_value(cls, value: CheckpointRetention | int | None) -> CheckpointRetention:
        return value if isinstance(value, CheckpointRetention) else cls(value)


def _list_user_files(folder: Path) -> list[Path]:
    found = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    return [
        path for path in found if not _CHECKPOINT_FILE.fullmatch(path.name) or not path.is_file() or path.is_symlink()
    ]


def move_user_files(source: Path, target: Path) -> None:
    for path in _list_user_files(source):
        if not os.path.lexists(target / path.name):
            path.rename(target / path.name)


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, but keep files that you have added to its folder. Skips files that it cannot delete."""
    hidden = make_temporary_path(folder.with_name(_get_step_folder_name(folder)), DROPPED)
    if not folder.is_symlink():
        with suppress(OSError):
            folder.rename(hidden)  # atomic: a reader sees a complete checkpoint or none
            delete_hidden_folder(hidden, folder)


def delete_hidden_folder(hidden: Path, user_files_folder: Path) -> None:
    """Move your own files out of a hidden checkpoint folder, and delete the folder."""
    for path in _list_user_files(hidden):
        user_files_folder.mkdir(exist_ok=True)
        path.rename(user_files_folder / path.name)
    remove_file_or_folder(hidden)


def delete_old_checkpoints(root: Path, retention: CheckpointRetention, newest: Path) -> None:
    """Delete the old checkpoints that ``retention`` does not keep, and those that were replaced."""
    for left in _list_replaced_folders(root):
        if (root / _get_step_folder_name(left)).exists():
            delete_checkpoint(left)
    if retention.last is None:
        return
    now = time.time()
    for place, (folder, at) in enumerate(list_checkpoints_with_save_times(root)):
        step = int(match[1]) if (match := STEP_NAME.fullmatch(folder.name)) else None
        is_kept = step in retention.steps or (
            retention.every is not None and step is not None and step % retention.every == 0
        )
        is_young = retention.younger_than is not None and now - at < retention.younger_than
        if place >= retention.last and folder != newest and not is_kept and not is_young:
            delete_checkpoint(folder)


def list_checkpoints_with_save_times(root: Path) -> list[tuple[Path, float]]:
    """Return the folder and the save time of each checkpoint in a directory, newest first.

    Replaced checkpoints are included until they are deleted.
    """
    ordered = [(read_save_number_and_time(folder), folder) for folder in list_checkpoint_folders(root)]
    ordered.sort(key=lambda pair: (*pair[0], _get_step_folder_name(pair[1])), reverse=True)
    return [(folder, at) for (_, at), folder in ordered]


def list_checkpoint_folders(root: Path) -> list[Path]:
    named = [folder for folder in root.glob("step-*") if STEP_NAME.fullmatch(folder.name)]
    return [folder for folder in (*named, *_list_replaced_folders(root)) if (folder / INDEX_FILE).exists()]


def _list_replaced_folders(root: Path) -> list[Path]:
    return [path for path in root.glob(".replaced-*") if _REPLACED_NAME.fullmatch(path.name) and not path.is_symlink()]


def _get_step_folder_name(folder: Path) -> str:
    found = STEP_NAME.search(folder.name)
    return found[0] if found is not None else folder.name
