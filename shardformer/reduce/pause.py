"""Backwards that leave agreeing on gradients to the last one of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardformer.layout.state import state_of


class Pausable:
    """A reducer whose backwards may accumulate this rank's own gradients."""

    _paused = was_paused = False

    @property
    def is_paused(self) -> bool:
        return self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward in here accumulates this rank's own gradients; the first one after it agrees on all of them."""
        before, self._paused = self._paused, True
        self.was_paused = True  # until all is agreed on; ranks know it alike, whether a gradient arrives or not
        try:
            yield
        finally:
            self._paused = before


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
