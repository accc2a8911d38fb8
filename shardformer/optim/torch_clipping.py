"""``torch.nn.utils.clip_grad_norm_`` for sharded parameters: the norm that it takes is that of the whole model.

Training scripts, accelerate and transformers' Trainer call it on ``model.parameters()``, which are parts here: each
rank would take another norm, and what ranks hold alike would drift apart. Its one step that computes a norm is led
here; of tensors that are no gradients of a sharded model it stays torch's.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from shardformer.errors import ConfigError
from shardformer.layout.state import Entry, ShardedState, live_states
from shardformer.optim.grad_norm import norm_of

_PATCHING = threading.Lock()


def lead_clipping_here() -> None:
    """From now on torch's clipping knows the parameters of every sharded model of this process.

    The function stays the one that scripts have imported; what it calls under its ``no_grad`` is led here.
    """
    function: Any = clip_grad._get_total_norm
    with _PATCHING:
        original = getattr(function, "__wrapped__", function)
        if hasattr(original, "of_torch"):
            return
        leading = _leading(original)
        cells = [cell for cell in function.__closure__ or () if cell.cell_contents is original]
        if cells:
            cells[0].cell_contents = function.__wrapped__ = leading
        else:  # a torch that wraps it otherwise: what was imported before stays torch's
            clip_grad._get_total_norm = torch.nn.utils.get_total_norm = leading


def _leading(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        found = _parts_among(grads) if grads else _of_another_stage()
        if not found:
            return original(grads, norm_type, error_if_nonfinite, foreach)
        known = {id(e.param.grad) for entries in found.values() for e in entries}
        norms = [norm_of(entries, state, float(norm_type)) for state, entries in found.items()]
        if others := [g for g in grads if id(g) not in known]:
            norms.append(original(others, norm_type, False, foreach))
        total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]), float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(f"The norm of the gradients is {total.item()}: they cannot be clipped")
        return total

    marked: Any = total_norm
    marked.of_torch = original
    return total_norm


def _parts_among(grads: Iterable[Tensor]) -> dict[ShardedState, list[Entry]]:
    """Of each model that is cut, the entries whose gradients these are."""
    asked = {id(g) for g in grads}
    found: dict[ShardedState, list[Entry]] = {}
    for state in live_states():
        if any(state.axis(name).size > 1 for e in state.entries for name in e.reduction.norm_over):
            entries = [e for e in state.entries if e.param.grad is not None and id(e.param.grad) in asked]
            if entries:
                found[state] = entries
    return found


def _of_another_stage() -> dict[ShardedState, list[Entry]]:
    """For a stage that holds no gradient of those that the others clip: the model that they ask for its part of.

    Raises ConfigError where several models have stages here, and nothing tells which of them is meant; and where an
    optimizer that zero returned keeps the gradients.
    """
    if len(live_states()) > 1 or any(state.gradients is not None for state in live_states()):
        gc.collect()  # models that nobody holds any more are not meant
    if any(state.gradients is not None for state in live_states()):
        raise ConfigError(
            "torch.nn.utils.clip_grad_norm_ was given no gradients, in a process where zero keeps those of a model",
            rule="The parameters have no .grad then: their norm would be 0, and nothing would be clipped",
            remedy="Write shardformer.clip_grad_norm_(model, max_norm), or zero(..., max_grad_norm=max_norm)",
        )
    states = [state for state in live_states() if state.context.pipe.size > 1]
    if len(states) > 1:
        raise ConfigError(
            f"torch.nn.utils.clip_grad_norm_ was given no gradients, in a process with stages of {len(states)} models",
            rule="All stages of a model take its norm together, and its gradients tell which model is meant",
            remedy="Write shardformer.clip_grad_norm_(model, max_norm), which is given the model",
        )
    return {state: [] for state in states}
