"""Prints a summary of a run before its first step, and the location of its results after the last step."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardformer.checkpoint.directory import get_step_folder, list_checkpoints_with_save_times
from shardformer.config import ParallelConfig
from shardformer.meta_init.lazy_init import NOTES
from shardformer.train_command.build import (
    count_steps_per_epoch,
    count_training_steps,
    count_warmup_steps,
    get_hook_output_folder,
)
from shardformer.train_command.config_schema import TrainConfig
from shardformer.train_command.load_data import TrainingData
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.hooks.progress import create_console, format_duration

if TYPE_CHECKING:
    from rich.console import Console

EXPORT_FOLDER = "model"
"""Subfolder for the trained model in the folder of the run."""
LABEL = 12
"""Columns of the labels of a summary."""
Rows = list[tuple[str, str]]
"""Label and text of each line of a summary."""


@dataclass(frozen=True)
class RunSummary:
    """Summary of the model, the data and the length of a run.

    Args:
        model: Name of the model class.
        weights: Text about the origin of the weights, and about weights that are initialized at random.
        tokens_per_step: Number of tokens in a global batch, or None for images.
        has_padding: Whether ``tokens_per_step`` is an upper limit, because samples differ in length.
        learning_rate: Text with the learning rate after warm-up and the schedule.
    """

    model: str
    num_parameters: int
    weights: str
    data: str
    num_samples: int | None
    samples_per_step: int
    tokens_per_step: int | None
    has_padding: bool
    num_steps: int
    epochs: float | None
    warmup_steps: int
    learning_rate: str
    files: str

    @classmethod
    def from_config(cls, config: TrainConfig, data: TrainingData, model: nn.Module) -> RunSummary:
        """Create the summary of a run from its configuration, its data and its unsharded model."""
        num_steps = count_training_steps(config, data)
        samples = min(config.data.batch_size, data.num_samples or config.data.batch_size)
        schedule = config.schedule
        decay = f" to {config.optimizer.lr * schedule.min_lr_rate:.3g}" if schedule.name != "constant" else ""
        return cls(
            model=type(model).__name__,
            num_parameters=sum(p.numel() for p in model.parameters()),
            weights=_describe_weight_origin(config, model),
            data=data.title,
            num_samples=data.num_samples,
            samples_per_step=samples,
            tokens_per_step=None if data.tokens is None else samples * config.data.sequence_length,
            has_padding=data.collate is not None,
            num_steps=num_steps,
            epochs=None if data.num_samples is None else num_steps / max(count_steps_per_epoch(config, data), 1),
            warmup_steps=min(count_warmup_steps(schedule, num_steps), num_steps),
            learning_rate=f"{config.optimizer.lr:g}, {schedule.name}{decay}",
            files=_describe_output_files(config),
        )

    def format_rows(self, layout_description: str) -> Rows:
        limit = "at most " if self.has_padding else ""
        tokens = f" ({limit}{self.tokens_per_step:,} tokens)" if self.tokens_per_step is not None else ""
        samples = "stream" if self.num_samples is None else f"{self.num_samples:,} samples"
        epochs = "" if self.epochs is None else f" ({self.epochs:.2g} {'epoch' if self.epochs == 1 else 'epochs'})"
        warmup = f", {self.warmup_steps:,} warm-up steps" if self.warmup_steps else ""
        return [
            ("Model", f"{self.model}, {self.num_parameters:,} parameters"),
            ("Weights", self.weights),
            ("Layout", layout_description),
            ("Data", f"{samples} of {self.data}"),
            ("Steps", f"{self.num_steps:,}{epochs}, each with {self.samples_per_step:,} samples{tokens}"),
            ("Schedule", f"lr {self.learning_rate}{warmup}"),
            ("Files", self.files),
        ]


class RunSummaryPrinter(Hook):
    """A hook that prints a summary of the model, layout, devices, length and files of a run."""

    def __init__(self, summary: RunSummary, layout: ParallelConfig) -> None:
        self._summary, self._layout = summary, layout

    def setup(self, trainer: TrainerProtocol) -> None:
        if not trainer.is_first:
            return
        context = trainer.engine.context
        name = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else context.device.type
        hosts, count = len(set(context.grid.hosts)), len(context.grid.ranks)
        where = f"{count} process{'es' * (count > 1)} on {name}" + (f" of {hosts} hosts" if hosts > 1 else "")
        print_rows(create_console(), self._summary.format_rows(describe_layout(self._layout, context.sizes, where)))


def describe_layout(layout: ParallelConfig, sizes: Mapping[str, int], device_description: str) -> str:
    """Describe a parallel layout in one line, such as "tensor 2, ZeRO stage 1, 2 processes on cpu"."""
    named = [f"{name} {sizes[name]}" for name in layout.sizes if sizes[name] > 1]
    named += [f"ZeRO stage {layout.zero_stage}"] * bool(layout.zero_stage)
    named += [str(layout.precision)] * (layout.precision != "fp32")
    return ", ".join([*named, device_description])


def print_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print each text after its label. In a terminal, wrap the texts to its width."""
    from rich.text import Text

    width = max(console.width - LABEL, 2 * LABEL) if console.is_terminal else 10**6
    for label, text in rows:
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
        for start, line in zip([label, *[""] * len(lines)], lines, strict=False):
            console.print(Text.assemble((start.ljust(LABEL), "bold"), line), soft_wrap=True)


