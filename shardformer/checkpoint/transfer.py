"""A training run moves into another layout, in memory: what a checkpoint would hold goes from rank to rank."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from torch import nn

from shardformer.checkpoint.files import Entry, Index, name_of
from shardformer.checkpoint.folder import goes_on_from, saved_into
from shardformer.checkpoint.holding import Holding, hold
from shardformer.checkpoint.model import ModelTensors
from shardformer.checkpoint.move import CHUNK_BYTES, Moved, move_items
from shardformer.checkpoint.optimizers import optimizers_of
from shardformer.checkpoint.wanted import Wanted
from shardformer.comm.collectives import gather_objects


class Departure:
    """What the ranks have of a training run, kept while the model and its optimizers are built anew.

    Communicates names and sizes of what all have, and plain values.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        tensors = ModelTensors(model)
        self._world = tensors.world
        self._folders = saved_into(tensors.model)
        self._reading = ExitStack()
        if tensors.zero is not None:
            self._reading.enter_context(tensors.zero.reading())
        _, self._holding = hold(tensors, lambda: None, optimizer, None, None)
        self._index = Index(0, time.time(), tensors.sizes, _entries(self._holding, tensors), self._holding.values)

    @property
    def groups(self) -> list[list[list[str]]]:
        """Of each optimizer, and each of its groups, the names of the parameters in the plain model, in their order."""
        return [[group["names"] for group in each["groups"]] for each in self._index.values["optimizers"]]

    def close(self) -> None:
        """What the ranks had is not read any more."""
        self._reading.close()

    def arrive(self, model: nn.Module, optimizer: Any = None, *, chunk_bytes: int = CHUNK_BYTES) -> Moved:
        """Fills a model of the same kind under another layout, and what trains it, over the same processes.

        All ranks call it. What a rank holds under both layouts it copies; of what else it will hold each number is sent
        to it once, by a rank that has it. ``chunk_bytes``: see ``move_items``.

        Raises ConfigError, on all ranks and with the new model as it was, for another model or optimizer.
        """
        tensors = ModelTensors(model)
        wanted = Wanted(self._index, "the run before", tensors, optimizers_of(optimizer, tensors))
        moved = move_items(self._holding.items, wanted.items, self._world, chunk_bytes=chunk_bytes)
        self.close()
        wanted.commit()
        goes_on_from(tensors.model, self._folders)
        return moved


def _entries(holding: Holding, tensors: ModelTensors) -> dict[str, Entry]:
    """All tensors, on any rank, without where they are."""
    mine = {item.name: (name_of(item.dtype), item.shape) for item in holding.items}
    found: dict[str, Entry] = {}
    for theirs in gather_objects(mine, tensors.world):
        for name, (dtype, shape) in theirs.items():
            found.setdefault(name, Entry(dtype, shape))
    return found
