"""The config of a run's model: what transformers builds of the fields of the file, of the run and of the data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardformer.errors import ConfigError, did_you_mean, first_line
from shardformer.train_command.config_schema import TrainConfig, remote_code_hint
from shardformer.train_command.datasets import TrainingData
from shardformer.transformers_compat import load_transformers

Fields = Mapping[str, Any]
_KEPT = (
    "Weights are kept in fp32, and a step computes in parallel.precision",
    "Write parallel.precision = 'bf16' or 'fp16' for a step in 16 bits, or leave it out",
)
DECIDED_BY = {
    "dtype": _KEPT,
    "torch_dtype": _KEPT,
    "architectures": ("model.task and model.head choose the class that is trained", "Write it as model.head"),
    "model_type": ("The type of a model is that of model.name", "Write it as model.name"),
}
"""Fields of a config that a run does not read -> the rule, and what to write instead."""


def load_model_config(config: TrainConfig, more: Fields | None = None) -> Any:
    """The config of the model as it is saved, or of its model type, with the fields that the run sets.

    It is what the class of the config makes of all fields together: fields that the run leaves out and that the class
    derives from others follow those that it sets. In a folder or a config.json they are written down and keep their
    values, unless the class then refuses the whole: see ``_built``.

    Args:
        more: fields, where the run does not set them.

    Raises ConfigError where it cannot be read, for a field that it does not have, and for values that do not fit.
    """
    found, saved = _as_saved(config)
    _check_used(config.model.config)
    _check_fields(found, config.model.config)
    fields = _with(found, config.model.config, more or {})
    return _built(config, found, saved, fields) if fields else found


def _as_saved(config: TrainConfig) -> tuple[Any, Fields]:
    """The config without changes, and the fields that its file has; none for a model type."""
    transformers = load_transformers()

    name, random, trust = config.model.name, config.model.random, config.model.trust_remote_code
    try:
        if random and name in transformers.CONFIG_MAPPING:
            return transformers.AutoConfig.for_model(name), {}
        found = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust)
        saved: Fields = type(found).get_config_dict(name)[0]
    except Exception as error:  # a file may hold anything, and its fields any value
        types = list(transformers.CONFIG_MAPPING.keys())
        raise ConfigError(
            f"model.name = {name!r}: {first_line(error)}",
            rule="It is a folder that save_pretrained wrote, a config.json, a name on the hub, or with random = true a "
            "model type of transformers",
            remedy=remote_code_hint(_remedy(name, types, random=random), error),
        ) from error
    if not random and Path(name).is_file():
        raise ConfigError(
            f"model.name = {name!r}, a config, without random = true",
            remedy="Write model.random = true, or give the folder with the weights",
        )
    return found, saved


def _remedy(name: str, types: Sequence[str], *, random: bool) -> str:
    if random:
        return did_you_mean(name, types)
    if name in types:
        return "Write model.random = true to begin with random weights, or give a folder that holds the weights"
    return "Correct the name"


def _part(found: Any, name: str) -> Any:
    """The config inside of another one that has this name; None for any other field."""
    thing = vars(found).get(found.attribute_map.get(name, name))
    return thing if hasattr(thing, "to_dict") and hasattr(thing, "attribute_map") else None


def _known(found: Any) -> list[str]:
    """Its fields, by all their names; of what a property keeps under a private name, such as ``attn_implementation``,
    the name of the argument."""
    settable = [name for name, kind in inspect.getmembers(type(found)) if isinstance(kind, property) and kind.fset]
    return [*found.to_dict(), *found.attribute_map, *(name.removeprefix("_") for name in settable)]


def _check_used(fields: Fields) -> None:
    """Raises ConfigError for a field that has no effect here: another key of the run decides."""
    for name in fields:
        if name in DECIDED_BY:
            rule, remedy = DECIDED_BY[name]
            raise ConfigError(
                f"model.config has {name} = {fields[name]!r:.60}, which has no effect in a run",
                rule=rule,
                remedy=remedy,
            )


def _check_fields(found: Any, fields: Fields, where: str = "model.config") -> None:
    """Raises ConfigError for a field that the config, or one inside of it, does not have."""
    known = _known(found)
    for field, value in fields.items():
        if field not in known:
            raise ConfigError(
                f"{where} has {field!r}",
                rule=f"The config of {found.model_type} has no such field",
                remedy=did_you_mean(field, known),
            )
        part = _part(found, field)
        if isinstance(value, Mapping) and part is not None:
            _check_fields(_of_type(part, value), value, f"{where}.{field}")


def _of_type(part: Any, value: Fields) -> Any:
    """The config inside of another one; where the fields name another model type, one of that type."""
    transformers = load_transformers()

    kind = value.get("model_type", part.model_type)
    other = kind != part.model_type and kind in transformers.CONFIG_MAPPING
    return transformers.AutoConfig.for_model(kind) if other else part


def _with(found: Any, own: Fields, more: Fields) -> dict[str, Any]:
    """Adds fields that are not set. Where a model has more than its text, those of the text are in a config inside."""
    text, known = found.get_text_config(), _known(found)
    place = next((name for name, value in vars(found).items() if value is text), None)
    fields = dict(own)
    for name, value in more.items():
        if place is None or name in known:
            fields.setdefault(name, value)
        elif isinstance(inside := fields.get(place, {}), Mapping):
            fields[place] = {name: value, **inside}
    return fields


def _merged(found: Any, saved: Fields, fields: Fields) -> dict[str, Any]:
    """The fields of a file with those that are to be others, each under the one name that the config keeps it under."""
    alias = found.attribute_map
    merged = {alias.get(name, name): value for name, value in saved.items()}
    for name, value in fields.items():
        part, before = _part(found, name), merged.get(alias.get(name, name))
        if isinstance(value, Mapping) and part is not None and _of_type(part, value) is part:
            value = _merged(part, before if isinstance(before, Mapping) else {}, value)
        merged[alias.get(name, name)] = value
    if "num_labels" in fields and len(merged.get("id2label") or {}) != fields["num_labels"]:
        merged.pop("id2label", None), merged.pop("label2id", None)  # of a file: names of other classes
    return merged


def _built(config: TrainConfig, found: Any, saved: Fields, fields: Fields) -> Any:
    """A config of the same class with other fields.

    Of a model type the fields are those that the run sets, by the names that it has for them: what the class derives
    may depend on the name. A file also holds what the class derived when it was written, such as the kind of each
    layer. Where the class refuses that together with the new fields, it derives it anew.

    Raises ConfigError for values that transformers refuses.
    """
    kind, merged = type(found), _merged(found, saved, fields) if saved else fields
    problem: Exception | None = None
    for left_out in _ways(kind, found, saved, fields):
        try:
            made = kind.from_dict(copy.deepcopy({n: v for n, v in merged.items() if n not in left_out}))
            if hasattr(made, "validate"):
                made.validate()
        except Exception as error:  # a class of a config may raise anything
            problem = problem or error
            continue
        made.name_or_path = found.name_or_path
        return made
    assert problem is not None
    raise ConfigError(
        f"transformers cannot build the config of {config.model.name!r} with "
        f"{', '.join(f'{name} = {value!r:.60}' for name, value in fields.items())}: {_reason(problem)}",
        remedy="Correct them, or set the other fields as well",
    ) from problem


def _ways(kind: Any, found: Any, saved: Fields, fields: Fields) -> Iterator[Sequence[str]]:
    """Which fields are left out for the class to derive: none, each that it derives, all that it derives."""
    yield ()
    derived = []
    changed = {found.attribute_map.get(name, name) for name in fields}
    whole = kind.from_dict(copy.deepcopy(dict(saved))).to_dict() if saved else {}
    for name in saved:
        if name in changed or name not in whole:
            continue
        try:
            again = kind.from_dict(copy.deepcopy({n: v for n, v in saved.items() if n != name})).to_dict()
        except Exception:  # it cannot be without
            continue
        if again.get(name) == whole[name]:
            derived.append(name)
    yield from ([name] for name in derived)
    yield derived


def _reason(error: Exception) -> str:
    """What transformers says; its first line names a validator, and the next ones the reason."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[1:] or lines).rstrip(".")


