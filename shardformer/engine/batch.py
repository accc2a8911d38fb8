"""A batch as users have it, by the names that the model's forward has for its parts, on the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardformer.errors import InputError

TARGET = "target of the loss"
"""The name, in a batch, of what the loss function alone reads."""


def named_batch(batch: Any, model: nn.Module, *, has_target: bool) -> dict[str, Any]:
    """A batch by name.

    Args:
        batch: a mapping, or a row of what the forward takes in order, as loaders give it: ``(inputs, targets)``.
        has_target: whether the last of a row is what a loss function compares with.

    Raises InputError for what is neither.
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, Tensor):
        batch = (batch,)
    if not isinstance(batch, (list, tuple)) or not batch:
        raise InputError(
            f"The batch is a {type(batch).__name__}",
            rule="A batch is a dict of what the model's forward takes, by name, or a row of it, in order",
            remedy="Write engine({'input_ids': ids, 'labels': labels}), or engine((inputs, targets)) with a loss_fn",
        )
    inputs = batch[:-1] if has_target and len(batch) > 1 else batch
    takes = [
        name
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(inputs) > len(takes):
        raise InputError(
            f"The batch has {len(inputs)} inputs, and the forward of {type(model).__name__} takes {len(takes)}",
            rule="The parts of a batch are what the forward takes, in order"
            + (", and behind them the target of the loss" if has_target else ""),
            remedy="Give a dict by name"
            if has_target
            else "Give loss_fn=, which gets the last part, or a dict by name",
        )
    named = dict(zip(takes, inputs))
    return named if inputs is batch else {**named, TARGET: batch[-1]}


def is_several(batch: Any) -> bool:
    """Whether this is a list of batches, and not a row of tensors that is one."""
    return (
        isinstance(batch, (list, tuple)) and bool(batch) and all(isinstance(b, (Mapping, list, tuple)) for b in batch)
    )


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch, its tensors on the device."""
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), batch)


def loss_of_target(loss_fn: Callable[..., Any]) -> Callable[[Any, Mapping[str, Any]], Any]:
    """(output, micro-batch) -> loss, where the loss function may expect (output, target)."""

    def loss(output: Any, part: Mapping[str, Any]) -> Any:
        return loss_fn(output, part.get(TARGET, part))

    return loss