def print_run_footer(config: TrainConfig, trainer: Any) -> None:
    """Print the locations of the checkpoint, exported model and metrics after a run, and the next command to try."""
    console = create_console()
    rows: Rows = []
    newest = find_newest_checkpoint(config)
    if newest is not None:
        rows.append(("Checkpoint", str(newest)))
    hook = next((hook for hook in trainer.hooks if isinstance(hook, Checkpoint)), None)
    step = trainer.step if hook is None else hook.trained_steps
    is_best = hook is not None and hook.loads_best and hook.best_step is not None
    if hook is not None and hook.best_step is not None:
        folder = _relative_to_cwd(get_step_folder(hook.directory, hook.best_step))
        rows.append(("Best", f"{folder}, {hook.metric} {hook.best_value:.6g}"))
    if config.training.export:
        rows.append(("Model", str(config.output_folder / EXPORT_FOLDER) + ", of the best checkpoint" * is_best))
    records = get_hook_output_folder(config, "json_lines")
    if records is not None:
        rows += [
            ("Records", f"{_relative_to_cwd(records)}/records.jsonl"),
            ("Next", f"shardformer plot {_relative_to_cwd(records)}"),
        ]
    if trainer.loss is None:
        key = "training.steps" if config.training.steps is not None else "training.epochs"
        console.print(f"To continue after step {step}, increase {key}.", soft_wrap=True)
    else:
        text = f"Trained up to step {step} in {format_duration(trainer.seconds)}."
        console.print(text, soft_wrap=True, markup=False)
    print_rows(console, rows)


def find_newest_checkpoint(config: TrainConfig) -> Path | None:
    """Return the folder of the newest checkpoint of a run, or None if the run has no checkpoint."""
    root = get_hook_output_folder(config, "checkpoint")
    found = list_checkpoints_with_save_times(root) if root is not None and root.is_dir() else []
    return _relative_to_cwd(found[0][0]) if found else None


def describe_how_to_resume(config: TrainConfig) -> str:
    """Describe how to resume a run that was stopped by a signal."""
    newest = find_newest_checkpoint(config)
    if newest is not None:
        return f"The newest checkpoint is {newest}.\nRun the same command to resume."
    if get_hook_output_folder(config, "checkpoint") is None:
        return "No checkpoint was saved, because hooks.checkpoint = false."
    return "There is no checkpoint yet. The same command starts again from step 1."


def _relative_to_cwd(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _describe_weight_origin(config: TrainConfig, model: nn.Module) -> str:
    if config.model.random:
        return f"random, with seed {config.seed}"
    notes = [note for note in vars(model).get(NOTES, ()) if "randomly initialized" in note]
    return " ".join([f"from {config.model.name}.", *notes])


def _describe_output_files(config: TrainConfig) -> str:
    folders = {
        "": get_hook_output_folder(config, "checkpoint"),
        "records.jsonl": get_hook_output_folder(config, "json_lines"),
    }
    paths = [folder / name for name, folder in folders.items() if folder is not None]
    paths += [config.output_folder / EXPORT_FOLDER] * config.training.export
    names = ", ".join(os.path.relpath(path, config.output_folder) for path in paths)
    return f"{config.folder}" + f" ({names})" * bool(names)
