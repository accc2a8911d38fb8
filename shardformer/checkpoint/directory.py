"""Manage a checkpoint directory: lock it, add new checkpoints, and find existing ones.

    checkpoints/
      step-00000100/          checkpoint.json, rank-00000.safetensors, ...
      step-00000200/
      latest                  one line: step-00000200
      .shardformer.lock       the process that saves into the directory

A checkpoint is written into a hidden folder, which is renamed once the checkpoint is complete. Checkpoints are numbered
in the order of the saves. The newest has the highest number, even if the clocks of the hosts differ.
"""

from __future__ import annotations

import gc
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from weakref import ref

from torch import nn

from shardformer.checkpoint.file_format import INDEX_FILE, CheckpointIndex, read_save_number_and_time
from shardformer.checkpoint.retention import (
    STEP_NAME,
    list_checkpoint_folders,
    list_checkpoints_with_save_times,
    move_user_files,
    move_user_files_and_delete_folder,
)
from shardformer.errors import ConfigError
from shardformer.filesystem import (
    DROPPED,
    SAVING,
    acquire_folder_lock,
    check_folder_lock_is_held,
    make_temporary_path,
    move_into_place_and_keep_backup,
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


def get_checkpoint_folder(checkpoint_root: Path, step: int) -> Path:
    """Return the path of the checkpoint of a training step, such as ``root/step-00000100``."""
    return checkpoint_root / f"step-{step:08d}"


def make_temporary_checkpoint_path(checkpoint_root: Path, step: int) -> Path:
    """Return a unique hidden path for a checkpoint that is still being written."""
    return make_temporary_path(get_checkpoint_folder(checkpoint_root, step))


def lock_checkpoint_directory(checkpoint_root: Path, step: int, model: nn.Module) -> bool:
    """Lock a checkpoint directory for one model, and delete unfinished checkpoints of killed processes.

    Called on the first rank before a save. The lock is released when ``model`` is deleted.

    Returns:
        True if the lock is new, False if ``model`` already had it.

    Raises:
        OSError: the process cannot write to the directory.
        ConfigError: another process has the lock, another model of this process saved the step, or a file or symbolic
            link has the name of the checkpoint.
    """
    if checkpoint_root.exists() and not checkpoint_root.is_dir():
        raise ConfigError(
            f"Cannot save a checkpoint to {checkpoint_root}, because it is a file.",
            remedy="Pass the path of a directory.",
        )
    named = get_checkpoint_folder(checkpoint_root, step)
    if os.path.lexists(named) and (named.is_symlink() or not named.is_dir()):
        kind = "symbolic link" if named.is_symlink() else "file"
        raise ConfigError(
            f"Cannot save the checkpoint {named}, because a {kind} with this name exists.",
            remedy=f"Rename or delete the {kind}, or save to another directory.",
        )
    if _was_saved_by_another_model(named, model):
        raise ConfigError(
            f"Cannot replace the checkpoint {named}, because it was saved from another model in this process.",
            remedy="Save each model to its own directory.",
        )
    is_new = acquire_folder_lock(checkpoint_root, model)
    for path in checkpoint_root.glob(".*"):
        found = parse_temporary_name(path)
        if found is None or not (STEP_NAME.fullmatch(found.target_name) or found.target_name == LATEST):
            continue
        if not (found.owner.is_dead or not found.owner.is_on_this_machine):
            continue  # in use by this process; the lock excludes processes of other hosts
        if found.purpose == SAVING:
            remove_file_or_folder(path)
        elif found.purpose == DROPPED:
            move_user_files_and_delete_folder(path, checkpoint_root / found.target_name)
    _SAVED[os.path.realpath(named)] = ref(model)
    return is_new


def _was_saved_by_another_model(checkpoint_path: Path, model: nn.Module) -> bool:
    """Return whether another model in this process saved the checkpoint at ``checkpoint_path``."""
    saved = _SAVED.get(os.path.realpath(checkpoint_path), lambda: None)
    goes_on = os.path.realpath(checkpoint_path.parent) in model.__dict__.get(_RESUMED_FROM, ())
    other = saved()
    if other is None or other is model or goes_on:
        return False
    if (saving := other.__dict__.get(SAVE)) is not None:
        saving.join()  # its thread keeps a reference to the model
    del other, saving
    gc.collect()  # a deleted model is often in a reference cycle
    return saved() is not None and checkpoint_path.exists()


def get_checkpoint_directories(model: nn.Module) -> set[str]:
    """Return the checkpoint directories that the model was saved to or resumed from."""
    own = {os.path.dirname(path) for path, saved in [*_SAVED.items()] if saved() is model}
    return own | set(model.__dict__.get(_RESUMED_FROM, ()))


def record_resumed_checkpoint_dirs(model: nn.Module, checkpoint_dirs: Iterable[str]) -> None:
    """Allow the model to replace checkpoints in the directories from which it was resumed."""
    model.__dict__[_RESUMED_FROM] = {*model.__dict__.get(_RESUMED_FROM, ()), *map(os.path.realpath, checkpoint_dirs)}


def wait_until_folder_exists(temporary_folder: Path) -> None:
    """Wait until this host sees the folder that rank 0 created. Raises ConfigError if it never appears."""
    end, wait_s = time.monotonic() + SEEN_WITHIN_S, 0.002
    while not temporary_folder.is_dir():
        if time.monotonic() > end:
            raise ConfigError(
                f"Host {platform.node()} cannot see the checkpoint directory {temporary_folder.parent} of rank 0.",
                remedy="Save to a directory on a file system that all hosts share.",
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.1)


def move_checkpoint_into_place(
    temporary_folder: Path, checkpoint_root: Path, checkpoint_index: CheckpointIndex, *, sync_to_disk: bool
) -> Path:
    """Rename a complete checkpoint to its final name, and write this name to the file ``latest``.

    The checkpoint gets the next save number and replaces an older checkpoint of the same step. Raises OSError, and
    InputError if another process took the lock.
    """
    named = get_checkpoint_folder(checkpoint_root, checkpoint_index.step)
    with _RENAME_LOCK:
        check_folder_lock_is_held(checkpoint_root)
        checkpoint_index.number = 1 + max(
            (read_save_number_and_time(each)[0] for each in list_checkpoint_folders(checkpoint_root)), default=0
        )
        checkpoint_index.write(temporary_folder, sync_to_disk=sync_to_disk)
        move_user_files(move_into_place_and_keep_backup(temporary_folder, named), named)
        replace_text_atomically(checkpoint_root / LATEST, f"{named.name}\n", sync_to_disk=sync_to_disk)
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


def _suggest_checkpoint_path(searched_path: Path) -> str:
    above = next((p for p in searched_path.parents if p.is_dir()), Path())
    inside = (
        sorted(p.parent for p in above.glob(f"*/{INDEX_FILE}"))[:4]
        + sorted(p.parent for p in above.glob(f"*/{LATEST}"))[:4]
    )
    return f"Did you mean {' or '.join(map(str, inside))}?" if inside else f"Check the path with ls -a {above}."


"""Names of the files of a checkpoint."""
