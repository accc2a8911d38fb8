"""Builds the transformers config of a model from its saved config, the run configuration and the training data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardformer.errors import ConfigError, get_first_message_line, suggest_similar_names
from shardformer.train_command.config_schema import TrainConfig, suggest_trust_remote_code
from shardformer.train_command.load_data import TrainingData
from shardformer.transformers_compat import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Fields = Mapping[str, Any]
_FP32_WEIGHTS = (
    "Weights are kept in fp32, and parallel.precision determines the dtype of a step",
    "Set parallel.precision = 'bf16' or 'fp16', or remove the field",
)
DECIDED_BY = {
    "dtype": _FP32_WEIGHTS,
    "torch_dtype": _FP32_WEIGHTS,
    "architectures": ("model.task and model.head determine the model class", "Set model.head"),
    "model_type": ("model.name determines the model type", "Set model.name"),
}
"""Model config fields that a run must not set -> rule and remedy of the error."""


def load_model_config(config: TrainConfig, default_fields: Fields | None = None) -> PreTrainedConfig:
    """Load the transformers config of the model, and apply the overrides in ``model.config``.

    Fields that the config class derives from changed fields are derived again. A folder or config.json contains such
    fields, so their values are kept unless the class rejects the combination. ``default_fields`` contains values for
    fields that the run does not set.
    """
    model_config, saved = _load_config_and_saved_fields(config)
    for name, value in config.model.config.items():
        if name in DECIDED_BY:
            rule, remedy = DECIDED_BY[name]
            raise ConfigError(f"model.config must not set {name} = {value!r:.60}.", rule=rule, remedy=remedy)
    _check_fields_exist(model_config, config.model.config)
    fields = _add_default_fields(model_config, config.model.config, default_fields or {})
    return _build_model_config(config, model_config, saved, fields) if fields else model_config


def _load_config_and_saved_fields(config: TrainConfig) -> tuple[PreTrainedConfig, Fields]:
    """Load the model's config, together with the fields of its config.json if it has this file."""
    transformers = import_transformers()
    name, random, trust = config.model.name, config.model.random, config.model.trust_remote_code
    try:
        if random and name in transformers.CONFIG_MAPPING:
            return transformers.AutoConfig.for_model(name), {}
        model_config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust)
        saved: Fields = type(model_config).get_config_dict(name)[0]
    except Exception as error:  # files may have any content
        types = list(transformers.CONFIG_MAPPING.keys())
        remedy = suggest_similar_names(name, types) if random else "Fix model.name"
        if not random and name in types:
            remedy = "Set model.random = true to start with random weights, or specify a folder with weights"
        reason = get_first_message_line(error)
        raise ConfigError(
            f"The config of the model {name!r} cannot be loaded: {reason}.",
            rule="model.name must be a folder that save_pretrained wrote or a name on the Hugging Face hub. With "
            "model.random = true, it can also be a config.json or a model type.",
            remedy=suggest_trust_remote_code(remedy, error),
        ) from error
    if not random and Path(name).is_file():
        raise ConfigError(
            f"The path {name!r} in model.name is a config file without weights.",
            remedy="Set model.random = true to start with random weights, or specify a folder with weights.",
        )
    return model_config, saved


def _get_nested_config(model_config: PreTrainedConfig, field_name: str) -> PreTrainedConfig | None:
    """Return the nested config in a field of a model config, or None if the field contains no config."""
    value = vars(model_config).get(model_config.attribute_map.get(field_name, field_name))
    return value if hasattr(value, "to_dict") and hasattr(value, "attribute_map") else None


def _get_field_names(model_config: PreTrainedConfig) -> list[str]:
    """Return all field names and aliases of a model config.

    A property with a private name, such as ``_attn_implementation``, is listed without the underscore.
    """
    settable = [
        name for name, kind in inspect.getmembers(type(model_config)) if isinstance(kind, property) and kind.fset
    ]
    return [*model_config.to_dict(), *model_config.attribute_map, *(name.removeprefix("_") for name in settable)]


