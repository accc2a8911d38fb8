"""The norm of all gradients of a sharded model, each element counted once, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import all_reduce
from shardformer.comm.params import param_specs, pipe_place, tensor_axis
from shardformer.errors import ConfigError
from shardformer.mesh.axis import Axis


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
    total = grad_norm(model, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"The norm of the gradients is {total.item()}: they cannot be clipped")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scale.to(p.grad))
    return total


def grad_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients: see ``clip_grad_norm_``."""
    axis = tensor_axis(model)
    terms = list(_terms(model, norm_type, axis))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in terms) else torch.float32
    if not terms:
        local = torch.zeros((), dtype=dtype, device=device)
    elif math.isinf(norm_type):
        local = torch.stack([t.to(dtype) for t in terms]).max()
    else:
        local = torch.stack([t.to(dtype) for t in terms]).sum()
    op, pipe = "max" if math.isinf(norm_type) else "sum", pipe_place(model).axis
    total = all_reduce(local, axis, op=op, purpose="norm")
    if pipe.size > 1:  # a stage may have nothing, and then does not know in which precision the others count
        total = all_reduce(total.double(), pipe, op=op, purpose="norm")
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def _terms(model: nn.Module, norm_type: float, axis: Axis) -> Iterator[Tensor]:
    """For each parameter the p-th power of its norm (or its largest element), weighted so that ranks add up to one."""
    specs, elsewhere = param_specs(model), pipe_place(model).counted_elsewhere
    for name, p in model.named_parameters():
        if p.grad is None or name in elsewhere:
            continue
        magnitude = p.grad.detach().abs()
        if magnitude.dtype in (torch.float16, torch.bfloat16):
            magnitude = magnitude.float()
        if math.isinf(norm_type):
            yield magnitude.max() if magnitude.numel() else magnitude.new_zeros(())
            continue
        powers = magnitude**norm_type
        spec = specs[name]
        held_by = spec.multiplicity(axis.rank)
        if isinstance(held_by, Tensor):
            yield (powers / held_by.to(powers)).sum()
        elif spec.is_sharded or axis.rank == 0:
            yield powers.sum()
