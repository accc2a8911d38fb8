"""The random state of a process: torch's, numpy's and Python's generators, read, set, seeded and kept.

Data draws its random numbers apart from training, the same under any layout.
"""

from __future__ import annotations

import hashlib
import random
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from shardformer.module_paths import find_configs
from shardformer.torch_compat import DropoutBase, without_fake_tensors

SPLITMIX64 = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The factors of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""
CPU = torch.device("cpu")
RandomStates = tuple[list[Tensor], Any, Any]

_GENERATORS = threading.RLock()
"""The generators are one for all threads, and ranks may be threads."""


def random_states(device: torch.device = CPU) -> RandomStates:
    """Those of torch's generators (the CPU's, then the device's), of numpy and of Python."""
    return [g.get_state() for g in generators_of(device)], numpy.random.get_state(), random.getstate()


def set_random_states(states: RandomStates, device: torch.device = CPU) -> None:
    """What ``random_states`` gave."""
    of_torch, of_numpy, of_python = states
    for generator, state in zip(generators_of(device), of_torch, strict=True):
        generator.set_state(state)
    numpy.random.set_state(of_numpy)
    random.setstate(of_python)


def generators_of(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


def seed_random(seed: int, *, cuda: bool = True) -> None:
    """Seeds torch's, numpy's and Python's random numbers."""
    torch.default_generator.manual_seed(seed)
    if cuda and torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def hash_seed(*what: object) -> int:
    """A seed made of numbers and words, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "big") >> 1


def seed_generators(*what: object) -> None:
    """The generators of the CPU begin at ``hash_seed(*what)``."""
    seed_random(hash_seed(*what), cuda=False)


@contextmanager
def fork_random_state(device: torch.device = CPU, enabled: bool = True) -> Iterator[None]:
    """Behind it the random states are what they were before."""
    states = random_states(device) if enabled else None
    try:
        yield
    finally:
        if states is not None:
            set_random_states(states, device)


@contextmanager
def random_kept_on_error(device: torch.device) -> Iterator[None]:
    """The random states are what they were before when the body raises."""
    states = random_states(device)
    try:
        yield
    except BaseException:
        set_random_states(states, device)
        raise


@contextmanager
def fixed_seed(seed: int) -> Iterator[None]:
    """What draws in here, on the CPU, draws the same each time; afterwards the states are those from before."""
    with fork_random_state():
        seed_random(seed, cuda=False)
        yield


@contextmanager
def restored_generators() -> Iterator[None]:
    """Behind it the generators go on as before. In a worker process, which draws for samples alone, it does nothing:
    what another thread of its parent held when it was forked would stay locked for ever.
    """
    if get_worker_info() is not None:
        yield
        return
    with _GENERATORS, fork_random_state():
        yield


@contextmanager
def seeded(*what: object) -> Iterator[None]:
    """In here the generators begin at a seed; behind it they go on as before."""
    with restored_generators():
        seed_generators(*what)
        yield


class RandomUseDetector:
    """Sees whether what runs draws random numbers, of torch, numpy or Python, by any function.

    Args:
        device: whose generators are looked at, besides the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: list[int] | None = None
        self.seen: bool | None = None

    def begin(self) -> None:
        """Before what is observed. Once it was seen to draw, it is taken to draw for ever."""
        self._before = None if self.seen else state_digest(self._device)

    def end(self) -> None:
        """Behind it."""
        if self._before is not None:
            self.seen = self._before != state_digest(self._device)
            self._before = None


@without_fake_tensors()
def state_digest(device: torch.device) -> list[int]:
    """A few numbers of the random states."""
    _, keys, *of_numpy = cast(tuple[Any, ...], numpy.random.get_state())
    of_torch = (zlib.crc32(generator.get_state().numpy().tobytes()) for generator in generators_of(device))
    _, words, gauss = random.getstate()
    of_python = hash((words, gauss or 0.0))  # not of None, which each process may number otherwise
    return [*of_torch, zlib.crc32(keys), *map(hash, of_numpy), of_python]


class PrivateRandomState:
    """Random numbers that go on from one ``with`` to the next, beside those of the process."""

    def __init__(self, *what: object) -> None:
        self._what = what
        self._states: RandomStates | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        with restored_generators():
            if self._states is None:
                seed_generators(*self._what)
            else:
                set_random_states(self._states)
            try:
                yield
            finally:
                self._states = random_states()


class SameRandomOnAllRanks:
    """Lets what is of the user's draw the same on all ranks in an epoch: a sampler, a stream, a loader."""

    def __init__(self, asked: Any, epoch: int, seed: int) -> None:
        parts = {id(p): p for p in (asked, *(getattr(asked, name, None) for name in ("sampler", "dataset")))}
        self._own = PrivateRandomState(seed, epoch, "sampler")
        self._generators: list[tuple[Any, torch.Generator]] = []
        for i, part in enumerate(parts.values()):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
            if isinstance(getattr(part, "generator", None), torch.Generator):
                own = torch.Generator().manual_seed(hash_seed(seed, epoch, "sampler", i))
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


LIBRARIES_WITH_KNOWN_DROPOUT = ("torch", "transformers", "timm", "shardformer")
"""Where dropout is a module, a rate called ``drop_prob`` or a field of the config."""


def uses_dropout(model: nn.Module) -> bool:
    """Whether the model may draw random numbers when it trains.

    Of transformers' own classes the dropout modules and the config tell; any other class may call a function for it.
    """
    for module in model.modules():
        if type(module).__module__.partition(".")[0] not in LIBRARIES_WITH_KNOWN_DROPOUT or getattr(
            module, "drop_prob", None
        ):
            return True
        if isinstance(module, DropoutBase) and module.p > 0:
            return True
    fields = [item for config in find_configs(model) for item in vars(config).items()]
    return any([name for name, value in fields if "drop" in name and isinstance(value, float) and value > 0])
