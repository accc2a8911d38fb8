"""The model of a run, built without values: each rank reads or draws its part."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from shardformer.errors import ConfigError, first_line, nearest
from shardformer.lazy.pretrained import from_pretrained
from shardformer.lazy.recorder import LazyInit
from shardformer.runs.config import RunConfig, consent_or
from shardformer.runs.data import RunData
from shardformer.transformers_compat import load_transformers

HEAD_OF = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "sequence_to_sequence": "AutoModelForSeq2SeqLM",
    "classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def head_of(config: RunConfig) -> Any:
    """The class of transformers. Raises ConfigError where there is none of that name."""
    transformers = load_transformers()

    name = config.model.head or HEAD_OF[config.model.task]
    kind = getattr(transformers, name, None)
    if kind is None or not hasattr(kind, "from_pretrained"):
        known = [n for n in dir(transformers) if "For" in n or n.endswith("Model")]
        raise ConfigError(f"model.head = {name!r}", rule="It is a model of transformers", remedy=nearest(name, known))
    return kind


def own_config(config: RunConfig) -> Any:
    """The config of the model as it is saved, with the fields that are to be others.

    Raises ConfigError where it cannot be read, and for a field that it does not have.
    """
    transformers = load_transformers()

    name, random, trust = config.model.name, config.model.random, config.model.trust_remote_code
    try:
        if random and name in transformers.CONFIG_MAPPING:
            found = transformers.AutoConfig.for_model(name)
        else:
            found = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust)
    except Exception as error:  # a file may hold anything, and its fields any value
        types = list(transformers.CONFIG_MAPPING.keys())
        raise ConfigError(
            f"model.name = {name!r}: {first_line(error)}",
            rule="It is a folder that save_pretrained wrote, a config.json, a name on the hub, or with random = true a "
            "model type of transformers",
            remedy=consent_or(nearest(name, types) if random or name in types else "Correct the name", error),
        ) from error
    if not random and Path(name).is_file():
        raise ConfigError(
            f"model.name = {name!r}, a config, without random = true",
            rule="A config holds no weights",
            remedy="Write model.random = true, or give the folder with the weights",
        )
    settable = [name for name, kind in inspect.getmembers(type(found)) if isinstance(kind, property) and kind.fset]
    known = [*found.to_dict(), *found.attribute_map, *settable]
    for field in config.model.config:
        if field not in known:
            raise ConfigError(
                f"model.config has {field!r}",
                rule=f"The config of {found.model_type} has no such field",
                remedy=nearest(field, known),
            )
        setattr(found, field, config.model.config[field])
    return found


def image_size_of(saved: Any) -> int | None:
    """The side of an image in pixels, as a model's config has it; None where it does not say."""
    for each in (saved, getattr(saved, "vision_config", None)):
        size = getattr(each, "image_size", None)
        if size is not None:
            return int(size if isinstance(size, int) else size[0])
    return None


def model_of(
    config: RunConfig, data: RunData, saved: Any, *, lazy: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model, its weights not there yet, unless not ``lazy``: then they are random whatever the config says.

    In fp32, whatever it was saved in: what is kept in fewer bits, ``parallel.precision`` says.

    Raises ConfigError where it cannot be, and where the data do not fit it.
    """
    for field, value in _from_data(config, data).items():
        if field not in config.model.config:
            setattr(saved, field, value)
    if data.classes is not None and getattr(saved, "pad_token_id", None) is None and data.tokens is not None:
        saved.pad_token_id = data.tokens.pad
    _check_fits(config, data, saved)
    kind, trust = head_of(config), config.model.trust_remote_code
    torch.manual_seed(config.seed)
    try:
        if not lazy:
            return _built(kind, saved, dtype, trust)
        if not config.model.random:
            return from_pretrained(kind, config.model.name, config=saved, dtype=dtype, trust_remote_code=trust)
        with LazyInit():
            return _built(kind, saved, dtype, trust)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"transformers cannot build {kind.__name__} of {config.model.name!r}: {first_line(error)}",
            rule="model.task and model.head fit the model, and model.config its sizes",
            remedy=consent_or("Correct them", error),
        ) from error


def _from_data(config: RunConfig, data: RunData) -> dict[str, Any]:
    """Fields of the model's config that follow from the data."""
    fields: dict[str, Any] = {}
    if data.classes is not None:
        fields["num_labels"] = len(data.classes)
    if data.tokens is not None and data.tokens.is_bytes and config.model.random:
        names = ["pad_token_id", "bos_token_id", "eos_token_id"]
        if config.model.task == "sequence_to_sequence":
            names.append("decoder_start_token_id")
        fields |= {"vocab_size": data.tokens.size, **dict.fromkeys(names, data.tokens.pad)}
    return fields


def _built(kind: Any, saved: Any, dtype: torch.dtype, trust: bool) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if hasattr(kind, "from_config"):  # without an answer it may ask for consent on the standard input
            return cast(nn.Module, kind.from_config(saved, dtype=dtype, trust_remote_code=trust))
        return cast(nn.Module, kind(saved))
    finally:
        torch.set_default_dtype(before)


def _check_fits(config: RunConfig, data: RunData, saved: Any) -> None:
    if data.tokens is None:
        return
    text = saved.get_text_config()
    size = getattr(text, "vocab_size", None)
    if size is not None and data.tokens.size > size:
        raise ConfigError(
            f"The tokenizer {data.tokens.name!r} has {data.tokens.size} tokens, and the model a vocabulary of {size}",
            rule="The model has a row for each token",
            remedy=f"Use the model's own tokenizer, or write model.config.vocab_size = {data.tokens.size} with random",
        )
    most = next((n for name in LENGTHS if isinstance(n := getattr(text, name, None), int)), None)
    if most is not None and config.data.sequence > most:
        raise ConfigError(
            f"data.sequence = {config.data.sequence}, and the model has {most} positions",
            rule="A sample is no longer than the model can see",
            remedy=f"Use {most} or less; where positions are not weights (RoPE), model.config can say more of them",
        )
