"""Imports that nearly every worker needs. The fork server of the worker pools runs them once."""

from __future__ import annotations

import gc
import importlib

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tests.models.chatglm2  # noqa: F401  (imported for the workers that are forked from here)
from shardformer.verify.small_models import DEFAULT_HEAD, HEAD_CLASSES

torch.set_num_threads(1)
for family, head in DEFAULT_HEAD.items():
    if family in CONFIG_MAPPING:
        getattr(transformers, head)
        for name in HEAD_CLASSES.get(family, ()):
            getattr(transformers, name, None)
for module in ("torch._dynamo", "torch.utils._sympy.functions", "shardformer.training.initialize"):
    importlib.import_module(module)

# imported objects are never garbage, so the workers need not traverse them and copy their pages
gc.collect()
gc.freeze()
