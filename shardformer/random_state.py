"""Read, seed and restore the random number generators of torch, NumPy and Python.

Data loading uses separate random states, so that the data order is the same under any layout.
"""

from __future__ import annotations

import hashlib
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from shardformer.module_paths import LIBRARIES, find_model_configs
from shardformer.torch_compat import DropoutBase, tolist_or_ones, without_fake_tensors

SPLITMIX64 = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Constants of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""
CPU = torch.device("cpu")
RandomStates = tuple[list[Tensor], Any, Any]

_GENERATORS = threading.RLock()  # generators are shared by all threads of a process, and ranks may be threads


def get_rng_states(device: torch.device = CPU) -> RandomStates:
    """Return the random states of torch (for the CPU and ``device``), NumPy and Python."""
    return [g.get_state() for g in get_torch_generators(device)], numpy.random.get_state(), random.getstate()


def set_rng_states(rng_states: RandomStates, device: torch.device = CPU) -> None:
    """Restore the random states returned by ``get_rng_states``."""
    of_torch, of_numpy, of_python = rng_states
    for generator, state in zip(get_torch_generators(device), of_torch, strict=True):
        generator.set_state(state)
    numpy.random.set_state(of_numpy)
    random.setstate(of_python)


def get_torch_generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


def seed_all_generators(seed: int, *, include_cuda: bool = True) -> None:
    """Seed the random number generators of torch, NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    if include_cuda and torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def hash_to_seed(*seed_parts: object) -> int:
    """Hash numbers and strings to a seed that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(seed_parts).encode(), digest_size=8).digest(), "big") >> 1


def seed_cpu_generators(*seed_parts: object) -> None:
    """Seed the CPU random number generators with a hash of the arguments."""
    seed_all_generators(hash_to_seed(*seed_parts), include_cuda=False)


@contextmanager
def fork_rng(device: torch.device = CPU) -> Iterator[None]:
    """Restore the random states after the ``with`` block, like ``torch.random.fork_rng``."""
    states = get_rng_states(device)
    try:
        yield
    finally:
        set_rng_states(states, device)


@contextmanager
def restore_rng_states_on_error(device: torch.device) -> Iterator[None]:
    """Restore the random states if the ``with`` block raises an exception."""
    states = get_rng_states(device)
    try:
        yield
    except BaseException:
        set_rng_states(states, device)
        raise


@contextmanager
def fork_rng_with_seed(seed: int) -> Iterator[None]:
    """Seed the CPU random number generators in the ``with`` block, and restore their states afterwards."""
    with fork_rng():
        seed_all_generators(seed, include_cuda=False)
        yield


@contextmanager
def preserve_cpu_rng_states() -> Iterator[None]:
    """Restore the CPU random states after the ``with`` block, except in a DataLoader worker.

    A DataLoader worker uses random numbers only for samples. A lock that another thread of its parent held during the
    fork would never be released in the worker.
    """
    if get_worker_info() is not None:
        yield
        return
    with _GENERATORS, fork_rng():
        yield


@contextmanager
def fork_rng_with_hashed_seed(*seed_parts: object) -> Iterator[None]:
    """Seed the CPU generators with a hash of the arguments, and restore them after the ``with`` block."""
    with preserve_cpu_rng_states():
        seed_cpu_generators(*seed_parts)
        yield


