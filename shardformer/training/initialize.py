"""``initialize``: makes an engine of a model, an optimizer and data. Also moves an engine to another layout."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.checkpoint.reshard_in_memory import ReshardSource, ReshardStats
from shardformer.checkpoint.training_state import ModelTensors
from shardformer.comm.collective_call import collective_call
from shardformer.comm.collectives import all_gather_objects
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, check_argument, check_callable, check_choice
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, check_module
from shardformer.mesh.init_distributed import launch_from_torch
from shardformer.mesh.parallel_context import ParallelContext, local_device, with_grid_axes, with_ring_axes
from shardformer.mesh.rank_grid import RankGrid
from shardformer.meta_init.materialization import meta_copy, record_changes
from shardformer.offload.activations import offload_activations
from shardformer.pipeline.pipeline import Pipeline, modes_of, set_modes, start_training
from shardformer.random_state import random_kept_on_error
from shardformer.shard_model_api import shard_in_place
from shardformer.torch_compat import is_compiled_in_place
from shardformer.training.data_loader import batches_of, loss_of_target
from shardformer.training.engine import Engine
from shardformer.training.reshape import Changes, Key, Seen, seen_in
from shardformer.zero.optimizer_state_view import let_go, unchanged_on_error
from shardformer.zero.shard_optimizer import shard_optimizer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, eq=False)
class ParamGroupNames:
    """A group of an optimizer: its list of parameters, and for each all names that the plain model has for it."""

    params: list[nn.Parameter]
    names: list[list[str]]


class DetachedOptimizers:
    """Optimizers of a plain model, which let go of its parameters while it is sharded.

    The optimizers stay the objects that they were, so that schedulers made of them go on. Their lists of parameters are
    filled in place, since some optimizers keep a reference to them.
    """

    def __init__(self, optimizers: Sequence[Optimizer], model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        for optimizer in optimizers:
            _check(optimizer, names)
        self._groups = [
            ParamGroupNames(group["params"], [names[id(p)] for p in group["params"]])
            for o in optimizers
            for group in o.param_groups
        ]

    def detach(self) -> None:
        """The lists are empty from here on."""
        for group in self._groups:
            group.params.clear()

    def attach(self, model: nn.Module) -> None:
        """Fills the lists with this rank's parameters: none of those that other stages hold.

        Raises ConfigError where one that was trained has no place any more.
        """
        here = dict(model.named_parameters(remove_duplicate=False))
        for group in self._groups:
            found = [next((here[name] for name in names if name in here), None) for names in group.names]
            group.params[:] = [p for p in found if p is not None]
        names = {name for group in self._groups for aliases in group.names for name in aliases}
        taken = {id(p) for group in self._groups for p in group.params}
        lost = next((n for n, p in here.items() if n in names and id(p) not in taken), None)
        if lost is not None:
            raise ConfigError(
                f"{lost} of the sharded model is not the parameter that the optimizer was given",
                remedy="Give optimizer=, a function: lambda parameters: torch.optim.AdamW(parameters)",
            )


def rebind_parameters(
    optimizers: Sequence[Optimizer], groups: Sequence[Sequence[Sequence[str]]], model: nn.Module
) -> None:
    """Gives optimizers the parameters of a model, by name, of those that this rank has; and takes their states away."""
    here: dict[str, Any] = ModelTensors(model).tensors
    for optimizer, names in zip(optimizers, groups, strict=True):
        let_go(optimizer)
        optimizer.state.clear()
        for group, own in zip(optimizer.param_groups, names, strict=True):
            group["params"][:] = [here[name] for name in own if name in here]


def _check(optimizer: Optimizer, names: dict[int, list[str]]) -> None:
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise ConfigError(
                    f"This {kind} holds a parameter of the shape {tuple(param.shape)} that is none of the model's",
                    remedy="Make a loss with parameters of its own a part of the model, or leave them out",
                )
    if optimizer.state:
        raise ConfigError(
            f"This {kind} has made steps already: it has a state for {len(optimizer.state)} parameters",
            remedy="Save it with save_checkpoint(model, folder, optimizer) and load it with engine.load(folder)",
        )


def as_optimizer_factory(given: Any) -> list[Optimizer] | MakeOptimizer | None:
    """Those that were given, or the function that makes one. Raises ConfigError for what is neither."""
    if given is None:
        return None
    if isinstance(given, Optimizer):
        return [given]
    if isinstance(given, (list, tuple)) and given and all(isinstance(each, Optimizer) for each in given):
        return list(given)
    if callable(given) and not isinstance(given, type):
        return given  # type: ignore[no-any-return]
    what = given.__name__ if isinstance(given, type) else f"{given!r:.80}"
    raise ConfigError(
        f"optimizer={what}",
        rule="It is an optimizer of the model's parameters, a list of some, or a function that makes one of parameters",
        remedy="Write optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4)",
    )


LAUNCHER_VARIABLES = ("RANK", "SLURM_PROCID")
"""What the environment of a process has that a launcher started."""
OptimizerArgument = list[Optimizer] | MakeOptimizer | None


def num_processes() -> int:
    """That were launched."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)