def _check_fields_exist(model_config: PreTrainedConfig, fields: Fields, config_path: str = "model.config") -> None:
    """Raise ConfigError for a field that the model config or one of its nested configs does not have."""
    known = _get_field_names(model_config)
    for field, value in fields.items():
        if field not in known:
            raise ConfigError(
                f"{config_path} sets {field!r}, but the config of {model_config.model_type} has no such field.",
                remedy=suggest_similar_names(field, known),
            )
        nested = _get_nested_config(model_config, field)
        if isinstance(value, Mapping) and nested is not None:
            _check_fields_exist(_get_config_for_model_type(nested, value), value, f"{config_path}.{field}")


def _get_config_for_model_type(nested_config: PreTrainedConfig, fields: Fields) -> PreTrainedConfig:
    """Return a new config if ``fields`` contains another ``model_type``, and otherwise ``nested_config``."""
    transformers = import_transformers()
    model_type = fields.get("model_type", nested_config.model_type)
    other = model_type != nested_config.model_type and model_type in transformers.CONFIG_MAPPING
    return transformers.AutoConfig.for_model(model_type) if other else nested_config


def _add_default_fields(model_config: PreTrainedConfig, run_fields: Fields, default_fields: Fields) -> dict[str, Any]:
    """Add defaults for fields that the run does not set. Fields of a text model go into the text config."""
    text, known = model_config.get_text_config(), _get_field_names(model_config)
    place = next((name for name, value in vars(model_config).items() if value is text), None)
    fields = dict(run_fields)
    for name, value in default_fields.items():
        if place is None or name in known:
            fields.setdefault(name, value)
        elif isinstance(inside := fields.get(place, {}), Mapping):
            fields[place] = {name: value, **inside}
    return fields


def _merge_config_fields(
    model_config: PreTrainedConfig, saved_fields: Fields, changed_fields: Fields
) -> dict[str, Any]:
    """Merge changed fields into the saved fields of a model config, and replace aliases with the actual field names."""
    alias = model_config.attribute_map
    merged = {alias.get(name, name): value for name, value in saved_fields.items()}
    for name, value in changed_fields.items():
        part, before = _get_nested_config(model_config, name), merged.get(alias.get(name, name))
        if isinstance(value, Mapping) and part is not None and _get_config_for_model_type(part, value) is part:
            value = _merge_config_fields(part, before if isinstance(before, Mapping) else {}, value)
        merged[alias.get(name, name)] = value
    if "num_labels" in changed_fields and len(merged.get("id2label") or {}) != changed_fields["num_labels"]:
        merged.pop("id2label", None), merged.pop("label2id", None)  # names of other classes
    return merged


def _build_model_config(
    config: TrainConfig, model_config: PreTrainedConfig, saved_fields: Fields, changed_fields: Fields
) -> PreTrainedConfig:
    """Build a copy of a model config with changed fields, or raise ConfigError if the config class rejects them.

    For a model type, only the fields of the run are passed, under the names that the run uses, because derived fields
    may depend on the name. A file also contains derived fields, such as the type of each layer. If the class rejects
    derived fields in combination with the changed fields, they are omitted and derived again.
    """
    config_class, merged = (
        type(model_config),
        _merge_config_fields(model_config, saved_fields, changed_fields) if saved_fields else changed_fields,
    )
    first_error: Exception | None = None
    for left_out in _iter_fields_to_omit(config_class, model_config, saved_fields, changed_fields):
        try:
            built = config_class.from_dict(copy.deepcopy({n: v for n, v in merged.items() if n not in left_out}))
            if hasattr(built, "validate"):
                built.validate()
        except Exception as error:  # config classes may raise any error
            first_error = first_error or error
            continue
        built.name_or_path = model_config.name_or_path
        return built
    lines = [line.strip() for line in str(first_error).splitlines() if line.strip()] or [type(first_error).__name__]
    reason = " ".join(lines[1:] or lines).rstrip(".")  # the first of several lines only names a validator
    changes = ", ".join(f"{name} = {value!r:.60}" for name, value in changed_fields.items())
    raise ConfigError(
        f"The config of {config.model.name!r} does not support {changes}: {reason}.",
        remedy="Fix these values in model.config, or also set the fields that depend on them.",
    ) from first_error


