"""Mixed precision: loss scaling, and bf16 parameters without fp32 master weights.

Without master weights, the optimizer step converts each shard to fp32, updates it, and rounds it back to bf16:

"kahan"       keeps the rounding error in 16 bits and adds it before the next update. This has 16 of the 24 bits of
              precision of a master weight, in half of its memory.
"stochastic"  rounds up or down at random. Updates smaller than the last bit then take effect on average.

Zamirai et al., "Revisiting BFloat16 Training" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, check_argument, check_choice, check_int, check_number
from shardformer.offload.host import MasterWeightStore
from shardformer.public_names import deprecate_renamed_arguments
from shardformer.random_state import SPLITMIX64

PARAMETER_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
MASTER_WEIGHT_KINDS = ("fp32", "kahan", "stochastic")


@dataclass
class LossScale:
    """A dynamic loss scale, which prevents underflow of small gradients in fp16.

    All ranks skip a step whose gradients are not finite. Micikevicius et al., "Mixed Precision Training" (2018),
    section 3.2. The scale changes by the rule of ``torch.amp.GradScaler``.

    Args:
        value: Initial scale.
        growth: Factor by which the scale grows after ``growth_interval`` consecutive steps with finite gradients.
        backoff: Factor by which the scale shrinks after ``hysteresis`` non-finite steps since it last grew.
    """

    value: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    good: int = 0
    bad: int = 0

    def __post_init__(self) -> None:
        for name, example in (("value", 2.0**16), ("growth", 2.0), ("backoff", 0.5)):
            check_number(f"LossScale.{name}", getattr(self, name), upper_bound=math.inf, example=example)
        for name, least in (("growth_interval", 1), ("hysteresis", 1), ("good", 0), ("bad", 0)):
            check_int(f"LossScale.{name}", getattr(self, name), least, unit="steps")

    def update(self, are_grads_finite: bool) -> None:
        """Increase or reduce the loss scale after a step, depending on whether its gradients were finite."""
        if are_grads_finite:
            self.good += 1
            if self.good == self.growth_interval:
                self.value, self.good, self.bad = self.value * self.growth, 0, 0
            return
        self.good, self.bad = 0, self.bad + 1
        if self.bad >= self.hysteresis:
            self.value *= self.backoff


@deprecate_renamed_arguments({"masters": "master_weights"})
@dataclass
class MixedPrecision:
    """The precision of parameters, gradients and master weights for ``shard_optimizer``.

    Args:
        parameters: "fp32" keeps the dtype of the parameters. "bf16" or "fp16" converts them, and keeps fp32 master
            weights of each rank's shard.
        gradients: "fp32" reduces gradients in fp32, which sends twice as many bytes as 16 bits. None uses the dtype of
            the parameters.
        loss_scale: Loss scale for fp16.
        master_weights: "fp32", or, for bf16 without master weights, "kahan" (keeps the rounding error in 16 bits) or
            "stochastic" (rounds up or down at random).
    """

    parameters: str = "fp32"
    gradients: str | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    master_weights: str = "fp32"

    def __post_init__(self) -> None:
        check_choice("precision", self.parameters, PARAMETER_DTYPES)
        check_choice("MixedPrecision.gradients", self.gradients, ("fp32", None))
        rule, remedy = "loss_scale must be a LossScale", "Omit loss_scale to use its default"
        is_scale = isinstance(self.loss_scale, LossScale)
        check_argument("MixedPrecision.loss_scale", self.loss_scale, is_scale, rule, remedy)
        supported = MASTER_WEIGHT_KINDS if self.parameters == "bf16" else ("fp32",)
        if self.master_weights not in supported:
            choices = " or ".join(map(repr, supported))
            raise ConfigError(
                f"With {self.parameters} weights, master_weights must be {choices}, but got {self.master_weights!r}.",
                remedy="Omit master_weights to use fp32 master weights.",
            )

    @classmethod
    def from_value(cls, precision: Any) -> MixedPrecision:
        """Convert the ``precision`` argument of ``shard_optimizer`` to a ``MixedPrecision``, or raise ConfigError."""
        return precision if isinstance(precision, cls) else cls(precision)

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype to which the parameters are converted, or None to keep their dtype."""
        return PARAMETER_DTYPES[self.parameters]

    @property
    def weight_rounding_mode(self) -> str | None:
        """The method for rounding updated parameters to bf16, or None if there are fp32 master weights."""
        return self.master_weights if self.master_weights != "fp32" else None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced, or None for the dtype of the gradients."""
        return torch.float32 if self.gradients else None

    @property
    def current_loss_scale(self) -> float:
        """The factor by which the loss is multiplied before the backward pass."""
        return self.loss_scale.value if self.parameters == "fp16" else 1.0


KAHAN, STOCHASTIC = "kahan", "stochastic"
_MIX = tuple(factor - 2**64 for factor in SPLITMIX64)  # as int64


@dataclass(frozen=True, eq=False)
class BF16RoundedParamSlice:
    """Slice of a bf16 parameter that is updated in fp32 and rounded, without master weights.

    Args:
        param: The parameter that the optimizer updates.
        shard_range: Range of the slice in the shard.
        start_index: Index of its first element in the parameter.
        seed: Seed for the stochastic rounding of the parameter.
    """

    param: nn.Parameter
    shard_range: slice
    start_index: int
    seed: int


class BF16WeightStore(MasterWeightStore):
    """Stores the weights of a shard in bf16, and converts them to fp32 only for the optimizer step.

    Args:
        bf16_shard: This rank's shard in bf16.
        keep_residual: Whether to keep the rounding errors.
    """

    def __init__(self, bf16_shard: Tensor, *, keep_residual: bool) -> None:
        self._own, self._slices = bf16_shard, list[BF16RoundedParamSlice]()
        self.rest = torch.zeros_like(bf16_shard) if keep_residual else None
        self._values: Tensor | None = None
        self.step = 0  # number of stochastic roundings

    def set_param_slices(self, param_slices: Sequence[BF16RoundedParamSlice]) -> None:
        """Assign parameter slices to this shard, and round their fp32 values to bf16."""
        self._slices = list(param_slices)
        self._values = torch.zeros_like(self._own, dtype=torch.float32)
        for param_slice in param_slices:
            self._values[param_slice.shard_range] = param_slice.param.detach().reshape(-1)
        self._own.copy_(self._values)
        self._store_kahan_residual()
        self.evict()

    def load(self) -> bool:
        """Convert the bf16 weights of the shard to fp32 for the optimizer step."""
        if self._values is None:
            self._values = self._own.float()
            if self.rest is not None:
                self._values += self.rest
            for param_slice in self._slices:
                param_slice.param.data = self._values[param_slice.shard_range].view(param_slice.param.shape)
        return True

    def round_to_bf16(self) -> None:
        """Round the updated fp32 weights of the shard to bf16."""
        assert self._values is not None
        if self.rest is not None:
            new = self._values.to(self._own.dtype)
            stays = (self._values - self._own).abs() <= (self._values - new).abs()  # keep the old value on a tie
            self._own.copy_(torch.where(stays, self._own, new))
            self._store_kahan_residual()
            return
        self.step += 1
        for param_slice in self._slices:
            wide = self._values[param_slice.shard_range]
            self._own[param_slice.shard_range] = stochastic_round(
                wide, generate_random_bits(wide, param_slice.start_index, param_slice.seed, self.step)
            )

    def _store_kahan_residual(self) -> None:
        if self.rest is not None and self._values is not None:
            self.rest.copy_(self._values - self._own)

    def evict(self) -> None:
        """Free the fp32 copy of the weights after the optimizer step."""
        self._values = None
        for param_slice in self._slices:
            value = torch.full((), torch.nan, dtype=torch.float32, device=self._own.device)
            param_slice.param.data = value.expand(param_slice.param.shape)

    def release(self, *, keep_memory: bool = False) -> None:
        self.evict()

    def write_back(self) -> None:
        self.round_to_bf16()
        self.evict()


def generate_random_bits(like_tensor: Tensor, start_index: int, param_seed: int, step: int) -> Tensor:
    """Generate 16 random bits for each element of a tensor. They do not depend on the rank that stores the element.

    Args:
        start_index: Index of the first element in the parameter.
        param_seed: Seed of the parameter.
    """
    seed = _hash_int64(torch.tensor((param_seed << 32) + step) * _MIX[0])
    x = (
        torch.arange(start_index, start_index + like_tensor.numel(), dtype=torch.int64, device=like_tensor.device)
        * _MIX[0]
    )
    return ((_hash_int64(x + int(seed)) >> 40) & 0xFFFF).to(torch.int32)


def _hash_int64(values: Tensor) -> Tensor:
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return values


def stochastic_round(fp32_values: Tensor, random_bits: Tensor) -> Tensor:
    """Round an fp32 tensor to bf16 stochastically, so that the expected value does not change.

    NaN and infinity remain unchanged.
    """
    rounded = ((fp32_values.view(torch.int32) + random_bits) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(fp32_values), rounded, fp32_values).to(torch.bfloat16)
