"""Training options of ``verify``, and the optimizers of the sharded and the unsharded model."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardformer.errors import ConfigError, check_choice, check_int, suggest_similar_names
from shardformer.offload.host import OffloadConfig
from shardformer.pipeline.schedules import LOSS_AVERAGES
from shardformer.public_names import deprecate_renamed_arguments
from shardformer.tensor_parallel.parallel_module import enable_fp32_inputs_of_16bit_layers
from shardformer.zero.config import ZERO_STAGES
from shardformer.zero.mixed_precision import LossScale, MixedPrecision
from shardformer.zero.optimizers import LAMB, LARS

LEARNING_RATE = 0.05
ADAPTIVE_BOUND = 1e-4
"""Tolerance for optimizers that divide by the gradient's magnitude, which amplifies rounding of small gradients."""

SCALE = 2.0**14  # Loss scale in fp16. No step may be skipped, so it is small enough for the gradients of a small model

UNSUPPORTED_OPTIMIZERS = ("Optimizer", "LBFGS", "SparseAdam")
"""Unsupported classes of torch.optim: the base class, one that needs a closure, one for sparse gradients."""
RENAMED_ARGUMENTS = {
    "zero": "zero_stage",
    "micro_steps": "gradient_accumulation_steps",
    "checkpointing": "activation_checkpointing",
    "reference": "average_loss_over",
}


