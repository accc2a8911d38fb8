"""Finds, loads and evaluates trained models, from runs, checkpoints or pretrained model folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardformer.checkpoint.directory import find_checkpoints, get_checkpoint_folder
from shardformer.checkpoint.file_format import CheckpointIndex, decode_json_value
from shardformer.checkpoint.load import load_checkpoint
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, get_first_message_line
from shardformer.meta_init.lazy_init import LazyInit
from shardformer.train_command.build import (
    build_hooks,
    create_model_from_config,
    freeze_and_add_lora,
    get_transformers_model_class,
)
from shardformer.train_command.config_schema import TrainConfig, apply_config_override, parse_train_config
from shardformer.train_command.datasets import ImageTransform
from shardformer.train_command.load_data import load_training_data, should_add_end_token
from shardformer.train_command.model_config import get_class_names, get_image_size, load_model_config
from shardformer.train_command.run import (
    CONFIG_FILE,
    EXPORT_FOLDER,
    MODEL_KEY,
    TEMPLATE_KEY,
    Resume,
    load_data_and_model,
)
from shardformer.train_command.tokenizer import load_tokenizer
from shardformer.training.data_loader import create_data_loader_on_all_ranks
from shardformer.training.engine import USER_STATE_KEY, Engine
from shardformer.training.hooks import Checkpoint, Metrics
from shardformer.training.initialize import initialize
from shardformer.training.sample_order import get_length_or_none
from shardformer.training.trainer import HOOKS, Trainer
from shardformer.transformers_compat import import_transformers
from shardformer.weights.from_pretrained import from_pretrained


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A trained model that can be loaded under any parallel layout.

    Args:
        name: The path or name of the model that the user passed.
        model_config: The transformers config of the model.
        checkpoint: The checkpoint that contains the weights, or None if ``from_pretrained`` loads them.
        run: The configuration of the run that saved the checkpoint, or None.
        chat_template: The chat template of the conversations that the run trained on, or None.
    """

    name: str
    model_config: Any
    checkpoint: Path | None = None
    run: TrainConfig | None = None
    chat_template: str | None = None

    def with_config_overrides(self, overrides: Sequence[str]) -> SavedModel:
        """Return a copy with overrides of its run configuration, such as ``parallel.tensor=2``."""
        assert self.run is not None
        tables = _remove_none_values(self.run.model_dump())
        for change in overrides:
            apply_config_override(tables, change)
        return replace(self, run=parse_train_config(tables, f"The run {self.name!r}"))

    def build_lazy_model(self) -> nn.Module:
        """Build the model without allocating its weights. Raises ConfigError if transformers cannot build it."""
        if self.run is not None:
            with LazyInit():
                model = create_model_from_config(
                    get_transformers_model_class(self.run),
                    self.model_config,
                    torch.float32,
                    self.run.model.trust_remote_code,
                )
            return freeze_and_add_lora(self.run, model)
        transformers = import_transformers()
        config = self.model_config
        kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        try:
            return from_pretrained(kind, self.name, config=config)
        except ValueError as error:  # the type has no such class
            raise ConfigError(
                f"The model type {config.model_type!r} of {self.name!r} has no {kind.__name__} class in transformers.",
                remedy="Use a model that can generate text.",
            ) from error

    def load_engine(self, layout: ParallelConfig) -> Engine:
        """Build the model, shard it, and load its weights. Communicates like ``initialize`` and ``load_checkpoint``."""
        engine = initialize(self.build_lazy_model(), None, parallel=layout)
        if self.checkpoint is not None:
            load_checkpoint(engine.model, self.checkpoint)
        engine.eval()
        return engine

    def load_processor(self) -> Any:
        """Load the tokenizer or the image transform of the model. Raises ConfigError if the model has neither."""
        run = self.run
        if run is None:
            return load_tokenizer(None, self.name, has_random_weights=False).hf_tokenizer
        if run.model.task == "image_classification":
            return ImageTransform.from_pretrained(run.model.name, get_image_size(self.model_config))
        tokens = load_tokenizer(
            run.data.tokenizer,
            run.model.name,
            has_random_weights=run.model.random,
            trust_remote_code=run.model.trust_remote_code,
        )
        return tokens.to_transformers_tokenizer(
            add_end_token=should_add_end_token(run), chat_template=self.chat_template
        )


def find_saved_model(path_or_name: str) -> SavedModel:
    """Find a trained model by the path of a run, a checkpoint or a model folder, or by its name on the hub.

    Raises:
        ConfigError: There is no such model.
    """
    path = Path(path_or_name).expanduser()
    if (path / CONFIG_FILE).is_file():
        return _find_saved_model_of_run(path, path_or_name)
    if path.exists() and not (path / "config.json").is_file():
        return _find_saved_model_of_checkpoint(path, path_or_name)
    name = str(path) if path.exists() else path_or_name
    try:
        return SavedModel(name, import_transformers().AutoConfig.from_pretrained(name))
    except Exception as error:  # files may have any content
        reason = get_first_message_line(error)
        raise ConfigError(
            f"No trained model was found at {path_or_name!r}: {reason}.",
            remedy="Use a run folder, a checkpoint, a folder that save_pretrained wrote, or a name on the Hugging Face "
            "hub.",
        ) from error


