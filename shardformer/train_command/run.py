"""Trains a run configuration in each worker process, or describes the run without training (dry run)."""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from shardformer.comm.collective_call import run_on_first_rank
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, ShardFormerError, first_line
from shardformer.local_ranks.fake_rank import MemoryTracker, fake_context, fake_tensors
from shardformer.mesh.parallel_context import ParallelContext, with_grid_axes
from shardformer.shard_model_api import shard_model
from shardformer.sharding.describe import describe_sharding
from shardformer.train_command.build import (
    build_hooks,
    build_model,
    build_optimizer,
    build_scheduler,
    freeze_parameters,
    model_class_for,
)
from shardformer.train_command.config_schema import TrainConfig
from shardformer.train_command.load_data import TrainingData, load_data
from shardformer.train_command.model_config import get_class_names, get_image_size, load_model_config
from shardformer.train_command.preference import PreferenceCollator, compute_reference
from shardformer.train_command.run_checks import Resume, check_packing, check_task
from shardformer.training.data_loader import collate_samples
from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.initialize import initialize, make_context, make_pipeline, num_processes
from shardformer.training.trainer import Trainer
from shardformer.weights.save_pretrained import check_export, check_target
from shardformer.zero.memory_estimate import MemoryEstimate, estimate_memory
from shardformer.zero.mixed_precision import MixedPrecision

EXPORT_FOLDER = "model"
"""Subfolder for the trained model in the folder of the run."""


def run_training(config: TrainConfig) -> dict[str, float]:
    """Train the model of a run configuration, or resume from a checkpoint in its folder. Returns the last metrics."""
    # an elastic restart may have fewer processes
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    layout = config.layout.fit_to(num_processes()) if is_restart else config.layout
    trainer, data = build_trainer(config, layout, make_context(None, layout))
    training = config.training
    if training.export:
        run_on_first_rank(
            lambda: _check_export_folder(config, config.path / EXPORT_FOLDER), trainer.engine.world, "Training"
        )
    steps, epochs = training.steps, None if training.steps is not None else training.epochs or 1
    if epochs is not None and epochs % 1:
        steps, epochs = count_steps(config, data), None
    with _convert_first_step_error(config, trainer):
        values = trainer.fit(
            steps=steps,
            epochs=None if epochs is None else int(epochs),
            validation=data.validation,
            validate_every=training.validate_every,
        )
    if trainer.was_interrupted:
        _print_interruption(trainer)
        raise SystemExit(128 + (trainer.signal or signal.SIGTERM))
    if trainer.is_first and trainer.loss is None:
        key = "training.steps" if training.steps is not None else "training.epochs"
        done = f"{trainer.step} of {trainer.num_steps} steps are complete"
        print(f"nothing to train: {done}; increase {key} to continue", flush=True)
    if training.export:
        trainer.engine.export(config.path / EXPORT_FOLDER, data.processor)
    return values


