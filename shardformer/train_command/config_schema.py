"""The schema of the configuration file of a run, and its reader."""

from __future__ import annotations

import os
import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, create_model, field_validator

from shardformer.config import RENAMED_FIELDS, ParallelConfig
from shardformer.errors import ConfigError, did_you_mean
from shardformer.mesh.rank_grid import num_ranks
from shardformer.pipeline.partition import RENAMED_METHODS

Task = Literal["causal", "masked", "sequence_to_sequence", "classification", "image_classification"]
Format = Literal["text", "jsonl", "datasets", "images"]


PATHS = ("folder", "name", "train", "validation", "tokenizer")
"""Keys that may name a file or a folder: no shell replaces the ~ in them."""


class ConfigTable(BaseModel):
    """A table of the file; a key that it does not have is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _of_key(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses an empty text or list, and replaces ~ in a path."""
        if value in ("", []) or (isinstance(value, list) and "" in value):
            raise ValueError("It is empty: write a value, or leave the key out")
        if info.field_name not in PATHS:
            return value
        if isinstance(value, list):
            return [os.path.expanduser(each) if isinstance(each, str) else each for each in value]
        return os.path.expanduser(value) if isinstance(value, str) else value


class ModelTable(ConfigTable):
    """The model."""

    name: str = Field(
        description="A folder that `save_pretrained` wrote, a name on the Hugging Face hub, a `config.json`, or with "
        "`random` a model type of transformers, such as `llama`."
    )
    task: Task = Field(
        default="causal",
        description="`causal`: predict the next token; `masked`: predict masked tokens; `sequence_to_sequence`: "
        "generate a text from another one; `classification` of texts; `image_classification`.",
    )
    head: str | None = Field(default=None, description="The class of transformers. By default that of the task.")
    random: bool = Field(default=False, description="Initialize the weights at random instead of loading them.")
    config: dict[str, Any] = Field(default={}, description="Fields of the model's config to change.")
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with a model or tokenizer that transformers does not have.",
    )


class DataTable(ConfigTable):
    """The training data."""

    train: str | list[str] = Field(
        description="A file or several, a folder with a folder of images for each class, or the name of a data set: "
        "see `format`."
    )
    validation: str | list[str] | None = Field(default=None, description="Data of the same form for validation.")
    format: Format | None = Field(
        default=None,
        description="`text`: plain text; `jsonl`: JSON objects, one on each line or in one list; `datasets`: the name "
        "or the folder of a data set of the library `datasets`; `images`. By default the suffix of the names decides, "
        "and a folder holds images.",
    )
    batch_size: int = Field(default=8, ge=1, description="Samples of a step, over all processes.")
    sequence_length: int = Field(default=128, ge=2, description="Tokens of a sample, at most.")
    tokenizer: str | None = Field(
        default=None,
        description="A folder, a name on the hub, or `bytes`: each byte is a token. By default the model's own, and "
        "`bytes` where the weights are random.",
    )
    text: str = Field(default="text", description="The field of a text, in `jsonl` and `datasets`.")
    pair: str | None = Field(default=None, description="The field of a second text, for `classification` of pairs.")
    target: str = Field(default="target", description="The field of the text to generate, for `sequence_to_sequence`.")
    label: str = Field(default="label", description="The field of the class, for `classification`.")
    image: str = Field(default="image", description="The field of the image in `datasets`, or of its path in `jsonl`.")
    split: str = Field(default="train", description="The split of `datasets` to train on.")
    validation_split: str | None = Field(
        default=None, description="The split to validate on, of `validation`, or without it of `train`."
    )
    shuffle: bool = Field(default=True, description="Shuffle the samples in each epoch.")
    drop_last: bool = Field(default=False, description="Leave out the last batch of an epoch if it is not full.")
    num_workers: int = Field(default=0, ge=0, description="Processes that read samples, for each that trains.")


ParallelTable = create_model(
    "ParallelTable",
    __base__=ConfigTable,
    __doc__="The layout, and how a step is made: the fields of `shardformer.ParallelConfig`.",
    **{
        name: (kind, Field(ParallelConfig.__dataclass_fields__[name].default, description=description))
        for name, (kind, description) in ParallelConfig.described_fields().items()
    },
)  # type: ignore[call-overload]


