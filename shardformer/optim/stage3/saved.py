"""What autograd saves of the parameters of stage 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardformer.optim.stage3.units import Unit


@dataclass
class Saved:
    """What autograd saved of a unit's values: the parameter, or where a view of it lies in what is gathered."""

    run: int
    unit: Unit
    param: nn.Parameter | None
    base: int
    layout: tuple[Any, ...]
    version: int
