"""The folder of checkpoints: one folder for each step, which is whole or not there.

    checkpoints/
      step-00000100/          checkpoint.json, rank-00000.safetensors, ...
      step-00000200/
      latest                  a line: step-00000200

A checkpoint is written into a hidden folder, which is given its name when all of it is written. Older ones go when the
new one is on the disk: after a loss of power one of them is whole.
"""

from __future__ import annotations

import platform
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardformer.checkpoint.files import INDEX, saved_at
from shardformer.errors import ConfigError

LATEST = "latest"
SEEN_WITHIN_S = 15.0
"""What one host makes, another one may see a moment later."""
_STEP = re.compile(r"step-(\d{8,})")
_SAVING, _REPLACED, _DROPPED = ".saving-", ".replaced-", ".dropped-"


@dataclass(frozen=True)
class Keep:
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
                    remedy="Write keep=3 for the three newest, or Keep(last=3, every=1000)",
                )

    @classmethod
    def of(cls, asked: Keep | int | None) -> Keep:
        return asked if isinstance(asked, Keep) else cls(asked)


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def hidden_folder(root: Path, step: Any) -> Path:
    """Where a checkpoint is written before it has its name."""
    return root / f"{_SAVING}step-{step}"


def begin(root: Path, hidden: Path) -> None:
    """Makes the hidden folder. Takes away those that were never finished, or that were to be taken away.

    Raises OSError, and ConfigError where ``root`` is a file.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(
            f"{root} is a file",
            rule="Checkpoints are saved into a folder, which is made where there is none",
            remedy="Give the path of a folder",
        )
    root.mkdir(parents=True, exist_ok=True)
    for left in [*root.glob(f"{_SAVING}*"), *root.glob(f"{_DROPPED}*")]:
        shutil.rmtree(left, ignore_errors=True)
    hidden.mkdir()


def check_seen(hidden: Path) -> None:
    """Raises ConfigError where this process does not see the hidden folder that the first one made."""
    end, wait_s = time.monotonic() + SEEN_WITHIN_S, 0.002
    while not hidden.is_dir():
        if time.monotonic() > end:
            raise ConfigError(
                f"{hidden.parent} on {platform.node()} is not the folder of that name that the first rank has",
                rule="All ranks write into one folder",
                remedy="Give a folder of a file system that all hosts share",
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.1)


def finish(folder: Path, root: Path, step: int) -> Path:
    """Gives what was written its name, in the place of an older one of that step, and moves ``latest``."""
    named = step_folder(root, step)
    replaced = root / f"{_REPLACED}{named.name}"
    if named.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        named.rename(replaced)
    folder.rename(named)
    pointer = root / f"{_SAVING}{LATEST}"
    pointer.write_text(f"{named.name}\n")
    pointer.replace(root / LATEST)
    return named


def drop(folder: Path) -> None:
    """Takes away what was not finished, or is not wanted any more; what cannot be taken away stays."""
    hidden = folder.with_name(f"{_DROPPED}{folder.name.removeprefix('.')}")
    try:
        folder.rename(hidden)  # it is whole or not there
    except OSError:
        hidden = folder
    if hidden.name.startswith("."):
        shutil.rmtree(hidden, ignore_errors=True)


def drop_old(root: Path, keep: Keep) -> None:
    """When the newest checkpoint is on the disk: takes away what ``keep`` does not name, and what was replaced."""
    for left in root.glob(f"{_REPLACED}*"):
        if (root / left.name.removeprefix(_REPLACED)).exists():
            shutil.rmtree(left, ignore_errors=True)
    if keep.last is None:
        return
    now = time.time()
    for number, (folder, at) in enumerate(found_in(root)):
        step = int(match[1]) if (match := _STEP.fullmatch(folder.name)) else None
        is_kept = keep.every is not None and step is not None and step % keep.every == 0
        is_young = keep.younger_than is not None and now - at < keep.younger_than
        if number >= keep.last and not is_kept and not is_young:
            drop(folder)


def found_in(root: Path) -> list[tuple[Path, float]]:
    """(folder, when it was saved) of the checkpoints in a folder, the newest first.

    One that was replaced by another of its step counts as long as it is there.
    """
    named = [folder for folder in root.glob("step-*") if _STEP.fullmatch(folder.name)]
    every = [*named, *root.glob(f"{_REPLACED}*")]
    pairs = [(folder, saved_at(folder)) for folder in every if (folder / INDEX).exists()]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0].name))


def candidates(path: Path) -> Iterator[Path]:
    """The checkpoints that ``path`` may mean, in the order in which they are tried. Raises ConfigError for none.

    A checkpoint means itself; a folder of checkpoints the newest of them.
    """
    if (path / INDEX).exists() or _STEP.fullmatch(path.name):
        yield path
        return
    pairs = found_in(path) if path.is_dir() else []
    if not pairs:
        what = "does not exist" if not path.exists() else "is a file" if not path.is_dir() else "holds no checkpoint"
        raise ConfigError(
            f"{path} {what}",
            rule="A checkpoint is loaded from the folder that save_checkpoint was given, or from one of its "
            f"step-... folders, which hold a {INDEX}",
            remedy=_nearby(path),
        )
    yield from (folder for folder, _ in pairs)


def _nearby(path: Path) -> str:
    above = next((p for p in path.parents if p.is_dir()), Path())
    inside = (
        sorted(p.parent for p in above.glob(f"*/{INDEX}"))[:4] + sorted(p.parent for p in above.glob(f"*/{LATEST}"))[:4]
    )
    return f"Near it there is {', '.join(map(str, inside))}" if inside else f"Look for it: ls -a {above}"
