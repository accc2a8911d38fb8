"""Random numbers that data draws: the same under any layout, and apart from those of training."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info

States = tuple[Any, Any, Any]

_GENERATORS = threading.RLock()
"""The generators are one for all threads, and ranks may be threads."""


def seed_of(*what: object) -> int:
    """A seed made of numbers and words, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "big") >> 1


def seed_from(*what: object) -> None:
    """torch's, numpy's and Python's generators begin at a seed."""
    seed = seed_of(*what)
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def put_back() -> Iterator[None]:
    """Behind it the generators go on as before. In a worker process, which draws for samples alone, it does nothing:
    what another thread of its parent held when it was forked would stay locked for ever.
    """
    if get_worker_info() is not None:
        yield
        return
    with _GENERATORS:
        before = _states()
        try:
            yield
        finally:
            _set(before)


@contextmanager
def drawing_from(*what: object) -> Iterator[None]:
    """In here the generators begin at a seed; behind it they go on as before."""
    with put_back():
        seed_from(*what)
        yield


class OwnRandom:
    """Random numbers that go on from one ``with`` to the next, beside those of the process."""

    def __init__(self, *what: object) -> None:
        self._what = what
        self._states: States | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        with put_back():
            if self._states is None:
                seed_from(*self._what)
            else:
                _set(self._states)
            try:
                yield
            finally:
                self._states = _states()


class Alike:
    """Lets what is of the user's draw the same on all ranks in an epoch: a sampler, a stream, a loader."""

    def __init__(self, asked: Any, epoch: int, seed: int) -> None:
        parts = {id(p): p for p in (asked, *(getattr(asked, name, None) for name in ("sampler", "dataset")))}
        self._own = OwnRandom(seed, epoch, "sampler")
        self._generators: list[tuple[Any, torch.Generator]] = []
        for i, part in enumerate(parts.values()):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
            if isinstance(getattr(part, "generator", None), torch.Generator):
                own = torch.Generator().manual_seed(seed_of(seed, epoch, "sampler", i))
                self._generators.append((part, own))

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """In here it has generators that begin at a seed; behind it those that it had."""
        before = [(part, part.generator) for part, _ in self._generators]
        try:
            for part, own in self._generators:
                part.generator = own
            with self._own.drawing():
                yield
        finally:
            for part, generator in before:
                part.generator = generator


def _states() -> States:
    return torch.get_rng_state(), numpy.random.get_state(), random.getstate()


def _set(states: States) -> None:
    torch.set_rng_state(states[0])
    numpy.random.set_state(states[1])
    random.setstate(states[2])