def make_context(context: ParallelContext | None, asked: ParallelConfig) -> ParallelContext:
    if context is None:
        if dist.is_initialized() or any(name in os.environ for name in LAUNCHER_VARIABLES):
            return _with_views(launch_from_torch(**asked.sizes), asked)  # type: ignore[arg-type]
        context = ParallelContext.of({}, device=local_device())
    differs = [name for name, size in asked.sizes.items() if size not in (None, 1) and context.sizes[name] != size]
    if not differs:
        return _with_views(context, asked)
    name = differs[0]
    alone = context.world is None and all(size == 1 for size in context.sizes.values())
    raise ConfigError(
        f"parallel asks for {name}={asked.sizes[name]}, and "
        + ("this process runs alone" if alone else f"the grid given has {name}={context.sizes[name]}"),
        remedy="Start it with: shardformer run --nproc_per_node N script.py" if alone else "Give one of the two",
    )


def _with_views(context: ParallelContext, asked: ParallelConfig) -> ParallelContext:
    """The context with the tensor grid, and the ring of Ulysses groups, of the configuration."""
    if "ring" not in context.sizes:
        context = with_ring_axes(context, asked.sequence if isinstance(asked.sequence, int) else list(asked.sequence))
    return context if "row" in context.sizes else with_grid_axes(context, asked.tensor)


@contextmanager
def _detached(given: Any, model: nn.Module) -> Iterator[DetachedOptimizers | None]:
    """The optimizers hold no parameters in here; where an error breaks it off they get those of the model back."""
    held = DetachedOptimizers(given, model) if isinstance(given, list) else None
    if held is not None:
        held.detach()
    try:
        yield held
    except BaseException:
        if held is not None:
            held.attach(model)
        raise


def shard_with_optimizers(
    model: nn.Module,
    given: OptimizerArgument,
    policy: Any,
    asked: ParallelConfig,
    grid: ParallelContext,
    then: Callable[[nn.Module], object] = lambda _: None,
) -> nn.Module:
    """The model over the grid, whose parameters the optimizers have that were made of the plain ones.

    Args:
        then: called with that model. Where it raises the model and the optimizers are put back as they were, too.
    """
    lines = [f"{name}={value}" for name, value in vars(asked).items() if not callable(value)]
    lines += [type(each).__name__ for each in given] if isinstance(given, list) else []
    collective_call(grid, lambda: lines, lambda lines: lines, action="train as it was asked to")
    with _detached(given, model) as held:

        def finish(model: nn.Module) -> None:
            if held is not None:
                held.attach(model)
            model.to(grid.device)
            if asked.activation_offload != "device":
                offload_activations(model, asked.activation_offload)
            then(start_training(model))

        if METADATA_ATTRIBUTE in model.__dict__:
            finish(model)
            return model
        return shard_in_place(model, asked.shard_config(grid), policy, finish)[0]


def make_optimizers(given: OptimizerArgument, scheduler: Any, model: nn.Module) -> tuple[list[Optimizer], Any]:
    """The optimizers, and the scheduler."""
    if given is None:
        optimizers = []
    elif isinstance(given, list):
        optimizers = given
    else:
        optimizers = [given([p for p in model.parameters() if p.requires_grad])]
    return optimizers, _scheduler(scheduler, optimizers)