class OptimizerTable(ConfigTable):
    """What updates the weights. Further keys are arguments of the optimizer, such as `betas` and `weight_decay`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    name: str = Field(default="AdamW", description="A class of `torch.optim`, or `LAMB`, `LARS`, `HybridAdam`.")
    lr: float = Field(default=1e-4, gt=0, description="The learning rate.")
    decay_biases_and_norms: bool = Field(
        default=False,
        description="Whether `weight_decay` also applies to biases and to the weights of norms, which the Trainer of "
        "transformers leaves out.",
    )


class ScheduleTable(ConfigTable):
    """The learning rate over the run."""

    name: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Its curve after warm-up.")
    warmup: float = Field(default=0, ge=0, description="Steps of warm-up from 0. Below 1: a share of all steps.")
    min_lr_rate: float = Field(default=0, ge=0, le=1, description="The final value, as a share of `optimizer.lr`.")
    steps: int | None = Field(
        default=None,
        ge=1,
        description="The length of the schedule, after which the learning rate stays. By default that of the run. A "
        "run that is resumed with another length needs it, if the learning rates of its steps would change.",
    )


class TrainingTable(ConfigTable):
    """The length of the run, and validation."""

    steps: int | None = Field(default=None, ge=1, description="Optimizer steps.")
    epochs: int | None = Field(default=None, ge=1, description="Passes over the data. By default 1, without `steps`.")
    validate_every: int | None = Field(default=None, ge=1, description="Steps between validations. Default: an epoch.")
    export: bool = Field(default=False, description="Write `folder/model` at the end, for `from_pretrained`.")


class TrainConfig(ConfigTable):
    """A whole run."""

    folder: str = Field(default="run", description="For logs, checkpoints and the trained model. ~ is the home folder.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="The seed of weights, data order and all random numbers.")
    model: ModelTable
    data: DataTable
    parallel: ParallelTable = ParallelTable()  # type: ignore[valid-type]
    optimizer: OptimizerTable = OptimizerTable()
    schedule: ScheduleTable = ScheduleTable()
    training: TrainingTable = TrainingTable()
    hooks: dict[str, bool | dict[str, Any]] = Field(
        default={},
        description="Hooks by name: `true`, `false`, or a table of their arguments. `throughput`, `progress`, "
        "`json_lines` and `checkpoint` are there if they are not switched off. One of your own is named by its file "
        'and its class: `"my_hooks.py:MyHook" = true`.',
    )

    def model_post_init(self, context: Any) -> None:
        self.layout  # noqa: B018 - raises what its fields cannot be together
        training, data = self.training, self.data
        if training.steps is not None and training.epochs is not None:
            raise ConfigError(
                f"training.steps = {training.steps} and training.epochs = {training.epochs}",
                rule="A run ends after a number of steps, or of epochs",
                remedy="Leave one of the two out; on the command line, --set training.epochs= removes a key",
            )
        if training.validate_every is not None and data.validation is None and data.validation_split is None:
            raise ConfigError(
                f"training.validate_every = {training.validate_every} without data.validation",
                rule="It is how often the model is tried on the validation data",
                remedy="Say data.validation, or leave it out",
            )
        self._check_used()

    def _check_used(self) -> None:
        """Raises ConfigError for a key that is set and can have no effect beside the others."""
        task, layout = self.model.task, self.layout
        images, tensor = task == "image_classification", num_ranks(layout.tensor, "tensor")
        changes = self.schedule.name != "constant" or 0 < self.schedule.warmup < 1
        of_data_sets = (self.data.format == "datasets", "data.format = 'datasets'")
        used = {
            "data.pair": (task == "classification", "model.task = 'classification'"),
            "data.target": (task == "sequence_to_sequence", "model.task = 'sequence_to_sequence'"),
            "data.label": (task.endswith("classification"), "a classification"),
            "data.image": (images, "model.task = 'image_classification'"),
            "data.text": (not images, "a task of texts"),
            "data.tokenizer": (not images, "a task of texts"),
            "data.split": of_data_sets,
            "data.validation_split": of_data_sets,
            "schedule.steps": (changes, "a warm-up or a schedule whose rates depend on it"),
            "schedule.min_lr_rate": (self.schedule.name != "constant", "schedule.name = 'linear' or 'cosine'"),
            "parallel.tensor_parallel_mode": (tensor > 1, "parallel.tensor = 2 or more"),
            "parallel.sequence_parallel": (tensor > 1, "parallel.tensor = 2 or more"),
            "parallel.context_parallel": ((layout.sizes["sequence"] or 1) > 1, "parallel.sequence = 2 or more"),
            "parallel.schedule": (layout.pipe > 1, "parallel.pipe = 2 or more"),
        }
        for key, (is_used, needed) in used.items():
            table, _, name = key.partition(".")
            tables: BaseModel = getattr(self, table)
            value = getattr(tables, name)
            if not is_used and value != type(tables).model_fields[name].default:
                raise ConfigError(
                    f"{key} = {value!r} without {needed}",
                    rule=f"It has an effect with {needed} alone",
                    remedy="Leave it out",
                )

    @property
    def layout(self) -> ParallelConfig:
        table: BaseModel = self.parallel
        return ParallelConfig(**table.model_dump())

    @property
    def path(self) -> Path:
        """Of the run's folder."""
        return Path(self.folder)


