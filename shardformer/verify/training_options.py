"""``VerifyTraining``: how ``verify`` trains the sharded model and the plain one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardformer.errors import ConfigError, check_choice, check_int, did_you_mean
from shardformer.offload.host import OffloadConfig
from shardformer.pipeline.schedules import LOSS_AVERAGES
from shardformer.public_names import renamed_arguments
from shardformer.tensor_parallel.parallel_module import accept_wide_inputs
from shardformer.zero.config import ZERO_STAGES
from shardformer.zero.mixed_precision import LossScale, MixedPrecision
from shardformer.zero.optimizers import LAMB, LARS

LEARNING_RATE = 0.05
ADAPTIVE_BOUND = 1e-4
"""Optimizers that divide by the size of a gradient make its rounding as large as itself, where it is small."""


SCALE = 2.0**14
"""Of the loss in fp16: small enough that no gradient of a small model overflows, since no step may be skipped here."""

SUPPORTED_OPTIMIZERS = ("Optimizer", "LBFGS", "SparseAdam")
"""Of torch.optim: the base of all, one that computes the loss itself, and one for sparse gradients."""
RENAMED_ARGUMENTS = {
    "zero": "zero_stage",
    "micro_steps": "gradient_accumulation_steps",
    "checkpointing": "activation_checkpointing",
    "reference": "average_loss_over",
}


@renamed_arguments(RENAMED_ARGUMENTS, {"average_loss_over": {"parts": "ranks", "whole": "tokens"}}, RENAMED_ARGUMENTS)
@dataclass(frozen=True)
class VerifyTraining:
    """How both models are trained.

    Args:
        zero_stage: the ZeRO stage of the sharded model, 0 to 3. None: no ZeRO.
        optimizer: with a stage, the name of one of torch.optim, or LAMB or LARS; Muon gets the matrices, and AdamW the
            rest. Those that divide by the size of a gradient are compared with a tolerance of 1e-4.
        average_loss_over: the plain loss, with data ranks. "ranks": the mean of the losses of the ranks' parts of the
            batch, as ``shard_model`` and DDP train it. "tokens": the loss of the whole batch. The two differ if parts
            have different numbers of labels, and for a loss that is no mean over samples, such as one that balances
            the load of experts.
        precision: with a stage, "bf16" or "fp16": the parameters of both models have 16 bits, with master weights in
            fp32, and the tolerances are those of 16 bits.
        offload: with a stage, "cpu" or "nvme:DIR": where the sharded model keeps master weights and optimizer state.
        gradient_accumulation_steps: backwards of a step, each of a batch of its own; all but the last under
            ``no_sync``.
        activation_checkpointing: whether the sharded model recomputes its layers in the backward.
        frozen_pattern: a regular expression; parameters whose whole name matches do not train.
    """

    zero_stage: int | None = None
    optimizer: str = "SGD"
    average_loss_over: str = "ranks"
    precision: str = "fp32"
    offload: str | None = None
    gradient_accumulation_steps: int = 1
    activation_checkpointing: bool = False
    frozen_pattern: str = ""

    def __post_init__(self) -> None:
        check_choice("zero_stage", self.zero_stage, (None, *ZERO_STAGES))
        check_choice("average_loss_over", self.average_loss_over, LOSS_AVERAGES)
        MixedPrecision.of(self.precision), OffloadConfig.of(self.offload)
        try:
            re.compile(self.frozen_pattern)
        except re.error as error:
            raise ConfigError(
                f"frozen={self.frozen_pattern!r}: {error}",
                rule="It is a regular expression that matches whole names of parameters",
                remedy="Write it as embeddings.*",
            ) from error
        rule = "The optimizer is one of torch.optim that steps on dense gradients without a closure, LAMB or LARS"
        check_choice("optimizer", self.optimizer, _known(), rule)
        for name, default in (("optimizer", "SGD"), ("precision", "fp32"), ("offload", None)):
            if self.zero_stage is None and (value := getattr(self, name)) != default:
                raise ConfigError(
                    f"{name}={value!r} without a ZeRO stage",
                    rule="Without ZeRO, verify trains with SGD, whose weights are compared to the last digit",
                    remedy="Add zero_stage=0, 1, 2 or 3 (--zero-stage)",
                )
        check_int("gradient_accumulation_steps", self.gradient_accumulation_steps)

    def check_pipeline(self, pipe: int) -> None:
        """Raises ConfigError for what is asked of a pipeline in another way."""
        if pipe > 1 and self.gradient_accumulation_steps > 1:
            raise ConfigError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} beside pipe={pipe}",
                remedy="Use micro_batches= (--micro-batches)",
            )

    def backwards(self, step: int) -> range:
        """The numbers of the backwards of a step, over all steps."""
        return range(step * self.gradient_accumulation_steps, (step + 1) * self.gradient_accumulation_steps)

    def freeze(self, model: nn.Module) -> None:
        """Raises ConfigError where no parameter has such a name."""
        names = [
            name
            for name, _ in model.named_parameters()
            if self.frozen_pattern and re.fullmatch(self.frozen_pattern, name)
        ]
        if self.frozen_pattern and not names:
            raise ConfigError(
                f"frozen={self.frozen_pattern!r} of a {type(model).__name__}",
                rule="A parameter is frozen whose whole name the regular expression fits",
                remedy=did_you_mean(self.frozen_pattern, [name for name, _ in model.named_parameters()]),
            )
        for name in names:
            model.get_parameter(name).requires_grad_(False)

    def checkpoint(self, model: Any) -> None:
        """Raises ConfigError for a model that does not know how."""
        if self.activation_checkpointing and not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(f"activation_checkpointing=True of a {type(model).__name__}", remedy="Leave it out")
        if self.activation_checkpointing:  # which transformers has by a new name
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable()

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the parameters, where they have 16 bits."""
        return MixedPrecision.of(self.precision).dtype

    @property
    def scale(self) -> float:
        """Of the loss."""
        return SCALE if self.precision == "fp16" else 1.0

    def of_zero(self) -> dict[str, Any]:
        """What ``shard_optimizer`` is called with."""
        kept = MixedPrecision(self.precision, loss_scale=LossScale(SCALE))
        return {"stage": self.zero_stage, "precision": kept, "offload": self.offload}

    @property
    def is_adaptive(self) -> bool:
        return self.optimizer not in ("SGD", "ASGD", "LARS")

    def __str__(self) -> str:
        if self.zero_stage is None:
            return ""
        more = [self.precision] if self.precision != "fp32" else []
        more += [f"offload to {self.offload.partition(':')[0]}"] if self.offload is not None else []
        more += [f"{self.gradient_accumulation_steps} backwards a step"] if self.gradient_accumulation_steps > 1 else []
        return ", ".join([f"ZeRO stage {self.zero_stage}, {self.optimizer}", *more])


