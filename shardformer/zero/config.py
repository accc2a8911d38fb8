"""Options of ``shard_optimizer``: precision, offload, how gradients are sent, and what a step does with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from shardformer.errors import ConfigError, check_argument
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
        if self.on_nonfinite not in ON_NONFINITE:
            raise ConfigError(
                f"on_nonfinite={self.on_nonfinite!r}",
                rule=f"It is one of {', '.join(map(repr, ON_NONFINITE))}",
                remedy="Leave it out, which raises an error",
            )
        norm = self.max_grad_norm
        is_number = isinstance(norm, int | float) and not isinstance(norm, bool) and norm > 0
        rule, remedy = "It is a number above 0", "Write 1.0, or leave it out"
        check_argument("max_grad_norm", norm, norm is None or is_number, rule, remedy)


@dataclass(frozen=True)
class BucketOptions:
    """How gradients travel: in buckets of how many bytes, and whether while the backward still runs."""

    bucket_bytes: int | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        size = self.bucket_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(
                f"bucket_bytes={size!r}", rule="It is a whole number of bytes", remedy="Leave it out, which takes 25 MB"
            )


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
        if self.stage not in ZERO_STAGES:
            rule = f"The stages are {', '.join(map(str, ZERO_STAGES))}"
            raise ConfigError(f"stage={self.stage!r}", rule=rule, remedy="Write stage=1, 2 or 3")
        if self.offload.to is not None and self.precision.rounding is not None:
            raise ConfigError(
                f"MixedPrecision(masters={self.precision.masters!r}) beside offload={self.offload.to!r}",
                rule="Under offload the masters are on the host, where they take no memory of the device",
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
        rule="Masters and states are written to a file there, twice, so that a step that fails leaves one",
        remedy="Name a folder that is there, on a disk with room; shardformer.estimate_memory says how much it takes",
    )
