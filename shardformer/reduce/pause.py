"""Backwards that leave agreeing on gradients to the last one of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardformer.layout.state import state_of


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward in here accumulates gradients without agreeing on them with other ranks; the first one after it does.

    For all but the last of the backwards of one optimizer step. Leaving it out is right too, and only costs traffic.

    >>> with no_sync(model):                    # doctest: +SKIP
    ...     model(**first_half).loss.backward()
    >>> model(**second_half).loss.backward()    # doctest: +SKIP
    """
    with state_of(model).paused():
        yield
