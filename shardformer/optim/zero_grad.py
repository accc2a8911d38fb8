"""``zero_grad()`` of a model, and of optimizers, whose gradients the optimizer keeps that ``zero`` returned."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

HELD_BY = "_shardformer_held_by"
"""The attribute of an optimizer with a weak reference to the one that ``zero`` made of it."""


class ZeroGrad:
    """``zero_grad()``: throws away what the optimizer keeps too. Of a copy, and without that, it is the usual one."""

    def __init__(self, owner: nn.Module | Optimizer, optimizer: Optimizer | None) -> None:
        self._owner = weakref.ref(owner)
        self._usual: Callable[[Any, bool], None] = type(owner).zero_grad
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None

    def __call__(self, set_to_none: bool = True) -> None:
        if (optimizer := self._optimizer()) is not None:
            optimizer.zero_grad(set_to_none)
        elif (owner := self._owner()) is not None:
            self._usual(owner, set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroGrad:
        return ZeroGrad(memo[id(self._owner())], None)


def hold(optimizer: Any, zero: Optimizer) -> None:
    """From now on an optimizer is stepped by what ``zero`` made of it."""
    optimizer.__dict__.update({HELD_BY: weakref.ref(zero), "zero_grad": ZeroGrad(optimizer, zero)})


def let_go(optimizer: Any) -> None:
    """From now on an optimizer is one for itself."""
    if optimizer.__dict__.pop(HELD_BY, None) is not None:
        optimizer.__dict__.pop("zero_grad", None)


def holder_of(optimizer: Any) -> Any:
    """What ``zero`` made of an optimizer; None of others, and of copies."""
    zero = optimizer.__dict__[HELD_BY]() if HELD_BY in optimizer.__dict__ else None
    return zero if zero is not None and any(optimizer is each for each in zero.inner) else None
