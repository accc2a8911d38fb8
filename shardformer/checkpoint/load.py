"""Loads a checkpoint into a training run of any layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from shardformer.checkpoint import folder as folders
from shardformer.checkpoint.files import DamagedError, Index
from shardformer.checkpoint.holding import as_list
from shardformer.checkpoint.model import ModelTensors
from shardformer.checkpoint.optimizers import optimizers_of
from shardformer.checkpoint.plain import from_json
from shardformer.checkpoint.read import read_items
from shardformer.checkpoint.together import all_do, first_does
from shardformer.checkpoint.wanted import Wanted
from shardformer.comm.calls import come
from shardformer.disk.writing import path_of


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Args:
        path: of the checkpoint.
        step: training steps that were made when it was saved.
        extra: what was given to ``save_checkpoint``.
        num_bytes: read by this rank.
        skipped: newer checkpoints that were damaged, and why.
        has_random: whether random numbers go on as they would have. They do where there are as many data ranks.
    """

    path: Path
    step: int
    extra: Any
    num_bytes: int
    skipped: tuple[str, ...] = ()
    has_random: bool = True


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *, scheduler: Any = None
) -> Loaded:
    """Goes on from a checkpoint, under whatever layout it was saved and this run has.

    Each rank reads what it will hold, once, and together the ranks check every number against the checksums. Nothing
    is changed before all of it was read and found right.

    All ranks call it. Communicates names, sizes and checksums; under ZeRO one all-gather of the parameters.

    Args:
        folder: a folder of checkpoints, of which the newest that is whole is loaded; or one of them.
        optimizer: one, several in a list, or what ``zero`` returned, of the classes and groups that were saved. None:
            the weights and buffers alone are loaded, and random numbers go on as they are.
        scheduler: what was given to ``save_checkpoint``.

    Raises, on all ranks, ConfigError for a checkpoint of another model or optimizer, DamagedError (an InputError) for
    one that is not what was saved; and what an optimizer, a scheduler or a module raises while it takes up its state.
    Then nothing was changed.
    """
    return load_and_take(folder, model, optimizer, scheduler)


def load_and_take(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    take: Callable[[Loaded], object] = lambda _: None,
) -> Loaded:
    """``load_checkpoint``, where more than that takes up what was saved.

    Args:
        take: called on every rank with what is about to be loaded. Where it raises on one, nothing is changed; it is
            the caller's to undo what it did.
    """
    tensors = ModelTensors(model)
    come("load_checkpoint", tensors.world)
    states = all_do(lambda: optimizers_of(optimizer, tensors), tensors.world, "Loading")
    tried: list[str] = []
    found = first_does(
        lambda: [str(each) for each in folders.candidates(path_of(folder))], tensors.world, f"Loading {folder}"
    )
    for number, name in enumerate(found):
        try:
            loaded = Path(name)
            index = all_do(partial(Index.read, loaded), tensors.world, f"Loading {loaded}")
            loading = Wanted(index, loaded, tensors, states, as_list(scheduler))
            num_bytes = read_items(loaded, index, loading.items, tensors.world)
            break
        except DamagedError as error:
            tried.append(error.what)
            if number == len(found) - 1:
                raise
    extra = from_json(index.values["extra"])
    made = Loaded(loaded, index.step, extra, num_bytes, tuple(tried), loading.has_random)
    loading.commit(partial(take, made))
    folders.goes_on_from(tensors.model, [str(loaded.parent)])
    return made
