"""What is asked of ``zero``: in how many bits what is kept, how the loss is scaled, what a step does with gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shardformer.errors import ConfigError

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ON_NONFINITE = ("raise", "skip", "ignore")


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
    """

    parameters: str = "fp32"
    gradients: str | None = None
    loss_scale: LossScale = field(default_factory=LossScale)

    def __post_init__(self) -> None:
        for name, given in (("parameters", self.parameters), ("gradients", self.gradients or "fp32")):
            if given not in DTYPES or (name == "gradients" and given != "fp32"):
                known = ", ".join(map(repr, DTYPES if name == "parameters" else ["fp32", None]))
                raise ConfigError(
                    f"precision={given!r}" if name == "parameters" else f"Precision(gradients={given!r})",
                    rule=f"The precisions are {known}",
                    remedy="Write precision='bf16', or leave it out",
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