class RNGUseDetector:
    """Detector for the use of random numbers from torch, NumPy or Python.

    Args:
        device: the device whose generators are checked in addition to the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: list[int] | None = None
        self.seen: bool | None = None

    def start(self) -> None:
        """Record the random states, unless the use of random numbers was already detected."""
        self._before = None if self.seen else hash_rng_states(self._device)

    def stop(self) -> None:
        """Set ``seen`` to whether random numbers were drawn since ``start``."""
        if self._before is not None:
            self.seen = self._before != hash_rng_states(self._device)
            self._before = None


@without_fake_tensors()
def hash_rng_states(device: torch.device) -> list[int]:
    """Hash the random states of torch, NumPy and Python, so that ranks can compare them."""
    _, keys, *of_numpy = cast(tuple[Any, ...], numpy.random.get_state())
    of_torch = (zlib.crc32(generator.get_state().numpy().tobytes()) for generator in get_torch_generators(device))
    _, words, gauss = random.getstate()
    of_python = hash((words, gauss or 0.0))  # hash(None) may differ between processes
    return [*of_torch, zlib.crc32(keys), *map(hash, of_numpy), of_python]


def derive_rank_seed(shared_seed: int, rank: int) -> int:
    """Derive a seed for one rank from a shared seed. Rank -1 gets the shared seed modulo 2**63."""
    return (shared_seed + SPLITMIX64[0] * (rank + 1)) % 2**63


class LocalRNGState:
    """Switch between a random state shared by all ranks and one per rank, for example for dropout.

    With ``broadcast_fn``, switches from one random state per rank to a shared one. This broadcasts one number.

    The inner seed is drawn from the outer random state. Activation checkpointing, which restores the outer state,
    therefore reproduces the inner numbers too.

    Args:
        rank: rank of this process on the axis whose ranks get their own random states.
        broadcast_fn: function that returns the first rank's value of a tensor on all ranks of the axis.
    """

    def __init__(
        self, rank: int, broadcast_fn: Callable[[Tensor], Tensor] | None = None, *, enabled: bool = True
    ) -> None:
        self._rank, self._share, self.is_enabled = rank, broadcast_fn, enabled
        self.is_in_graph = False  # whether the layers of the model are compiled with their random state
        self._outer: list[tuple[torch.Generator, Tensor]] = []

    def enter_local_rng_state(self, input_tensor: Tensor, training: bool = True) -> None:
        if not (self.is_enabled and training):
            return
        if self.is_in_graph and torch.compiler.is_compiling():
            torch.ops.shardformer.enter_random_state(self._rank)
            return
        seed, rank = torch.randint(2**62, (), device="cpu"), self._rank
        if self._share is not None:
            seed, rank = self._share(seed.to(input_tensor.device)), -1
        self._outer = [(g, g.get_state()) for g in get_torch_generators(input_tensor.device)]
        for g, _ in self._outer:
            g.manual_seed(derive_rank_seed(int(tolist_or_ones(seed)), rank))

    def exit_local_rng_state(self) -> None:
        if self.is_in_graph and torch.compiler.is_compiling():
            torch.ops.shardformer.leave_random_state()
            return
        for generator, state in self._outer:
            generator.set_state(state)
        self._outer = []

    @contextmanager
    def use_outer_rng_state(self) -> Iterator[None]:
        """Switch back to the shared random state inside the ``with`` block."""
        if self.is_in_graph and torch.compiler.is_compiling():
            torch.ops.shardformer.swap_random_state()
            try:
                yield
            finally:
                torch.ops.shardformer.swap_random_state()
            return
        inner = [(generator, generator.get_state()) for generator, _ in self._outer]
        for generator, state in self._outer:
            generator.set_state(state)
        try:
            yield
        finally:
            self._outer = [(generator, generator.get_state()) for generator, _ in self._outer]
            for generator, state in inner:
                generator.set_state(state)


class ResumableRNGState:
    """Separate random state that continues from one ``with`` block to the next."""

    def __init__(self, *seed_parts: object) -> None:
        self._seed_parts = seed_parts
        self._states: RandomStates | None = None

    @contextmanager
    def activate(self) -> Iterator[None]:
        with preserve_cpu_rng_states():
            if self._states is None:
                seed_cpu_generators(*self._seed_parts)
            else:
                set_rng_states(self._states)
            try:
                yield
            finally:
                self._states = get_rng_states()


class EpochSeededRNG:
    """Random state that makes a sampler or dataset draw the same random numbers on all ranks in an epoch."""

    def __init__(self, data_source: Any, epoch: int, seed: int) -> None:
        parts = {
            id(p): p for p in (data_source, *(getattr(data_source, name, None) for name in ("sampler", "dataset")))
        }
        self._own = ResumableRNGState(seed, epoch, "sampler")
        self._generators: list[tuple[Any, torch.Generator]] = []
        for i, part in enumerate(parts.values()):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
            if isinstance(getattr(part, "generator", None), torch.Generator):
                own = torch.Generator().manual_seed(hash_to_seed(seed, epoch, "sampler", i))
                self._generators.append((part, own))

    @contextmanager
    def use_epoch_seed(self) -> Iterator[None]:
        """Make the sampler and the dataset use the seed of the epoch in the ``with`` block."""
        before = [(part, part.generator) for part, _ in self._generators]
        try:
            for part, own in self._generators:
                part.generator = own
            with self._own.activate():
                yield
        finally:
            for part, generator in before:
                part.generator = generator


def may_use_dropout(model: nn.Module) -> bool:
    """Return whether a model's forward pass may draw random numbers in training, as dropout does.

    For classes of ``LIBRARIES``, this follows from dropout modules, ``drop_prob`` and config fields. Any other class
    may call a dropout function.
    """
    for module in model.modules():
        if type(module).__module__.partition(".")[0] not in LIBRARIES or getattr(module, "drop_prob", None):
            return True
        if isinstance(module, DropoutBase) and module.p > 0:
            return True
    fields = [item for config in find_model_configs(model) for item in vars(config).items()]
    return any([name for name, value in fields if "drop" in name and isinstance(value, float) and value > 0])
