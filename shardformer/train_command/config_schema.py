"""Defines the schema of the run configuration, and reads and validates the TOML file that contains it."""

from __future__ import annotations

import json
import os
import re
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, create_model, field_validator

from shardformer.config import RENAMED_FIELDS, ParallelConfig
from shardformer.errors import ConfigError, suggest_similar_names
from shardformer.mesh.rank_grid import count_ranks_on_axis
from shardformer.pipeline.partition import RENAMED_METHODS

Task = Literal[
    "causal", "masked", "sequence_to_sequence", "classification", "multi_label_classification", "token_classification",
    "regression", "preference", "image_classification",
]  # fmt: skip
Format = Literal["text", "jsonl", "csv", "parquet", "datasets", "images"]
PATHS = ("folder", "name", "train", "validation", "tokenizer", "chat_template")
"""Configuration keys whose value may be a path, in which ~ is expanded."""


class ConfigSection(BaseModel):
    """Base class for the tables of a run configuration. Unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _reject_empty_and_expand_path(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject empty strings and empty lists, and expand ~ in paths."""
        if value == "" or (value == [] and info.field_name != "freeze") or (isinstance(value, list) and "" in value):
            raise ValueError(f"{info.field_name} must not be empty. Set a value, or remove the key")
        if info.field_name not in PATHS:
            return value
        if isinstance(value, list):
            return [os.path.expanduser(each) if isinstance(each, str) else each for each in value]
        return os.path.expanduser(value) if isinstance(value, str) else value


def _make_pydantic_field(description: str, default: Any = ..., **constraints: Any) -> Any:
    return Field(default, description=description, **constraints)


class ModelOptions(ConfigSection):
    """The model to train."""

    name: str = _make_pydantic_field(
        "A folder that `save_pretrained` wrote, a name on the Hugging Face hub, a `config.json`, or, if `random` is "
        "set, a transformers model type such as `llama`."
    )
    task: Task = _make_pydantic_field(
        "`causal`: predict the next token; `masked`: predict masked tokens; `sequence_to_sequence`: generate a target "
        "text from a source text; `classification` of texts; `multi_label_classification`: any number of classes per "
        "text; `token_classification`: one class per word; `regression`: one number per text; `preference`: prefer "
        "one answer over another (DPO); `image_classification`.",
        "causal",
    )
    head: str | None = _make_pydantic_field("The transformers model class. By default, the task determines it.", None)
    random: bool = _make_pydantic_field("Initialize the weights at random instead of loading them.", False)
    config: dict[str, Any] = _make_pydantic_field("Fields to change in the model's config.", {})
    freeze: list[str] = _make_pydantic_field(
        "Name patterns of parameters that are not trained, such as `model.embed_tokens.*`.", []
    )
    trust_remote_code: bool = _make_pydantic_field("Allow running Python code that comes with a model.", False)


