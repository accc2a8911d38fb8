"""Provides ``initialize``, which shards a model and its optimizer and returns a training engine."""

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
from torch.optim.lr_scheduler import LRScheduler

from shardformer.checkpoint.reshard_in_memory import ReshardSource, ReshardStats
from shardformer.checkpoint.training_state import ModelCheckpointTensors, with_nested_optimizers
from shardformer.comm.collective_call import run_and_compare_across_ranks
from shardformer.comm.collectives import all_gather_objects
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, check_argument, check_callable, check_choice
from shardformer.gradient_accumulation.micro_batch_loss import LossWeight
from shardformer.gradient_accumulation.micro_batches import TARGET_KEY
from shardformer.layout.packed_weights import check_quantized_model_has_adapters, find_quantized_weights
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, check_is_module, get_sharding_metadata
from shardformer.mesh.init_distributed import get_launcher_env_variable_name, get_num_slurm_tasks, launch_from_torch
from shardformer.mesh.parallel_context import (
    ParallelContext,
    get_local_device,
    reshape_sequence_axis,
    reshape_tensor_axis,
)
from shardformer.mesh.rank_grid import RankGrid
from shardformer.meta_init.lazy_init import copy_to_meta, record_changes_if_lazy
from shardformer.offload.activations import offload_activations
from shardformer.pipeline.contrastive_losses import warn_about_batch_norm_statistics
from shardformer.pipeline.pipeline import (
    Pipeline,
    ensure_training_mode,
    get_training_modes,
    is_batch_norm,
    set_training_modes,
)
from shardformer.policies.policy import Policy
from shardformer.random_state import restore_rng_states_on_error
from shardformer.shard_model_api import shard_model_in_place
from shardformer.sharding.checks import check_no_dtensors
from shardformer.sharding.compiled_layers import compile_model, get_layer_stack_compilers
from shardformer.torch_compat import is_compiled_in_place, unwrap_compiled_module
from shardformer.training.data_loader import (
    ShardedDataLoader,
    batch_to_forward_kwargs,
    create_data_loader_on_all_ranks,
    is_list_of_batches,
    wrap_loss_fn_for_micro_batches,
)
from shardformer.training.engine import Engine, get_required_step_argument
from shardformer.training.user_changes import (
    AttributeSnapshot,
    ItemKey,
    apply_user_changes,
    gather_user_changes,
    take_model_snapshot,
)
from shardformer.zero.optimizer_state_view import (
    OptimizerStateBeforeSharding,
    detach_zero_optimizer,
    rollback_optimizers_on_error,
)
from shardformer.zero.shard_optimizer import must_shard_optimizers, shard_optimizer
from shardformer.zero.zero_optimizer import unwrap_zero_optimizers

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
OptimizerArgument = list[Optimizer] | MakeOptimizer | None
SchedulerArgument = LRScheduler | Sequence[LRScheduler] | Callable[[Optimizer], LRScheduler] | None


@contextmanager
def _detach_params_from_optimizers(
    optimizers: Sequence[Optimizer], model: nn.Module
) -> Iterator[Callable[[nn.Module], None]]:
    """Remove a model's parameters from its optimizers, and yield a function that adds the sharded parameters.

    The optimizers stay the same objects, so that schedulers remain valid. Their parameter lists are modified in place,
    because some optimizers keep a reference to them. Their states, which Adagrad creates in its constructor, are
    sharded with the parameters. An error restores the original parameters and states.
    """
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for optimizer in optimizers:
        _check_optimizer_params_in_model(optimizer, names)
    lists = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    aliases = [[names[id(p)] for p in params] for params in lists]
    states = [OptimizerStateBeforeSharding(optimizer) for optimizer in with_nested_optimizers(optimizers)]

    def attach_params(sharded_model: nn.Module) -> None:
        local = dict(sharded_model.named_parameters(remove_duplicate=False))  # without those of other pipeline stages
        for params, names_of_params in zip(lists, aliases, strict=True):
            found = [next((local[name] for name in names if name in local), None) for names in names_of_params]
            params[:] = [p for p in found if p is not None]
        for state in states:
            state.assign_to_sharded_params(
                lambda p: next((local[name] for name in names.get(id(p), ()) if name in local), None)
            )
        trained = {name for names_of_params in aliases for names in names_of_params for name in names}
        attached = {id(p) for params in lists for p in params}
        missing = next((name for name, p in local.items() if name in trained and id(p) not in attached), None)
        if missing is not None:
            raise ConfigError(
                f"Sharding replaced the parameter {missing}, so the optimizer would no longer update it.",
                remedy="Pass a function that creates the optimizer: "
                "optimizer=lambda parameters: torch.optim.AdamW(parameters).",
            )

    for params in lists:
        params.clear()
    try:
        yield attach_params
    except BaseException:
        attach_params(model)
        raise


