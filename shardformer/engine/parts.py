"""The parts of an engine: the grid, the model over it, what trains it, and the pipeline that runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardformer.activations.attach import store_activations
from shardformer.comm.agree import agree
from shardformer.engine.batch import loss_of_target
from shardformer.engine.modes import start_training
from shardformer.engine.optimizers import Held, MakeOptimizer
from shardformer.engine.parallel import Parallel
from shardformer.engine.pipeline import Pipeline
from shardformer.errors import ConfigError
from shardformer.layout.state import ROOT
from shardformer.mesh.context import ParallelContext, local_device, with_tensor
from shardformer.mesh.launch import launch_from_torch
from shardformer.optim.zero import zero
from shardformer.sharder import ModelSharder

LAUNCHED = ("RANK", "SLURM_PROCID")
"""What the environment of a process has that a launcher started."""
Given = list[Optimizer] | MakeOptimizer | None


def num_processes() -> int:
    """That were launched."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)


def grid_of(context: ParallelContext | None, asked: Parallel) -> ParallelContext:
    if context is None:
        if dist.is_initialized() or any(name in os.environ for name in LAUNCHED):
            return with_tensor(launch_from_torch(**asked.sizes), asked.tensor)  # type: ignore[arg-type]
        context = ParallelContext.of({}, device=local_device())
    differs = [name for name, size in asked.sizes.items() if size not in (None, 1) and context.sizes[name] != size]
    if not differs:
        return context if "row" in context.sizes else with_tensor(context, asked.tensor)
    name = differs[0]
    alone = context.world is None and all(size == 1 for size in context.sizes.values())
    raise ConfigError(
        f"parallel asks for {name}={asked.sizes[name]}, and "
        + ("this process runs alone" if alone else f"the grid given has {name}={context.sizes[name]}"),
        rule="The sizes of the axes multiply to the number of processes",
        remedy="Start it with: shardformer run --nproc_per_node N script.py" if alone else "Give one of the two",
    )


@contextmanager
def _held(given: Any, model: nn.Module) -> Iterator[Held | None]:
    """The optimizers hold no parameters in here; where an error breaks it off they get those of the model back."""
    held = Held(given, model) if isinstance(given, list) else None
    if held is not None:
        held.let_go()
    try:
        yield held
    except BaseException:
        if held is not None:
            held.take(model)
        raise


def sharded(
    model: nn.Module,
    given: Given,
    policy: Any,
    asked: Parallel,
    grid: ParallelContext,
    then: Callable[[nn.Module], object] = lambda _: None,
) -> nn.Module:
    """The model over the grid, whose parameters the optimizers have that were made of the plain ones.

    Args:
        then: called with that model. Where it raises the model and the optimizers are put back as they were, too.
    """
    lines = [f"{name}={value}" for name, value in vars(asked).items() if not callable(value)]
    lines += [type(each).__name__ for each in given] if isinstance(given, list) else []
    agree(grid, lambda: lines, lambda lines: lines, doing="train as it was asked to")
    with _held(given, model) as held:

        def finish(model: nn.Module) -> None:
            if held is not None:
                held.take(model)
            model.to(grid.device)
            if asked.activations != "device":
                store_activations(model, asked.activations)
            then(start_training(model))

        if ROOT in model.__dict__:
            finish(model)
            return model
        sharder = ModelSharder(model, asked.shard_config(grid), policy)
        sharder.shard(finish)
        return sharder.model


def trained_by(given: Given, scheduler: Any, model: nn.Module) -> tuple[list[Optimizer], Any]:
    """The optimizers, and the scheduler."""
    if given is None:
        optimizers = []
    elif isinstance(given, list):
        optimizers = given
    else:
        optimizers = [given([p for p in model.parameters() if p.requires_grad])]
    return optimizers, _scheduler(scheduler, optimizers)


def pipeline_of(model: nn.Module, asked: Parallel, loss_fn: Any, loss_weight: Any) -> Pipeline:
    return Pipeline(
        model,
        asked.micro_batches,
        micro_batch_size=asked.micro_batch_size,
        loss_fn=loss_of_target(loss_fn) if loss_fn is not None else None,
        loss_weight=loss_weight,
        average_over_data=asked.average == "tokens",
        takes_short_batches=True,
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


def zero_of(optimizers: list[Optimizer], model: nn.Module, asked: Parallel) -> Optimizer:
    return zero(
        optimizers,
        model,
        stage=asked.zero_stage or 0,
        precision=asked.precision,
        offload=asked.offload,
        max_grad_norm=asked.max_grad_norm,
        on_nonfinite=asked.on_nonfinite,
    )
