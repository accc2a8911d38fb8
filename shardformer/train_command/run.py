"""Trains a model from a run configuration, and checks for changed settings when a run resumes."""

from __future__ import annotations

import copy
import json
import os
import signal
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from shardformer.checkpoint.directory import get_checkpoint_folder
from shardformer.checkpoint.retention import list_checkpoints_with_save_times
from shardformer.comm.collective_call import run_on_first_rank
from shardformer.config import ParallelConfig
from shardformer.discovery.reduced_model import check_packing_support, measure_label_dependence
from shardformer.errors import ConfigError, ShardFormerError, get_first_message_line
from shardformer.filesystem import create_folder, remove_stale_temporary_files, replace_text_atomically
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.meta_init.lazy_init import NOTES, LazyInit
from shardformer.train_command.build import (
    build_hooks,
    build_lr_scheduler_factory,
    build_model,
    build_optimizer_factory,
    count_steps_per_epoch,
    count_training_steps,
    count_warmup_steps,
    freeze_and_add_lora,
    get_hook_output_folder,
    make_lr_lambda,
)
from shardformer.train_command.config_schema import ScheduleOptions, TrainConfig, format_toml
from shardformer.train_command.load_data import TrainingData, load_training_data
from shardformer.train_command.model_config import get_class_names, get_image_size, load_model_config
from shardformer.train_command.preference import PreferenceCollator, precompute_reference_logps
from shardformer.train_command.read_rows import compute_file_checksums
from shardformer.training.engine import Engine
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.hooks.progress import create_rich_console, format_duration
from shardformer.training.initialize import get_launcher_world_size, get_or_create_parallel_context, initialize
from shardformer.training.trainer import Trainer
from shardformer.weights.save_pretrained import check_export_directory, check_model_is_exportable, export_pretrained

