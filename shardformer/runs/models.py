"""The model of a run, built without values: each rank reads or draws its part."""

from __future__ import annotations

import inspect
import re
from typing import Any, cast

import torch
from torch import nn

from shardformer.errors import ConfigError, ShardFormerError, first_line, nearest
from shardformer.lazy.pretrained import from_pretrained
from shardformer.lazy.recorder import LazyInit
from shardformer.runs.config import RunConfig, consent_or
from shardformer.runs.data import RunData
from shardformer.runs.model_config import from_data, own_config
from shardformer.transformers_compat import configs_of, load_transformers

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
    is_model = isinstance(kind, type) and (issubclass(kind, nn.Module) or configs_of(kind) is not None)
    if not is_model or not hasattr(kind, "from_pretrained"):
        known = [n for n in dir(transformers) if re.search(r"For[A-Z]|Model$", n)]
        raise ConfigError(f"model.head = {name!r}", rule="It is a model of transformers", remedy=nearest(name, known))
    return kind


def model_of(
    config: RunConfig, data: RunData, saved: Any, *, lazy: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model, its weights not there yet, unless not ``lazy``: then they are random whatever the config says.

    In fp32, whatever it was saved in: what is kept in fewer bits, ``parallel.precision`` says.

    Args:
        saved: its config without what follows from the data.

    Raises ConfigError where it cannot be, and where the data do not fit it.
    """
    complete = own_config(config, from_data(config, data, saved))
    _check_fits(config, data, complete)
    kind = head_of(config)
    _check_task(config, complete, kind)
    torch.manual_seed(config.seed)
    try:
        model = _made(config, kind, complete, lazy=lazy, dtype=dtype)
    except ShardFormerError:
        raise
    except Exception as error:  # the code of a model may raise anything
        raise ConfigError(
            f"transformers cannot build {kind.__name__} of {config.model.name!r}: {type(error).__name__}: "
            f"{first_line(error)}",
            rule="model.task and model.head fit the model, and the fields of model.config fit each other",
            remedy=consent_or("Correct them", error),
        ) from error
    _check_loss(model)
    return model


def _made(config: RunConfig, kind: Any, saved: Any, *, lazy: bool, dtype: torch.dtype) -> nn.Module:
    trust = config.model.trust_remote_code
    if not lazy:
        return _built(kind, saved, dtype, trust)
    if not config.model.random:
        return from_pretrained(kind, config.model.name, config=saved, dtype=dtype, trust_remote_code=trust)
    with LazyInit():
        return _built(kind, saved, dtype, trust)


def _check_loss(model: nn.Module) -> None:
    """Raises ConfigError for a model of transformers without a loss, such as what ``AutoModel`` builds."""
    kind = type(model)
    if kind.__module__.startswith("transformers.") and "labels" not in inspect.signature(kind.forward).parameters:
        raise ConfigError(
            f"model.head builds a {kind.__name__}, which takes no labels and returns no loss",
            rule="A run trains a model with the head of its task",
            remedy="Leave model.head out, or name a class with a head, such as AutoModelForCausalLM",
        )


def _built(kind: Any, saved: Any, dtype: torch.dtype, trust: bool) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if hasattr(kind, "from_config"):  # without an answer it may ask for consent on the standard input
            return cast(nn.Module, kind.from_config(saved, dtype=dtype, trust_remote_code=trust))
        return cast(nn.Module, kind(saved))
    finally:
        torch.set_default_dtype(before)


def _check_task(config: RunConfig, saved: Any, kind: Any) -> None:
    """Raises ConfigError where transformers has no model of this type for the task."""
    known = configs_of(kind)
    if known is None or type(saved) in known or kind.__name__ in (getattr(saved, "auto_map", None) or {}):
        return
    transformers = load_transformers()
    tasks = [task for task, name in HEAD_OF.items() if type(saved) in (configs_of(getattr(transformers, name)) or ())]
    raise ConfigError(
        f"model.{'head' if config.model.head else 'task'} = {config.model.head or config.model.task!r} with "
        f"{config.model.name!r}, a model of the type {saved.model_type}",
        rule=f"{kind.__name__} of transformers has no model of this type",
        remedy=f"Write model.task = {' or '.join(map(repr, tasks))}, or take another model"
        if tasks
        else "Take another model",
    )


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
    most = next((n for name in LENGTHS if isinstance(n := getattr(text, name, None), int) and n > 0), None)
    if most is not None and config.data.sequence > most:
        raise ConfigError(
            f"data.sequence = {config.data.sequence}, and the model has {most} positions",
            rule="A sample is no longer than the model can see",
            remedy=f"Use {most} or less; where positions are not weights (RoPE), model.config can say more of them",
        )
