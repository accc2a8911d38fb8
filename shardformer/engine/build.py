"""``initialize``: a model, an optimizer and data become an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.comm.agree import agree
from shardformer.engine.data import batches_of
from shardformer.engine.engine import Engine
from shardformer.engine.modes import start_training
from shardformer.engine.optimizers import MakeOptimizer, as_optimizers
from shardformer.engine.parallel import Parallel
from shardformer.engine.parts import grid_of, num_processes, pipeline_of, sharded, trained_by, zero_of
from shardformer.engine.pipeline import Pipeline
from shardformer.engine.reshape import Recipe, reshaped
from shardformer.errors import ConfigError, expect, nearest
from shardformer.layout.state import ROOT, check_module
from shardformer.lazy.materialize import without_values
from shardformer.mesh.context import ParallelContext
from shardformer.optim.undo import unchanged_on_error

EVERY = ("step", "epoch")


def initialize(
    model: nn.Module,
    optimizer: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    train_data: Any = None,
    scheduler: Any = None,
    parallel: Parallel | dict[str, Any] | Callable[[int], Parallel] | None = None,
    *,
    batch_size: int | None = None,
    policy: Any = None,
    context: ParallelContext | None = None,
    loss_weight: Callable[[Any], float] | None = None,
    scheduler_every: str = "step",
    data_options: dict[str, Any] | None = None,
) -> Engine:
    """Shards a model, and gives the engine that trains it: the same script for one process and for many.

    >>> engine = shardformer.initialize(model, optimizer, train_data=data, batch_size=32,         # doctest: +SKIP
    ...                                 parallel=shardformer.Parallel(tensor=2, zero=1))
    >>> for batch in engine.data:                                                                 # doctest: +SKIP
    ...     engine.train_step(batch)

    Args:
        model: the plain model, of transformers or any other, the same on every rank.
        optimizer: made of ``model.parameters()``, before anything is sharded; or several in a list; or a function that
            makes one of the parameters that this rank will have.
        loss_fn: (output, batch) -> loss, for a model that gives none itself; where batches are rows, (output, target),
            as ``torch.nn.CrossEntropyLoss()``.
        train_data: a data set, a list, an iterable, a HF data set or a DataLoader: see ``Batches``, which
            ``engine.data`` becomes.
        scheduler: of the learning rate, made of ``optimizer``; several in a list; or a function that makes one.
        parallel: the layout, and how a step is made; or a function that makes it of the number of processes, for runs
            that go on with fewer: ``shardformer.Parallel(tensor=4).fit``.
        batch_size: samples of the whole batch, over all data ranks.
        policy: the user's own policy of sharding; None takes the one that is found.
        context: a grid that was laid already; None: over the processes that were launched, by the sizes in
            ``parallel``, or this process alone.
        loss_weight: micro-batch -> what counts in it, for a loss that is no mean of torch's functions.
        scheduler_every: "step" or "epoch".
        data_options: further arguments of ``Batches``: seed, shuffle, drop_last, collate_fn, num_workers, accumulate.

    Raises ShardFormerError, on every rank and with the model as it was, when something cannot be. Communicates what
    ``shard_model`` does.
    """
    _check_kinds(model, context, data_options, loss_fn=loss_fn, loss_weight=loss_weight)
    asked = _asked(parallel, scheduler_every)
    given = as_optimizers(optimizer)
    grid = grid_of(context, asked)
    options = {"batch_size": batch_size, **(data_options or {})}
    data = None if train_data is None else batches_of(train_data, grid, **options)
    twin = start_training(without_values(model)) if ROOT not in model.__dict__ else None
    recipe, made = Recipe(twin, policy, loss_fn, loss_weight), list[Engine]()
    make = partial(_engine_of, recipe=recipe, scheduler_every=scheduler_every, data=data)
    sharded(model, given, policy, asked, grid, lambda model: made.append(make(model, given, scheduler, asked, grid)))
    return made[0]


def _engine_of(
    model: nn.Module,
    given: list[Optimizer] | MakeOptimizer | None,
    scheduler: Any,
    asked: Parallel,
    grid: ParallelContext,
    *,
    recipe: Recipe,
    **options: Any,
) -> Engine:
    """The engine of a sharded model. Where a rank fails to make what trains it, all raise."""

    def make() -> tuple[Pipeline, list[Optimizer], Any]:
        pipeline = pipeline_of(model, asked, recipe.loss_fn, recipe.loss_weight)
        return pipeline, *trained_by(given, scheduler, model)

    pipeline, optimizers, schedulers = agree(grid, make, doing="make what trains the model")
    if asked.zero_stage is not None and optimizers:
        with unchanged_on_error(optimizers):
            optimizers = [zero_of(optimizers, model, asked)]
    engine = Engine(
        model, optimizers, pipeline, asked, grid,
        scheduler=schedulers, has_target=recipe.loss_fn is not None, **options,
    )  # fmt: skip
    recipe.see(model)
    engine.rebuild = partial(reshaped, engine, recipe)
    return engine


def _check_kinds(model: Any, context: Any, data_options: Any, **functions: Any) -> None:
    check_module(model)
    for name, value in functions.items():
        expect(name, value, value is None or callable(value), "It is a function", f"Give one, or leave {name} out")
    is_grid = context is None or isinstance(context, ParallelContext)
    expect("context", context, is_grid, "It is the grid that launch_from_torch returned", "Leave context out")
    is_dict = data_options is None or isinstance(data_options, dict)
    expect("data_options", data_options, is_dict, "They are a dict of what Batches takes", "Leave data_options out")


def _asked(parallel: Any, scheduler_every: str) -> Parallel:
    if scheduler_every not in EVERY:
        rule = f"The scheduler steps every {' or '.join(EVERY)}"
        raise ConfigError(f"scheduler_every={scheduler_every!r}", rule=rule, remedy=nearest(scheduler_every, EVERY))
    return Parallel.of(parallel(num_processes()) if callable(parallel) else parallel)