if TYPE_CHECKING:
    from peft import PeftModel
    from rich.console import Console
    from transformers import PreTrainedModel


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
    def from_config(cls, config: TrainConfig, training_data: TrainingData, model: nn.Module) -> RunSummary:
        """Create the summary of a run from its configuration, its data and its unsharded model."""
        num_steps = count_training_steps(config, training_data)
        samples = min(config.data.batch_size, training_data.num_samples or config.data.batch_size)
        schedule = config.schedule
        decay = f" to {config.optimizer.lr * schedule.min_lr_rate:.3g}" if schedule.name != "constant" else ""
        return cls(
            model=type(model).__name__,
            num_parameters=sum(p.numel() for p in model.parameters()),
            weights=_describe_weight_origin(config, model),
            data=training_data.title,
            num_samples=training_data.num_samples,
            samples_per_step=samples,
            tokens_per_step=None if training_data.tokenizer is None else samples * config.data.sequence_length,
            has_padding=training_data.collate_fn is not None,
            num_steps=num_steps,
            epochs=None
            if training_data.num_samples is None
            else num_steps / max(count_steps_per_epoch(config, training_data), 1),
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
        print_labeled_rows(
            create_rich_console(), self._summary.format_rows(describe_layout(self._layout, context.sizes, where))
        )


def describe_layout(layout: ParallelConfig, axis_sizes: Mapping[str, int], device_description: str) -> str:
    """Describe a parallel layout in one line, such as "tensor 2, ZeRO stage 1, 2 processes on cpu"."""
    named = [f"{name} {axis_sizes[name]}" for name in layout.sizes if axis_sizes[name] > 1]
    named += [f"ZeRO stage {layout.zero_stage}"] * bool(layout.zero_stage)
    named += [str(layout.precision)] * (layout.precision != "fp32")
    return ", ".join([*named, device_description])


def print_labeled_rows(console: Console, labeled_rows: Iterable[tuple[str, str]]) -> None:
    """Print labels and texts in two aligned columns. In a terminal, wrap the texts to its width."""
    from rich.text import Text

    width = max(console.width - LABEL, 2 * LABEL) if console.is_terminal else 10**6
    for label, text in labeled_rows:
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
        for start, line in zip([label, *[""] * len(lines)], lines, strict=False):
            console.print(Text.assemble((start.ljust(LABEL), "bold"), line), soft_wrap=True)


def print_run_footer(config: TrainConfig, trainer: Trainer) -> None:
    """Print the locations of the checkpoint, exported model and metrics after a run, and the next command to try."""
    console = create_rich_console()
    rows: Rows = []
    newest = find_newest_checkpoint(config)
    if newest is not None:
        rows.append(("Checkpoint", str(newest)))
    hook = next((hook for hook in trainer.hooks if isinstance(hook, Checkpoint)), None)
    step = trainer.step if hook is None else hook.trained_steps
    is_best = hook is not None and hook.loads_best and hook.best_step is not None
    if hook is not None and hook.best_step is not None:
        folder = _relative_to_cwd(get_checkpoint_folder(hook.directory, hook.best_step))
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
    print_labeled_rows(console, rows)


def find_newest_checkpoint(config: TrainConfig) -> Path | None:
    """Return the folder of the newest checkpoint of a run, or None if the run has no checkpoint."""
    root = get_hook_output_folder(config, "checkpoint")
    found = list_checkpoints_with_save_times(root) if root is not None and root.is_dir() else []
    return _relative_to_cwd(found[0][0]) if found else None


def get_resume_hint(config: TrainConfig) -> str:
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


CONFIG_FILE = "resolved_config.toml"
MODEL_KEY, TEMPLATE_KEY = "model_config", "chat_template"
"""Keys in the state of ``Resume``. They make it possible to load the model from a checkpoint alone."""
FIXED = ("model", "optimizer", "seed")
"""Keys and tables that must not change when a run resumes, because the checkpoint depends on them."""
MAX_COMPARED_STEPS = 10_000
"""Maximum number of steps whose learning rates are compared."""


class Resume(Hook):
    """A hook that stores the run configuration in each checkpoint, and checks for changes when the run resumes.

    The configuration with all defaults is also written to ``folder/resolved_config.toml``. This hook must come after
    the hook that loads the checkpoint. Communicates nothing.

    Raises:
        ConfigError: The resumed run has another model or optimizer, or its new length would change learning rates.
    """

    def __init__(self, config: TrainConfig, num_steps: int, chat_template: str | None = None) -> None:
        self._config, self._num_steps, self._chat_template = config, num_steps, chat_template
        self._values: dict[str, Any] = json.loads(json.dumps(config.model_dump(), default=str))
        self._before: dict[str, Any] | None = None
        self._checksums = compute_file_checksums(config.data)
        self._model_config = ""

    def state(self) -> dict[str, Any]:
        return {
            "config": json.dumps(self._values), "num_steps": self._num_steps, MODEL_KEY: self._model_config,
            TEMPLATE_KEY: self._chat_template, "data_checksums": self._checksums,
        }  # fmt: skip

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._before = {**state, "config": json.loads(state["config"])}

    def setup(self, trainer: TrainerProtocol) -> None:
        model_config: Any = trainer.engine.model.config
        self._model_config = model_config.to_json_string()
        if self._before is None:
            if trainer.is_first and trainer.step == 0 and (self._config.output_folder / CONFIG_FILE).exists():
                print(
                    f"New run: {self._config.output_folder} has files of an earlier run, but no checkpoint.", flush=True
                )
            return
        before, old_steps = self._before["config"], self._before["num_steps"]
        changes = dict(_iter_changed_keys(before, self._values))
        for key, (was, now) in changes.items():
            if key.partition(".")[0] in FIXED:
                keep = f"Remove {key}" if was is None else f"Set {key} = {_format_config_value(was)}"
                initial, current = _format_config_value(was), _format_config_value(now)
                raise ConfigError(
                    f"{key} is {current}, but was {initial} when the run in {self._config.folder!r} started.",
                    remedy=f"{keep} to resume this run, or set another folder to start a new run.",
                )
        self._check_classes_unchanged(json.loads(self._before.get(MODEL_KEY) or "{}"), json.loads(self._model_config))
        checksums = self._before.get("data_checksums") or {}
        changed = [name for name, each in self._checksums.items() if checksums.get(name, each) != each]
        if changed and trainer.is_first:
            print(
                f"Changed since the checkpoint: {', '.join(changed)}. The run continues at the same position.",
                flush=True,
            )
        old, new = (
            _make_lr_lambda(before["schedule"], old_steps),
            _make_lr_lambda(self._values["schedule"], self._num_steps),
        )
        last = max(self._num_steps, old_steps)
        steps = range(trainer.step, last + 1, max((last - trainer.step) // MAX_COMPARED_STEPS, 1))
        step = next((step for step in steps if abs(old(step) - new(step)) > 1e-9), None)
        rates = "unchanged"
        if step is not None:
            lr = self._config.optimizer.lr
            old_rate, new_rate = f"{lr * old(step):.3g}", f"{lr * new(step):.3g}"
            rates = f"changes from step {step + 1}, which uses {new_rate} (before: {old_rate})"
            if before["schedule"] == self._values["schedule"]:
                raise ConfigError(
                    f"Resuming with {self._num_steps} instead of {old_steps} steps would change the "
                    f"learning rate of step {step + 1} from {old_rate} to {new_rate}.",
                    remedy=f"Set schedule.steps = {old_steps} to keep the old schedule, or "
                    f"schedule.steps = {self._num_steps} to use the new schedule.",
                )
            _set_learning_rates(trainer, new)
        if trainer.is_first and changes:
            print("Resumed with changed settings:", *format_changed_options(changes), sep="\n", flush=True)
            if any(key.startswith(("schedule.", "training.steps", "training.epochs", "data.")) for key in changes):
                print(f"Learning rate: {rates}.", flush=True)

    @staticmethod
    def _check_classes_unchanged(old_model_config: Mapping[str, Any], new_model_config: Mapping[str, Any]) -> None:
        """Raise ConfigError if the classes of the data have changed since the checkpoint was saved."""
        old, new = old_model_config.get("id2label"), new_model_config.get("id2label")
        if old_model_config and old != new:
            now, was = (", ".join(map(str, (each or {}).values())) or "without names" for each in (new, old))
            raise ConfigError(
                f"The run started with the classes {was:.100}, but the data now has the classes {now:.100}.",
                remedy="Use data with the same classes, or set another folder to start a new run.",
            )

    def before_train(self, trainer: TrainerProtocol) -> None:
        if trainer.is_first:
            folder = self._config.output_folder
            create_folder(folder)
            remove_stale_temporary_files(folder, CONFIG_FILE)
            replace_text_atomically(folder / CONFIG_FILE, format_toml(self._config.model_dump()))


def format_changed_options(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Format changed settings as a table that shows the old and the new value of each option."""
    rows = [("option", "before", "now")]
    rows += [(key, _format_config_value(before), _format_config_value(now)) for key, (before, now) in changes.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {key:<{widths[0]}}  {before:<{widths[1]}}  {now}" for key, before, now in rows]


def _iter_changed_keys(
    old_config: Mapping[str, Any], new_config: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield each configuration key whose value changed, with its old and its new value."""
    for name in dict.fromkeys((*old_config, *new_config)):
        before, now, key = old_config.get(name), new_config.get(name), f"{prefix}{name}"
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from _iter_changed_keys(before, now, f"{key}.")
        elif before != now:
            yield key, (before, now)


def _make_lr_lambda(schedule_options: Mapping[str, Any], num_steps: int) -> Callable[[int], float]:
    return make_lr_lambda(
        ScheduleOptions.model_validate({n: v for n, v in schedule_options.items() if v is not None}), num_steps
    )


def _set_learning_rates(trainer: TrainerProtocol, lr_lambda: Callable[[int], float]) -> None:
    """Replace the learning rates from the checkpoint with those of the new schedule."""
    for scheduler in trainer.engine.schedulers:
        assert isinstance(scheduler, LambdaLR)
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
            group["lr"] = rate * lr_lambda(scheduler.last_epoch)


def _format_config_value(value: Any) -> str:
    return "not set" if value is None else f"{json.dumps(value):.60}"


DECODER = "is_decoder"
"""Config field that turns a transformers encoder into a decoder."""


def check_attention_fits_task(config: TrainConfig, model: PreTrainedModel) -> None:
    """Raise ConfigError if the attention mask of a language model does not suit the task of the run.

    A causal model must not read the token that it predicts, and a masked model must read later tokens. Models that
    require other inputs than tokens are not checked. Communicates nothing, and keeps the random state.
    """
    task = config.model.task
    if task not in ("causal", "masked"):
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dependence = measure_label_dependence(model)
        if dependence is None:
            return
        name = type(model).__name__
        if task == "causal" and dependence.depends_on_label:
            alternative = _suggest_causal_model(model)
            raise ConfigError(
                f"model.task = 'causal' does not support {name}, because the model sees the tokens it must predict.",
                remedy=f"Set model.task = 'masked', or {alternative}.",
            )
        if task == "masked" and not (dependence.depends_on_later_tokens and dependence.is_label_aligned):
            problem = "ignores later tokens" if not dependence.depends_on_later_tokens else "predicts the next token"
            raise ConfigError(
                f"model.task = 'masked' does not support {name}, because the model {problem}.",
                remedy="Set model.task = 'causal', or use a masked language model.",
            )


def _suggest_causal_model(model: PreTrainedModel) -> str:
    """Suggest ``is_decoder = true`` if it makes the attention causal, and otherwise suggest another model."""
    if getattr(model.config, DECODER, True):
        return "use a model that predicts the next token"
    config = copy.deepcopy(model.config)
    setattr(config, DECODER, True)
    with LazyInit():
        decoder = type(model)(config)
    dependence = measure_label_dependence(decoder)
    if dependence is None or dependence.depends_on_label:
        return "use a model that predicts the next token"
    return f"set model.config.{DECODER} = true for causal attention"


def run_training(config: TrainConfig) -> dict[str, float]:
    """Train a model as specified in a run configuration, and return the last metrics.

    The training resumes if the folder of the run contains a checkpoint.
    """
    # an elastic restart may have fewer processes
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    layout = config.layout.fit_to(get_launcher_world_size()) if is_restart else config.layout
    trainer, data = build_trainer_and_data(config, layout, get_or_create_parallel_context(None, layout))
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
            validation=data.validation_dataset,
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
    model: PeftModel = engine.model
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
            f"The first training step with model.config = {config.model.config!r:.200} raised {name}: {reason}.",
            remedy="Fix model.config, model.task, model.head or optimizer.",
        ) from error


def _check_export_folder(config: TrainConfig, export_folder: Path) -> None:
    """Raise ConfigError if exporting the trained model would overwrite the base model or unrelated files."""
    base = Path(config.model.name)
    base = base if base.is_dir() else base.parent
    if Path(config.model.name).exists() and export_folder.exists() and os.path.samefile(base, export_folder):
        raise ConfigError(
            f"training.export would overwrite the base model {config.model.name!r} in {export_folder}.",
            remedy="Set folder to another output folder, such as folder = 'run'.",
        )
    is_adapter_folder = (export_folder / "adapter_config.json").is_file()
    if config.lora is None or config.lora.merge or not is_adapter_folder:
        check_export_directory(export_folder)


def build_trainer_and_data(
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
        scheduler=build_lr_scheduler_factory(config.schedule, num_steps),
        parallel=layout,
        batch_size=batch_size,
        context=context,
        loss_weight=data.loss_weight,
        data_options={"seed": config.seed, **data_options},
    )
    for part in data.preference_datasets:  # before a checkpoint is loaded: the reference is the initial model
        precompute_reference_logps(engine, part, cast(PreferenceCollator, data.collate_fn), config.data.batch_size)
    return Trainer(engine, [header, *hooks, Resume(config, num_steps, data.chat_template)]), data


def _get_data_arguments(config: TrainConfig, training_data: TrainingData) -> tuple[Any, int | None, dict[str, Any]]:
    """Return the training data, batch size and data options to pass to ``initialize``."""
    table = config.data
    options: dict[str, Any] = {
        "drop_last": table.drop_last,
        "collate_fn": training_data.collate_fn,
        "num_workers": table.num_workers,
    }
    if training_data.sampler is not None:  # only a DataLoader has its own order
        loader = DataLoader(
            training_data.train_dataset, batch_size=table.batch_size, sampler=training_data.sampler, **options
        )
        return loader, None, {}
    return (
        training_data.train_dataset,
        table.batch_size,
        {**options, "shuffle": table.shuffle and training_data.num_samples is not None},
    )


def load_data_and_model(config: TrainConfig) -> tuple[TrainingData, nn.Module]:
    """Load the data of a run, and build its model without allocating the weights.

    Errors that would otherwise occur in the first step or when the model is exported are raised here.
    """
    saved = load_model_config(config)
    data = load_training_data(config, get_image_size(saved), get_class_names(saved))
    model = build_model(config, data, saved)
    check_attention_fits_task(config, model)
    if config.data.packing or config.model.task == "preference":
        is_preference = config.model.task == "preference"
        check_packing_support(model, *(("model.task = 'preference'", "Use another model") if is_preference else ()))
    if config.training.export:
        check_model_is_exportable(model, data.processor)
    model = freeze_and_add_lora(config, model)
    if data.skipped_rows_message and os.environ.get("RANK", "0") == "0":
        warnings.warn(data.skipped_rows_message, stacklevel=2)
    return data, model
