"""The norm of all gradients of a sharded model, each element counted once, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import all_reduce
from shardformer.errors import ConfigError, expect
from shardformer.layout.spec import ShardSpec
from shardformer.layout.split import Coords
from shardformer.layout.state import Entry, ShardedState, known_state


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales all gradients so that their norm over the whole model is at most ``max_norm``.

    The same numbers as ``torch.nn.utils.clip_grad_norm_`` on the plain model. All tensor ranks and stages call it.

    Args:
        model: sharded or plain.
        max_norm: the largest norm allowed; ``inf`` only measures.
        norm_type: 2 for the Euclidean norm, ``inf`` for the largest element, any p > 0.
        error_if_nonfinite: raises RuntimeError when the norm is nan or inf, as torch does.

    Returns the norm before clipping, the same on all ranks. Communicates one all-reduce of one number over
    tensor, and one over pipe.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"clip_grad_norm_ was given a {type(model).__name__}",
            rule="The norm is that of all parts of the model's parameters, and the model knows what they are parts of",
            remedy="Write clip_grad_norm_(model, max_norm), without .parameters()",
        )
    kept = known_state(model).gradients
    if kept is None:
        total = grad_norm(model, norm_type)
    else:
        total = kept.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"The norm of the gradients is {total.item()}: they cannot be clipped")
    if kept is None:
        scale_gradients(model, total, max_norm)
    return total


def scale_gradients(model: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Scales all gradients, of which the norm is known, so that it is at most ``max_norm``; ``inf`` changes nothing."""
    if math.isinf(max_norm):
        return  # also where the norm is not finite, and inf / inf would make all of them NaN
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scale.to(p.grad))


def grad_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients: see ``clip_grad_norm_``."""
    state = known_state(model)
    if state.gradients is not None:
        return state.gradients.clip_grad_norm_(math.inf, norm_type)
    entries = state.by_param()
    asked = [entries.get(id(p)) or Entry("", p, ShardSpec(p.shape)) for p in model.parameters()]
    return norm_of(asked, state, norm_type)


def norm_of(entries: Sequence[Entry], state: ShardedState, norm_type: float) -> Tensor:
    """The norm of the gradients of some parameters of one table, the same on all ranks.

    Communicates one all-reduce of one number over each axis that any parameter of the table is cut over.
    """
    is_number = isinstance(norm_type, int | float) and not isinstance(norm_type, bool) and norm_type > 0
    expect("norm_type", norm_type, is_number, "It is a number above 0, or math.inf", "Write norm_type=2.0")
    op = "max" if math.isinf(norm_type) else "sum"
    coords = state.coords
    names = [name for name in coords if any(name in e.reduction.norm_over for e in state.entries)]
    terms = [t for e in entries if (t := _term(e, norm_type, coords, names)) is not None]
    # what all ranks know, not what this one has a gradient of: a rank, or a stage, may have none
    is_wide = any(e.param.dtype in (torch.float64, torch.complex128) for e in state.entries)
    device = next((e.param.device for e in state.entries), torch.device("cpu"))
    dtype = torch.float64 if is_wide or "pipe" in names else torch.float32
    total = torch.zeros((), dtype=dtype, device=device)
    for term in terms:
        total = torch.maximum(total, term.to(total)) if op == "max" else total + term.to(total)
    for name in names:
        total = all_reduce(total, state.axis(name), op=op, purpose="norm")
    total = total if op == "max" else total ** (1.0 / norm_type)
    return total if is_wide else total.float()


def _term(entry: Entry, norm_type: float, coords: Coords, names: Sequence[str]) -> Tensor | None:
    """The p-th power of a gradient's norm (or its largest element), weighted so that the ranks' add up to one.

    None where there is no gradient, or another rank counts it: of what several ranks hold alike, the first.
    """
    grad, reduction = entry.param.grad, entry.reduction
    others = [coords[name] for name in names if name not in reduction.norm_over]
    if grad is None or any(others) or (reduction.stages and reduction.stages[0] != coords["pipe"]):
        return None
    held_by = entry.spec.multiplicity(coords)
    if grad.is_sparse:
        grad = grad.to_dense() if isinstance(held_by, Tensor) else grad.coalesce().values()
    magnitude = grad.detach().abs()
    if magnitude.dtype in (torch.float16, torch.bfloat16):
        magnitude = magnitude.float()
    if math.isinf(norm_type):
        return magnitude.max() if magnitude.numel() else magnitude.new_zeros(())
    powers = magnitude**norm_type
    return (powers / held_by.to(powers) if isinstance(held_by, Tensor) else powers).sum()
