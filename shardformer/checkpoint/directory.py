"""The directory of checkpoints: one folder per step, complete or absent, written atomically.

    checkpoints/
      step-00000100/          checkpoint.json, rank-00000.safetensors, ...
      step-00000200/
      latest                  a line: step-00000200
      .shardformer.lock       which process saves into the folder

A checkpoint is written into a hidden folder, which is given its name when all of it is written. Older ones go when the
new one is on the disk: after a loss of power one of them is whole. Checkpoints are numbered in the order in which they
were saved: the newest one is the one with the highest number, however the clocks of the hosts are set.

Only files that a save writes are deleted. What else lies in the folder of a step stays.
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

from shardformer.checkpoint.file_format import INDEX_FILE, CheckpointIndex, order_of
from shardformer.errors import ConfigError
from shardformer.filesystem.atomic_write import (
    DROPPED,
    SAVING,
    exchange,
    private,
    private_path,
    remove,
    replace_text,
)
from shardformer.filesystem.lock import check_held, hold

LATEST = "latest"
SEEN_WITHIN_S = 15.0
"""What one host makes, another one may see a moment later."""
_STEP = re.compile(r"step-(\d{8,})")
_OLD = re.compile(r"\.replaced-step-\d{8,}.*")
_OWN_FILE = re.compile(rf"{re.escape(INDEX_FILE)}|rank-\d{{5,}}\.safetensors")
"""What a checkpoint consists of."""
_NAMING = threading.Lock()
"""One checkpoint of this process gets its name at a time."""
_SAVED: dict[str, ref[nn.Module]] = {}
"""Real path of a checkpoint -> the model of this process that saved it last, or is saving it."""
SAVE = "_shardformer_saving"
"""Attribute of a model: the save that was begun last, and the memory that it copied into."""
_GOES_ON = "_shardformer_goes_on"
"""Attribute of a model: real paths of the folders from whose checkpoints it goes on."""


@dataclass(frozen=True)
class CheckpointRetention:
    """Which checkpoints stay when a new one is there.

    Args:
        last: how many of the newest; None: all.
        every: those of steps that this number divides stay besides.
        younger_than: seconds; what is younger stays besides.
    """

    last: int | None = None
    every: int | None = None
    younger_than: float | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "younger_than"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ConfigError(
                    f"keep: {name}={value!r}",
                    rule="A number above 0, or None",
                    remedy="Write retention=3 for the three newest, or CheckpointRetention(last=3, every=1000)",
                )

    @classmethod
    def of(cls, asked: CheckpointRetention | int | None) -> CheckpointRetention:
        return asked if isinstance(asked, CheckpointRetention) else cls(asked)


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def hidden_folder(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it has its name; another one for each save."""
    return private_path(step_folder(root, step))


