"""An engine goes on under another layout, without the disk."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn

from shardformer.checkpoint.move import Moved
from shardformer.checkpoint.transfer import Departure
from shardformer.comm.collectives import gather_objects
from shardformer.engine.changes import Changes, Key, Seen, seen_in
from shardformer.engine.engine import Engine
from shardformer.engine.modes import modes_of, set_modes
from shardformer.engine.optimizers import fill
from shardformer.engine.parallel import Parallel
from shardformer.engine.parts import grid_of, pipeline_of, sharded, zero_of
from shardformer.errors import ConfigError
from shardformer.layers.random_stream import random_kept_on_error
from shardformer.lazy.materialize import recording
from shardformer.mesh.context import ParallelContext, with_tensor
from shardformer.mesh.grid import Grid
from shardformer.optim.undo import unchanged_on_error
from shardformer.torch_compat import is_compiled_in_place


@dataclass(eq=False)
class Recipe:
    """Of what an engine is built once more.

    Args:
        twin: the plain model without values; None where it was sharded when it came.
        policy, loss_fn, loss_weight: as ``initialize`` was given them.
        seen: what the sharded model was then.
    """

    twin: nn.Module | None
    policy: Any
    loss_fn: Any
    loss_weight: Any
    seen: Mapping[Key, Seen] = field(default_factory=dict)

    def see(self, model: nn.Module) -> None:
        """What is changed from here on is carried over."""
        if self.twin is not None:
            self.seen = seen_in(model, self.twin)


def reshaped(engine: Engine, recipe: Recipe, given: Any) -> Moved:
    """Moves what the engine trains into another layout: see ``Engine.reshape``."""
    asked = Parallel.of(given)
    if recipe.twin is None:
        raise ConfigError(
            "reshape of an engine whose model was sharded before it was given to initialize",
            rule="The model is built once more for the other layout, from what it was before it was cut",
            remedy="Give initialize the plain model",
        )
    grid = _other_grid(engine.context, asked)
    if engine.data is not None:
        engine.data.check_ranks(grid.data.size)
    changes = Changes.since(recipe.seen, engine.model, recipe.twin, engine.world)
    _note_compiled(engine.model)
    checkpointed = set().union(*gather_objects(engine.pipeline.checkpointed, engine.world))
    optimizers = [own for each in engine.optimizers for own in getattr(each, "inner", [each])]
    undone = unchanged_on_error(optimizers, engine.schedulers)
    with random_kept_on_error(engine.context.device), undone, closing(Departure(engine.model, engine.optimizer)) as old:
        with recording(recipe.twin):
            model = copy.deepcopy(recipe.twin)
        changes.apply(model)
        for path in checkpointed:
            vars(model.get_submodule(path))["gradient_checkpointing"] = True
        modes = modes_of(model)
        model = sharded(model, None, copy.copy(recipe.policy), asked, grid)
        pipeline = pipeline_of(model, asked, recipe.loss_fn, recipe.loss_weight)
        fill(optimizers, old.groups, model)
        if asked.zero_stage is not None and optimizers:
            optimizers = [zero_of(optimizers, model, asked)]
        moved = old.arrive(model, optimizers)
    set_modes(model, modes)
    changes.apply(recipe.twin)
    engine.take_over(model, optimizers, pipeline, asked, grid)
    recipe.see(model)
    return moved


def _note_compiled(model: nn.Module) -> None:
    compiled = [path for path, module in model.named_modules() if is_compiled_in_place(module)]
    if compiled:
        where = f"engine.model{f'.{compiled[0]}' if compiled[0] else ''}"
        warnings.warn(
            f"reshape builds the model once more, and what you compiled is not compiled in it. Call {where}.compile() "
            "again, with your options.",
            stacklevel=4,
        )


def _other_grid(context: ParallelContext, asked: Parallel) -> ParallelContext:
    """Over the same processes."""
    if context.world is None or context.mesh is not None:
        return grid_of(None, asked)
    count = len(context.grid.ranks)
    sizes = {name: size or 1 for name, size in asked.sizes.items()}
    if asked.data is None:
        sizes["data"] = count // (prod(sizes.values()) or 1)
    grid = Grid.of(sizes)
    other = ParallelContext.of(sizes, grid.coords(context.rank), world=context.world, device=context.device)
    return with_tensor(other, asked.tensor)