def _check_optimizer_params_in_model(optimizer: Optimizer, names_by_param_id: Mapping[int, object]) -> None:
    kind = type(optimizer).__name__
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if id(param) not in names_by_param_id:
            raise ConfigError(
                f"The {kind} optimizer has a parameter of shape {tuple(param.shape)} that is not in the model.",
                remedy="Add the module of this parameter to the model, or remove the parameter from the optimizer.",
            )


def _normalize_optimizer_argument(optimizer: Any) -> list[Optimizer] | MakeOptimizer | None:
    """Convert the ``optimizer`` argument to a list of optimizers, unless it is None or a function."""
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    if isinstance(optimizer, (list, tuple)) and optimizer and all(isinstance(each, Optimizer) for each in optimizer):
        return list(optimizer)
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, type)):
        return optimizer
    what = optimizer.__name__ if isinstance(optimizer, type) else f"{optimizer!r:.80}"
    raise ConfigError(
        f"optimizer must be an optimizer, a list of optimizers, or a function that creates one, but got {what}.",
        remedy="For example, pass optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4).",
    )


def get_launcher_world_size() -> int:
    """Return the number of processes that the launcher started."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or get_num_slurm_tasks() or 1)


def get_or_create_parallel_context(context: ParallelContext | None, config: ParallelConfig) -> ParallelContext:
    if context is None:
        if dist.is_initialized() or get_launcher_env_variable_name() is not None:
            return _add_derived_mesh_axes(launch_from_torch(**config.sizes), config)  # type: ignore[arg-type]
        context = ParallelContext.from_sizes({}, device=get_local_device())
    differs = [name for name, size in config.sizes.items() if size not in (None, 1) and context.sizes[name] != size]
    if not differs:
        return _add_derived_mesh_axes(context, config)
    name, requested, actual = differs[0], config.sizes[differs[0]], context.sizes[differs[0]]
    if context.world is None and all(size == 1 for size in context.sizes.values()):
        srun = "srun, or with " if "SLURM_JOB_ID" in os.environ else ""
        raise ConfigError(
            f"The argument parallel requests {name}={requested}, but the script runs in only one process.",
            remedy=f"Start the script with {srun}shardformer run --nproc_per_node N script.py.",
        )
    raise ConfigError(
        f"The argument parallel requests {name}={requested}, but the argument context has {name}={actual}.",
        remedy="Pass only one of the arguments parallel and context.",
    )


def _add_derived_mesh_axes(context: ParallelContext, config: ParallelConfig) -> ParallelContext:
    """Add mesh axes for ring attention, Ulysses and tensor-parallel grids to a context if the config uses them."""
    if "ring" not in context.sizes:
        sequence = config.sequence if isinstance(config.sequence, int) else list(config.sequence)
        context = reshape_sequence_axis(context, sequence)
    return context if "row" in context.sizes else reshape_tensor_axis(context, config.tensor)


def _shard_model_and_optimizers(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    policy: Policy | type[Policy] | None,
    config: ParallelConfig,
    context: ParallelContext,
    on_sharded: Callable[[nn.Module], object] = lambda _: None,
    make_example_inputs: Callable[[], dict[str, Any] | None] = lambda: None,
) -> nn.Module:
    """Shard the model, and make its optimizers update the sharded parameters.

    An error restores the model and the optimizers, even if ``on_sharded``, a function of the sharded model, raises it.
    """
    lines = [f"{name}={value}" for name, value in vars(config).items() if not callable(value)]
    lines += [type(each).__name__ for each in optimizers]
    plain, compiler = unwrap_compiled_module(model)
    if METADATA_ATTRIBUTE not in plain.__dict__:  # the states of a sharded model differ between ranks
        for optimizer in with_nested_optimizers(optimizers):
            lines += OptimizerStateBeforeSharding(optimizer).format_lines()
    run_and_compare_across_ranks(
        context, lambda: lines, lambda lines: lines, action_description="initialize the engine"
    )
    with _detach_params_from_optimizers(optimizers, plain) as attach:

        def finish_sharding(sharded_model: nn.Module) -> None:
            sharded_model.to(context.device)
            attach(sharded_model)
            if config.activation_offload != "device":
                offload_activations(sharded_model, config.activation_offload)
            on_sharded(ensure_training_mode(sharded_model))

        if METADATA_ATTRIBUTE in plain.__dict__:
            if compiler:
                compile_model(plain, **compiler)
            finish_sharding(plain)
            return plain
        return shard_model_in_place(
            model, config.make_shard_config(context), policy, finish_sharding, make_example_inputs
        )[0]


def make_pipeline(
    model: nn.Module, config: ParallelConfig, loss_fn: Callable[..., Tensor] | None, loss_weight: LossWeight | None
) -> Pipeline:
    return Pipeline(
        model,
        config.micro_batches,
        micro_batch_size=config.micro_batch_size,
        loss_fn=wrap_loss_fn_for_micro_batches(loss_fn) if loss_fn is not None else None,
        loss_weight=loss_weight,
        average_loss_over=config.average_loss_over,
        allow_short_batches=True,
    )


def _resolve_scheduler(scheduler: SchedulerArgument, optimizers: list[Optimizer]) -> Any:
    several = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
    if scheduler is None or (several and all(hasattr(x, "step") and not isinstance(x, type) for x in several)):
        for each in several if scheduler is not None else ():
            get_required_step_argument(each)  # raises for an argument that the engine cannot pass
        return scheduler
    if not callable(scheduler):
        raise ConfigError(
            "scheduler must be a scheduler, a list of schedulers, or a function that creates a scheduler, but got "
            f"{scheduler!r:.80}.",
            remedy="For example, pass scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, ...).",
        )
    if len(optimizers) != 1:
        raise ConfigError(
            f"A scheduler function supports only one optimizer, but initialize got {len(optimizers)} optimizers.",
            remedy="Pass a list of schedulers instead, or use a single optimizer.",
        )
    return _resolve_scheduler(scheduler(optimizers[0]), optimizers)


@dataclass(eq=False)
class EngineRebuildArguments:
    """Stores the arguments of ``initialize``, so that ``Engine.reshard`` can build an engine with another layout.

    Args:
        meta_model: Unsharded model on the meta device, or None if the user passed a sharded model.
        model_snapshot: Snapshot of the sharded model, to detect later changes by the user.
        make_example_inputs: Function that returns example arguments of ``forward``, from which a policy may be derived.
    """

    meta_model: nn.Module | None
    policy: Policy | type[Policy] | None
    loss_fn: Callable[..., Tensor] | None
    loss_weight: LossWeight | None
    model_snapshot: Mapping[ItemKey, AttributeSnapshot] = field(default_factory=dict)
    make_example_inputs: Callable[[], dict[str, Any] | None] = lambda: None

    def take_snapshot(self, model: nn.Module) -> None:
        if self.meta_model is not None:
            self.model_snapshot = take_model_snapshot(model, self.meta_model)


def reshard_engine(engine: Engine, rebuild_arguments: EngineRebuildArguments, new_parallel_config: Any) -> ReshardStats:
    """Reshard the model and optimizers of an engine for another parallel layout. See ``Engine.reshard``."""
    config = ParallelConfig.from_value(new_parallel_config)
    if rebuild_arguments.meta_model is None:
        raise ConfigError(
            "The engine cannot be resharded, because initialize received a model that was already sharded or "
            "quantized.",
            remedy="Pass an unsharded model to initialize. For a quantized model, save a checkpoint and load it into "
            "a new engine with the new layout.",
        )
    context = _create_context_for_new_layout(engine.context, config)
    if engine.has_data:
        engine.data.check_num_data_ranks(context.data.size)
    changes = gather_user_changes(
        rebuild_arguments.model_snapshot, engine.model, rebuild_arguments.meta_model, engine.world
    )
    compiled = next((path for path, module in engine.model.named_modules() if is_compiled_in_place(module)), None)
    if get_layer_stack_compilers(engine.model) and not config.compile:
        compiled = ""
    if compiled is not None:
        where = f"engine.model.{compiled}".rstrip(".")
        text = f"engine.reshard rebuilds the model without its compiled modules. Call {where}.compile() again."
        warnings.warn(text, stacklevel=3)
    checkpointed = set().union(*all_gather_objects(engine.pipeline.checkpointed, engine.world))
    optimizers = unwrap_zero_optimizers(engine.optimizers)
    all_optimizers = with_nested_optimizers(optimizers)
    with (
        restore_rng_states_on_error(engine.context.device),
        rollback_optimizers_on_error(all_optimizers, engine.schedulers),
        closing(ReshardSource(engine.model, engine.optimizer)) as old,
    ):
        with record_changes_if_lazy(rebuild_arguments.meta_model):
            model = copy.deepcopy(rebuild_arguments.meta_model)
        apply_user_changes(changes, model)
        for path in checkpointed:
            vars(model.get_submodule(path))["gradient_checkpointing"] = True
        modes = get_training_modes(model)
        policy = copy.copy(rebuild_arguments.policy)
        model = _shard_model_and_optimizers(
            model, [], policy, config, context, make_example_inputs=rebuild_arguments.make_example_inputs
        )
        pipeline = make_pipeline(model, config, rebuild_arguments.loss_fn, rebuild_arguments.loss_weight)
        tensors: dict[str, Tensor] = ModelCheckpointTensors(model).tensors
        for optimizer, names_of_groups in zip(all_optimizers, old.param_names_by_group, strict=True):
            detach_zero_optimizer(optimizer)
            optimizer.state.clear()
            for group, names in zip(optimizer.param_groups, names_of_groups, strict=True):
                group["params"][:] = [tensors[name] for name in names if name in tensors]
        if must_shard_optimizers(model, optimizers, config.effective_zero_stage):
            optimizers = [shard_optimizer(model, optimizers, **config.get_zero_kwargs())]
        moved = old.load_into(model, optimizers)
    set_training_modes(model, modes)
    apply_user_changes(changes, rebuild_arguments.meta_model)
    engine.adopt(model, optimizers, pipeline, config, context)
    rebuild_arguments.take_snapshot(model)
    return moved


def _create_context_for_new_layout(context: ParallelContext, config: ParallelConfig) -> ParallelContext:
    if context.world is None or context.mesh is not None:
        return get_or_create_parallel_context(None, config)
    count = len(context.grid.ranks)
    sizes = {name: size or 1 for name, size in config.sizes.items()}
    if config.data is None:
        sizes["data"] = count // (prod(sizes.values()) or 1)
    grid = RankGrid.from_sizes(sizes)
    other = ParallelContext.from_sizes(sizes, grid.get_coords(context.rank), world=context.world, device=context.device)
    return _add_derived_mesh_axes(other, config)


def initialize(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | MakeOptimizer | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    train_data: Any = None,
    scheduler: SchedulerArgument = None,
    parallel: ParallelConfig | dict[str, Any] | Callable[[int], ParallelConfig] | None = None,
    *,
    batch_size: int | None = None,
    policy: Policy | type[Policy] | None = None,
    context: ParallelContext | None = None,
    loss_weight: LossWeight | None = None,
    scheduler_every: str = "step",
    data_options: dict[str, Any] | None = None,
) -> Engine:
    """Shard a model and its optimizer, and return a training engine. The same script runs on one process or many.

    >>> engine = shardformer.initialize(model, optimizer, train_data=data, batch_size=32,         # doctest: +SKIP
    ...                                 parallel=shardformer.ParallelConfig(tensor=2, zero_stage=1))
    >>> for batch in engine.data:                                                                 # doctest: +SKIP
    ...     engine.train_step(batch)

    Communicates what ``shard_model`` communicates.

    Args:
        model: Unsharded transformers model or any other ``nn.Module``, identical on every rank.
        optimizer: Optimizer of ``model.parameters()``, a list of optimizers, or a function that creates an optimizer
            from this rank's parameters.
        loss_fn: Loss function for a model that returns no loss. It is called as ``loss_fn(output, batch)``, or as
            ``loss_fn(output, target)`` if batches are tuples.
        train_data: Data set, list, iterable or DataLoader, from which ``engine.data`` is created.
        scheduler: Scheduler of ``optimizer``, a list of schedulers, or a function that creates the scheduler.
        parallel: Layout and options, or a function that returns them for the number of processes, such as
            ``ParallelConfig(tensor=4).fit_to``.
        batch_size: Global batch size, summed over all data ranks.
        policy: Your own sharding policy. By default, a policy is selected automatically.
        context: Existing process grid. By default, the grid is created from the sizes in ``parallel``.
        loss_weight: Function that returns the weight of a micro-batch, if its loss is not a mean of a torch loss.
        scheduler_every: "step" or "epoch".
        data_options: Further arguments of ``ShardedDataLoader``, such as seed, shuffle, collate_fn and accumulate.

    Raises:
        ShardFormerError: The combination is not supported. Raised on every rank, with the model unchanged.
    """
    _check_initialize_arguments(model, loss_fn, loss_weight, scheduler_every, context, data_options)
    config = ParallelConfig.from_value(parallel(get_launcher_world_size()) if callable(parallel) else parallel)
    optimizers = _normalize_optimizer_argument(optimizer)
    process_grid = get_or_create_parallel_context(context, config)
    options = {"batch_size": batch_size, **(data_options or {})}
    data = None if train_data is None else create_data_loader_on_all_ranks(train_data, process_grid, **options)
    plain, _ = unwrap_compiled_module(model)
    example = partial(_make_example_inputs, data, plain, has_target=loss_fn is not None)
    arguments = EngineRebuildArguments(None, policy, loss_fn, loss_weight, make_example_inputs=example)
    engine = _create_sharded_engine(model, optimizers, scheduler, config, process_grid, arguments)
    engine.scheduler_every = scheduler_every
    if data is not None:
        engine.set_data(data)
    return engine


def make_engine_without_data(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | MakeOptimizer | None,
    config: ParallelConfig,
    context: ParallelContext,
    policy: Policy | type[Policy] | None = None,
    make_example_inputs: Callable[[], dict[str, Any] | None] = lambda: None,
) -> Engine:
    """Shard a model and its optimizers like ``initialize``, for a training loop that loads its own data.

    Args:
        make_example_inputs: Function that returns example arguments of ``forward``, from which a policy may be derived,
            or None.
    """
    _check_initialize_arguments(model, None, None, "step", context, None)
    if context.data.size > 1 and any(map(is_batch_norm, model.modules())):
        warn_about_batch_norm_statistics(f"over {context.data.size} data-parallel ranks")
    arguments = EngineRebuildArguments(None, policy, None, None, make_example_inputs=make_example_inputs)
    return _create_sharded_engine(model, _normalize_optimizer_argument(optimizer), None, config, context, arguments)


def _make_example_inputs(data_loader: ShardedDataLoader | None, model: nn.Module, *, has_target: bool) -> Any:
    """Build example inputs for ``forward`` from the first training samples, or return None if this is impossible."""
    batch = data_loader.get_example_batch() if data_loader is not None else None
    if batch is None or is_list_of_batches(batch):
        return None
    arguments = batch_to_forward_kwargs(batch, model, has_target=has_target)
    return {name: value for name, value in arguments.items() if name != TARGET_KEY}


def _check_initialize_arguments(
    model: Any, loss_fn: Any, loss_weight: Any, scheduler_every: Any, context: Any, data_options: Any
) -> None:
    check_is_module(model)
    check_no_dtensors(model)
    check_callable("loss_fn", loss_fn, "It must be a function")
    check_callable("loss_weight", loss_weight, "It must be a function")
    check_choice("scheduler_every", scheduler_every, ("step", "epoch"))
    is_context = context is None or isinstance(context, ParallelContext)
    check_argument("context", context, is_context, "It must be a ParallelContext", "Remove context")
    is_dict = data_options is None or isinstance(data_options, dict)
    rule = "It must be a dict of arguments of ShardedDataLoader"
    check_argument("data_options", data_options, is_dict, rule, "Remove data_options")


def _create_sharded_engine(
    model: nn.Module,
    optimizer: OptimizerArgument,
    scheduler: SchedulerArgument,
    config: ParallelConfig,
    context: ParallelContext,
    rebuild_arguments: EngineRebuildArguments,
) -> Engine:
    """Shard the model and create the training engine. If one rank fails, all ranks restore the model and raise."""
    plain, _ = unwrap_compiled_module(model)
    if METADATA_ATTRIBUTE not in plain.__dict__ and not find_quantized_weights(plain):
        rebuild_arguments.meta_model = ensure_training_mode(copy_to_meta(plain))
    engines: list[Engine] = []

    def create_engine(sharded_model: nn.Module) -> None:
        check_quantized_model_has_adapters(sharded_model, get_sharding_metadata(sharded_model).adapters)

        def create_training_objects() -> tuple[Pipeline, list[Optimizer], Any]:
            pipeline = make_pipeline(sharded_model, config, rebuild_arguments.loss_fn, rebuild_arguments.loss_weight)
            optimizers = (
                [optimizer([p for p in sharded_model.parameters() if p.requires_grad])]
                if callable(optimizer)
                else optimizer or []
            )
            return pipeline, optimizers, _resolve_scheduler(scheduler, optimizers)

        pipeline, optimizers, schedulers = run_and_compare_across_ranks(
            context, create_training_objects, action_description="create the pipeline, optimizer and scheduler"
        )
        if must_shard_optimizers(sharded_model, optimizers, config.effective_zero_stage):
            with rollback_optimizers_on_error(optimizers):
                optimizers = [shard_optimizer(sharded_model, optimizers, **config.get_zero_kwargs())]
        has_target = rebuild_arguments.loss_fn is not None
        engine = Engine(
            sharded_model, optimizers, pipeline, config, context, scheduler=schedulers, has_target=has_target
        )
        rebuild_arguments.take_snapshot(sharded_model)
        engine.rebuild = partial(reshard_engine, engine, rebuild_arguments)
        engines.append(engine)

    _shard_model_and_optimizers(
        model,
        optimizer if isinstance(optimizer, list) else [],
        rebuild_arguments.policy,
        config,
        context,
        create_engine,
        rebuild_arguments.make_example_inputs,
    )
    return engines[0]