def claim(root: Path, step: int, owner: nn.Module) -> bool:
    """Takes the folder for this process, for as long as ``owner`` is alive, and removes what killed ones left.

    The first rank calls it before a save. Returns whether ``owner`` did not have the folder before. Raises OSError, and
    ConfigError where another process has it, where another model of this process saved the step, or where what is not a
    folder has the name of the checkpoint.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file", remedy="Give the path of a folder")
    named = step_folder(root, step)
    if os.path.lexists(named) and (named.is_symlink() or not named.is_dir()):
        raise ConfigError(
            f"{named} is a {'symbolic link' if named.is_symlink() else 'file'}",
            rule="A checkpoint takes the place of an older one of its step, and of nothing else",
            remedy="Move it away, or give another folder",
        )
    if _is_of_another(named, owner):
        raise ConfigError(
            f"{named} was saved by another model of this process", remedy="Give each model a folder of its own"
        )
    is_new = hold(root, owner)
    for path in root.glob(".*"):
        found = private(path)
        if found is None or not (_STEP.fullmatch(found.name) or found.name == LATEST):
            continue
        if not (found.owner.is_dead or not found.owner.is_here):
            continue  # of this process: none of another machine writes here any more
        if found.kind == SAVING:
            remove(path)
        elif found.kind == DROPPED:
            _delete(path, root / found.name)
    _SAVED[os.path.realpath(named)] = ref(owner)
    return is_new


def _is_of_another(named: Path, model: nn.Module) -> bool:
    """Whether a checkpoint was saved by another model of this process, which is in use."""
    saved = _SAVED.get(os.path.realpath(named), lambda: None)
    goes_on = os.path.realpath(named.parent) in model.__dict__.get(_GOES_ON, ())
    other = saved()
    if other is None or other is model or goes_on:
        return False
    if (saving := other.__dict__.get(SAVE)) is not None:
        saving.join()  # its thread uses the model
    del other, saving
    gc.collect()  # a model that is not in use any more is often in a cycle
    return saved() is not None and named.exists()


def saved_into(model: nn.Module) -> set[str]:
    """The folders into which a model has saved, or from which it goes on."""
    own = {os.path.dirname(path) for path, saved in [*_SAVED.items()] if saved() is model}
    return own | set(model.__dict__.get(_GOES_ON, ()))


def goes_on_from(model: nn.Module, roots: Iterable[str]) -> None:
    """The model goes on from the checkpoints in these folders, and may save in their place."""
    model.__dict__[_GOES_ON] = {*model.__dict__.get(_GOES_ON, ()), *map(os.path.realpath, roots)}


def check_visible(hidden: Path) -> None:
    """Raises ConfigError where this process does not see the hidden folder that the first one made."""
    end, wait_s = time.monotonic() + SEEN_WITHIN_S, 0.002
    while not hidden.is_dir():
        if time.monotonic() > end:
            raise ConfigError(
                f"{hidden.parent} on {platform.node()} is not the folder of that name that the first rank has",
                remedy="Give a folder of a file system that all hosts share",
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.1)


def publish_directory(folder: Path, root: Path, index: CheckpointIndex, *, to_disk: bool) -> Path:
    """Gives what was written its number and its name, in the place of an older one of that step, and moves ``latest``.

    Raises OSError, and InputError where another process has taken the folder over.
    """
    named = step_folder(root, index.step)
    with _NAMING:
        check_held(root)
        index.number = 1 + max((order_of(each)[0] for each in _checkpoints_in(root)), default=0)
        index.write(folder, to_disk=to_disk)
        _move_others(exchange(folder, named), named)
        replace_text(root / LATEST, f"{named.name}\n", to_disk=to_disk)
    return named


def _others_in(folder: Path) -> list[Path]:
    """What lies in the folder of a step and is not of a checkpoint."""
    found = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    return [path for path in found if not _OWN_FILE.fullmatch(path.name) or not path.is_file() or path.is_symlink()]


def _move_others(source: Path, target: Path) -> None:
    for path in _others_in(source):
        if not os.path.lexists(target / path.name):
            path.rename(target / path.name)


def discard_directory(folder: Path) -> None:
    """Deletes a checkpoint. What cannot be deleted stays, and so does what no save wrote, a link among it."""
    hidden = private_path(folder.with_name(_step_of(folder)), DROPPED)
    if not folder.is_symlink():
        with suppress(OSError):
            folder.rename(hidden)  # it is whole or not there
            _delete(hidden, folder)


def _delete(hidden: Path, folder: Path) -> None:
    """Deletes what was a checkpoint, after what no save wrote is back in ``folder``. Raises OSError."""
    for path in _others_in(hidden):
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    remove(hidden)


def delete_old(root: Path, keep: CheckpointRetention, newest: Path) -> None:
    """When the newest checkpoint is on the disk: deletes those that ``keep`` does not name, and those replaced."""
    for left in _replaced_in(root):
        if (root / _step_of(left)).exists():
            discard_directory(left)
    if keep.last is None:
        return
    now = time.time()
    for place, (folder, at) in enumerate(list_checkpoints(root)):
        step = int(match[1]) if (match := _STEP.fullmatch(folder.name)) else None
        is_kept = keep.every is not None and step is not None and step % keep.every == 0
        is_young = keep.younger_than is not None and now - at < keep.younger_than
        if place >= keep.last and folder != newest and not is_kept and not is_young:
            discard_directory(folder)


def list_checkpoints(root: Path) -> list[tuple[Path, float]]:
    """(folder, when it was saved) of the checkpoints in a folder; the one that was saved last is the first.

    One that was replaced by another of its step counts as long as it is there.
    """
    ordered = [(order_of(folder), folder) for folder in _checkpoints_in(root)]
    ordered.sort(key=lambda pair: (*pair[0], _step_of(pair[1])), reverse=True)
    return [(folder, at) for (_, at), folder in ordered]


def _checkpoints_in(root: Path) -> list[Path]:
    named = [folder for folder in root.glob("step-*") if _STEP.fullmatch(folder.name)]
    return [folder for folder in (*named, *_replaced_in(root)) if (folder / INDEX_FILE).exists()]


def _replaced_in(root: Path) -> list[Path]:
    return [path for path in root.glob(".replaced-*") if _OLD.fullmatch(path.name) and not path.is_symlink()]


def _step_of(folder: Path) -> str:
    """``step-00000100``, of the checkpoint and of the one that it replaced."""
    found = _STEP.search(folder.name)
    return found[0] if found is not None else folder.name


def candidates(path: Path) -> Iterator[Path]:
    """The checkpoints that ``path`` may mean, in the order in which they are tried. Raises ConfigError for none.

    A checkpoint means itself; a folder of checkpoints the newest of them.
    """
    if (path / INDEX_FILE).exists() or _STEP.fullmatch(path.name):
        yield path
        return
    pairs = list_checkpoints(path) if path.is_dir() else []
    if not pairs:
        what = "does not exist" if not path.exists() else "is a file" if not path.is_dir() else "holds no checkpoint"
        raise ConfigError(
            f"{path} {what}",
            rule="A checkpoint is loaded from the folder that save_checkpoint was given, or from one of its "
            f"step-... folders, which hold a {INDEX_FILE}",
            remedy=_nearby(path),
        )
    yield from (folder for folder, _ in pairs)


def _nearby(path: Path) -> str:
    above = next((p for p in path.parents if p.is_dir()), Path())
    inside = (
        sorted(p.parent for p in above.glob(f"*/{INDEX_FILE}"))[:4]
        + sorted(p.parent for p in above.glob(f"*/{LATEST}"))[:4]
    )
    return f"Near it there is {', '.join(map(str, inside))}" if inside else f"Look for it: ls -a {above}"