def make_pipeline(model: nn.Module, asked: ParallelConfig, loss_fn: Any, loss_weight: Any) -> Pipeline:
    return Pipeline(
        model,
        asked.micro_batches,
        micro_batch_size=asked.micro_batch_size,
        loss_fn=loss_of_target(loss_fn) if loss_fn is not None else None,
        loss_weight=loss_weight,
        average_loss_over=asked.average_loss_over,
        allow_short_batches=True,
    )


def _scheduler(given: Any, optimizers: list[Optimizer]) -> Any:
    several = given if isinstance(given, (list, tuple)) else [given]
    if given is None or (several and all(hasattr(each, "step") for each in several)):
        return given
    if not callable(given) or len(optimizers) != 1:
        raise ConfigError(
            f"scheduler={given!r:.80} with {len(optimizers)} optimizers",
            rule="It is a scheduler, a list of some, or a function that makes one of the optimizer",
            remedy="Write scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, ...)",
        )
    return given(optimizers[0])


@dataclass(eq=False)
class RebuildArguments:
    """Of what an engine is built once more.

    Args:
        meta_model: the plain model without values; None where it was sharded when it came.
        policy, loss_fn, loss_weight: as ``initialize`` was given them.
        seen: what the sharded model was then.
    """

    meta_model: nn.Module | None
    policy: Any
    loss_fn: Any
    loss_weight: Any
    seen: Mapping[Key, Seen] = field(default_factory=dict)

    def see(self, model: nn.Module) -> None:
        """What is changed from here on is carried over."""
        if self.meta_model is not None:
            self.seen = seen_in(model, self.meta_model)


def reshard_engine(engine: Engine, recipe: RebuildArguments, given: Any) -> ReshardStats:
    """Moves what the engine trains into another layout: see ``Engine.reshape``."""
    asked = ParallelConfig.of(given)
    if recipe.meta_model is None:
        raise ConfigError(
            "reshape of an engine whose model was sharded before it was given to initialize",
            remedy="Give initialize the plain model",
        )
    grid = _other_grid(engine.context, asked)
    if engine.data is not None:
        engine.data.check_ranks(grid.data.size)
    changes = Changes.since(recipe.seen, engine.model, recipe.meta_model, engine.world)
    _note_compiled(engine.model)
    checkpointed = set().union(*all_gather_objects(engine.pipeline.checkpointed, engine.world))
    optimizers = [own for each in engine.optimizers for own in getattr(each, "inner", [each])]
    undone = unchanged_on_error(optimizers, engine.schedulers)
    with (
        random_kept_on_error(engine.context.device),
        undone,
        closing(ReshardSource(engine.model, engine.optimizer)) as old,
    ):
        with record_changes(recipe.meta_model):
            model = copy.deepcopy(recipe.meta_model)
        changes.apply(model)
        for path in checkpointed:
            vars(model.get_submodule(path))["gradient_checkpointing"] = True
        modes = modes_of(model)
        model = shard_with_optimizers(model, None, copy.copy(recipe.policy), asked, grid)
        pipeline = make_pipeline(model, asked, recipe.loss_fn, recipe.loss_weight)
        rebind_parameters(optimizers, old.groups, model)
        if asked.effective_zero_stage is not None and optimizers:
            optimizers = [shard_optimizer(model, optimizers, **asked.zero_options())]
        moved = old.load_into(model, optimizers)
    set_modes(model, modes)
    changes.apply(recipe.meta_model)
    engine.adopt(model, optimizers, pipeline, asked, grid)
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


def _other_grid(context: ParallelContext, asked: ParallelConfig) -> ParallelContext:
    """Over the same processes."""
    if context.world is None or context.mesh is not None:
        return make_context(None, asked)
    count = len(context.grid.ranks)
    sizes = {name: size or 1 for name, size in asked.sizes.items()}
    if asked.data is None:
        sizes["data"] = count // (prod(sizes.values()) or 1)
    grid = RankGrid.of(sizes)
    other = ParallelContext.of(sizes, grid.coords(context.rank), world=context.world, device=context.device)
    return _with_views(other, asked)


EVERY = ("step", "epoch")


