"""What autograd saves of the parameters of stage 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

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


def check_version(x: Tensor, version: int) -> None:
    """As autograd does of what it saves by itself. Raises RuntimeError."""
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(x.shape)} is at version {x._version}; expected version {version} instead"
        )