def _find_saved_model_of_run(run_folder: Path, path_or_name: str) -> SavedModel:
    checkpoints = run_folder / "checkpoints"
    try:
        found = _find_saved_model_of_checkpoint(checkpoints, path_or_name)
    except ConfigError as error:
        exported = run_folder / EXPORT_FOLDER
        remedy = f"Pass {str(exported)!r}" if exported.is_dir() else "Pass the folder that contains the checkpoints"
        raise ConfigError(f"The run {path_or_name!r} has no checkpoint in {checkpoints}.", remedy=remedy) from error
    assert found.checkpoint is not None and found.run is not None
    best = _read_hook_states(found.checkpoint).get(Checkpoint.__name__)
    options = found.run.hooks.get("checkpoint")
    if best is None or not isinstance(options, dict) or options.get("best") != "load":
        return found
    folder = get_checkpoint_folder(checkpoints, best["best_step"] or 0)
    return replace(found, checkpoint=folder) if folder.is_dir() else found


def _find_saved_model_of_checkpoint(checkpoint_folder: Path, path_or_name: str) -> SavedModel:
    checkpoint = next(find_checkpoints(checkpoint_folder))
    state = _read_hook_states(checkpoint).get(Resume.__name__)
    if not isinstance(state, dict) or MODEL_KEY not in state:
        raise ConfigError(
            f"The checkpoint '{checkpoint}' does not contain the config of its model.",
            remedy="If your script saved the checkpoint, call engine.load and engine.export. If shardformer train "
            "saved the checkpoint, resume the run to save a new one.",
        )
    run = parse_train_config(_remove_none_values(json.loads(state["config"])), str(checkpoint))
    fields = json.loads(state[MODEL_KEY])
    mapping = import_transformers().CONFIG_MAPPING
    kind = mapping[fields["model_type"]] if fields["model_type"] in mapping else type(load_model_config(run))
    return SavedModel(path_or_name, kind.from_dict(fields), checkpoint, run, state.get(TEMPLATE_KEY))


def _read_hook_states(checkpoint: Path) -> dict[str, Any]:
    extra = decode_json_value(CheckpointIndex.read(checkpoint).values["extra"])
    user = extra.get(USER_STATE_KEY) if isinstance(extra, dict) else None
    return (user.get(HOOKS) if isinstance(user, dict) else None) or {}


def _remove_none_values(config_dict: Any) -> Any:
    """Remove None values from nested tables, because TOML has no such value."""
    if not isinstance(config_dict, dict):
        return config_dict
    return {name: _remove_none_values(value) for name, value in config_dict.items() if value is not None}


def evaluate_model(saved_model: SavedModel) -> dict[str, float] | None:
    """Evaluate a model on its validation data, and return the loss, the metrics and the number of samples.

    Returns None on all ranks except the first. The metrics are those of the run's hook ``metrics``. Without this hook,
    they are the perplexity of a language model, or the accuracy of a classifier if scikit-learn is installed.
    Communicates like ``Engine.evaluate`` and ``Metrics``.
    """
    run = saved_model.run
    assert run is not None
    if run.model.task == "preference":
        raise ConfigError(
            "A model with model.task = 'preference' cannot be evaluated after training, because the DPO loss "
            "also requires the initial weights.",
            remedy="Read validation/loss in the metrics of the training run instead.",
        )
    if saved_model.checkpoint is None:
        data, model = load_data_and_model(run)
        engine = initialize(model, None, parallel=run.layout)
    else:
        data = load_training_data(
            run, get_image_size(saved_model.model_config), get_class_names(saved_model.model_config)
        )
        engine = saved_model.load_engine(run.layout)
    hooks = [hook for hook in build_hooks(run) if isinstance(hook, Metrics)]
    if not hooks and run.model.task in ("causal", "masked", "sequence_to_sequence"):
        hooks = [Metrics("perplexity")]
    elif not hooks and find_spec("sklearn") is not None:
        hooks = [Metrics("mean_squared_error" if run.model.task == "regression" else "accuracy")]
    options = {"batch_size": run.data.batch_size, "shuffle": False, "merge_last": True, "collate_fn": data.collate_fn}
    validation = create_data_loader_on_all_ranks(data.validation_dataset, engine.context, **options)
    values = Trainer(engine, hooks).evaluate(validation)
    found_values = {name.removeprefix("validation/"): value for name, value in values.items()}
    count = get_length_or_none(data.validation_dataset)  # None for a stream
    return {**found_values, **({} if count is None else {"samples": count})} if engine.is_first else None