class DataOptions(ConfigSection):
    """The training and validation data."""

    train: str | list[str] = _make_pydantic_field(
        "A file, a list of files, a pattern of files such as `data/*.parquet`, a folder with one subfolder of images "
        "per class, or the name of a data set. See `format`."
    )
    weights: list[float] | None = _make_pydantic_field(
        "One number per item in `train`, to mix the items in this proportion. An epoch ends when each item has been "
        "read at least once.",
        None,
    )
    validation: str | list[str] | None = _make_pydantic_field("Validation data in the same format.", None)
    validation_fraction: float | None = _make_pydantic_field(
        "Fraction of the training rows to use for validation instead of training.", None, gt=0, lt=1
    )
    format: Format | None = _make_pydantic_field(
        "`text`: plain text; `jsonl`: JSON objects, one per line or in one list; `csv`: a table whose first line has "
        "the field names (includes .tsv files); `parquet`; `datasets`: the name or the folder of a data set for the "
        "`datasets` library; `images`. By default, the suffix determines the format, and a folder contains images.",
        None,
    )
    delimiter: str | None = _make_pydantic_field(
        "The character between the fields in a `csv` file. By default, a tab in .tsv files, where quotes are part of "
        "the text, and a comma in other files, where quotes may enclose a field.",
        None,
        max_length=1,
    )
    options: dict[str, Any] = _make_pydantic_field(
        "Arguments of `datasets.load_dataset` for `parquet` and `datasets`.", {}
    )
    streaming: bool = _make_pydantic_field(
        "Read the data during training instead of before it. `training.steps` must be set.", False
    )
    batch_size: int = _make_pydantic_field(
        "Global batch size: the number of samples per step over all processes.", 8, ge=1
    )
    sequence_length: int = _make_pydantic_field("Maximum number of tokens per sample.", 128, ge=2)
    tokenizer: str | None = _make_pydantic_field(
        "A folder, a name on the hub, or `bytes` to use each byte as a token. By default, the model's tokenizer, "
        "or `bytes` if the weights are random.",
        None,
    )
    text: str = _make_pydantic_field(
        "The field that contains the text, or the list of words for `token_classification`.", "text"
    )
    pair: str | None = _make_pydantic_field("The field with the second text, for `classification` of text pairs.", None)
    target: str = _make_pydantic_field(
        "The field with the target text, for `sequence_to_sequence`, or with the answer to `prompt`.", "target"
    )
    label: str = _make_pydantic_field(
        "The field with the class label or list of labels for classification, or the number for regression.", "label"
    )
    messages: str = _make_pydantic_field(
        "The field with a conversation, for `causal`: a list of messages with `role` and `content`, or `from` and "
        "`value`. It is used for rows without a `text` field.",
        "messages",
    )
    prompt: str | None = _make_pydantic_field(
        "The field with a prompt that `target` answers, for `causal`. The fields `prompt` and `completion`, "
        "`instruction` and `output`, and `question` and `answer` are found automatically.",
        None,
    )
    chosen: str = _make_pydantic_field("The field with the better answer, for `preference`.", "chosen")
    rejected: str = _make_pydantic_field("The field with the worse answer, for `preference`.", "rejected")
    chat_template: str | None = _make_pydantic_field(
        "The chat template: a Jinja file, `chatml`, or `none` to concatenate the texts. By default, the tokenizer's "
        "template, or `chatml` for `bytes`.",
        None,
    )
    train_on: Literal["answers", "last", "all"] = _make_pydantic_field(
        "The tokens in a conversation that contribute to the loss: all answers, only the last answer, or all tokens.",
        "answers",
    )
    packing: bool = _make_pydantic_field(
        "Pack several texts or conversations into one row, for `causal`. No text attends to another text.", False
    )
    group_by_length: bool = _make_pydantic_field("Put samples of similar length into the same batch.", False)
    image: str = _make_pydantic_field("The field with the image in `datasets`, or its path in other formats.", "image")
    split: str = _make_pydantic_field("The split to train on, for `datasets`.", "train")
    validation_split: str | None = _make_pydantic_field(
        "The split to validate on, from `validation` if it is set, and otherwise from `train`.", None
    )
    shuffle: bool = _make_pydantic_field("Shuffle the samples in each epoch.", True)
    drop_last: bool = _make_pydantic_field("Drop the last batch of an epoch if it is incomplete.", False)
    num_workers: int = _make_pydantic_field("Number of data loading processes per training process.", 0, ge=0)

    @property
    def has_validation_data(self) -> bool:
        return any(value is not None for value in (self.validation, self.validation_split, self.validation_fraction))


ParallelTable = create_model(
    "ParallelTable",
    __base__=ConfigSection,
    __doc__="The parallel layout and the options for a training step: the fields of `shardformer.ParallelConfig`.",
    **{
        name: (kind, Field(ParallelConfig.__dataclass_fields__[name].default, description=description))
        for name, (kind, description) in ParallelConfig.get_field_descriptions().items()
    },
)  # type: ignore[call-overload]


