"""The options of ``shard_optimizer``: ZeRO stage, mixed precision, offload, gradient buckets and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from shardformer.errors import ConfigError, check_argument, check_choice, check_int, check_number
from shardformer.offload.host import FREE_MEMORY, OffloadConfig
from shardformer.zero.mixed_precision import MixedPrecision

ON_NONFINITE = ("raise", "skip", "ignore")
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class ZeroOptions:
    """Options of ``shard_optimizer``, validated on creation."""

    stage: int = 1
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    max_grad_norm: float | None = None
    on_nonfinite: str = "raise"
    keep_frozen: bool = True
    reshard_after_forward: bool | int | str | None = None
    bucket_bytes: int | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        check_choice("stage", self.stage, ZERO_STAGES)
        check_choice("on_nonfinite", self.on_nonfinite, ON_NONFINITE)
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm, example=1.0)
        if self.bucket_bytes is not None:
            check_int("bucket_bytes", self.bucket_bytes, unit="bytes", example=25 * 2**20)
        reshard = self.reshard_after_forward
        if not (reshard is None or reshard == FREE_MEMORY or (isinstance(reshard, int) and reshard >= 0)):
            raise ConfigError(
                f"reshard_after_forward must be True, False, 'free', or a number of bytes, but got {reshard!r}.",
                remedy="Omit reshard_after_forward to free each layer after its forward pass.",
            )
        if self.offload.to is not None and self.precision.weight_rounding_mode is not None:
            raise ConfigError(
                f"offload={self.offload.to!r} requires fp32 master weights, but MixedPrecision has "
                f"master_weights={self.precision.master_weights!r}.",
                remedy="Omit master_weights to use fp32 master weights, or omit offload.",
            )
        if self.offload.parameters and (self.stage < 3 or self.offload.to is None):
            raise ConfigError(
                f"Only ZeRO stage 3 can offload parameters, but OffloadConfig({self.offload.to!r}, parameters=True) "
                f"was passed with stage={self.stage}.",
                remedy="Use stage=3 and offload=OffloadConfig('cpu', parameters=True), or omit parameters=True.",
            )


def as_optimizer_list(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Convert one or more optimizers to a list. Raise ConfigError if an object is not an optimizer."""
    found: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) and optimizer else [optimizer]
    are_right = all(isinstance(getattr(each, "param_groups", None), list) for each in found)
    rule = "optimizer must be a torch optimizer or a list of optimizers for the model's parameters"
    check_argument("optimizer", optimizer, are_right, rule, "Pass torch.optim.AdamW(model.parameters(), lr=1e-4)")
    return found
