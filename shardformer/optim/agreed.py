"""Checks before a step of a torch optimizer that all ranks have the same gradients.

Ranks sum gradients in ``loss.backward()``. Gradients that reach ``p.grad`` in another way differ between ranks: those
of ``torch.autograd.grad``, those of backwards that all ran in ``no_sync``, and those that a hook sees in the middle of
a backward. A step with them would make the ranks diverge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardformer.comm.calls import come
from shardformer.comm.collectives import checksum, gather_objects
from shardformer.comm.values import has_values
from shardformer.errors import ConfigError
from shardformer.layout.state import ShardedState
from shardformer.reduce.bucket import Gradient
from shardformer.reduce.buckets import GradientReducer
from shardformer.reduce.watch import models_of

PASSES = "_shardformer_passes"
"""The attribute of an optimizer with how often gradients had been summed when it last stepped."""


def agree_before_step(optimizer: Optimizer) -> None:
    """Sums gradients of backwards in ``no_sync``. Raises ConfigError, on all ranks, if gradients differ between ranks.

    Communicates the gradients of such backwards; checksums of gradients if none were summed since the last step.
    """
    found = [(state, _reducers(state)) for state in models_of(optimizer)]
    found = [(state, reducers) for state, reducers in found if reducers]
    if not found:
        return
    if torch._C._current_graph_task_id() >= 0:
        raise _in_backward(optimizer)
    for reducer in (each for _, reducers in found for each in reducers if each.was_paused and not each.is_paused):
        reducer.start()
        reducer.finish()
    passes = [sum(each.passes for each in reducers) for _, reducers in found]
    if passes == optimizer.__dict__.get(PASSES, [0] * len(passes)):
        for _, reducers in found:
            _compare(optimizer, reducers)
    optimizer.__dict__[PASSES] = passes


def _reducers(state: ShardedState) -> list[GradientReducer]:
    return [each for each in state.reducers if isinstance(each, GradientReducer) and each.sums]


def _compare(optimizer: Optimizer, reducers: Sequence[GradientReducer]) -> None:
    """The gradients that ranks should have in common. All ranks call it."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    over: dict[tuple[int, ...], list[Gradient]] = {}
    for reducer in (each for each in reducers if not each.is_paused):
        for gradient in reducer.gradients:
            if id(gradient.param) in held and gradient.axis.size > 1 and not gradient.is_shared:
                over.setdefault(gradient.axis.ranks, []).append(gradient)
    for gradients in over.values():
        sums = [_sum_of(gradient.param.grad) for gradient in gradients]
        come(f"{type(optimizer).__name__}.step, without a backward since its last step", gradients[0].axis)
        every = gather_objects(sums, gradients[0].axis)
        for gradient, *theirs in zip(gradients, *every, strict=True):
            if len(set(theirs)) > 1:
                raise _own(optimizer, gradient.entry.name, theirs)


def _sum_of(grad: Tensor | None) -> Any:
    if grad is None or not has_values(grad):
        return None
    return checksum(grad.detach().to_dense() if grad.is_sparse else grad.detach())


def _own(optimizer: Optimizer, name: str, sums: Sequence[Any]) -> ConfigError:
    what = "that only some ranks have" if None in sums else "of which each rank has its own"
    return ConfigError(
        f"{type(optimizer).__name__}.step was called with a gradient of {name} {what}",
        rule="Ranks sum gradients in loss.backward(), not in torch.autograd.grad, nor those that a script sets",
        remedy="Call loss.backward() and use p.grad instead of torch.autograd.grad; set p.grad to the same numbers on "
        "all ranks",
    )


def _in_backward(optimizer: Optimizer) -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__}.step was called during a backward, as by a hook of a parameter",
        rule="Ranks sum gradients until the backward ends: what a hook sees is this rank's own",
        remedy="Step after loss.backward(). To keep fewer gradients, use shardformer.zero(optimizer, model, stage=2)",
    )
