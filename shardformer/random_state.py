"""The random state of a rank: its own inside a tensor-parallel block, the same on all ranks outside.

Data draws its random numbers apart from training, the same under any layout.
"""

from __future__ import annotations

import hashlib
import random
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import get_worker_info

from shardformer.comm.collectives import all_gather_numbers, broadcast, broadcast_object
from shardformer.mesh.parallel_context import Axis
from shardformer.module_paths import find_configs
from shardformer.torch_compat import to_list, without_fake_tensors


class LocalRandomState:
    """Random numbers that differ by tensor rank from ``enter`` to ``leave``, and are the same on all ranks outside.

    With ``aligned`` the other way round: the same on all ranks between, where each has its own outside. Communicates
    one number then.

    The stream inside starts from a number drawn from the stream outside, so whoever restores the outer state, such as
    activation checkpointing, gets the same numbers inside again.
    """

    def __init__(self, axis: Axis, *, aligned: bool = False) -> None:
        self._axis, self._aligned = axis, aligned
        self._outer: list[tuple[torch.Generator, Tensor]] = []

    def enter(self, x: Tensor) -> None:
        seed, own = torch.randint(2**62, (), device="cpu"), 0x9E3779B97F4A7C15 * (self._axis.rank + 1)
        if self._aligned:
            seed, own = broadcast(seed.to(x.device), self._axis), 0
        self._outer = [(g, g.get_state()) for g in _generators(x.device)]
        for g, _ in self._outer:
            g.manual_seed((int(to_list(seed)) + own) % 2**63)

    def leave(self) -> None:
        for generator, state in self._outer:
            generator.set_state(state)
        self._outer = []


def same_random_in(axis: Axis, module: nn.Module) -> None:
    """A module's draws are the same on all ranks, though the stream around it is each rank's own.

    Stochastic depth between blocks drops whole samples, of which with sequence parallelism each rank has a part.
    The first rank's next number seeds what the module draws, in a recomputation under checkpointing again.

    Communicates: in training one broadcast of one number a call.
    """
    stream = LocalRandomState(axis, aligned=True)
    module.register_forward_pre_hook(lambda module, args: stream.enter(args[0]) if module.training else None)
    module.register_forward_hook(lambda *_: stream.leave(), always_call=True)


def broadcast_random_state(
    axis: Axis,
    device: torch.device,
    drew: bool = False,
    beside: Sequence[int] = (),
    look: Callable[[list[list[int]]], None] = lambda _: None,
) -> bool:
    """Gives all ranks of an axis the random states of the first: torch's, numpy's and Python's.

    What a model draws outside of its blocks has to be alike on all of them, and a script may seed each rank otherwise.
    Every rank calls this at the same time, whatever it saw itself: another thread of one process, which logs or reads
    data, may draw too.

    Args:
        drew: whether this rank was seen to draw.
        beside, look: numbers that go along, as many from each rank, and what is given those of all.

    Communicates a few numbers a rank; the states where they differ. Returns whether any rank of the axis ``drew``.
    """
    if axis.size == 1:
        return drew
    mine = [int(drew), *_state_digest(device)]
    count = len(mine)
    every = all_gather_numbers([*mine, *beside], axis)
    look([theirs[count:] for theirs in every])
    if any(theirs[1:count] != mine[1:] for theirs in every):
        set_random_states(broadcast_object(random_states(device), axis), device)
    return any(theirs[0] for theirs in every)


@contextmanager
def fork_random_state(device: torch.device, enabled: bool = True) -> Iterator[None]:
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


def seed_random(seed: int) -> None:
    """Seeds torch's, numpy's and Python's random numbers."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


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
        self._before = None if self.seen else _state_digest(self._device)

    def end(self) -> None:
        """Behind it."""
        if self._before is not None:
            self.seen = self._before != _state_digest(self._device)
            self._before = None


@without_fake_tensors()
def _state_digest(device: torch.device) -> list[int]:
    """A few numbers of the random states."""
    _, keys, *of_numpy = cast(tuple[Any, ...], numpy.random.get_state())
    of_torch = (zlib.crc32(generator.get_state().numpy().tobytes()) for generator in _generators(device))
    _, words, gauss = random.getstate()
    of_python = hash((words, gauss or 0.0))  # not of None, which each process may number otherwise
    return [*of_torch, zlib.crc32(keys), *map(hash, of_numpy), of_python]


def random_states(device: torch.device) -> tuple[list[Tensor], Any, Any]:
    """Those of torch's generators (the CPU's, then the device's), of numpy and of Python."""
    return [g.get_state() for g in _generators(device)], numpy.random.get_state(), random.getstate()


def set_random_states(states: tuple[list[Tensor], Any, Any], device: torch.device) -> None:
    """What ``random_states`` gave."""
    of_torch, of_numpy, of_python = states
    for generator, state in zip(_generators(device), of_torch, strict=True):
        generator.set_state(state)
    numpy.random.set_state(of_numpy)
    random.setstate(of_python)


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


GeneratorStates = tuple[Any, Any, Any]

_GENERATORS = threading.RLock()
"""The generators are one for all threads, and ranks may be threads."""


def hash_seed(*what: object) -> int:
    """A seed made of numbers and words, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "big") >> 1


def seed_generators(*what: object) -> None:
    """torch's, numpy's and Python's generators begin at a seed."""
    seed = hash_seed(*what)
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def restored_generators() -> Iterator[None]:
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
def seeded(*what: object) -> Iterator[None]:
    """In here the generators begin at a seed; behind it they go on as before."""
    with restored_generators():
        seed_generators(*what)
        yield


class PrivateRandomState:
    """Random numbers that go on from one ``with`` to the next, beside those of the process."""

    def __init__(self, *what: object) -> None:
        self._what = what
        self._states: GeneratorStates | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        with restored_generators():
            if self._states is None:
                seed_generators(*self._what)
            else:
                _set(self._states)
            try:
                yield
            finally:
                self._states = _states()


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


def _states() -> GeneratorStates:
    return torch.get_rng_state(), numpy.random.get_state(), random.getstate()


def _set(states: GeneratorStates) -> None:
    torch.set_rng_state(states[0])
    numpy.random.set_state(states[1])
    random.setstate(states[2])


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
        if isinstance(module, _DropoutNd) and module.p > 0:
            return True
    fields = [item for config in find_configs(model) for item in vars(config).items()]
    return any("drop" in name and isinstance(v, float) and v > 0 for name, v in fields)
