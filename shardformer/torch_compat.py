"""What has another form in another version of torch, in one place, from the oldest that is supported (2.11)."""

from __future__ import annotations

import inspect
import sys
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


def wrapped_name(module: nn.Module) -> str | None:
    """The name under which one of torch's wrappers holds the module that it was put around; None for other modules.

    These are the wrappers for activation checkpointing and offload, and what ``torch.compile`` makes of a module. Their
    classes are private or slow to import: where nothing imported them, no module is one of them.
    """
    if _is_a(module, "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"):
        return "_checkpoint_wrapped_module"
    return "_orig_mod" if is_compiled_wrapper(module) else None


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` returned."""
    return _is_a(module, "torch._dynamo.eval_frame", "OptimizedModule")


def _is_a(module: nn.Module, where: str, kind: str) -> bool:
    found = getattr(sys.modules.get(where), kind, None)
    return found is not None and isinstance(module, found)