@deprecate_renamed_arguments(
    RENAMED_ARGUMENTS, {"average_loss_over": {"parts": "ranks", "whole": "tokens"}}, RENAMED_ARGUMENTS
)
@dataclass(frozen=True)
class VerifyTraining:
    """Training options of ``verify``: optimizer, ZeRO stage, precision and gradient accumulation.

    Args:
        zero_stage: the ZeRO stage of the sharded model, 0 to 3. None: no ZeRO.
        optimizer: with a ZeRO stage, the name of an optimizer of torch.optim, or LAMB or LARS. Muon updates the
            matrices, and AdamW the other parameters. Adaptive optimizers are compared with a tolerance of 1e-4. Or a
            class or function that creates an optimizer from a list of parameters, with this tolerance. It must be
            picklable, such as a function at the top level of a module.
        average_loss_over: the reference loss with data parallelism. "tokens": the loss of the full batch. "ranks": the
            mean of the losses of the data-parallel ranks, as ``loss.backward()`` and DDP compute it. The two losses
            differ if shards have different numbers of labels, or if the loss is not a mean over samples (for example a
            loss that balances experts). None: "tokens" with a pipeline, and otherwise "ranks".
        precision: with a ZeRO stage, "bf16" or "fp16": 16-bit parameters in both models, fp32 master weights, and the
            tolerances of 16 bits.
        offload: with a ZeRO stage, "cpu" or "nvme:DIR" for master weights and optimizer state of the sharded model.
        gradient_accumulation_steps: backward passes per step, with a batch each. All but the last run in ``no_sync``.
        activation_checkpointing: whether the sharded model recomputes its layers in the backward pass.
        frozen_pattern: a regular expression. Parameters whose full name matches are frozen.
    """

    zero_stage: int | None = None
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer] = "SGD"
    average_loss_over: str | None = None
    precision: str = "fp32"
    offload: str | None = None
    gradient_accumulation_steps: int = 1
    activation_checkpointing: bool = False
    frozen_pattern: str = ""

    def __post_init__(self) -> None:
        check_choice("zero_stage", self.zero_stage, (None, *ZERO_STAGES))
        check_choice("average_loss_over", self.average_loss_over, (None, *LOSS_AVERAGES))
        MixedPrecision.from_value(self.precision), OffloadConfig.from_argument(self.offload)
        try:
            re.compile(self.frozen_pattern)
        except re.error as error:
            raise ConfigError(
                f"The pattern {self.frozen_pattern!r} in frozen is not a valid regular expression: {error}.",
                remedy="Use an expression that matches full parameter names, such as embeddings.*.",
            ) from error
        if callable(self.optimizer):
            _check_optimizer_factory_is_picklable(self.optimizer)
        else:
            rule = "Use an optimizer of torch.optim for dense gradients that takes no closure, or LAMB or LARS"
            check_choice("optimizer", self.optimizer, _get_supported_optimizer_classes(), rule)
        for name, default in (("optimizer", "SGD"), ("precision", "fp32"), ("offload", None)):
            if self.zero_stage is None and (value := getattr(self, name)) != default:
                raise ConfigError(
                    f"{name}={value!r} requires ZeRO, but zero_stage is not set.",
                    remedy="Set zero_stage (--zero-stage) to 0, 1, 2 or 3.",
                )
        check_int("gradient_accumulation_steps", self.gradient_accumulation_steps)

    def get_accumulation_indices(self, step: int) -> range:
        """Return the indices of the batches whose gradients are accumulated in a step."""
        return range(step * self.gradient_accumulation_steps, (step + 1) * self.gradient_accumulation_steps)

    def freeze_matching_params(self, model: nn.Module) -> None:
        """Freeze the parameters of a model that match ``frozen_pattern``. Raises ConfigError if none matches."""
        names = [
            name
            for name, _ in model.named_parameters()
            if self.frozen_pattern and re.fullmatch(self.frozen_pattern, name)
        ]
        if self.frozen_pattern and not names:
            raise ConfigError(
                f"The pattern {self.frozen_pattern!r} in frozen matches no parameter of {type(model).__name__}.",
                rule="The regular expression must match the full name of a parameter.",
                remedy=suggest_similar_names(self.frozen_pattern, [name for name, _ in model.named_parameters()]),
            )
        for name in names:
            model.get_parameter(name).requires_grad_(False)

    def enable_activation_checkpointing(self, model: Any) -> None:
        """Enable activation checkpointing if it is configured. Raises ConfigError if the model does not support it."""
        if self.activation_checkpointing and not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(
                f"{type(model).__name__} does not support activation checkpointing.",
                remedy="Remove activation_checkpointing=True (--activation-checkpointing).",
            )
        if self.activation_checkpointing:  # newer versions of transformers renamed the method
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable()

    @property
    def dtype(self) -> torch.dtype | None:
        """16-bit dtype of the parameters, or None if they have 32 or 64 bits."""
        return MixedPrecision.from_value(self.precision).param_dtype

    @property
    def loss_scale(self) -> float:
        """Factor by which the loss is scaled before the backward pass. It is 1 except in fp16."""
        return SCALE if self.precision == "fp16" else 1.0

    def get_shard_optimizer_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments for ``shard_optimizer`` that correspond to these options."""
        kept = MixedPrecision(self.precision, loss_scale=LossScale(SCALE))
        return {"stage": self.zero_stage, "precision": kept, "offload": self.offload}

    @property
    def has_adaptive_optimizer(self) -> bool:
        return self.optimizer not in ("SGD", "ASGD", "LARS")

    def __str__(self) -> str:
        if self.zero_stage is None:
            return ""
        more = [self.precision] if self.precision != "fp32" else []
        more += [f"offload to {self.offload.partition(':')[0]}"] if self.offload is not None else []
        more += [f"{n} backward passes a step"] if (n := self.gradient_accumulation_steps) > 1 else []
        name = (
            self.optimizer if isinstance(self.optimizer, str) else getattr(self.optimizer, "__name__", "own optimizer")
        )
        return ", ".join([f"ZeRO stage {self.zero_stage}, {name}", *more])


def _check_optimizer_factory_is_picklable(optimizer_class_or_fn: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    try:
        pickle.dumps(optimizer_class_or_fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"optimizer={optimizer_class_or_fn!r} cannot be pickled for the worker processes: {error}.",
            remedy="Pass a class or function that is defined at the top level of a module.",
        ) from error


def _make_user_optimizer(optimizer_class_or_fn: Callable[..., object], params: list[nn.Parameter]) -> Optimizer:
    found = optimizer_class_or_fn(params)
    if not isinstance(found, Optimizer):
        raise ConfigError(
            f"optimizer={optimizer_class_or_fn!r} returned a {type(found).__name__} instead of an optimizer.",
            remedy="Pass a class or function that creates a torch.optim.Optimizer from a list of parameters.",
        )
    return found


def _get_supported_optimizer_classes() -> dict[str, Callable[..., Optimizer]]:
    found = {n: kind for n, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    return {**{n: kind for n, kind in found.items() if n not in UNSUPPORTED_OPTIMIZERS}, "LAMB": LAMB, "LARS": LARS}


class UnshardedModelOptimizers:
    """Optimizers of the unsharded model, which keep fp32 master weights if the parameters have 16 bits."""

    def __init__(self, model: nn.Module, training_options: VerifyTraining) -> None:
        self._training = training_options
        trained = [p for p in model.parameters() if p.requires_grad]
        masters = trained if training_options.dtype is None else [nn.Parameter(p.detach().clone()) for p in trained]
        self._pairs = list(zip(trained, masters, strict=True))
        self._optimizers = make_verify_optimizers(masters, training_options)
        if training_options.dtype is not None:
            for p in (p for p in model.parameters() if p.is_floating_point()):
                p.data = p.data.to(training_options.dtype)
            enable_fp32_inputs_of_16bit_layers(model)

    def step(self, max_norm: float) -> float:
        """Clip the gradients, update the weights, and return the gradient norm before clipping."""
        for p, master in self._pairs:
            if master is not p:
                master.grad = None if p.grad is None else p.grad.float() / self._training.loss_scale
        norm = float(torch.nn.utils.clip_grad_norm_([master for _, master in self._pairs], max_norm))
        for optimizer in self._optimizers:
            optimizer.step()
        for p, master in self._pairs:
            if master is not p:
                p.data.copy_(master.detach())
                master.grad = None
        return norm


def make_verify_optimizers(params: Iterable[nn.Parameter], training_options: VerifyTraining) -> list[Optimizer]:
    """Create the configured optimizers for a model's parameters, or SGD with momentum if ZeRO is not used."""
    trainable = [p for p in params if p.requires_grad]
    if training_options.zero_stage is None or not trainable:  # a stage may have no trainable parameters
        return [torch.optim.SGD([{"params": trainable}], lr=LEARNING_RATE, momentum=0.9)]
    if callable(training_options.optimizer):
        return [_make_user_optimizer(training_options.optimizer, trainable)]
    kind, rate = (
        _get_supported_optimizer_classes()[training_options.optimizer],
        LEARNING_RATE if not training_options.has_adaptive_optimizer else LEARNING_RATE / 50,
    )
    settings = {"momentum": 0.9} if training_options.optimizer in ("SGD", "LARS") else {}
    matrices, rest = [p for p in trainable if p.dim() == 2], [p for p in trainable if p.dim() != 2]
    if training_options.optimizer == "Muon":
        made = [kind(matrices, lr=rate)] if matrices else []
        return [*made, torch.optim.AdamW(rest, lr=rate)] if rest else made
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "lr": rate / 2}]
    return [kind([group for group in groups if group["params"]], lr=rate, **settings)]