@contextmanager
def _convert_first_step_error(config: TrainConfig, trainer: Trainer) -> Iterator[None]:
    """Convert an error in the first training step to a ConfigError that names the configuration keys.

    Only the first step detects some combinations of config fields that transformers accepts but cannot run.
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
            remedy="Correct model.config, model.task, model.head or optimizer",
        ) from error


def _check_export_folder(config: TrainConfig, folder: Path) -> None:
    """Raise ConfigError if exporting the trained model would overwrite the base model or unrelated files."""
    base = Path(config.model.name)
    base = base if base.is_dir() else base.parent
    if Path(config.model.name).exists() and folder.exists() and os.path.samefile(base, folder):
        raise ConfigError(
            f"training.export would overwrite model.name = {config.model.name!r} with the trained model in {folder}",
            remedy="Set another folder for the run, such as folder = 'run'",
        )
    check_target(folder)


def _print_interruption(trainer: Trainer) -> None:
    saved = next((hook for hook in trainer.hooks if isinstance(hook, Checkpoint) and hook.saved_step > 0), None)
    how = " without a checkpoint: see hooks.checkpoint in the configuration"
    if saved is not None:
        more = f" at step {saved.saved_step}" if saved.saved_step != trainer.step else ""
        is_local = saved.directory.is_relative_to(Path.cwd())
        folder = saved.directory.relative_to(Path.cwd()) if is_local else saved.directory
        how = f"; saved in {folder}{more}: run the same command to resume"
    if trainer.is_first:
        print(f"stopped after step {trainer.step}{how}", flush=True)


def build_trainer(
    config: TrainConfig, layout: ParallelConfig, context: ParallelContext
) -> tuple[Trainer, TrainingData]:
    """Build the trainer of a run configuration, with its engine and hooks, and load its data."""
    hooks = build_hooks(config)
    make_optimizer = build_optimizer(config.optimizer)
    data, model = load_data_and_model(config)
    num_steps = count_steps(config, data)
    torch.manual_seed(config.seed)
    source, batch_size, data_options = _data_source(config, data)
    engine = initialize(
        model,
        make_optimizer(model),
        data.loss_fn,
        train_data=source,
        scheduler=build_scheduler(config.schedule, num_steps),
        parallel=layout,
        batch_size=batch_size,
        context=context,
        loss_weight=data.loss_weight,
        data_options={"seed": config.seed, **data_options},
    )
    for part in data.preferences:  # before a checkpoint is loaded: the reference is the initial model
        compute_reference(engine, part, cast(PreferenceCollator, data.collate), config.data.batch_size)
    return Trainer(engine, [*hooks, Resume(config, num_steps)]), data


def _data_source(config: TrainConfig, data: TrainingData) -> tuple[Any, int | None, dict[str, Any]]:
    """Return the training data, batch size and data options that ``initialize`` receives."""
    table = config.data
    options: dict[str, Any] = {
        "drop_last": table.drop_last,
        "collate_fn": data.collate,
        "num_workers": table.num_workers,
    }
    if data.sampler is not None:  # only a DataLoader has its own order
        loader = DataLoader(data.train, batch_size=table.batch_size, sampler=data.sampler, **options)
        return loader, None, {}
    return data.train, table.batch_size, {**options, "shuffle": table.shuffle and data.num_samples is not None}


def load_data_and_model(config: TrainConfig) -> tuple[TrainingData, nn.Module]:
    """Load the data of a run, and build its model without allocating the weights.

    Raises the errors that would occur in the first step or in the export after the last step.
    """
    saved = load_model_config(config)
    data = load_data(config, get_image_size(saved), get_class_names(saved))
    model = build_model(config, data, saved)
    freeze_parameters(model, config.model.freeze)
    check_task(config, model)
    if config.data.packing or config.model.task == "preference":
        check_packing(model, *(["model.task = 'preference'"] if config.model.task == "preference" else []))
    if config.training.export:
        check_export(model, data.processor)
    if data.skipped and os.environ.get("RANK", "0") == "0":
        warnings.warn(data.skipped, stacklevel=2)
    return data, model


def count_steps(config: TrainConfig, data: TrainingData) -> int:
    """Return the total number of training steps of a run."""
    if config.training.steps is not None:
        return config.training.steps
    samples, size = data.num_samples, config.data.batch_size
    assert samples is not None  # a stream requires training.steps
    return math.ceil(
        (config.training.epochs or 1) * (samples // size if config.data.drop_last else -(-samples // size))
    )


# B batch, S sequence


@dataclass(frozen=True)
class RankMemory:
    """Estimated memory of one rank in bytes.

    Args:
        persistent_bytes: Memory by kind during the run.
        step: Peak memory of a step without parameters: activations, gradients and workspace. None if tracing failed.
    """

    coords: dict[str, int]
    persistent_bytes: MemoryEstimate
    step: int | None


@dataclass(frozen=True)
class DryRunReport:
    """Description of a run that ``shardformer train --dry-run`` prints: model, data, layout and memory."""

    model: str
    num_parameters: int
    data: str
    num_samples: int | None
    num_steps: int
    layout: dict[str, int]
    description: str
    ranks: list[RankMemory]
    why_untraced: str = ""


def make_dry_run_report(config: TrainConfig) -> DryRunReport:
    """Describe a run and its memory per rank, without allocating weights and without training.

    Raises the errors that training would raise before its first step. Communicates nothing.
    """
    build_hooks(config)
    make_optimizer = build_optimizer(config.optimizer)
    data, _ = load_data_and_model(config)
    saved = load_model_config(config)
    layout = config.layout
    sizes = {name: size or 1 for name, size in layout.sizes.items()}
    step_dtype = MixedPrecision.of(layout.precision).dtype
    ranks: list[RankMemory] = []
    description = reason_untraced = ""
    num_parameters = 0
    batch_size = min(config.data.batch_size, data.num_samples or config.data.batch_size)
    samples = data.first_samples(max(-(-batch_size // sizes["data"]), 1))
    shapes: dict[int, dict[Any, Any]] = {}  # shapes that stages send, by tensor rank
    for pipe, tensor in product(range(sizes["pipe"]), range(sizes["tensor"])):
        coords = {"pipe": pipe, "tensor": tensor}
        context = fake_context(
            coords, tensor=sizes["tensor"], data=sizes["data"], pipe=sizes["pipe"], sequence=sizes["sequence"]
        )
        context = with_grid_axes(context, layout.tensor)
        with torch.random.fork_rng(devices=[]), fake_tensors():
            unsharded = build_model(config, data, saved, lazy=False)
            freeze_parameters(unsharded, config.model.freeze)
            num_parameters = num_parameters or sum(p.numel() for p in unsharded.parameters())
            of_params = make_optimizer(unsharded)
            model = shard_model(unsharded, config=layout.shard_config(context)).train()
            description = description or str(describe_sharding(model))
            persistent = estimate_memory(
                model,
                of_params([p for p in model.parameters() if p.requires_grad]),
                stage=layout.effective_zero_stage or 0,
                precision=layout.precision,
                offload=layout.offload,
                data=sizes["data"],
            )
        with torch.random.fork_rng(devices=[]), fake_tensors() as fake:  # in the dtype of a step
            unsharded = build_model(config, data, saved, lazy=False, dtype=step_dtype or torch.float32)
            freeze_parameters(unsharded, config.model.freeze)
            model = shard_model(unsharded, config=layout.shard_config(context)).train()
            batch = fake((data.collate or collate_samples)(samples))
            step, reason = _trace_peak_memory(model, layout, data, batch, shapes.setdefault(tensor, {}))
        reason_untraced = reason_untraced or reason
        ranks.append(RankMemory(coords, persistent, step))
    return DryRunReport(
        model=f"{model_class_for(config).__name__} of {config.model.name}",
        num_parameters=num_parameters,
        data=data.title,
        num_samples=data.num_samples,
        num_steps=count_steps(config, data),
        layout=sizes,
        description=description,
        ranks=ranks,
        why_untraced=reason_untraced,
    )


def _trace_peak_memory(
    model: Any, layout: ParallelConfig, data: TrainingData, batch: Any, shapes: dict[Any, Any]
) -> tuple[int | None, str]:
    """Trace a training step and return its peak memory without parameters, or None and the reason why tracing failed.

    ``shapes`` collects the shapes that each stage sends to the next stage.
    """
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        with MemoryTracker([*model.parameters()]) as tracker:
            pipeline = make_pipeline(model, layout, data.loss_fn, data.loss_weight)
            if layout.pipe > 1:
                pipeline.exchange.given = dict(shapes)
            pipeline.step(batch)
    except (ShardFormerError, RuntimeError, TypeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
    if layout.pipe > 1:
        shapes |= pipeline.exchange.known
    return tracker.peak - parameter_bytes, ""
