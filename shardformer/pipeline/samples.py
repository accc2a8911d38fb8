"""Finds out whether a ``loss_fn`` compares samples, from the losses of two samples apart and together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from shardformer.pipeline.microbatches import like

IS_TRYING: ContextVar[bool] = ContextVar("shardformer_is_trying_a_loss", default=False)
RELATIVE, ABSOLUTE = 1e-3, 1e-6
"""How far losses may differ by rounding, in 32 bits."""


class Gathers(Exception):
    """Raised where a loss that is tried out gathers the samples of all data ranks."""


@torch.no_grad()
def compares_outputs(loss_fn: Callable[..., Any], output: Any, batch: Any, size: int, num_parts: int) -> bool:
    """Whether it is known that a loss compares samples, from the losses of two of them, on one rank alone.

    The loss of two samples is between their own if it is a mean over what counts in them, or their sum.

    Args:
        output, batch: of ``size`` samples.
        num_parts: with one, a loss that calls ``gather_over_data`` is right.
    """
    if size < 2:
        return False
    token = IS_TRYING.set(True)
    try:
        alone = [float(loss_fn(_rows(output, size, i, i + 1), _rows(batch, size, i, i + 1))) for i in (0, 1)]
        both = float(loss_fn(_rows(output, size, 0, 2), _rows(batch, size, 0, 2)))
    except Gathers:
        return num_parts > 1
    except Exception:  # a loss that cannot be cut is not judged
        return False
    finally:
        IS_TRYING.reset(token)
    if not all(map(math.isfinite, (*alone, both))):
        return False
    room = ABSOLUTE + RELATIVE * max(abs(x) for x in (*alone, both))
    is_mean = min(alone) - room <= both <= max(alone) + room
    return not is_mean and abs(both - sum(alone)) > room


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
