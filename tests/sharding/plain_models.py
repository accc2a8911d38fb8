"""Plain models and batches in fp64, the reference of sharded models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.verify.small_models import SmallModel


def in_fp64(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in batch.items()}


@cache
def plain_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = SmallModel(family)().double().train()
    return model
