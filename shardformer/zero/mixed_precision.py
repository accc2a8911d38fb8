"""Parameters in bf16 without masters: in a step each shard is widened, updated in fp32, and rounded again.

"kahan"       what rounding took away is kept, in 16 bits, and added before the next update: 16 of a master's 24 bits of
              precision, in half of its memory.
"stochastic"  up or down by chance, so that updates that are smaller than the last bit count on average.

Zamirai et al., "Revisiting BFloat16 Training" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, check_argument
from shardformer.public_names import renamed_arguments
from shardformer.random_state import SPLITMIX64

PARAMETER_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
MASTER_WEIGHT_KINDS = ("fp32", "kahan", "stochastic")


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
            check_argument(f"LossScale({name})", given, is_right, rule, f"Leave {name} out")

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


@renamed_arguments({"masters": "master_weights"})
@dataclass
class MixedPrecision:
    """What ``shard_optimizer`` keeps in how many bits.

    Args:
        parameters: "fp32" leaves them as they are; "bf16" or "fp16" keeps them in 16 bits, and masters in fp32 of each
            rank's pieces.
        gradients: "fp32" sums them in fp32, which sends twice the bytes of 16 bits; None: as the parameters.
        loss_scale: for fp16.
        master_weights: of bf16. "fp32"; or none, to save memory: "kahan" keeps what rounding took away, in 16 bits;
            "stochastic" rounds up or down by chance.
    """

    parameters: str = "fp32"
    gradients: str | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    master_weights: str = "fp32"

    def __post_init__(self) -> None:
        for name, given in vars(self).items():
            is_right = isinstance(given, LossScale) if name == "loss_scale" else isinstance(given, str | None)
            rule = "It is a LossScale" if name == "loss_scale" else "It is a word"
            check_argument(
                f"MixedPrecision({name})", given, is_right, rule, f"Write precision='bf16', or leave {name} out"
            )
        for name, given in (("parameters", self.parameters), ("gradients", self.gradients or "fp32")):
            if given not in PARAMETER_DTYPES or (name == "gradients" and given != "fp32"):
                known = ", ".join(map(repr, PARAMETER_DTYPES if name == "parameters" else ["fp32", None]))
                raise ConfigError(
                    f"precision={given!r}" if name == "parameters" else f"MixedPrecision(gradients={given!r})",
                    rule=f"The precisions are {known}",
                    remedy="Write precision='bf16', or leave it out",
                )

        if self.master_weights not in MASTER_WEIGHT_KINDS or (
            self.master_weights != "fp32" and self.parameters != "bf16"
        ):
            raise ConfigError(
                f"MixedPrecision({self.parameters!r}, masters={self.master_weights!r})",
                rule=f"For bf16, masters is one of {', '.join(map(repr, MASTER_WEIGHT_KINDS))}",
                remedy="Leave masters out",
            )

    @classmethod
    def of(cls, given: Any) -> MixedPrecision:
        """From what ``shard_optimizer`` was given. Raises ConfigError for what is none."""
        return given if isinstance(given, cls) else cls(given)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the parameters; None: as they are."""
        return PARAMETER_DTYPES[self.parameters]

    @property
    def rounding(self) -> str | None:
        """How parameters are rounded that have no masters; None: they have some, or need none."""
        return self.master_weights if self.master_weights != "fp32" else None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which gradients are summed; None: as they are."""
        return torch.float32 if self.gradients else None

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return self.loss_scale.value if self.parameters == "fp16" else 1.0


KAHAN, STOCHASTIC = "kahan", "stochastic"
_MIX = tuple(factor - 2**64 for factor in SPLITMIX64)  # as int64


@dataclass(frozen=True, eq=False)
class RoundedSlice:
    """An optimizer's parameter, where its numbers lie in the shard, and which ones of which parameter they are."""

    value: nn.Parameter
    at: slice
    first: int
    key: int


class RoundedWeights:
    """The masters of one shard, which are there in a step alone.

    Args:
        own: this rank's part in 16 bits.
        rests: whether what rounding takes away is kept.
    """

    def __init__(self, own: Tensor, *, rests: bool) -> None:
        self._own, self._pieces = own, list[RoundedSlice]()
        self.rest = torch.zeros_like(own) if rests else None
        self._values: Tensor | None = None
        self.step = 0  # rounds by chance that were made

    def hold(self, pieces: Sequence[RoundedSlice]) -> None:
        """Their values are wide; from now on they are rounded."""
        self._pieces = list(pieces)
        self._values = torch.zeros_like(self._own, dtype=torch.float32)
        for piece in pieces:
            self._values[piece.at] = piece.value.detach().reshape(-1)
        self._own.copy_(self._values)
        self._keep_kahan_residual()
        self.evict()

    def fetch(self) -> None:
        """There is nothing to wait for."""

    def wait(self) -> None:
        """There is nothing under way."""

    def load(self) -> bool:
        """Widens."""
        if self._values is None:
            self._values = self._own.float()
            if self.rest is not None:
                self._values += self.rest
            for piece in self._pieces:
                piece.value.data = self._values[piece.at].view(piece.value.shape)
        return True

    def store(self) -> None:
        """Rounds what is here."""
        assert self._values is not None
        if self.rest is not None:
            new = self._values.to(self._own.dtype)
            stays = (self._values - self._own).abs() <= (self._values - new).abs()  # halfway between two: as it was
            self._own.copy_(torch.where(stays, self._own, new))
            self._keep_kahan_residual()
            return
        self.step += 1
        for piece in self._pieces:
            wide = self._values[piece.at]
            self._own[piece.at] = stochastic_round(wide, random_bits(wide, piece.first, piece.key, self.step))

    def _keep_kahan_residual(self) -> None:
        if self.rest is not None and self._values is not None:
            self.rest.copy_(self._values - self._own)

    def evict(self) -> None:
        """Drops what is wide."""
        self._values = None
        for piece in self._pieces:
            value = torch.full((), torch.nan, dtype=torch.float32, device=self._own.device)
            piece.value.data = value.expand(piece.value.shape)

    def discard(self, *, keeps_memory: bool = False) -> None:
        self.evict()

    def save(self) -> None:
        self.store()
        self.evict()


def random_bits(like: Tensor, first: int, key: int, step: int) -> Tensor:
    """16 random bits for each number, which are the same wherever this number of this parameter is kept.

    Args:
        first: which number of the parameter the first one is.
        key: of the parameter.
    """
    seed = _mixed(torch.tensor((key << 32) + step) * _MIX[0])
    x = torch.arange(first, first + like.numel(), dtype=torch.int64, device=like.device) * _MIX[0]
    return ((_mixed(x + int(seed)) >> 40) & 0xFFFF).to(torch.int32)


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def stochastic_round(wide: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16: up as often as the rest that is left out is large. What is not finite stays as it is."""
    rounded = ((wide.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(wide), rounded, wide).to(torch.bfloat16)
