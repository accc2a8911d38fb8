"""The small twin of any model type of transformers, for a comparison: nothing is written down for the type."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.discovery.example_inputs import unknown_inputs
from shardformer.discovery.reduced_model import ReducedModel, first_batch, probe_loss, reduce_model
from shardformer.discovery.shrink_config import build_meta_model, model_class
from shardformer.errors import ConfigError, PolicyError, first_line
from shardformer.pipeline.micro_batches import MEDIA_TOKEN_FIELDS, batch_size_of, special_token_ids, split_batch
from shardformer.transformers_compat import load_transformers
from shardformer.verify.small_models import num_samples

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
"""Those of docs/coverage.md."""
MULTIMODAL_TASKS = (
    "MULTIMODAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "VISUAL_QUESTION_ANSWERING",
)
"""Those whose models read images and text together: a type that has several classes is known by this one."""


def main_classes(tasks: Sequence[str] = TASKS) -> dict[str, str]:
    """Model type -> the name of the class that the first of the auto classes for these tasks names."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task in tasks:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).items():
            found.setdefault(model_type, names if isinstance(names, str) else names[0])
    return found


@lru_cache(maxsize=1)
def all_classes() -> Mapping[str, str]:
    """Every model type of transformers -> its class: of TOGETHER, of TASKS, of another task, or its base model."""
    from transformers.models.auto import modeling_auto

    names = (re.fullmatch("MODEL_FOR_(.*)_MAPPING_NAMES", name) for name in dir(modeling_auto))
    found = main_classes((*MULTIMODAL_TASKS, *TASKS, *(name[1] for name in names if name)))
    base = modeling_auto.MODEL_MAPPING_NAMES.items()
    return {**{kind: names if isinstance(names, str) else names[0] for kind, names in base}, **found}


CONTRAST = "return_loss"
"""The argument with which transformers' models compare each sample of a batch with each other."""


@dataclass(frozen=True)
class ReducedModelType:
    """A small model of a type, of its default config: call it to build the model. Picklable.

    Args:
        model_type: one of ``all_classes()``.
        head: a class of transformers; by default the type's first one.
    """

    model_type: str
    head: str = ""

    @property
    def head_class(self) -> str:
        return self.head or all_classes()[self.model_type]

    def config(self) -> Any:
        return _small(self).model.config

    def __call__(self) -> nn.Module:
        model = copy.deepcopy(_small(self).model)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        return model

    def own(self) -> dict[str, Any]:
        """What goes with the model: batches, and a loss for one that makes none of its own."""
        batch_fn = ExampleBatches(self)
        batches: dict[str, Any] = {"batch_fn": batch_fn}
        own_loss = {"labels", CONTRAST} & batch_fn(0).keys()
        return batches if own_loss else {**batches, "loss_fn": output_mean, "loss_weight": num_samples}


@dataclass(frozen=True)
class ExampleBatch:
    """A batch that a model takes.

    Args:
        ids: field of the model's config -> a token that stands for images.
        compares: whether the model can be asked for a loss that compares its samples.
    """

    batch: Mapping[str, Tensor]
    ids: Mapping[str, int]
    dtype: torch.dtype
    compares: bool

    @staticmethod
    def of(model: nn.Module, batch: Mapping[str, Tensor]) -> ExampleBatch:
        compares = CONTRAST in inspect.signature(model.forward).parameters
        return ExampleBatch(batch, special_token_ids(model.config), next(model.parameters()).dtype, compares)


@dataclass(frozen=True)
class ExampleBatches:
    """step -> a batch that a model takes: another one for each step and sample as far as tokens go.

    Args:
        model_fn: builds the model; a type's small one is known already.
    """

    model_fn: Callable[[], nn.Module]
    samples: int = 2

    def __call__(self, step: int) -> Mapping[str, Tensor]:
        fed = _fed(self.model_fn)
        given = batch_size_of(fed.batch)
        each = split_batch(fed.batch, [1] * given, ids=fed.ids)
        moved = [_moved(each[n % given], step + n // given, fed.ids) for n in range(self.samples)]
        batch = {name: torch.cat([one[name] for one in moved]) if x.dim() else x for name, x in fed.batch.items()}
        batch = {name: x.to(fed.dtype) if x.is_floating_point() else x for name, x in batch.items()}
        return {**batch, CONTRAST: torch.tensor(True)} if fed.compares and self.samples > 1 else batch

    def with_samples(self, samples: int) -> ExampleBatches:
        return replace(self, samples=samples)


def is_multimodal(head: str) -> bool:
    """Whether a class of transformers reads images or sounds, perhaps beside a text."""
    kind = model_class(head)
    names = inspect.signature(kind.forward).parameters if kind is not None else {}
    return any(name in names for name in ("pixel_values", "input_features", "input_values"))


def _moved(sample: Mapping[str, Tensor], by: int, ids: Mapping[str, int]) -> Mapping[str, Tensor]:
    """A sample with its words in other places; tokens that stand for something stay where they are."""
    if (tokens := sample.get(MEDIA_TOKEN_FIELDS)) is None:
        return sample
    words = ~torch.isin(tokens, torch.tensor([*ids.values(), -1]))
    moved = tokens.clone()
    moved[words] = tokens[words].roll(by)
    return {**sample, MEDIA_TOKEN_FIELDS: moved}


def output_mean(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """A mean over samples of all that a model gives."""
    return probe_loss(model(**batch), alike=True)


@lru_cache(maxsize=1)
def _fed(model_fn: Callable[[], nn.Module]) -> ExampleBatch:
    if isinstance(model_fn, ReducedModelType):
        twin = _small(model_fn)
        return ExampleBatch.of(twin.model, twin.batch)
    model = model_fn().eval()
    try:
        return ExampleBatch.of(model, first_batch(model))
    except Exception as error:  # whatever its forward raises
        raise _unknown(model, f"{type(error).__name__}: {first_line(error)}") from error


@lru_cache(maxsize=1)
def _small(small: ReducedModelType) -> ReducedModel:
    transformers = load_transformers()

    try:
        config = transformers.CONFIG_MAPPING[small.model_type](architectures=[small.head_class])
    except Exception as error:  # a default config that its own class refuses
        raise ConfigError(
            f"transformers builds no default config of {small.model_type}: {error!s:.200}",
            rule="A model type stands for a small model of its default config",
            remedy="Give a folder, a config.json, or module:function",
        ) from error
    model = build_meta_model(config)
    try:
        return reduce_model(model, together=True)
    except PolicyError as error:
        raise _unknown(model, error.what) from error


def _unknown(model: nn.Module, why: str) -> ConfigError:
    needed, taken = unknown_inputs(model)
    lacks = f"; nothing is known of {', '.join(needed)}, which its forward needs" if needed else ""
    lacks += f"; without {', '.join(taken)}, of which nothing is known" if taken and not needed else ""
    return ConfigError(
        f"{type(model).__name__} ran with none of the batches that are made of its config{lacks} ({why:.400})",
        rule="Tokens, images and sounds are made by the names of forward's arguments and the fields of the config",
        remedy="Give module:function, whose function returns (model_fn, batch_fn)",
    )
