"""Decide which checkpoints of a directory to keep after a save, and delete the others.

Older checkpoints are deleted only after the new one is on the disk, so that one of them survives a power failure. Only
files that a save writes are deleted. Other files in the folder of a step are kept.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardformer.checkpoint.file_format import INDEX_FILE, read_save_number_and_time
from shardformer.errors import ConfigError
from shardformer.filesystem import (
    DROPPED,
    make_temporary_path,
    remove_file_or_folder,
)

STEP_NAME = re.compile(r"step-(\d{8,})")
_REPLACED_NAME = re.compile(r"\.replaced-step-\d{8,}.*")
_CHECKPOINT_FILE = re.compile(rf"{re.escape(INDEX_FILE)}|rank-\d{{5,}}\.safetensors")


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


def move_user_files(source_folder: Path, target_folder: Path) -> None:
    for path in _list_user_files(source_folder):
        if not os.path.lexists(target_folder / path.name):
            path.rename(target_folder / path.name)


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, but keep files that you have added to its folder. Skips files that it cannot delete."""
    hidden = make_temporary_path(folder.with_name(_get_step_folder_name(folder)), DROPPED)
    if not folder.is_symlink():
        with suppress(OSError):
            folder.rename(hidden)  # atomic: a reader sees a complete checkpoint or none
            move_user_files_and_delete_folder(hidden, folder)


def move_user_files_and_delete_folder(temporary_folder: Path, user_files_folder: Path) -> None:
    """Move files that you added out of a hidden checkpoint folder, and delete the folder."""
    for path in _list_user_files(temporary_folder):
        user_files_folder.mkdir(exist_ok=True)
        path.rename(user_files_folder / path.name)
    remove_file_or_folder(temporary_folder)


def delete_old_checkpoints(checkpoint_root: Path, retention: CheckpointRetention, newest_checkpoint: Path) -> None:
    """Delete the old checkpoints that ``retention`` does not keep, and those that were replaced."""
    for left in _list_replaced_checkpoints(checkpoint_root):
        if (checkpoint_root / _get_step_folder_name(left)).exists():
            delete_checkpoint(left)
    if retention.last is None:
        return
    now = time.time()
    for place, (folder, at) in enumerate(list_checkpoints_with_save_times(checkpoint_root)):
        step = int(match[1]) if (match := STEP_NAME.fullmatch(folder.name)) else None
        is_kept = step in retention.steps or (
            retention.every is not None and step is not None and step % retention.every == 0
        )
        is_young = retention.younger_than is not None and now - at < retention.younger_than
        if place >= retention.last and folder != newest_checkpoint and not is_kept and not is_young:
            delete_checkpoint(folder)


def list_checkpoints_with_save_times(checkpoint_root: Path) -> list[tuple[Path, float]]:
    """Return the folder and the save time of each checkpoint in a directory, newest first.

    Replaced checkpoints are included until they are deleted.
    """
    ordered = [(read_save_number_and_time(folder), folder) for folder in list_checkpoint_folders(checkpoint_root)]
    ordered.sort(key=lambda pair: (*pair[0], _get_step_folder_name(pair[1])), reverse=True)
    return [(folder, at) for (_, at), folder in ordered]


def list_checkpoint_folders(checkpoint_root: Path) -> list[Path]:
    named = [folder for folder in checkpoint_root.glob("step-*") if STEP_NAME.fullmatch(folder.name)]
    return [
        folder for folder in (*named, *_list_replaced_checkpoints(checkpoint_root)) if (folder / INDEX_FILE).exists()
    ]


def _list_replaced_checkpoints(checkpoint_root: Path) -> list[Path]:
    return [
        path
        for path in checkpoint_root.glob(".replaced-*")
        if _REPLACED_NAME.fullmatch(path.name) and not path.is_symlink()
    ]


def _get_step_folder_name(checkpoint_folder: Path) -> str:
    found = STEP_NAME.search(checkpoint_folder.name)
    return found[0] if found is not None else checkpoint_folder.name
