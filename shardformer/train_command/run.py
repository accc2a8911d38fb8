"""Runs the training that a run configuration describes, in each worker process."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from shardformer.comm.collective_call import run_on_first_rank
from shardformer.config import ParallelConfig
from shardformer.discovery.token_dependence import check_packing_is_supported
from shardformer.errors import ConfigError, ShardFormerError, get_first_message_line
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.train_command.build import (
    build_hooks,
    build_model,
    build_optimizer_factory,
    build_scheduler_factory,
    count_training_steps,
    freeze_and_add_lora,
)
from shardformer.train_command.config_schema import TrainConfig
from shardformer.train_command.load_data import TrainingData, load_data
from shardformer.train_command.model_config import get_class_names, get_image_size, load_model_config
from shardformer.train_command.preference import PreferenceCollator, compute_reference_logps
from shardformer.train_command.run_checks import Resume, check_attention_fits_task
from shardformer.train_command.summary import EXPORT_FOLDER, RunSummary, RunSummaryPrinter, print_run_footer
from shardformer.training.engine import Engine
from shardformer.training.initialize import get_num_processes, initialize, make_parallel_context
from shardformer.training.trainer import Trainer
from shardformer.weights.save_pretrained import check_export_directory, check_model_is_exportable, export_pretrained


def run_training(config: TrainConfig) -> dict[str, float]:
    """Train a model as specified in a run configuration, and return the last metrics.

    The training resumes if the folder of the run contains a checkpoint.
    """
    # an elastic restart may have fewer processes
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    layout = config.layout.fit_to(get_num_processes()) if is_restart else config.layout
    trainer, data = build_trainer(config, layout, make_parallel_context(None, layout))
    training = config.training
    if training.export:
        run_on_first_rank(
            lambda: _check_export_folder(config, config.output_folder / EXPORT_FOLDER), trainer.engine.world, "Training"
        )
    steps, epochs = training.steps, None if training.steps is not None else training.epochs or 1
    if epochs is not None and epochs % 1:
        steps, epochs = count_training_steps(config, data), None
    with _explain_error_in_first_step(config, trainer):
        values = trainer.fit(
            steps=steps,
            epochs=None if epochs is None else int(epochs),
            validation=data.validation,
            validate_every=training.validate_every,
        )
    if trainer.was_interrupted:
        raise SystemExit(128 + (trainer.signal or signal.SIGTERM))
    if training.export:
        export_model(config, trainer.engine, config.output_folder / EXPORT_FOLDER, data.processor)
    if trainer.is_first:
        print_run_footer(config, trainer)
    return values


def export_model(config: TrainConfig, engine: Engine, directory: Path, processor: Any) -> None:
    """Export the trained model for ``from_pretrained``, or its LoRA adapters for PEFT. All ranks must call it."""
    if config.lora is None:
        engine.export(directory, processor)
        return
    model: Any = engine.model
    if config.lora.merge:
        export_pretrained(model.merge_and_unload(), directory, tokenizer=processor)
        return
    model.save_pretrained(directory)
    run_on_first_rank(
        lambda: processor.save_pretrained(directory) if processor is not None else None, engine.world, "Exporting"
    )


@contextmanager
def _explain_error_in_first_step(config: TrainConfig, trainer: Trainer) -> Iterator[None]:
    """Convert an error in the first training step to a ConfigError that suggests which configuration keys to correct.

    transformers accepts some combinations of config fields that fail only in the first step.
    """
    try:
        yield
    except (ShardFormerError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if trainer.loss is not None:
            raise
        name, reason = type(error).__name__, get_first_message_line(error)
        raise ConfigError(
            f"The first training step failed with model.config = {config.model.config!r:.200}. {name}: {reason}.",
            remedy="Correct model.config, model.task, model.head or optimizer.",
        ) from error


def _check_export_folder(config: TrainConfig, folder: Path) -> None:
    """Raise ConfigError if exporting the trained model would overwrite the base model or unrelated files."""
    base = Path(config.model.name)
    base = base if base.is_dir() else base.parent
    if Path(config.model.name).exists() and folder.exists() and os.path.samefile(base, folder):
        raise ConfigError(
            f"training.export would overwrite the base model {config.model.name!r} in {folder}.",
            remedy="Set folder to another output folder, such as folder = 'run'.",
        )
    is_adapter_folder = (folder / "adapter_config.json").is_file()
    if config.lora is None or config.lora.merge or not is_adapter_folder:
        check_export_directory(folder)


def build_trainer(
    config: TrainConfig, layout: ParallelConfig, context: ParallelContext
) -> tuple[Trainer, TrainingData]:
    """Load the data of a run configuration, and build the trainer with its engine and hooks."""
    hooks = build_hooks(config)
    make_optimizer = build_optimizer_factory(config.optimizer)
    data, model = load_data_and_model(config)
    num_steps = count_training_steps(config, data)
    header = RunSummaryPrinter(RunSummary.from_config(config, data, model), layout)
    torch.manual_seed(config.seed)
    source, batch_size, data_options = _get_data_arguments(config, data)
    engine = initialize(
        model,
        make_optimizer(model),
        data.loss_fn,
        train_data=source,
        scheduler=build_scheduler_factory(config.schedule, num_steps),
        parallel=layout,
        batch_size=batch_size,
        context=context,
        loss_weight=data.loss_weight,
        data_options={"seed": config.seed, **data_options},
    )
    for part in data.preferences:  # before a checkpoint is loaded: the reference is the initial model
        compute_reference_logps(engine, part, cast(PreferenceCollator, data.collate), config.data.batch_size)
    return Trainer(engine, [header, *hooks, Resume(config, num_steps, data.chat_template)]), data


def _get_data_arguments(config: TrainConfig, data: TrainingData) -> tuple[Any, int | None, dict[str, Any]]:
    """Return the training data, batch size and data options to pass to ``initialize``."""
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

    Errors that would otherwise occur in the first step or when the model is exported are raised here.
    """
    saved = load_model_config(config)
    data = load_data(config, get_image_size(saved), get_class_names(saved))
    model = build_model(config, data, saved)
    check_attention_fits_task(config, model)
    if config.data.packing or config.model.task == "preference":
        is_preference = config.model.task == "preference"
        check_packing_is_supported(
            model, *(("model.task = 'preference'", "Use another model") if is_preference else ())
        )
    if config.training.export:
        check_model_is_exportable(model, data.processor)
    model = freeze_and_add_lora(config, model)
    if data.skipped and os.environ.get("RANK", "0") == "0":
        warnings.warn(data.skipped, stacklevel=2)
    return data, model