def _iter_fields_to_omit(
    config_class: type[PreTrainedConfig], model_config: PreTrainedConfig, saved_fields: Fields, changed_fields: Fields
) -> Iterator[Sequence[str]]:
    """Yield the derived fields to omit from the saved config in each attempt to build the model config."""
    yield ()
    derived = []
    changed = {model_config.attribute_map.get(name, name) for name in changed_fields}
    complete = config_class.from_dict(copy.deepcopy(dict(saved_fields))).to_dict() if saved_fields else {}
    for name in saved_fields:
        if name in changed or name not in complete:
            continue
        try:
            rebuilt = config_class.from_dict(
                copy.deepcopy({n: v for n, v in saved_fields.items() if n != name})
            ).to_dict()
        except Exception:  # the field is required
            continue
        if rebuilt.get(name) == complete[name]:
            derived.append(name)
    yield from ([name] for name in derived)
    yield derived


def get_image_size(model_config: PreTrainedConfig) -> int | None:
    """Return the image size in pixels that a model config specifies, or None if it specifies none."""
    for each in (model_config, getattr(model_config, "vision_config", None)):
        size = getattr(each, "image_size", None)
        if size is not None:
            return int(size if isinstance(size, int) else size[0])
    return None


def get_class_names(model_config: PreTrainedConfig) -> list[str]:
    """Return the class names of a model config, ordered by class index."""
    names: Mapping[int, str] = getattr(model_config, "id2label", None) or {}
    return [names[number] for number in sorted(names)]


def derive_config_fields_from_data(
    config: TrainConfig, training_data: TrainingData, model_config: PreTrainedConfig
) -> dict[str, Any]:
    """Derive model config fields such as ``vocab_size`` from the training data, unless the run sets them."""
    fields: dict[str, Any] = {}
    if training_data.tokenizer is not None and training_data.tokenizer.is_byte_level and config.model.random:
        names = ["pad_token_id", "bos_token_id", "eos_token_id"]
        if getattr(model_config, "is_encoder_decoder", False):
            names.append("decoder_start_token_id")
        fields |= {
            "vocab_size": training_data.tokenizer.vocab_size,
            **dict.fromkeys(names, training_data.tokenizer.pad_token_id),
        }
    if training_data.problem_type is not None:
        fields["problem_type"] = training_data.problem_type
    if training_data.problem_type == "regression":
        fields |= {"num_labels": 1}
    if training_data.classes is not None:
        fields |= _derive_class_fields(config, training_data.classes, model_config)
    if training_data.classes is not None or training_data.problem_type is not None:
        if training_data.tokenizer is not None and getattr(model_config, "pad_token_id", None) is None:
            fields.setdefault("pad_token_id", training_data.tokenizer.pad_token_id)
    own = {model_config.attribute_map.get(name, name) for name in config.model.config}
    return {name: value for name, value in fields.items() if model_config.attribute_map.get(name, name) not in own}


def _derive_class_fields(config: TrainConfig, classes: Sequence[Any], model_config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields ``id2label`` and ``label2id`` of a model config for the classes of the training data."""
    own, names = config.model.config, get_class_names(model_config)
    if "id2label" in own or "num_labels" in own:
        if len(names) < len(classes):
            raise ConfigError(
                f"model.config specifies {len(names)} classes, but the data has {len(classes)}.",
                remedy="Remove num_labels and id2label from model.config to infer them from the data.",
            )
        if "id2label" in own:
            return {"label2id": {name: number for number, name in enumerate(names)}}
    if all(type(each) is int for each in classes) and list(classes) == list(range(len(classes))):
        if len(names) == len(classes) or "num_labels" in own:
            return {}  # keep the model's own names
        labels = [f"LABEL_{number}" for number in classes]
    else:
        labels = [str(name) for name in classes] + names[len(classes) :] * ("num_labels" in own)
    return {"id2label": dict(enumerate(labels)), "label2id": {name: number for number, name in enumerate(labels)}}