def _known() -> dict[str, Any]:
    found = {n: kind for n, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    return {**{n: kind for n, kind in found.items() if n not in SUPPORTED_OPTIMIZERS}, "LAMB": LAMB, "LARS": LARS}


class ReferenceOptimizers:
    """The optimizers of the plain model. Where its parameters have 16 bits, they change masters in fp32."""

    def __init__(self, model: nn.Module, asked: VerifyTraining) -> None:
        self._asked, self._model = asked, model
        trained = [p for p in model.parameters() if p.requires_grad]
        masters = trained if asked.dtype is None else [nn.Parameter(p.detach().clone()) for p in trained]
        self._pairs = list(zip(trained, masters, strict=True))
        self._optimizers = make_verify_optimizers(masters, asked)
        if asked.dtype is not None:
            for p in (p for p in model.parameters() if p.is_floating_point()):
                p.data = p.data.to(asked.dtype)
            accept_wide_inputs(model)

    def step(self, max_norm: float) -> float:
        """Clips, and updates. Returns the norm before."""
        for p, master in self._pairs:
            if master is not p:
                master.grad = None if p.grad is None else p.grad.float() / self._asked.scale
        norm = float(torch.nn.utils.clip_grad_norm_([master for _, master in self._pairs], max_norm))
        for optimizer in self._optimizers:
            optimizer.step()
        for p, master in self._pairs:
            if master is not p:
                p.data.copy_(master.detach())
                master.grad = None
        return norm


def make_verify_optimizers(params: Iterable[nn.Parameter], asked: VerifyTraining) -> list[Optimizer]:
    """SGD with momentum; under ZeRO what was asked for, with a group of its own for what has one dim."""
    trainable = [p for p in params if p.requires_grad]
    if asked.zero_stage is None or not trainable:  # a stage may have nothing that trains
        return [torch.optim.SGD([{"params": trainable}], lr=LEARNING_RATE, momentum=0.9)]
    kind, rate = _known()[asked.optimizer], LEARNING_RATE if not asked.is_adaptive else LEARNING_RATE / 50
    settings = {"momentum": 0.9} if asked.optimizer in ("SGD", "LARS") else {}
    matrices, rest = [p for p in trainable if p.dim() == 2], [p for p in trainable if p.dim() != 2]
    if asked.optimizer == "Muon":
        made = [kind(matrices, lr=rate)] if matrices else []
        return [*made, torch.optim.AdamW(rest, lr=rate)] if rest else made
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "lr": rate / 2}]
    return [kind([group for group in groups if group["params"]], lr=rate, **settings)]