def remote_code_hint(remedy: str, error: Exception) -> str:
    """What to do about an error of transformers, which asks for ``trust_remote_code`` where code was not to run."""
    asks = "trust_remote_code" in str(error)
    return "Read that code; where it may run, write model.trust_remote_code = true" if asks else remedy


OF_TRAINER = {
    "adam_beta1": ["optimizer.betas"],
    "adam_beta2": ["optimizer.betas"],
    "adam_epsilon": ["optimizer.eps"],
    "bf16": ["parallel.precision = 'bf16'"],
    "dataloader_drop_last": ["data.drop_last"],
    "dataloader_num_workers": ["data.num_workers"],
    "eval_steps": ["training.validate_every"],
    "fp16": ["parallel.precision = 'fp16'"],
    "gradient_accumulation_steps": ["parallel.micro_batches", "parallel.micro_batch_size"],
    "gradient_checkpointing": ["parallel.recompute_layers, with parallel.pipe = 2 or more"],
    "learning_rate": ["optimizer.lr"],
    "lr_scheduler_type": ["schedule.name"],
    "max_length": ["data.sequence_length"],
    "max_seq_length": ["data.sequence_length"],
    "max_steps": ["training.steps"],
    "num_train_epochs": ["training.epochs"],
    "optim": ["optimizer.name"],
    "output_dir": ["folder, above all tables"],
    "per_device_train_batch_size": ["data.batch_size, which counts the samples of all processes"],
    "save_steps": ["hooks.checkpoint.every_steps"],
    "save_total_limit": ["hooks.checkpoint.keep"],
    "warmup_ratio": ["schedule.warmup, below 1"],
    "warmup_steps": ["schedule.warmup"],
}
"""What ``TrainingArguments`` of transformers calls a key -> what it is here."""
RENAMED_KEYS = {
    "data.sequence": "data.sequence_length",
    "data.workers": "data.num_workers",
    "schedule.final": "schedule.min_lr_rate",
    "hooks.gradient_watch": "hooks.gradient_monitor",
    **{f"parallel.{old}": f"parallel.{new}" for old, new in RENAMED_FIELDS.items()},
}
"""Earlier name of a key -> its name."""


def load_train_config(file: str | Path, changes: Sequence[str] = ()) -> TrainConfig:
    """The run that a TOML file says.

    Args:
        changes: keys that are to have another value, as ``parallel.tensor=2``; the value is written as in TOML, and
            what is not TOML is a word. ``training.epochs=`` removes a key.

    Raises ConfigError for a file that cannot be read, and for what cannot be in it.
    """
    path = Path(file)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe: each process reads it, and would wait
            raise OSError("it is no regular file")
        said = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        near = did_you_mean(path.name, (other.name for other in path.absolute().parent.glob("*.toml")))
        raise ConfigError(
            f"The config {str(file)!r} cannot be read: {error.strerror or error}",
            rule="A run is said by a file in TOML",
            remedy=near if near.startswith("Did") else "Correct the path",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"The config {str(file)!r} is no TOML: {error}",
            rule='A table begins with its name in brackets, and holds lines such as steps = 100 or name = "gpt2"',
            remedy="Correct the line",
        ) from error
    for change in changes:
        _change(said, change)
    return parse_config(said, str(file))


def parse_config(said: dict[str, Any], where: str) -> TrainConfig:
    """The run that these tables say; ``where`` they stand is for errors."""
    try:
        return TrainConfig.model_validate(_with_new_names(said))
    except ValidationError as error:
        raise _to_config_error(error, where) from error


