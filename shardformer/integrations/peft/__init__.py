"""Adapters of PEFT (LoRA, DoRA, IA3, AdaLoRA, LoHa, LoKr, VeRA, prompts) on sharded models.

>>> model = peft.get_peft_model(model, peft.LoraConfig(...))                # doctest: +SKIP
>>> model = shardformer.shard_model(model, context=context)                 # doctest: +SKIP

``get_peft_model`` and ``from_pretrained`` of this package add adapters to a model that is sharded already. PEFT is
imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardformer.integrations.peft import sharding
from shardformer.integrations.peft.models import from_pretrained, get_peft_model, install_methods
from shardformer.integrations.peft.sharding import has_adapters

__all__ = ["from_pretrained", "get_peft_model", "has_adapters", "shard_with_adapters"]


def shard_with_adapters(
    model: nn.Module, shard: Callable[..., Any], finish: Callable[[nn.Module], object]
) -> tuple[nn.Module, Any]:
    """Shard a model with adapters in place. See ``shardformer.integrations.peft.sharding``."""
    return sharding.shard_with_adapters(model, shard, finish, install_methods)
