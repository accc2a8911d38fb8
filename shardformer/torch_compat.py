"""What has another form in another version of torch, in one place, from the oldest that is supported (2.11)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.optim import Adagrad, Optimizer


def state_when_made(optimizer: Optimizer, group: dict[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """The state that the constructor of the optimizer gives a parameter; empty if its first step makes all of it.

    In torch 2.11 Adagrad makes its state in the constructor only: its step raises KeyError for a parameter that is put
    into a group later.

    Args:
        group: the settings, which become arguments of the constructor.
    """
    if not isinstance(optimizer, Adagrad):
        return {}
    known = inspect.signature(Adagrad).parameters
    settings = {**optimizer.defaults, **group}
    made = Adagrad([param], **{name: value for name, value in settings.items() if name in known and name != "params"})
    return dict(made.state[param])
