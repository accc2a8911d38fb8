"""``model.zero_grad()`` of a model whose optimizer keeps the gradients."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer


class ZeroGrad:
    """``model.zero_grad()``: throws away what the optimizer keeps too. Of a copied model it is the usual one."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None

    def __call__(self, set_to_none: bool = True) -> None:
        if (optimizer := self._optimizer()) is not None:
            optimizer.zero_grad()
        elif (model := self._model()) is not None:
            nn.Module.zero_grad(model, set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroGrad:
        return ZeroGrad(memo[id(self._model())], None)
