"""Options of ``shard_optimizer``: precision, offload, how gradients are sent, and what a step does with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from shardformer.errors import ConfigError, check_argument, check_choice, check_int, check_number
from shardformer.offload.host import FREE_MEMORY, OffloadConfig
from shardformer.zero.mixed_precision import MixedPrecision

ON_NONFINITE = ("raise", "skip", "ignore")
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class StepOptions:
    """What a step does with the gradients before the optimizers get them: see ``shard_optimizer``."""

    max_grad_norm: float | None = None
    on_nonfinite: str = "raise"

    def __post_init__(self) -> None:
        check_choice("on_nonfinite", self.on_nonfinite, ON_NONFINITE)
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm, example=1.0)


@dataclass(frozen=True)
class BucketOptions:
    """How gradients travel: in buckets of how many bytes, and whether while the backward still runs."""

    bucket_bytes: int | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None:
            check_int("bucket_bytes", self.bucket_bytes, unit="bytes", example=25 * 2**20)


@dataclass(frozen=True)
class Stage3Options:
    """What of stage 3 may be chosen: see ``shard_optimizer``."""

    keep_frozen: bool = True
    reshard_after_forward: bool | int | str | None = None

    def __post_init__(self) -> None:
        asked = self.reshard_after_forward
        if not (asked is None or asked == FREE_MEMORY or (isinstance(asked, int) and asked >= 0)):
            raise ConfigError(
                f"reshard_after_forward={asked!r}",
                rule="It is True, False, bytes of layers that may stay for the backward, or 'free'",
                remedy="Leave it out, which drops each layer behind its use",
            )


@dataclass(frozen=True)
class ZeroOptions:
    """All that is asked of ``shard_optimizer``."""

    stage: int
    precision: MixedPrecision
    rules: StepOptions
    sending: BucketOptions
    layout: Stage3Options
    offload: OffloadConfig

    def __post_init__(self) -> None:
        check_choice("stage", self.stage, ZERO_STAGES)
        if self.offload.to is not None and self.precision.rounding is not None:
            raise ConfigError(
                f"MixedPrecision(masters={self.precision.master_weights!r}) beside offload={self.offload.to!r}",
                remedy="Leave one of the two out",
            )
        if self.offload.parameters and (self.stage < 3 or self.offload.to is None):
            raise ConfigError(
                f"OffloadConfig({self.offload.to!r}, parameters=True) under stage={self.stage}",
                rule="Parameters are gathered from the host where they are read, which is what stage 3 does",
                remedy="Write stage=3, offload=OffloadConfig('cpu', parameters=True)",
            )


def as_optimizer_list(optimizer: Any) -> list[Optimizer]:
    """One optimizer, or several. Raises ConfigError for what is none."""
    several = isinstance(optimizer, list | tuple) and bool(optimizer)
    found = list(optimizer) if several else [optimizer]
    are_right = all(isinstance(getattr(each, "param_groups", None), list) for each in found)
    rule = "It is an optimizer of the model's parameters, or a list of some"
    check_argument("optimizer", optimizer, are_right, rule, "Write torch.optim.AdamW(model.parameters(), lr=1e-4)")
    return found


def no_files(folder: str, said: str) -> ConfigError:
    return ConfigError(
        f"offload='nvme:{folder}' cannot be used: {said}",
        remedy="Name a folder that is there, on a disk with room; shardformer.estimate_memory says how much it takes",
    )
