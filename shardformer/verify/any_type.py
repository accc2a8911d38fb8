"""The small twin of any model type of transformers, for a comparison: nothing is written down for the type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.policies.infer.prove import loss_of
from shardformer.policies.infer.twin import Twin, twin_of
from shardformer.testing.zoo import num_samples
from shardformer.testing.zoo.shrink import model_of

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")


def main_classes() -> dict[str, str]:
    """Model type -> the name of the class that the first of the auto classes for TASKS names."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task in TASKS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            found.setdefault(model_type, names if isinstance(names, str) else names[0])
    return found


@dataclass(frozen=True)
class SmallOf:
    """A small model of a type, of its default config: call it to build the model. Picklable.

    Args:
        model_type: one of ``main_classes()``.
        head: a class of transformers; by default the type's first one.
    """

    model_type: str
    head: str = ""

    @property
    def head_class(self) -> str:
        return self.head or main_classes()[self.model_type]

    def config(self) -> Any:
        return self._twin().model.config

    def __call__(self) -> nn.Module:
        model = self._twin().model
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        return model

    def own(self) -> dict[str, Any]:
        """What goes with the model: batches, and a loss for one that makes none of its own."""
        batch_fn = SmallBatches(self)
        batches: dict[str, Any] = {"batch_fn": batch_fn}
        return batches if "labels" in batch_fn(0) else {**batches, "loss_fn": of_output, "loss_weight": num_samples}

    def _twin(self) -> Twin:
        import transformers

        try:
            config = transformers.CONFIG_MAPPING[self.model_type](architectures=[self.head_class])
        except Exception as error:  # a default config that its own class refuses
            raise ConfigError(
                f"transformers builds no default config of {self.model_type}: {error!s:.200}",
                rule="A model type stands for a small model of its default config",
                remedy="Give a folder, a config.json, or module:function",
            ) from error
        return twin_of(model_of(config))


@dataclass(frozen=True)
class SmallBatches:
    """step -> a batch that the small model takes: another one for each step and sample as far as tokens go."""

    small: SmallOf
    samples: int = 2

    def __call__(self, step: int) -> Mapping[str, Tensor]:
        taken, dtype = _batch_of(self.small)
        size = next(iter(taken.values())).shape[0]
        return {n: self._cast(n, x, step, dtype) if x.dim() and x.shape[0] == size else x for n, x in taken.items()}

    def _cast(self, name: str, x: Tensor, step: int, dtype: torch.dtype) -> Tensor:
        moved = [x.roll(step + n, -1) if name == "input_ids" else x for n in range(-(-self.samples // x.shape[0]))]
        out = torch.cat(moved)[: self.samples]
        return out.to(dtype) if out.is_floating_point() else out

    def with_samples(self, samples: int) -> SmallBatches:
        return replace(self, samples=samples)


def of_output(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """A mean over samples of all that a model gives."""
    return loss_of(model(**batch), alike=True)


@lru_cache(maxsize=1)
def _batch_of(small: SmallOf) -> tuple[Mapping[str, Tensor], torch.dtype]:
    twin = small._twin()
    return twin.batch, next(twin.model.parameters()).dtype
