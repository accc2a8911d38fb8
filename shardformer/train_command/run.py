"""Runs a training configuration in each worker process, or describes the run without training (dry run)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardformer.comm.collective_call import run_on_first_rank
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, ShardFormerError, first_line
from shardformer.local_ranks.fake_rank import MemoryTracker, fake_context, fake_tensors
from shardformer.mesh.parallel_context import ParallelContext, with_grid_axes
from shardformer.shard_model_api import shard_model
from shardformer.sharding.describe import describe_sharding
from shardformer.train_command.build import build_hooks, build_model, build_optimizer, build_scheduler, model_class_for
from shardformer.train_command.config_schema import TrainConfig
from shardformer.train_command.datasets import TrainingData, load_data
from shardformer.train_command.model_config import class_names_of, image_size_of, load_model_config
from shardformer.train_command.run_checks import Resume, check_task
from shardformer.training.data_sources import collate_samples
from shardformer.training.engine import Engine
from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.initialize import initialize, make_context, make_pipeline, num_processes
from shardformer.training.trainer import Trainer
from shardformer.weights.save_pretrained import check_export, check_target
from shardformer.zero.memory_estimate import MemoryEstimate, estimate_memory
from shardformer.zero.mixed_precision import MixedPrecision

EXPORT = "model"
"""In the run's folder: where the trained model is written."""


def run_training(config: TrainConfig) -> dict[str, float]:
    """Trains, and goes on where the run's folder holds a checkpoint. Returns the last values.

    Raises, on all ranks, what ended the run; SystemExit where a signal did.
    """
    layout = parallel_config_for(config)
    context = make_context(None, layout)
    trainer, data = build_trainer(config, layout, context)
    if config.training.export:
        run_on_first_rank(lambda: _check_export(config, config.path / EXPORT), trainer.engine.world, "Training")
    epochs = None if config.training.steps is not None else config.training.epochs or 1
    with _first_step(config, trainer):
        values = trainer.fit(
            steps=config.training.steps,
            epochs=epochs,
            validation=data.validation,
            validate_every=config.training.validate_every,
        )
    _tell_unless_trained(config, trainer)
    if trainer.was_interrupted:
        _tell_interrupted(trainer)
        # who waits for it hears that it is not through
        raise SystemExit(128 + (trainer.signal or signal.SIGTERM))
    if config.training.export:
        trainer.engine.export(config.path / EXPORT, data.beside)
    return values


