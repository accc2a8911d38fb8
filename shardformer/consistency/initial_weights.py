"""Ranks that would read different weights: which rank, which file, and in what it differs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from shardformer.comm.collective_call import all_gather_from_grid
from shardformer.comm.collectives import all_gather_numbers, all_gather_objects, broadcast, broadcast_object, checksum
from shardformer.errors import ConfigError
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.meta_init.init_recipe import deferred_storage_of, random_steps, recipe_as_text
from shardformer.meta_init.materialization import is_lazy, named_tensors
from shardformer.meta_init.safetensors_source import FileFingerprint, weight_files
from shardformer.module_paths import find_configs
from shardformer.random_state import random_states, set_random_states, state_digest


def model_fingerprint(model: nn.Module) -> list[str]:
    """What a model is, as far as all ranks must have the same."""
    return (
        [type(model).__name__]
        + [f"{path or 'model'}: {_settings_of(module)}" for path, module in model.named_modules()]
        + [f"config.{name}={value}" for config in find_configs(model) for name, value in _fields_of(config)]
        + [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in model.named_parameters()]
        + [
            f"{n}: {recipe_as_text(place)}"
            for n, t in (named_tensors(model) if is_lazy(model) else ())
            if (place := deferred_storage_of(t)) is not None
        ]
    )


def _settings_of(module: nn.Module) -> str:
    """What kind a module is, its mode, and the numbers, words and functions that its forward may read."""
    said = [
        f"{name}={value.__qualname__ if isinstance(value, FunctionType) else repr(value)}"
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | FunctionType) and name != "name_or_path" and not name.startswith("_")
    ]
    return f"{type(module).__qualname__}({', '.join(said)})"


def _fields_of(config: Any) -> Iterator[tuple[str, Any]]:
    """Of a config, without where it was read from."""
    for name, value in vars(config).items():
        if not name.startswith("_") and name != "name_or_path" and isinstance(value, int | float | str | list | tuple):
            yield name, value


def sync_initial_weights(model: nn.Module, axes: list[Axis]) -> list[str]:
    """Makes every rank hold the first rank's weights and buffers, when their checksums differ.

    And draw the first rank's random numbers for those that wait for their values. Returns notes of what was done.
    Communicates two numbers a tensor; the tensors, or the states of random numbers, only if they differ.
    """
    named = named_tensors(model)
    tensors = [t for _, t in named if t.numel() and not t.is_meta]
    waiting = named if is_lazy(model) else ()
    places = [place for _, t in waiting if (place := deferred_storage_of(t)) is not None]
    steps = [step for place in places for step in random_steps(place)]
    notes = []
    for axis in axes:
        states = b"".join(step.state.numpy().tobytes() for step in steps if step.state is not None)
        if differs_across_ranks(hashlib.sha256(states).hexdigest(), axis):
            for step, state in zip(steps, broadcast_object([step.state for step in steps], axis), strict=True):
                step.state = state
            notes.append(f"The {axis.name} ranks would have drawn different weights: all drew those of rank 0.")
        if axis.size > 1 and tensors and differs_across_ranks([checksum(t) for t in tensors], axis):
            for t in tensors:
                broadcast(t.data, axis)
            notes.append(f"The {axis.name} ranks held different weights: all took those of rank 0.")
    return notes


def differs_across_ranks(value: Any, axis: Axis) -> bool:
    """Whether ranks of an axis have another value than its first. Communicates one gather of it."""
    every = all_gather_objects(value, axis)
    return any(theirs != every[0] for theirs in every)


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
    mine = [int(drew), *state_digest(device)]
    count = len(mine)
    every = all_gather_numbers([*mine, *beside], axis)
    look([theirs[count:] for theirs in every])
    if any(theirs[1:count] != mine[1:] for theirs in every):
        set_random_states(broadcast_object(random_states(device), axis), device)
    return any(theirs[0] for theirs in every)


FileFingerprints = list[tuple[str, FileFingerprint]]


def check_same_files(model: nn.Module, context: ParallelContext) -> None:
    """Raises ConfigError, on every rank, where ranks would read files with other contents. Where they lie may differ.

    The files that most ranks have are taken for the right ones. Communicates one gather of paths and checksums.
    """
    every: dict[int, FileFingerprints] = dict(
        all_gather_from_grid([(f.path, f.contents) for f in weight_files(model)], context)
    )
    if not all(every.values()):
        return  # some rank reads nothing, which is another difference
    held = {rank: tuple(contents for _, contents in files) for rank, files in every.items()}
    usual = Counter(held.values()).most_common(1)[0][0]
    others = [rank for rank in held if held[rank] != usual]
    if not others:
        return
    rank, first = others[0], next(rank for rank in held if held[rank] == usual)
    asked = {bool(contents.whole) for contents in (held[rank][0], usual[0])}
    if len(asked) > 1:
        raise ConfigError(
            f"Rank {rank} loaded its weights with all_bytes={bool(held[rank][0].whole)}, rank {first} with "
            f"all_bytes={bool(usual[0].whole)}",
            remedy="Give all of them the same",
        )
    raise ConfigError(
        f"Ranks disagree on the weights: {_difference(rank, first, every)}"
        + (f"; rank {', '.join(map(str, others[1:]))} differs too" if len(others) > 1 else ""),
        remedy=f"Give rank {rank} the folder that rank {first} reads, or a copy of it",
    )


def _difference(rank: int, first: int, every: dict[int, FileFingerprints]) -> str:
    theirs, usual = every[rank], every[first]
    pairs = list(zip(theirs, usual, strict=False))
    (path, contents), (other, right) = next((pair for pair in pairs if pair[0][1] != pair[1][1]), pairs[0])
    if len(theirs) != len(usual):
        return f"rank {rank} reads {len(theirs)} files, such as {path!r}, rank {first} {len(usual)}, such as {other!r}"
    return f"rank {rank} reads {path!r}, rank {first} {other!r}, and they differ in their {contents.difference(right)}"
