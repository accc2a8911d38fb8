"""How ``verify`` trains: with which optimizer, under which stage of ZeRO, beside which plain loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardformer.errors import ConfigError, nearest
from shardformer.optim.layerwise import LAMB, LARS
from shardformer.optim.settings import STAGES

LEARNING_RATE = 0.05
ADAPTIVE_BOUND = 1e-4
"""Optimizers that divide by the size of a gradient make its rounding as large as itself, where it is small."""


REFERENCES = ("parts", "whole")


@dataclass(frozen=True)
class Training:
    """How both models are trained.

    Args:
        zero: the stage of ZeRO of the sharded one, 0 to 3; None: without.
        optimizer: with a stage, the name of one of torch.optim, or LAMB or LARS; Muon gets the matrices, and AdamW the
            rest. Those that divide by the size of a gradient are held to 1e-4.
        reference: what the plain loss is where there are data ranks. "parts": the mean of the losses of the ranks'
            parts of the batch, as data parallelism has it. "whole": the loss of the batch as a whole. The two differ
            where parts count different numbers of labels, and for a loss that is no mean over samples, such as one
            that balances the load of experts.
    """

    zero: int | None = None
    optimizer: str = "SGD"
    reference: str = "parts"

    def __post_init__(self) -> None:
        if self.zero is not None and self.zero not in STAGES:
            raise ConfigError(
                f"zero={self.zero}", rule="The stages are 0, 1, 2 and 3", remedy="Write zero=1, or leave it out"
            )
        if self.optimizer not in _known():
            rule = "The optimizer is one of torch.optim, LAMB or LARS"
            raise ConfigError(f"optimizer={self.optimizer!r}", rule=rule, remedy=nearest(self.optimizer, _known()))
        if self.zero is None and self.optimizer != "SGD":
            raise ConfigError(
                f"optimizer={self.optimizer!r} without a stage of ZeRO",
                rule="Without one, verify trains with SGD, whose weights are compared to the last digit",
                remedy="Add zero=0, 1, 2 or 3 (--zero)",
            )
        if self.reference not in REFERENCES:
            rule = f"The plain loss is that of the {' or the '.join(REFERENCES)}"
            raise ConfigError(f"reference={self.reference!r}", rule=rule, remedy=nearest(self.reference, REFERENCES))

    @property
    def is_adaptive(self) -> bool:
        return self.optimizer not in ("SGD", "ASGD", "LARS")

    def __str__(self) -> str:
        return "" if self.zero is None else f"ZeRO stage {self.zero}, {self.optimizer}"


def _known() -> dict[str, Any]:
    found = {n: kind for n, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    return {**found, "LAMB": LAMB, "LARS": LARS}


def optimizers_of(model: nn.Module, asked: Training) -> list[Optimizer]:
    """SGD with momentum; under ZeRO what was asked for, with a group of its own for what has one dim."""
    # a stage may have nothing that trains, and an optimizer wants something
    trainable = [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(()))]
    if asked.zero is None:
        return [torch.optim.SGD(trainable, lr=LEARNING_RATE, momentum=0.9)]
    kind, rate = _known()[asked.optimizer], LEARNING_RATE if not asked.is_adaptive else LEARNING_RATE / 50
    settings = {"momentum": 0.9} if asked.optimizer in ("SGD", "LARS") else {}
    matrices, rest = [p for p in trainable if p.dim() == 2], [p for p in trainable if p.dim() != 2]
    if asked.optimizer == "Muon":
        made = [kind(matrices, lr=rate)] if matrices else []
        return [*made, torch.optim.AdamW(rest, lr=rate)] if rest else made
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "lr": rate / 2}]
    return [kind([group for group in groups if group["params"]], lr=rate, **settings)]