def image_size_of(saved: Any) -> int | None:
    """The side of an image in pixels, as a model's config has it; None where it does not say."""
    for each in (saved, getattr(saved, "vision_config", None)):
        size = getattr(each, "image_size", None)
        if size is not None:
            return int(size if isinstance(size, int) else size[0])
    return None


def class_names_of(saved: Any) -> list[str]:
    """The names of the classes of a model, in its order."""
    names: Mapping[int, str] = getattr(saved, "id2label", None) or {}
    return [names[number] for number in sorted(names)]


def from_data(config: TrainConfig, data: TrainingData, saved: Any) -> dict[str, Any]:
    """Fields of the model's config that follow from the data, where the run does not set them."""
    fields: dict[str, Any] = {}
    if data.tokens is not None and data.tokens.is_bytes and config.model.random:
        names = ["pad_token_id", "bos_token_id", "eos_token_id"]
        if getattr(saved, "is_encoder_decoder", False):
            names.append("decoder_start_token_id")
        fields |= {"vocab_size": data.tokens.size, **dict.fromkeys(names, data.tokens.pad)}
    if data.classes is not None:
        fields |= _class_fields(config, data.classes, saved)
        if data.tokens is not None and getattr(saved, "pad_token_id", None) is None:
            fields.setdefault("pad_token_id", data.tokens.pad)
    own = {saved.attribute_map.get(name, name) for name in config.model.config}
    return {name: value for name, value in fields.items() if saved.attribute_map.get(name, name) not in own}


def _class_fields(config: TrainConfig, classes: Sequence[Any], saved: Any) -> dict[str, Any]:
    """How many classes there are, and their names, which the exported config has."""
    own, names = config.model.config, class_names_of(saved)
    if "id2label" in own or "num_labels" in own:
        if len(names) < len(classes):
            raise ConfigError(
                f"model.config has {len(names)} classes, and the data {len(classes)}",
                remedy="Leave num_labels and id2label out: they follow from the data",
            )
        if "id2label" in own:
            return {"label2id": {name: number for number, name in enumerate(names)}}
    if all(type(each) is int for each in classes) and list(classes) == list(range(len(classes))):
        if len(names) == len(classes) or "num_labels" in own:
            return {}  # the model's own names for its outputs
        said = [f"LABEL_{number}" for number in classes]
    else:
        said = [str(name) for name in classes] + names[len(classes) :] * ("num_labels" in own)
    return {"id2label": dict(enumerate(said)), "label2id": {name: number for number, name in enumerate(said)}}
