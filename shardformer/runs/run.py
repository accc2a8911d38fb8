"""Trains what a config says, in each of the processes that were launched."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardformer.checkpoint.export import check_export, check_target
from shardformer.checkpoint.together import first_does
from shardformer.engine.build import initialize
from shardformer.engine.engine import Engine
from shardformer.engine.parallel import Parallel
from shardformer.engine.parts import grid_of, num_processes
from shardformer.errors import ConfigError, ShardFormerError, first_line
from shardformer.mesh.context import ParallelContext
from shardformer.runs.config import RunConfig
from shardformer.runs.data import RunData, data_of
from shardformer.runs.hooks import hooks_of
from shardformer.runs.model_config import class_names_of, image_size_of, own_config
from shardformer.runs.models import model_of
from shardformer.runs.resume import Resume
from shardformer.runs.task_check import check_task
from shardformer.runs.updates import optimizer_of, scheduler_of
from shardformer.trainer.hooks.checkpoint import Checkpoint
from shardformer.trainer.trainer import Trainer

EXPORT = "model"
"""In the run's folder: where the trained model is written."""


def train(config: RunConfig) -> dict[str, float]:
    """Trains, and goes on where the run's folder holds a checkpoint. Returns the last values.

    Raises, on all ranks, what ended the run; SystemExit where a signal did.
    """
    layout = layout_of(config)
    context = grid_of(None, layout)
    trainer, data = trainer_of(config, layout, context)
    if config.training.export:
        first_does(lambda: _check_export(config, config.path / EXPORT), trainer.engine.world, "Training")
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
def _first_step(config: RunConfig, trainer: Trainer) -> Iterator[None]:
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
            rule="The model runs on batches of the data, and the optimizer updates it",
            remedy="Correct model.config, model.task, model.head or optimizer, whichever this is about",
        ) from error


def _check_export(config: RunConfig, folder: Path) -> None:
    """Raises ConfigError where the trained model would take the place of what no export wrote."""
    base = Path(config.model.name)
    base = base if base.is_dir() else base.parent
    if Path(config.model.name).exists() and folder.exists() and os.path.samefile(base, folder):
        raise ConfigError(
            f"training.export would write the trained model to {folder}, from where model.name = "
            f"{config.model.name!r} is read",
            rule="The model that a run starts from is not overwritten",
            remedy="Give the run another folder, such as folder = 'run'",
        )
    check_target(folder)


def _tell_unless_trained(config: RunConfig, trainer: Trainer) -> None:
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


def layout_of(config: RunConfig) -> Parallel:
    """As it is asked for; where a launcher has started the processes once more, the one that fits those it started."""
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return config.layout.fit(num_processes()) if is_restart else config.layout


def trainer_of(config: RunConfig, layout: Parallel, context: ParallelContext) -> tuple[Trainer, RunData]:
    """Everything that the config says, put together."""
    hooks = hooks_of(config)
    make_optimizer = optimizer_of(config.optimizer)
    data, model = data_and_model_of(config)
    hooks.append(Resume(config, num_steps_of(config, data)))
    return Trainer(_engine(config, layout, context, model, data, make_optimizer), hooks), data


def data_and_model_of(config: RunConfig) -> tuple[RunData, nn.Module]:
    """Both, with the model's weights not there yet.

    Raises what cannot be before the first step, and what an export behind the last one would fail with.
    """
    saved = own_config(config)
    data = data_of(config, image_size_of(saved), class_names_of(saved))
    model = model_of(config, data, saved)
    check_task(config, model)
    if config.training.export:
        check_export(model, data.beside)
    return data, model


def _engine(
    config: RunConfig, layout: Parallel, context: ParallelContext, model: Any, data: RunData, make_optimizer: Any
) -> Engine:
    torch.manual_seed(config.seed)
    return initialize(
        model,
        make_optimizer(model),
        train_data=data.train,
        scheduler=scheduler_of(config.schedule, num_steps_of(config, data)),
        parallel=layout,
        batch_size=config.data.batch_size,
        context=context,
        data_options={
            "seed": config.seed,
            "shuffle": config.data.shuffle,
            "drop_last": config.data.drop_last,
            "collate_fn": data.collate,
            "num_workers": config.data.workers,
        },
    )


def num_steps_of(config: RunConfig, data: RunData) -> int:
    """Steps of the whole run."""
    if config.training.steps is not None:
        return config.training.steps
    samples, size = len(data.train), config.data.batch_size
    return (config.training.epochs or 1) * (samples // size if config.data.drop_last else -(-samples // size))
