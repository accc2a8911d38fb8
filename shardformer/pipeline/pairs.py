"""Losses that compare the samples of a batch with each other, as contrastive ones do.

Such a loss is not the mean of the losses of parts of the batch: micro-batches and data ranks each compare their own
samples alone. ``gather_over_data`` gives every data rank the samples of all; ``compares_samples`` finds such a loss.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardformer.comm.collectives import all_gather, all_reduce, gather_numbers
from shardformer.errors import ConfigError
from shardformer.mesh.axis import Axis
from shardformer.mesh.context import ParallelContext
from shardformer.pipeline.microbatches import like

_IS_TRYING: ContextVar[bool] = ContextVar("shardformer_is_trying_a_loss", default=False)
RELATIVE, ABSOLUTE = 1e-3, 1e-6
"""How far the loss of two samples may be from the range of theirs by rounding."""


class _Gathers(Exception):
    """Raised where a loss that is tried out gathers the samples of all data ranks."""


def gather_over_data(x: Tensor, context: Any) -> Tensor:
    """The samples of all data ranks, in rank order, on every one of them, with gradients.

    For a ``loss_fn`` that compares all samples of the batch with each other. Every data rank then computes the loss of
    the whole batch, and the engine's mean over data ranks is that loss, with the gradients of one device. It needs one
    micro-batch: those of one rank run one after the other.

    >>> def contrastive(output, batch):                                                           # doctest: +SKIP
    ...     images, texts = (shardformer.gather_over_data(x, engine.context) for x in output)
    ...     return torch.nn.functional.cross_entropy(images @ texts.T, torch.arange(len(images)))

    Args:
        x: this rank's samples along dim 0; their number may differ by rank.
        context: the grid that ``launch_from_torch`` returned, or ``engine.context``.

    Communicates one all-gather of the joined tensor over data; in the backward one all-reduce of it.
    """
    if not isinstance(context, ParallelContext):
        raise ConfigError(
            f"gather_over_data was given a {type(context).__name__} as context",
            rule="It gathers over the data axis of a grid",
            remedy="Pass engine.context, or what launch_from_torch returned",
        )
    if _IS_TRYING.get():
        raise _Gathers
    if context.data.size == 1:
        return x
    lengths = [row[0] for row in gather_numbers([len(x)], context.data)]
    gathered: Tensor = _GatherSamples.apply(x, context.data, lengths)
    return gathered


class _GatherSamples(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, lengths: list[int]) -> Tensor:
        ctx.axis, ctx.lengths = axis, lengths
        return all_gather(x.detach(), axis, 0, lengths=lengths, purpose="samples").clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        summed = all_reduce(grad.contiguous().clone(), ctx.axis, purpose="samples")
        begin = sum(ctx.lengths[: ctx.axis.rank])
        return summed[begin : begin + ctx.lengths[ctx.axis.rank]], None, None


def warn_of_pairs(found: str, into: str) -> None:
    """Warns of a loss of which ``compared_samples`` found that it compares samples.

    Args:
        into: what the batch is divided into, in words.
    """
    warnings.warn(
        f"The loss compares the samples of a batch with each other ({found}), and the batch is divided {into}: each "
        "part compares its own samples alone, so that loss and weights differ from those of one device. Use one "
        "micro-batch, and shardformer.gather_over_data in loss_fn; see docs/engine.md",
        stacklevel=2,
    )


def compared_samples(loss_fn: Callable[..., Any], output: Any, batch: Any, size: int, *, gathers: bool) -> str | None:
    """In words how it is known that a loss compares the samples of a batch; None where it is not known.

    Args:
        gathers: whether a loss that calls ``gather_over_data`` is right: with one micro-batch.
    """
    found = _compares_samples(loss_fn, output, batch, size)
    return None if found == "gathers" and gathers else found


@torch.no_grad()
def _compares_samples(loss_fn: Callable[..., Any], output: Any, batch: Any, size: int) -> str | None:
    """In words how it is known, from the losses of two samples alone and together; None where it is not known.

    The loss of two samples is between their own if it is a mean over what counts in them, or their sum.
    """
    if size < 2:
        return None
    token = _IS_TRYING.set(True)
    try:
        alone = [float(loss_fn(_rows(output, size, i, i + 1), _rows(batch, size, i, i + 1))) for i in (0, 1)]
        both = float(loss_fn(_rows(output, size, 0, 2), _rows(batch, size, 0, 2)))
    except _Gathers:
        return "gathers"
    except Exception:  # a loss that cannot be cut is not judged
        return None
    finally:
        _IS_TRYING.reset(token)
    if not all(map(math.isfinite, (*alone, both))):
        return None
    room = ABSOLUTE + RELATIVE * max(abs(x) for x in (*alone, both))
    is_mean = min(alone) - room <= both <= max(alone) + room
    if is_mean or abs(both - sum(alone)) <= room:
        return None
    return f"the first two have the losses {alone[0]:.6g} and {alone[1]:.6g}, and together {both:.6g}"


def _rows(value: Any, size: int, begin: int, end: int) -> Any:
    """Some samples out of tensors that have a row for each."""
    if isinstance(value, Tensor):
        return value[begin:end].clone() if value.dim() and value.shape[0] == size else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _rows(getattr(value, f.name), size, begin, end) for f in dataclasses.fields(value) if f.init}
        kind: Any = type(value)
        return kind(**fields)
    if isinstance(value, Mapping):
        return like(value, {name: _rows(each, size, begin, end) for name, each in value.items()})
    if isinstance(value, (list, tuple)):
        return like(value, [_rows(each, size, begin, end) for each in value])
    return value
