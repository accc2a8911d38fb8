"""What is asked of ``zero``: in how many bits what is kept, and where; how gradients are sent, and what a step does."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardformer.errors import ConfigError, expect

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ON_NONFINITE = ("raise", "skip", "ignore")
MASTERS = ("fp32", "kahan", "stochastic")
STAGES = (0, 1, 2, 3)
FREE, HOST, DISK = "free", "cpu", "nvme:"


@dataclass
class LossScale:
    """What the loss is multiplied by before a backward, so that small gradients are numbers in fp16.

    A step whose gradients are not finite is skipped, by all ranks. Micikevicius et al., "Mixed Precision Training"
    (2018), section 3.2; the rule by which it changes is that of ``torch.amp.GradScaler``.

    Args:
        value: of the first step.
        growth: by which it is multiplied after ``growth_interval`` steps in a row with finite gradients.
        backoff: by which it is multiplied after ``hysteresis`` steps without, since it last grew.
    """

    value: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    good: int = 0
    bad: int = 0

    def __post_init__(self) -> None:
        for name, given in vars(self).items():
            is_count = name in ("growth_interval", "hysteresis", "good", "bad")
            least = 0 if name in ("good", "bad") else 1
            is_right = isinstance(given, int if is_count else int | float) and not isinstance(given, bool)
            is_right = is_right and (given >= least if is_count else 0 < given < math.inf)
            rule = f"It is a whole number, {least} or more" if is_count else "It is a number above 0"
            expect(f"LossScale({name})", given, is_right, rule, f"Leave {name} out")

    def update(self, is_finite: bool) -> None:
        """After a step."""
        if is_finite:
            self.good += 1
            if self.good == self.growth_interval:
                self.value, self.good, self.bad = self.value * self.growth, 0, 0
            return
        self.good, self.bad = 0, self.bad + 1
        if self.bad >= self.hysteresis:
            self.value *= self.backoff


@dataclass
class Precision:
    """What ``zero`` keeps in how many bits.

    Args:
        parameters: "fp32" leaves them as they are; "bf16" or "fp16" keeps them in 16 bits, and masters in fp32 of each
            rank's pieces.
        gradients: "fp32" sums them in fp32, which sends twice the bytes of 16 bits; None: as the parameters.
        loss_scale: for fp16.
        masters: of bf16. "fp32"; or none, to save memory: "kahan" keeps what rounding took away, in 16 bits;
            "stochastic" rounds up or down by chance.
    """

    parameters: str = "fp32"
    gradients: str | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    masters: str = "fp32"

    def __post_init__(self) -> None:
        for name, given in vars(self).items():
            is_right = isinstance(given, LossScale) if name == "loss_scale" else isinstance(given, str | None)
            rule = "It is a LossScale" if name == "loss_scale" else "It is a word"
            expect(f"Precision({name})", given, is_right, rule, f"Write precision='bf16', or leave {name} out")
        for name, given in (("parameters", self.parameters), ("gradients", self.gradients or "fp32")):
            if given not in DTYPES or (name == "gradients" and given != "fp32"):
                known = ", ".join(map(repr, DTYPES if name == "parameters" else ["fp32", None]))
                raise ConfigError(
                    f"precision={given!r}" if name == "parameters" else f"Precision(gradients={given!r})",
                    rule=f"The precisions are {known}",
                    remedy="Write precision='bf16', or leave it out",
                )

        if self.masters not in MASTERS or (self.masters != "fp32" and self.parameters != "bf16"):
            raise ConfigError(
                f"Precision({self.parameters!r}, masters={self.masters!r})",
                rule=f"Of bf16 the masters are one of {', '.join(map(repr, MASTERS))}, of others there is no choice",
                remedy="Leave masters out",
            )

    @classmethod
    def of(cls, given: Any) -> Precision:
        """From what ``zero`` was given. Raises ConfigError for what is none."""
        return given if isinstance(given, cls) else cls(given)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the parameters; None: as they are."""
        return DTYPES[self.parameters]

    @property
    def rounding(self) -> str | None:
        """How parameters are rounded that have no masters; None: they have some, or need none."""
        return self.masters if self.masters != "fp32" else None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which gradients are summed; None: as they are."""
        return torch.float32 if self.gradients else None

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return self.loss_scale.value if self.parameters == "fp16" else 1.0


@dataclass(frozen=True)
class Rules:
    """What a step does with the gradients before the optimizers get them: see ``zero``."""

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
        expect("max_grad_norm", norm, norm is None or is_number, rule, remedy)


@dataclass(frozen=True)
class Sending:
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
class Layout:
    """What of stage 3 may be chosen: see ``zero``."""

    keep_frozen: bool = True
    reshard_after_forward: bool | int | str | None = None

    def __post_init__(self) -> None:
        asked = self.reshard_after_forward
        if not (asked is None or asked == FREE or (isinstance(asked, int) and asked >= 0)):
            raise ConfigError(
                f"reshard_after_forward={asked!r}",
                rule="It is True, False, bytes of layers that may stay for the backward, or 'free'",
                remedy="Leave it out, which drops each layer behind its use",
            )


@dataclass(frozen=True)
class Offload:
    """What ``zero`` keeps elsewhere than on the device.

    Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021); for files, Rajbhandari et al.,
    "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning" (2021).

    Args:
        to: where masters, states and gradients are, and are updated: "cpu", the host's memory; "nvme:DIR", files in a
            folder, from which they are read for the update, and the gradients on the host. None: on the device.
        on_device: the share of the numbers whose masters and states stay on the device all the same, from 0 to 1; or
            "free", as many as fit into what the first step left free of a GPU.
        parameters: whether this rank's part of the parameters rests on the host too, under stage 3; then the device
            holds no more of them than the layers that are gathered.
        buffers: of files, how many buckets are in memory at a time: being read, updated and written.
        threads: with which the host updates; by default as many as it has cores for each process, beside a GPU.
        bandwidth: where the device is the CPU, bytes a second that the link carries at the most: see ``Link``.
    """

    to: str | None = None
    on_device: float | str = 0.0
    parameters: bool = False
    buffers: int = 3
    threads: int | None = None
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        share = self.on_device
        is_share = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
        if not (self.to in (None, HOST) or (isinstance(self.to, str) and self.to.startswith(DISK) and self.folder)):
            rule, remedy = "It is 'cpu', or 'nvme:' and a folder", "Write offload='cpu'"
            raise ConfigError(f"offload={self.to!r}", rule=rule, remedy=remedy)
        if share != FREE and not is_share:
            rule, remedy = "It is a share, from 0 to 1, or 'free'", "Write on_device=0.5"
            raise ConfigError(f"on_device={share!r}", rule=rule, remedy=remedy)
        is_right = type(self.buffers) is int and self.buffers >= 2
        expect("buffers", self.buffers, is_right, "One bucket is read while another one is updated", "Write buffers=3")
        is_right = self.threads is None or (type(self.threads) is int and self.threads >= 1)
        expect("threads", self.threads, is_right, "It is a number of threads, one or more", "Leave threads out")
        given = self.bandwidth
        is_right = given is None or (isinstance(given, int | float) and not isinstance(given, bool) and given > 0)
        expect("Offload(bandwidth)", given, is_right, "It is a number of bytes a second", "Leave bandwidth out")
        is_right = isinstance(self.parameters, bool)
        expect("Offload(parameters)", self.parameters, is_right, "It is on or off", "Write parameters=True")

    @classmethod
    def of(cls, given: Any, optimizers: Sequence[Any] = ()) -> Offload:
        """From what ``zero`` was given. Where that says no more, an optimizer may say what stays on the device.

        Raises ConfigError for what is none.
        """
        shares = [optimizer.on_device for optimizer in optimizers if hasattr(optimizer, "on_device")]
        return given if isinstance(given, cls) else cls(given, *shares[:1])

    @property
    def folder(self) -> str | None:
        """Of the files; None without any."""
        return None if self.to is None or self.to == HOST else os.path.expanduser(self.to[len(DISK) :])


@dataclass(frozen=True)
class Settings:
    """All that is asked of ``zero``."""

    stage: int
    precision: Precision
    rules: Rules
    sending: Sending
    layout: Layout
    offload: Offload

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            rule = f"The stages are {', '.join(map(str, STAGES))}"
            raise ConfigError(f"stage={self.stage!r}", rule=rule, remedy="Write stage=1, 2 or 3")
        if self.offload.to is not None and self.precision.rounding is not None:
            raise ConfigError(
                f"Precision(masters={self.precision.masters!r}) beside offload={self.offload.to!r}",
                rule="Under offload the masters are on the host, where they take no memory of the device",
                remedy="Leave one of the two out",
            )
        if self.offload.parameters and (self.stage < 3 or self.offload.to is None):
            raise ConfigError(
                f"Offload({self.offload.to!r}, parameters=True) under stage={self.stage}",
                rule="Parameters are gathered from the host where they are read, which is what stage 3 does",
                remedy="Write stage=3, offload=Offload('cpu', parameters=True)",
            )
