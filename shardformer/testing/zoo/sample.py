"""A small random model of a family."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from shardformer.comm.values import has_values
from shardformer.errors import ConfigError, nearest
from shardformer.testing.zoo import chatglm2
from shardformer.testing.zoo.depth import deepened
from shardformer.testing.zoo.heads import MAIN, NEEDS, PART
from shardformer.testing.zoo.settings import SMALL
from shardformer.transformers_compat import load_transformers


@dataclass(frozen=True)
class Sample:
    """A small model of a family: call it to build the model. Picklable.

    Args:
        family: one of ``SMALL``.
        head: a class of transformers; by default the family's main one.
        changes: fields of the family's config that differ from ``SMALL``.
    """

    family: str
    head: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.family not in SMALL:
            raise ConfigError(
                f"There is no small model of {self.family!r}",
                rule=f"The families are {', '.join(SMALL)}",
                remedy=nearest(self.family, SMALL),
            )

    @property
    def head_class(self) -> str:
        return self.head or MAIN[self.family]

    def deeper(self, layers: int) -> Sample:
        """The same with ``layers`` layers in all, for that many stages of a pipeline; with a few more where a family's
        layers come in pairs or in several stacks, or where the small model has more."""
        return replace(self, changes={**self.changes, **deepened(self.family, self.head_class, layers)})

    def config(self) -> Any:
        """The config that the head takes: of its part of the family's where it is a part."""
        if self.family == "chatglm":
            return chatglm2.ChatGLMConfig(**self.changes)
        transformers = load_transformers()

        head = self.head_class
        num_labels = 2 if head.endswith("ForQuestionAnswering") else 3
        settings = {**SMALL[self.family], "num_labels": num_labels, **NEEDS.get(head, {}), **self.changes}
        config = transformers.AutoConfig.for_model(self.family, **settings)
        return getattr(config, PART[head]) if head in PART else config

    def __call__(self) -> nn.Module:
        with _LOADS:
            library: Any = chatglm2 if self.family == "chatglm" else import_module("transformers")
            config, kind = self.config(), getattr(library, self.head_class)
        model: nn.Module = kind(config)
        _fill_tables(model)
        return model


_LOADS = threading.Lock()
"""Ranks that are threads: transformers loads itself and its classes where they are first used."""


@torch.no_grad()
def _fill_tables(model: nn.Module) -> None:
    """Random numbers for tables and tokens that start at zero, such as relative positions: a zero shows no mistake."""
    for param in model.parameters():
        if param.dim() > 1 and has_values(param) and not param.any():
            param.normal_(std=0.02)