def _with_new_names(said: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with earlier keys renamed, with a warning. A key that has both names is left, and an error."""
    found = {name: dict(table) if isinstance(table, dict) else table for name, table in said.items()}
    for old, new in RENAMED_KEYS.items():
        (name, _, old_key), new_key = old.partition("."), new.partition(".")[2]
        table = found.get(name)
        if isinstance(table, dict) and old_key in table and new_key not in table:
            value = table.pop(old_key)
            table[new_key] = RENAMED_METHODS.get(value, value) if isinstance(value, str) else value
            if os.environ.get("RANK", "0") == "0":
                warnings.warn(f"{old} is now {new}", FutureWarning, stacklevel=3)
    return found


def _change(said: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    *tables, name = (part.strip() for part in key.split("."))
    if not equals or not name or not all(tables):
        raise ConfigError(
            f"--set {change}", rule="A change is a key and its value", remedy="Write it as --set parallel.tensor=2"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = said
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"--set {change}", rule=f"{part} is no table in the file", remedy=f"Write [{part}] in the file"
            )
    if text.strip():
        table[name] = value
    else:
        table.pop(name, None)


def _to_config_error(error: ValidationError, where: str) -> ConfigError:
    """The first of what pydantic found, with the key as it stands in the file, and the names that there are."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    table, name = _table_at(place), place[-1]
    key = ".".join(_without_unions(place))
    if first["type"] == "extra_forbidden":
        return ConfigError(
            f"{where} has {key} = {first['input']!r:.80}",
            rule=f"There is no such key in {'the file' if len(place) == 1 else f'[{place[-2]}]'}",
            remedy=f"It is now {RENAMED_KEYS[key]}" if key in RENAMED_KEYS else _meant(name, table),
        )
    if first["type"] == "missing":
        return ConfigError(
            f"{where} does not say {key}",
            rule=_said_of(table, name) or "Every run says it",
            remedy=f"Write {name} in [{'.'.join(place[:-1])}]" if len(place) > 1 else f"Write a table [{name}]",
        )
    found = first["input"]
    here = [
        e["msg"].removeprefix("Value error, ")
        for e in error.errors()
        if _without_unions(map(str, e["loc"])) == _without_unions(place)
    ]
    known = str(first.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
    said = _said_of(table, name)
    return ConfigError(
        f"{where} has {key} = {found!r:.80}",
        rule="; or ".join(dict.fromkeys(here)) + (f". {said}" if said else ""),
        remedy=did_you_mean(str(found), known) if first["type"] == "literal_error" else _value_for(first),
    )


def _value_for(error: Mapping[str, Any]) -> str:
    """What to write in the place of a value that pydantic refuses."""
    limits = error.get("ctx", {})
    for name, words in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if name in limits:
            return f"Write a number of {words} {limits[name]}"
    of_type = {
        "int_type": "Write a whole number, without quotes and without a point",
        "float_type": "Write a number, without quotes",
        "bool_type": "Write true or false, without quotes",
        "string_type": "Write it in quotes",
    }
    return of_type.get(error["type"], "Correct the value")


def _meant(name: str, table: type[BaseModel] | None) -> str:
    """Where a key is that stands in the wrong table, or that the Trainer of transformers calls so."""
    tables = {key: _table_at([key, ""]) for key in TrainConfig.model_fields}
    every = [f"{key}.{field}" for key, each in tables.items() if each is not None for field in each.model_fields]
    places = OF_TRAINER.get(
        name, [key for key in (*TrainConfig.model_fields, *every) if key.rpartition(".")[2] == name]
    )
    if places:
        return f"Write it as {' or '.join(places)}"
    if table is TrainConfig:
        near = did_you_mean(name, [*TrainConfig.model_fields, *every])
        return f"{near} A key is under the name of its table, as [data] or data.batch_size"
    return did_you_mean(name, table.model_fields if table is not None else ())


def _without_unions(place: Iterable[str]) -> list[str]:
    """A place without the names of types, which pydantic puts behind the key of a union."""
    return [part for part in place if part.replace("_", "").isalnum() and part not in ("str", "int", "bool", "float")]


def _table_at(place: Sequence[str]) -> type[BaseModel] | None:
    table: Any = TrainConfig
    for part in place[:-1]:
        field = getattr(table, "model_fields", {}).get(part)
        if field is None:
            return None
        kinds: list[Any] = [field.annotation, *get_args(field.annotation)]
        table = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return table  # type: ignore[no-any-return]


def _said_of(table: type[BaseModel] | None, name: str) -> str:
    field = table.model_fields.get(name) if table is not None else None
    return (field.description or "").replace("`", "'").rstrip(".") if field is not None else ""
