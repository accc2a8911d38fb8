"""What has another form in another version of torch, in one place, from the oldest that is supported (2.11)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Adagrad, Optimizer

COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module with what ``module.compile()`` made of its call."""


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


def hooked_state(optimizer: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``make`` gives, between the hooks for ``state_dict`` that scripts registered on an optimizer."""
    for hook in list(optimizer._optimizer_state_dict_pre_hooks.values()):
        hook(optimizer)
    found = make()
    for hook in list(optimizer._optimizer_state_dict_post_hooks.values()):
        other = hook(optimizer, found)
        found = found if other is None else other
    return found


def hooked_load(optimizer: Any, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """Loads a state, between the hooks for ``load_state_dict`` that scripts registered on an optimizer."""
    for hook in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
        other = hook(optimizer, state_dict)
        state_dict = state_dict if other is None else other
    load(state_dict)
    for hook in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
        hook(optimizer)


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


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called. torch has no public word for that."""
    return getattr(module, COMPILED_CALL, None) is not None


def _is_a(module: nn.Module, where: str, kind: str) -> bool:
    found = getattr(sys.modules.get(where), kind, None)
    return found is not None and isinstance(module, found)
