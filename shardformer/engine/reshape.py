"""An engine goes on under another layout, without the disk."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from shardformer.checkpoint.move import Moved
from shardformer.checkpoint.transfer import Departure
from shardformer.engine.engine import Engine
from shardformer.engine.optimizers import fill
from shardformer.engine.parallel import Parallel
from shardformer.engine.parts import grid_of, pipeline_of, sharded, zero_of
from shardformer.errors import ConfigError
from shardformer.lazy.materialize import recording
from shardformer.mesh.context import ParallelContext, with_tensor
from shardformer.mesh.grid import Grid


@dataclass(frozen=True, eq=False)
class Recipe:
    """Of what an engine is built once more.

    Args:
        twin: the plain model without values; None where it was sharded when it came.
        policy, loss_fn, loss_weight: as ``initialize`` was given them.
    """

    twin: nn.Module | None
    policy: Any
    loss_fn: Any
    loss_weight: Any


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
    with closing(Departure(engine.model, engine.optimizer)) as departure:
        with recording(recipe.twin):
            model = copy.deepcopy(recipe.twin)
        model = sharded(model, None, copy.copy(recipe.policy), asked, grid)
        optimizers = [own for each in engine.optimizers for own in getattr(each, "inner", [each])]
        fill(optimizers, departure.groups, model)
        if asked.zero_stage is not None and optimizers:
            optimizers = [zero_of(optimizers, model, asked)]
        moved = departure.arrive(model, optimizers)
    pipeline = pipeline_of(model, asked, recipe.loss_fn, recipe.loss_weight)
    engine.take_over(model.train(engine.model.training), optimizers, pipeline, asked, grid)
    return moved


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