@contextmanager
def _first_step(config: TrainConfig, trainer: Trainer) -> Iterator[None]:
    """Raises ConfigError where the model or the optimizer fails before a step is made: they do not fit the run.

    What no check can know before is known then: transformers accepts fields of a config that do not fit each other.
    """
    try:
        yield
    except (ShardFormerError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if trainer.loss is not None:
            raise
        fields = f" with model.config = {config.model.config!r:.200}" if config.model.config else ""
        raise ConfigError(
            f"The first step failed{fields}: {type(error).__name__}: {first_line(error)}",
            remedy="Correct model.config, model.task, model.head or optimizer, whichever this is about",
        ) from error


def _check_export(config: TrainConfig, folder: Path) -> None:
    """Raises ConfigError where the trained model would take the place of what no export wrote."""
    base = Path(config.model.name)
    base = base if base.is_dir() else base.parent
    if Path(config.model.name).exists() and folder.exists() and os.path.samefile(base, folder):
        raise ConfigError(
            f"training.export would write the trained model to {folder}, from where model.name = "
            f"{config.model.name!r} is read",
            remedy="Give the run another folder, such as folder = 'run'",
        )
    check_target(folder)


def _tell_unless_trained(config: TrainConfig, trainer: Trainer) -> None:
    if trainer.is_first and trainer.loss is None and not trainer.was_interrupted:
        key = "training.steps" if config.training.steps is not None else "training.epochs"
        done = f"{trainer.step} of {trainer.num_steps} steps are done"
        print(f"nothing to train: {done}; raise {key} to go on", flush=True)


def _tell_interrupted(trainer: Trainer) -> None:
    saved = next((hook for hook in trainer.hooks if isinstance(hook, Checkpoint) and hook.saved_step > 0), None)
    if not trainer.is_first:
        return
    if saved is None:
        print(f"stopped after step {trainer.step}; nothing is saved: see hooks.checkpoint in the config", flush=True)
    else:
        more = f" as of step {saved.saved_step}" if saved.saved_step != trainer.step else ""
        here = saved.folder.is_relative_to(Path.cwd())
        folder = saved.folder.relative_to(Path.cwd()) if here else saved.folder
        print(f"stopped after step {trainer.step}; saved in {folder}{more}: the same command resumes", flush=True)


def parallel_config_for(config: TrainConfig) -> ParallelConfig:
    """As it is asked for; where a launcher has started the processes once more, the one that fits those it started."""
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return config.layout.fit_to(num_processes()) if is_restart else config.layout


def build_trainer(
    config: TrainConfig, layout: ParallelConfig, context: ParallelContext
) -> tuple[Trainer, TrainingData]:
    """Everything that the config says, put together."""
    hooks = build_hooks(config)
    make_optimizer = build_optimizer(config.optimizer)
    data, model = data_and_model_of(config)
    hooks.append(Resume(config, num_steps_of(config, data)))
    return Trainer(_engine(config, layout, context, model, data, make_optimizer), hooks), data


def data_and_model_of(config: TrainConfig) -> tuple[TrainingData, nn.Module]:
    """Both, with the model's weights not there yet.

    Raises what cannot be before the first step, and what an export behind the last one would fail with.
    """
    saved = load_model_config(config)
    data = load_data(config, image_size_of(saved), class_names_of(saved))
    model = build_model(config, data, saved)
    check_task(config, model)
    if config.training.export:
        check_export(model, data.beside)
    return data, model


def _engine(
    config: TrainConfig,
    layout: ParallelConfig,
    context: ParallelContext,
    model: Any,
    data: TrainingData,
    make_optimizer: Any,
) -> Engine:
    torch.manual_seed(config.seed)
    return initialize(
        model,
        make_optimizer(model),
        train_data=data.train,
        scheduler=build_scheduler(config.schedule, num_steps_of(config, data)),
        parallel=layout,
        batch_size=config.data.batch_size,
        context=context,
        data_options={
            "seed": config.seed,
            "shuffle": config.data.shuffle,
            "drop_last": config.data.drop_last,
            "collate_fn": data.collate,
            "num_workers": config.data.num_workers,
        },
    )


def num_steps_of(config: TrainConfig, data: TrainingData) -> int:
    """Steps of the whole run."""
    if config.training.steps is not None:
        return config.training.steps
    samples, size = len(data.train), config.data.batch_size
    return (config.training.epochs or 1) * (samples // size if config.data.drop_last else -(-samples // size))


# B batch, S sequence


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, and where it stands.

    Args:
        coords: its place on the axes.
        persistent_bytes: by kind, through the whole run.
        step: the most that a step holds beside parameters: activations, gradients, scratch. None where it could not
            be traced.
    """

    coords: dict[str, int]
    persistent_bytes: MemoryEstimate
    step: int | None


@dataclass(frozen=True)
class DryRunReport:
    """What ``--dry-run`` prints."""

    model: str
    num_parameters: int
    data: str
    num_samples: int
    num_steps: int
    layout: dict[str, int]
    description: str
    ranks: list[RankMemory]
    why_untraced: str = ""


def make_dry_run_report(config: TrainConfig) -> DryRunReport:
    """Reads config and data, and shards the model for each rank without its values.

    Raises what training would raise before its first step. Communicates nothing, and allocates no weights.
    """
    build_hooks(config)
    make_optimizer = build_optimizer(config.optimizer)
    data, _ = data_and_model_of(config)
    saved = load_model_config(config)
    layout = config.layout
    sizes = {name: size or 1 for name, size in layout.sizes.items()}
    narrow = MixedPrecision.of(layout.precision).dtype
    ranks: list[RankMemory] = []
    said = why = ""
    num_parameters = 0
    known: dict[int, dict[Any, Any]] = {}  # what stages hand on, by tensor rank
    for pipe, tensor in product(range(sizes["pipe"]), range(sizes["tensor"])):
        coords = {"pipe": pipe, "tensor": tensor}
        context = fake_context(
            coords, tensor=sizes["tensor"], data=sizes["data"], pipe=sizes["pipe"], sequence=sizes["sequence"]
        )
        context = with_grid_axes(context, layout.tensor)
        with _without_values():
            plain = build_model(config, data, saved, lazy=False)
            num_parameters = num_parameters or sum(p.numel() for p in plain.parameters())
            of_params = make_optimizer(plain)
            model = shard_model(plain, config=layout.shard_config(context)).train()
            said = said or str(describe_sharding(model))
            kept = _persistent_memory(model, of_params, layout, sizes["data"])
        with _without_values() as copied:  # in the dtype in which a step computes
            plain = build_model(config, data, saved, lazy=False, dtype=narrow or torch.float32)
            model = shard_model(plain, config=layout.shard_config(context)).train()
            batch = copied(_batch(config, data, sizes["data"]))
            step, reason = _peak_of_traced_step(model, layout, batch, known.setdefault(tensor, {}))
        why = why or reason
        ranks.append(RankMemory(coords, kept, step))
    title = f"{model_class_for(config).__name__} of {config.model.name}"
    return DryRunReport(
        title, num_parameters, data.title, len(data.train), num_steps_of(config, data), sizes, said, ranks, why
    )


@contextmanager
def _without_values() -> Iterator[Any]:
    with torch.random.fork_rng(devices=[]), fake_tensors() as copied:
        yield copied


def _persistent_memory(model: Any, make_optimizer: Any, layout: ParallelConfig, data: int) -> MemoryEstimate:
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    stage = layout.effective_zero_stage
    return estimate_memory(
        model, optimizer, stage=stage or 0, precision=layout.precision, offload=layout.offload, data=data
    )


def _batch(config: TrainConfig, data: TrainingData, ranks: int) -> Any:
    """A data rank's part of the first batch."""
    count = max(-(-min(config.data.batch_size, len(data.train)) // ranks), 1)
    samples = [data.train[i % len(data.train)] for i in range(count)]
    return (data.collate or collate_samples)(samples)


def _peak_of_traced_step(
    model: Any, layout: ParallelConfig, batch: Any, known: dict[Any, Any]
) -> tuple[int | None, str]:
    """(the most bytes that a step holds beside the parameters, why that is not known).

    ``known`` are the shapes that earlier stages hand on, to which those of this one are added.
    """
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        with MemoryTracker([*model.parameters()]) as live:
            pipeline = make_pipeline(model, layout, None, None)
            if layout.pipe > 1:
                pipeline.exchange.given = dict(known)
            pipeline.step(batch)
    except (ShardFormerError, RuntimeError, TypeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
    if layout.pipe > 1:
        known |= pipeline.exchange.known
    return live.peak - held, ""
