"""What a checkpoint has of an engine, beside its model and what trains it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from shardformer.checkpoint.folder import found_in
from shardformer.checkpoint.load import Loaded
from shardformer.checkpoint.together import first_does
from shardformer.disk.lock import hold
from shardformer.disk.writing import path_of
from shardformer.mesh.axis import Axis

PLACE, USER = "engine", "user"
"""Under which names the engine's own values, and those of the user, stand in ``extra``."""


def packed(steps: int, skipped: int, position: Any, extra: Any) -> dict[str, Any]:
    return {PLACE: {"steps": steps, "skipped": skipped, "data": position}, USER: extra}


def unpacked(loaded: Loaded) -> tuple[int, int, Any, Loaded]:
    """(steps, skipped steps, position in the data, what was loaded, with the user's own values).

    Of a checkpoint that no engine saved its step is known.
    """
    said = loaded.extra
    if not isinstance(said, dict) or said.keys() != {PLACE, USER}:
        return loaded.step, 0, None, loaded
    place = said[PLACE]
    return place["steps"], place["skipped"], place["data"], replace(loaded, extra=said[USER])


def take_folder(folder: str | os.PathLike[str], owner: object, world: Axis) -> None:
    """Takes a folder of checkpoints for this run, on the first rank, for as long as ``owner`` is alive.

    Raises, on all ranks, ConfigError where another process saves into it, InputError where it cannot be written to.
    """
    first_does(lambda: hold(path_of(folder), owner), world, f"Saving into {folder}")


def holds_checkpoint(folder: str | os.PathLike[str], world: Axis) -> bool:
    """Whether a folder has a checkpoint, as the first rank sees it."""

    def look() -> bool:
        path = path_of(folder)
        return path.is_dir() and bool(found_in(path))

    return first_does(look, world, f"Looking into {folder}")
