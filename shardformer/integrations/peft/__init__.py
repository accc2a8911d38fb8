"""Support for PEFT adapters (LoRA, DoRA, IA3, AdaLoRA, LoHa, LoKr, VeRA, prompts) on sharded models.

>>> model = peft.get_peft_model(model, peft.LoraConfig(...))                # doctest: +SKIP
>>> model = shardformer.shard_model(model, context=context)                 # doctest: +SKIP

The functions of PEFT can also add adapters to a model that is already sharded. PEFT is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardformer.integrations.peft import sharding
from shardformer.integrations.peft.entry_points import PEFT_ENTRY_POINTS
from shardformer.integrations.peft.models import install_methods
from shardformer.integrations.peft.sharding import has_adapters
from shardformer.torch_patches import call_after_import

__all__ = ["from_pretrained", "get_peft_model", "has_adapters", "shard_with_adapters"]


def shard_with_adapters(
    model: nn.Module, shard: Callable[..., Any], finish: Callable[[nn.Module], object]
) -> tuple[nn.Module, Any]:
    """Shard a model that has PEFT adapters. See ``shardformer.integrations.peft.sharding``."""
    return sharding.shard_with_adapters(model, shard, finish, install_methods)


def get_peft_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Add adapters to a sharded or plain model with ``peft.get_peft_model``. All ranks must call it."""
    import peft

    call_after_import(*PEFT_ENTRY_POINTS)
    return peft.get_peft_model(model, *args, **kwargs)


def from_pretrained(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Load adapters into a sharded or plain model with ``PeftModel.from_pretrained``. All ranks must call it."""
    import peft

    call_after_import(*PEFT_ENTRY_POINTS)
    return peft.PeftModel.from_pretrained(model, *args, **kwargs)
