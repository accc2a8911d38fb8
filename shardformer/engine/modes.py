"""Train and eval modes: those that you gave to parts of a model are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


def start_training(model: nn.Module) -> nn.Module:
    """Puts a model into train mode, unless some of its modules are in train mode already. Returns the model.

    ``from_pretrained`` returns a model in eval mode. Where some modules are in train mode you chose which, as with a
    frozen part that keeps the running averages of its BatchNorm; then only the mode of the model itself is set, by
    which an engine tells training from evaluation.
    """
    if any(module.training for module in model.modules()):
        model.training = True
    else:
        model.train()
    return model


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Path of each module -> whether it is in train mode."""
    return {path: module.training for path, module in model.named_modules()}


def set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Puts modules back into the modes that ``modes_of`` returned, by ``train`` of their own."""
    modules = [(module, modes[path]) for path, module in model.named_modules() if path in modes]
    for module, mode in modules:  # each before the modules in it, which it takes along
        if module.training != mode:
            module.train(mode)
    for module, mode in modules:  # where a class overrides ``train``
        module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in eval mode in here. Behind it each module is in the mode that it was in."""
    before = modes_of(model)
    try:
        model.eval()
        yield
    finally:
        set_modes(model, before)
