"""Random numbers of ranks that are threads, and of forwards that are compared with each other."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy
import torch


def states() -> tuple[Any, ...]:
    """The states of torch's (on the CPU), numpy's and Python's random numbers."""
    return torch.get_rng_state(), numpy.random.get_state(), random.getstate()


def restore(kept: tuple[Any, ...]) -> None:
    """What ``states`` returned."""
    torch.set_rng_state(kept[0])
    numpy.random.set_state(kept[1])
    random.setstate(kept[2])


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """What draws in here draws the same each time; afterwards the random states are those from before."""
    kept = states()
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        restore(kept)


class Turn:
    """A lock for threads of which one runs at a time, each with random states of its own.

    All threads begin with the states at the time when the lock is made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = states()
        self._own: dict[int, tuple[Any, ...]] = {}

    def acquire(self) -> None:
        self._lock.acquire()
        restore(self._own.get(threading.get_ident(), self._first))

    def release(self) -> None:
        self._own[threading.get_ident()] = states()
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