class OptimizerOptions(ConfigSection):
    """The optimizer and its arguments. Further keys, such as `betas` and `weight_decay`, are passed to its class."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    name: str = _make_pydantic_field(
        "A `torch.optim` class, or `LAMB`, `LARS` or `HybridAdam`. To use your own class, specify its file or "
        "module: `my_optimizers.py:MyOptimizer` or `package.module:MyOptimizer`.",
        "AdamW",
    )
    lr: float = _make_pydantic_field("The learning rate.", 1e-4, gt=0)
    decay_biases_and_norms: bool = _make_pydantic_field(
        "Also apply `weight_decay` to biases and normalization weights.", False
    )
    lr_factors: dict[str, float] = _make_pydantic_field(
        "Factors for the learning rate of parameters whose names match a pattern, such as `{ 'lm_head.*' = 10 }`. The "
        "first matching pattern applies.",
        {},
    )
    layer_decay: float = _make_pydantic_field(
        "A layer's learning rate divided by the next layer's. The last layer and the head use `lr`.",
        1.0,
        gt=0,
        le=1,
    )


class ScheduleOptions(ConfigSection):
    """The learning-rate schedule, with warm-up and decay."""

    name: Literal["constant", "linear", "cosine", "cosine_with_restarts", "warmup_stable_decay", "inverse_sqrt"] = (
        _make_pydantic_field("The decay after warm-up.", "constant")
    )
    warmup: float = _make_pydantic_field(
        "Number of warm-up steps. A value below 1 is a fraction of all steps.", 0, ge=0
    )
    min_lr_rate: float = _make_pydantic_field("The final learning rate as a fraction of `optimizer.lr`.", 0, ge=0, le=1)
    cycles: int = _make_pydantic_field("Number of cosine cycles for `cosine_with_restarts`.", 1, ge=1)
    decay: float = _make_pydantic_field(
        "Steps in the final decay of `warmup_stable_decay`. A value below 1 is a fraction of all steps.", 0.1, gt=0
    )
    steps: int | None = _make_pydantic_field(
        "The number of steps after which the learning rate is constant. By default, the length of the run. You must "
        "set it to resume a run with a different length, if learning rates would change otherwise.",
        None,
        ge=1,
    )


class PreferenceOptions(ConfigSection):
    """Options of the DPO loss for `task = "preference"`."""

    beta: float = _make_pydantic_field("How strongly differences from the initial model are penalized.", 0.1, gt=0)
    label_smoothing: float = _make_pydantic_field("Probability that a preference is wrong.", 0.0, ge=0, lt=0.5)


class LoraOptions(ConfigSection):
    """LoRA adapters from PEFT. If this table exists, only the adapters are trained."""

    rank: int = _make_pydantic_field("Rank of the adapters.", 8, ge=1)
    alpha: float = _make_pydantic_field("Scale of the adapters, which are multiplied by `alpha / rank`.", 16.0, gt=0)
    dropout: float = _make_pydantic_field("Dropout on the inputs of the adapters.", 0.0, ge=0, lt=1)
    target_modules: str | list[str] = _make_pydantic_field(
        "Names of the linear layers that get adapters, or `all-linear` for all except the head.", "all-linear"
    )
    modules_to_save: list[str] | None = _make_pydantic_field(
        "Names of modules to train in full and save with the adapters.", None
    )
    use_rslora: bool = _make_pydantic_field("Multiply the adapters by `alpha / sqrt(rank)` instead (rsLoRA).", False)
    use_dora: bool = _make_pydantic_field("Also train the norm of each row of a weight (DoRA).", False)
    merge: bool = _make_pydantic_field(
        "Merge the adapters into the exported model, instead of exporting only the adapters.", False
    )


class TrainingOptions(ConfigSection):
    """The length of the run, the validation interval, and whether the trained model is exported."""

    steps: int | None = _make_pydantic_field("Number of optimizer steps.", None, ge=1)
    epochs: float | None = _make_pydantic_field(
        "Number of epochs, such as 3 or 0.5. By default 1 if `steps` is not set.", None, gt=0
    )
    validate_every: int | None = _make_pydantic_field(
        "Number of steps between validations. By default, one epoch.", None, ge=1
    )
    export: bool = _make_pydantic_field("Export the trained model to `folder/model`, for `from_pretrained`.", False)


class TrainConfig(ConfigSection):
    """Complete configuration of a training run."""

    folder: str = _make_pydantic_field("Folder for logs, checkpoints and the trained model.", "run")
    seed: int = _make_pydantic_field("Seed for the weights, the data order and all random numbers.", 0, ge=0, lt=2**63)
    model: ModelOptions
    data: DataOptions
    parallel: ParallelTable = ParallelTable()  # type: ignore[valid-type]
    optimizer: OptimizerOptions = OptimizerOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    training: TrainingOptions = TrainingOptions()
    preference: PreferenceOptions = PreferenceOptions()
    lora: LoraOptions | None = None
    hooks: dict[str, bool | dict[str, Any]] = _make_pydantic_field(
        "Hooks by name: `true`, `false`, or a table of arguments. `throughput`, `progress`, `json_lines` and "
        "`checkpoint` are enabled by default. To add your own hook, specify its file or module, "
        'and its class: `"my_hooks.py:MyHook" = true` or `"package.module:MyHook" = true`.',
        {},
    )

    def model_post_init(self, context: Any) -> None:
        self.layout  # noqa: B018 - raises for invalid combinations
        training, data = self.training, self.data
        if training.steps is not None and training.epochs is not None:
            raise ConfigError(
                f"training.steps = {training.steps} and training.epochs = {training.epochs:g} cannot both be set.",
                remedy="Remove one of them, for example with --set training.epochs= on the command line.",
            )
        if training.validate_every is not None and not data.has_validation_data:
            raise ConfigError(
                f"training.validate_every = {training.validate_every} requires validation data.",
                remedy="Set data.validation, or remove training.validate_every.",
            )
        self._check_data_options()
        self._check_no_unused_keys()

    def _check_data_options(self) -> None:
        """Raise ConfigError if the options in ``[data]`` contradict each other."""
        data = self.data
        count = 1 if isinstance(data.train, str) else len(data.train)
        if data.weights is not None and (len(data.weights) != count or min(data.weights) <= 0):
            raise ConfigError(
                f"data.weights must contain one positive number for each of the {count} items in data.train, but got "
                f"{data.weights}.",
                remedy="Fix the list, or remove data.weights.",
            )
        if data.validation_fraction is not None and (data.validation or data.validation_split):
            raise ConfigError(
                f"data.validation_fraction = {data.validation_fraction} and data.validation cannot both be set.",
                remedy="Remove one of them.",
            )
        if not data.streaming:
            return
        conflicts = {
            "data.validation_fraction": data.validation_fraction, "data.packing": data.packing,
            "data.group_by_length": data.group_by_length, "data.num_workers": data.num_workers,
        }  # fmt: skip
        for key, value in conflicts.items():
            if value:
                text = str(value).lower()
                raise ConfigError(
                    f"data.streaming = true and {key} = {text} cannot both be set.", remedy="Remove one of them."
                )
        if self.training.steps is None:
            raise ConfigError(
                "data.streaming = true requires training.steps, because the length of the data is unknown.",
                remedy="Set training.steps.",
            )

    def _check_no_unused_keys(self) -> None:
        """Raise ConfigError if a key is set but has no effect with the other settings."""
        conditions = _get_optional_key_conditions(self)
        for key, (is_used, needed) in conditions.items():
            table, _, name = key.partition(".")
            tables: BaseModel = getattr(self, table)
            value = getattr(tables, name)
            if not is_used and value != type(tables).model_fields[name].default:
                raise ConfigError(f"{key} = {value!r} has no effect without {needed}.", remedy=f"Remove {key}.")

    @property
    def layout(self) -> ParallelConfig:
        table: BaseModel = self.parallel
        return ParallelConfig(**table.model_dump())

    @property
    def output_folder(self) -> Path:
        """Output folder of the run."""
        return Path(self.folder)


def _get_optional_key_conditions(config: TrainConfig) -> dict[str, tuple[bool, str]]:
    """Return whether each optional key has an effect, and the setting that it requires."""
    task, layout = config.model.task, config.layout
    is_image_task, tensor_ranks = task == "image_classification", count_ranks_on_axis(layout.tensor, "tensor")
    has_changing_rate = config.schedule.name != "constant" or 0 < config.schedule.warmup < 1
    datasets_format = (config.data.format == "datasets", "data.format = 'datasets'")
    names = [config.data.train] if isinstance(config.data.train, str) else config.data.train
    is_of_library = config.data.format in ("parquet", "datasets") or any(n.lower().endswith(".parquet") for n in names)
    is_causal = (task == "causal", "model.task = 'causal'")
    is_chat = (task in ("causal", "preference"), "model.task = 'causal' or 'preference'")
    is_preference = (task == "preference", "model.task = 'preference'")
    return {
        "data.pair": (
            task in ("classification", "multi_label_classification", "regression"),
            "a classification of texts or a regression",
        ),
        "data.target": (
            task == "sequence_to_sequence" or config.data.prompt is not None,
            "model.task = 'sequence_to_sequence' or data.prompt",
        ),
        "data.label": (task.endswith(("classification", "regression")), "a classification task or a regression"),
        "data.messages": is_causal,
        "data.prompt": is_chat,
        "data.chat_template": is_chat,
        "data.chosen": is_preference,
        "data.rejected": is_preference,
        "preference.beta": is_preference,
        "preference.label_smoothing": is_preference,
        "data.train_on": is_causal,
        "data.packing": is_causal,
        "data.streaming": (task in ("causal", "masked"), "model.task = 'causal' or 'masked'"),
        "data.options": (is_of_library, "parquet files or data.format = 'datasets'"),
        "data.image": (is_image_task, "model.task = 'image_classification'"),
        "data.text": (not is_image_task and task != "preference", "a text task"),
        "data.tokenizer": (not is_image_task, "a text task"),
        "data.split": datasets_format,
        "data.validation_split": datasets_format,
        "schedule.steps": (has_changing_rate, "a warm-up below 1, or schedule.name = 'linear' or 'cosine'"),
        "schedule.min_lr_rate": (
            config.schedule.name not in ("constant", "inverse_sqrt"),
            "schedule.name = 'linear' or 'cosine'",
        ),
        "schedule.cycles": (
            config.schedule.name == "cosine_with_restarts",
            "schedule.name = 'cosine_with_restarts'",
        ),
        "schedule.decay": (config.schedule.name == "warmup_stable_decay", "schedule.name = 'warmup_stable_decay'"),
        "parallel.tensor_parallel_mode": (tensor_ranks > 1, "parallel.tensor = 2 or more"),
        "parallel.sequence_parallel": (tensor_ranks > 1, "parallel.tensor = 2 or more"),
        "parallel.context_parallel": ((layout.sizes["sequence"] or 1) > 1, "parallel.sequence = 2 or more"),
        "parallel.schedule": (layout.pipe > 1, "parallel.pipe = 2 or more"),
    }


def suggest_trust_remote_code(default_remedy: str, exception: Exception) -> str:
    """Suggest setting ``trust_remote_code`` if the error mentions it, and otherwise return ``default_remedy``."""
    needs_code = "trust_remote_code" in str(exception)
    return "Review that code, and set model.trust_remote_code = true to run it" if needs_code else default_remedy


TRAINER_KEYS = {
    "adam_beta1": "optimizer.betas", "adam_beta2": "optimizer.betas", "adam_epsilon": "optimizer.eps",
    "learning_rate": "optimizer.lr", "optim": "optimizer.name", "lr_scheduler_type": "schedule.name",
    "warmup_steps": "schedule.warmup", "warmup_ratio": "schedule.warmup, below 1",
    "bf16": "parallel.precision = 'bf16'", "fp16": "parallel.precision = 'fp16'",
    "gradient_accumulation_steps": "parallel.micro_batches or parallel.micro_batch_size",
    "gradient_checkpointing": "parallel.recompute_layers, with parallel.pipe = 2 or more",
    "dataloader_drop_last": "data.drop_last", "dataloader_num_workers": "data.num_workers",
    "max_length": "data.sequence_length", "max_seq_length": "data.sequence_length",
    "per_device_train_batch_size": "data.batch_size, the samples of all processes",
    "max_steps": "training.steps", "num_train_epochs": "training.epochs", "eval_steps": "training.validate_every",
    "save_steps": "hooks.checkpoint.every_steps", "save_total_limit": "hooks.checkpoint.retention",
    "output_dir": "folder, above all tables",
    "logging_dir": "hooks.tensor_board.directory", "logging_steps": "hooks.json_lines.every",
    "report_to": "hooks.tensor_board = true", "data_seed": "seed, above all tables",
    "num_labels": "model.config.num_labels. By default it follows from the data",
    "zero": "parallel.zero_stage", "deepspeed": "parallel.zero_stage", "fsdp": "parallel.zero_stage = 3",
    "tensor_parallel_size": "parallel.tensor", "pipeline_parallel_size": "parallel.pipe",
    "context_parallel_size": "parallel.sequence", "attn_implementation": "parallel.flash_attention",
    "early_stopping_patience": "hooks.early_stopping.patience",
    "load_best_model_at_end": "hooks.checkpoint.best = 'load'", "metric_for_best_model": "hooks.checkpoint.metric",
    "greater_is_better": "hooks.checkpoint.mode = 'max'",
}  # fmt: skip
"""Argument of ``TrainingArguments`` in transformers -> equivalent key of a run configuration."""
RENAMED_KEYS = {
    "data.sequence": "data.sequence_length",
    "data.workers": "data.num_workers",
    "schedule.final": "schedule.min_lr_rate",
    "hooks.gradient_watch": "hooks.gradient_monitor",
    "hooks.checkpoint.keep": "hooks.checkpoint.retention",
    **{f"hooks.{n}.folder": f"hooks.{n}.directory" for n in ("checkpoint", "json_lines", "tensor_board", "profiler")},
    **{f"parallel.{old}": f"parallel.{new}" for old, new in RENAMED_FIELDS.items()},
}
"""Earlier name of a configuration key -> its current name."""


def load_train_config(config_path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read and validate a run configuration from a TOML file.

    Args:
        config_path: Path of the file.
        overrides: Keys to change, such as ``parallel.tensor=2``. A value that is not valid TOML is used as a string.
            An empty value, as in ``training.epochs=``, removes the key.
    """
    path = Path(config_path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # only one process could read a pipe
            raise ConfigError(
                f"The configuration file {path} is not a regular file.", remedy="Pass the path of a TOML file."
            )
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        near = suggest_similar_names(path.name, (other.name for other in path.absolute().parent.glob("*.toml")))
        reason = error.strerror or error
        raise ConfigError(
            f"The configuration file {str(config_path)!r} cannot be read: {reason}.",
            remedy=near if near.startswith("Did") else "Pass the path of a TOML file",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"The configuration file {str(config_path)!r} is not valid TOML: {error}.",
            remedy="Fix the line. A table is a line such as [training], and a key a line such as steps = 100.",
        ) from error
    for change in overrides:
        apply_config_override(tables, change)
    return parse_train_config(tables, str(config_path))


def parse_train_config(config_dict: dict[str, Any], source_name: str) -> TrainConfig:
    """Validate the tables of a run configuration, and return a ``TrainConfig``. Errors mention ``source_name``."""
    try:
        return TrainConfig.model_validate(_rename_deprecated_keys(config_dict))
    except ValidationError as error:
        raise _to_config_error(error, source_name) from error


def _rename_deprecated_keys(config_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Rename deprecated keys to their current names, with a warning.

    If a table has both names, validation reports the earlier name.
    """
    found: dict[str, Any] = deepcopy(dict(config_dict))
    for old, new in RENAMED_KEYS.items():
        *parents, old_key = old.split(".")
        new_key, table = new.rpartition(".")[2], found
        for name in parents:
            table = table.get(name, {}) if isinstance(table, dict) else {}
        if isinstance(table, dict) and old_key in table and new_key not in table:
            value = table.pop(old_key)
            table[new_key] = RENAMED_METHODS.get(value, value) if isinstance(value, str) else value
            if os.environ.get("RANK", "0") == "0":
                warnings.warn(f"{old} is deprecated. Use {new} instead.", FutureWarning, stacklevel=3)
    return found


def apply_config_override(config_dict: dict[str, Any], override: str) -> None:
    """Apply a command-line change such as ``parallel.tensor=2`` to the tables of a run configuration, in place."""
    key, equals, text = override.partition("=")
    try:
        *parents, name = _split_toml_key(key) if equals else []
    except ValueError as error:  # also without a key, or if the key is not valid TOML
        raise ConfigError(
            f"--set requires the form key=value, but got {override!r}.",
            remedy="Use a form such as --set parallel.tensor=2.",
        ) from error
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = config_dict
    for part in parents:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"--set {override} cannot be applied, because {part!r} is not a table in the file.",
                remedy=f"Replace {part!r} in the file with a table [{part}].",
            )
    if text.strip():
        table[name] = value
    else:
        table.pop(name, None)


def _split_toml_key(key: str) -> list[str]:
    """Split a TOML key at its dots, except inside quotes. Raises ValueError if it is not a valid key."""
    names, value = list[str](), tomllib.loads(f"{key} = 0")
    while isinstance(value, dict):
        ((part, value),) = value.items()
        names.append(part)
    return names


def _to_config_error(error: ValidationError, source_name: str) -> ConfigError:
    """Convert the first error that pydantic reports to a ConfigError that suggests a correct key or value."""
    first = error.errors()[0]
    key_path = [str(part) for part in first["loc"]]
    table, name = _find_section_class(key_path), key_path[-1]
    key = ".".join(_remove_union_type_names(key_path))
    if first["type"] == "extra_forbidden":
        known = list(table.model_fields) if table is not None else []
        return ConfigError(
            f"{source_name} contains the unknown key {key} = {first['input']!r:.80}.",
            remedy=f"Use its new name {RENAMED_KEYS[key]}" if key in RENAMED_KEYS else suggest_config_key(name, known),
        )
    if first["type"] == "missing":
        return ConfigError(
            f"The required key {key} is missing from {source_name}.",
            rule=_describe_key(table, name),
            remedy=f"Write {name} in [{'.'.join(key_path[:-1])}]" if len(key_path) > 1 else f"Write a table [{name}]",
        )
    same_key = [e for e in error.errors() if ".".join(_remove_union_type_names(map(str, e["loc"]))) == key]
    messages = "; or ".join(dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in same_key))
    known = str(first.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
    return ConfigError(
        f"{source_name} contains the invalid value {key} = {first['input']!r:.80}.",
        rule=". ".join(filter(None, (messages, _describe_key(table, name)))),
        remedy=suggest_similar_names(str(first["input"]), known)
        if first["type"] == "literal_error"
        else _suggest_correction(first),
    )


def _suggest_correction(pydantic_error: Mapping[str, Any]) -> str:
    limits = pydantic_error.get("ctx", {})
    for name, words in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if name in limits:
            return f"Write a number of {words} {limits[name]}"
    of_type = {
        "int_type": "Write an integer, without quotes and without a decimal point",
        "float_type": "Write a number, without quotes",
        "bool_type": "Write true or false, without quotes",
        "string_type": "Write it in quotes",
    }
    return of_type.get(pydantic_error["type"], "Fix the value")


def suggest_config_key(unknown_key: str, known_keys: Iterable[str]) -> str:
    """Suggest a correct key for an unknown configuration key.

    The unknown key may be in the wrong table, or may be an argument of ``TrainingArguments`` in transformers.
    ``known_keys`` contains the names that are valid in its place.
    """
    tables = {key: _find_section_class([key, ""]) for key in TrainConfig.model_fields}
    all_keys = [f"{key}.{field}" for key, each in tables.items() if each is not None for field in each.model_fields]
    same_name = [key for key in all_keys if key.rpartition(".")[2] == unknown_key]
    if unknown_key in tables:
        same_name.append(
            f"{unknown_key}, above all tables" if tables[unknown_key] is None else f"a table [{unknown_key}]"
        )
    if not same_name and unknown_key in get_builtin_hook_classes():
        same_name.append(f"hooks.{unknown_key}")
    if key := TRAINER_KEYS.get(unknown_key, " or ".join(same_name)):
        return f"Write it as {key}"
    if {*known_keys} == {*TrainConfig.model_fields}:
        suggestion = suggest_similar_names(unknown_key, [*TrainConfig.model_fields, *all_keys])
        return f"{suggestion} Write a key under its table, as in [data] or data.batch_size"
    return suggest_similar_names(unknown_key, known_keys)


def get_builtin_hook_classes() -> dict[str, Any]:
    """Return the built-in hook classes by their names in a run configuration, such as ``early_stopping``."""
    from shardformer.training import hooks

    return {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(): kind
        for name, kind in vars(hooks).items()
        if isinstance(kind, type)
    }


def _remove_union_type_names(key_path: Iterable[str]) -> list[str]:
    """Remove the type names, such as ``str``, that pydantic adds to the location of an error in a union type."""
    return [
        part for part in key_path if part.replace("_", "").isalnum() and part not in ("str", "int", "bool", "float")
    ]


def _find_section_class(key_path: Sequence[str]) -> type[BaseModel] | None:
    table: Any = TrainConfig
    for part in key_path[:-1]:
        field = getattr(table, "model_fields", {}).get(part)
        if field is None:
            return None
        kinds: list[Any] = [field.annotation, *get_args(field.annotation)]
        table = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return table  # type: ignore[no-any-return]


def _describe_key(section_class: type[BaseModel] | None, key: str) -> str:
    field = section_class.model_fields.get(key) if section_class is not None else None
    return (field.description or "").replace("`", "'").rstrip(".") if field is not None else ""


def format_toml(config_dict: Mapping[str, Any]) -> str:
    """Format the tables of a configuration as TOML, and leave out values that are None."""

    def format_tables(table: Mapping[str, Any], table_path: tuple[str, ...]) -> Iterator[str]:
        inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
        lines = [
            f"{_format_toml_key(k)} = {_format_toml_value(v)}"
            for k, v in table.items()
            if k not in inner and v is not None
        ]
        if table_path and (lines or not inner):
            yield f"\n[{'.'.join(map(_format_toml_key, table_path))}]"
        yield from lines
        for key, value in inner.items():
            yield from format_tables(value, (*table_path, key))

    return "\n".join(format_tables(config_dict, ())) + "\n"


def _format_toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _format_toml_value(key)


def _format_toml_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format_toml_value, value))}]"
    if isinstance(value, Mapping):
        items = (f"{_format_toml_key(k)} = {_format_toml_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {', '.join(items)} }}"
    return str(value)  # numbers and dates