def initialize(
    model: nn.Module,
    optimizer: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    train_data: Any = None,
    scheduler: Any = None,
    parallel: ParallelConfig | dict[str, Any] | Callable[[int], ParallelConfig] | None = None,
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
    ...                                 parallel=shardformer.ParallelConfig(tensor=2, zero_stage=1))
    >>> for batch in engine.data:                                                                 # doctest: +SKIP
    ...     engine.train_step(batch)

    Args:
        model: the plain model, of transformers or any other, the same on every rank.
        optimizer: made of ``model.parameters()``, before anything is sharded; or several in a list; or a function that
            makes one of the parameters that this rank will have.
        loss_fn: (output, batch) -> loss, for a model that gives none itself; where batches are rows, (output, target),
            as ``torch.nn.CrossEntropyLoss()``.
        train_data: a data set, a list, an iterable, a HF data set or a DataLoader: see ``ShardedDataLoader``, which
            ``engine.data`` becomes.
        scheduler: of the learning rate, made of ``optimizer``; several in a list; or a function that makes one.
        parallel: the layout, and how a step is made; or a function that makes it of the number of processes, for runs
            that go on with fewer: ``shardformer.ParallelConfig(tensor=4).fit_to``.
        batch_size: samples of the whole batch, over all data ranks.
        policy: the user's own policy of sharding; None takes the one that is found.
        context: a grid that was laid already; None: over the processes that were launched, by the sizes in
            ``parallel``, or this process alone.
        loss_weight: micro-batch -> what counts in it, for a loss that is no mean of torch's functions.
        scheduler_every: "step" or "epoch".
        data_options: further arguments of ``ShardedDataLoader``: seed, shuffle, drop_last, collate_fn, num_workers,
            accumulate.

    Raises ShardFormerError, on every rank and with the model as it was, when something cannot be. Communicates what
    ``shard_model`` does.
    """
    _check_kinds(model, context, data_options, loss_fn=loss_fn, loss_weight=loss_weight)
    asked = _asked(parallel, scheduler_every)
    given = as_optimizer_factory(optimizer)
    grid = make_context(context, asked)
    options = {"batch_size": batch_size, **(data_options or {})}
    data = None if train_data is None else batches_of(train_data, grid, **options)
    twin = start_training(meta_copy(model)) if METADATA_ATTRIBUTE not in model.__dict__ else None
    recipe, made = RebuildArguments(twin, policy, loss_fn, loss_weight), list[Engine]()
    make = partial(_engine_of, recipe=recipe, scheduler_every=scheduler_every, data=data)
    shard_with_optimizers(
        model, given, policy, asked, grid, lambda model: made.append(make(model, given, scheduler, asked, grid))
    )
    return made[0]


def _engine_of(
    model: nn.Module,
    given: list[Optimizer] | MakeOptimizer | None,
    scheduler: Any,
    asked: ParallelConfig,
    grid: ParallelContext,
    *,
    recipe: RebuildArguments,
    **options: Any,
) -> Engine:
    """The engine of a sharded model. Where a rank fails to make what trains it, all raise."""

    def make() -> tuple[Pipeline, list[Optimizer], Any]:
        pipeline = make_pipeline(model, asked, recipe.loss_fn, recipe.loss_weight)
        return pipeline, *make_optimizers(given, scheduler, model)

    pipeline, optimizers, schedulers = collective_call(grid, make, action="make what trains the model")
    if asked.effective_zero_stage is not None and optimizers:
        with unchanged_on_error(optimizers):
            optimizers = [shard_optimizer(model, optimizers, **asked.zero_options())]
    engine = Engine(
        model, optimizers, pipeline, asked, grid,
        scheduler=schedulers, has_target=recipe.loss_fn is not None, **options,
    )  # fmt: skip
    recipe.see(model)
    engine.rebuild = partial(reshard_engine, engine, recipe)
    return engine


def _check_kinds(model: Any, context: Any, data_options: Any, **functions: Any) -> None:
    check_module(model)
    for name, value in functions.items():
        check_callable(name, value, "It is a function")
    is_grid = context is None or isinstance(context, ParallelContext)
    check_argument("context", context, is_grid, "It is the grid that launch_from_torch returned", "Leave context out")
    is_dict = data_options is None or isinstance(data_options, dict)
    rule = "It is a dict of arguments of ShardedDataLoader"
    check_argument("data_options", data_options, is_dict, rule, "Leave data_options out")


def _asked(parallel: Any, scheduler_every: str) -> ParallelConfig:
    check_choice("scheduler_every", scheduler_every, EVERY)
    return ParallelConfig.of(parallel(num_processes()) if callable(parallel) else parallel)
