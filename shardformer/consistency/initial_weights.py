"""Ensure that all ranks start training with the same model, weights and random state."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from shardformer.comm.collective_call import all_gather_over_mesh
from shardformer.comm.collectives import (
    all_gather_ints,
    all_gather_objects,
    broadcast,
    broadcast_object,
    compute_numel_and_hash,
)
from shardformer.errors import ConfigError
from shardformer.layout.packed_weights import find_quantized_weights, get_packed_tensors
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.meta_init.init_recipe import fingerprint_init_recipe, get_deferred_storage, iter_random_init_steps
from shardformer.meta_init.safetensors_source import FileFingerprint, find_weight_files
from shardformer.module_paths import find_model_configs, named_params_and_buffers
from shardformer.random_state import get_rng_states, hash_rng_states, set_rng_states
from shardformer.torch_compat import has_meta_tensors


def compute_model_fingerprint(model: nn.Module) -> list[str]:
    """Describe the modules, config and parameters of a model as text, so that ranks can compare them."""
    return (
        [type(model).__name__]
        + [
            f"{path or 'model'}: {_format_module_class_and_attributes(module)}"
            for path, module in model.named_modules()
        ]
        + [
            f"config.{name}={value}"
            for config in find_model_configs(model)
            for name, value in _iter_plain_config_fields(config)
        ]
        + [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in model.named_parameters()]
        + [
            f"{n} {[compute_numel_and_hash(t) for t in get_packed_tensors(p)]}"
            for n, p in find_quantized_weights(model).items()
        ]
        + [
            f"{n}: {fingerprint_init_recipe(place)}"
            for n, t in (named_params_and_buffers(model) if has_meta_tensors(model) else ())
            if (place := get_deferred_storage(t)) is not None
        ]
    )


def _format_module_class_and_attributes(module: nn.Module) -> str:
    attributes = [
        f"{name}={value.__qualname__ if isinstance(value, FunctionType) else repr(value)}"
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | FunctionType) and name != "name_or_path" and not name.startswith("_")
    ]
    return f"{type(module).__qualname__}({', '.join(attributes)})"


def _iter_plain_config_fields(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of config fields that are numbers, strings or lists, except ``name_or_path``."""
    for name, value in vars(config).items():
        if not name.startswith("_") and name != "name_or_path" and isinstance(value, int | float | str | list | tuple):
            yield name, value


def sync_initial_weights(model: nn.Module, axes: list[Axis]) -> list[str]:
    """Broadcast weights and buffers from the first rank of each mesh axis if they differ between ranks.

    Parameters that are not yet materialized get the random state of the first rank. Communicates two numbers per
    tensor, and the tensors or random states only if they differ. Returns notes about what was copied.
    """
    named = named_params_and_buffers(model)
    packed = set(map(id, find_quantized_weights(model).values()))  # the ranks compared them in the fingerprint
    tensors = [t for _, t in named if id(t) not in packed and t.numel() and not t.is_meta]
    waiting = named if has_meta_tensors(model) else ()
    places = [place for _, t in waiting if (place := get_deferred_storage(t)) is not None]
    steps = [step for place in places for step in iter_random_init_steps(place)]
    notes = []
    for axis in axes:
        states = b"".join(step.rng_state.numpy().tobytes() for step in steps if step.rng_state is not None)
        if is_different_across_ranks(hashlib.sha256(states).hexdigest(), axis):
            for step, state in zip(steps, broadcast_object([step.rng_state for step in steps], axis), strict=True):
                step.rng_state = state
            notes.append(f"The {axis.name} ranks had different initial random states. They now use those of rank 0.")
        if axis.size > 1 and tensors and is_different_across_ranks([compute_numel_and_hash(t) for t in tensors], axis):
            for t in tensors:
                broadcast(t.data, axis)
            notes.append(f"The {axis.name} ranks had different initial weights. They now use those of rank 0.")
    return notes


def is_different_across_ranks(local_value: Any, axis: Axis) -> bool:
    """All-gather a value, and return whether it differs between the ranks of an axis."""
    every = all_gather_objects(local_value, axis)
    return any(other != every[0] for other in every)


def broadcast_random_state(
    axis: Axis,
    device: torch.device,
    has_drawn_random_numbers: bool = False,
    extra_numbers_to_gather: Sequence[int] = (),
    on_extra_numbers_gathered: Callable[[list[list[int]]], None] = lambda _: None,
) -> bool:
    """Broadcast the random state of torch, NumPy and Python from the first rank of an axis if ranks differ.

    Outside the sharded blocks, these ranks must draw the same random numbers, even if a script seeds each rank
    differently. All ranks must call this at the same time, even without having drawn random numbers, because another
    thread of a process may have drawn some.

    Args:
        has_drawn_random_numbers: whether this rank has drawn random numbers.
        extra_numbers_to_gather: numbers to gather in the same message. Each rank must pass the same count of numbers.
        on_extra_numbers_gathered: called with the gathered numbers of all ranks.

    Communicates a few numbers per rank, and the random states if they differ. Returns whether any rank has drawn random
    numbers.
    """
    if axis.size == 1:
        return has_drawn_random_numbers
    own = [int(has_drawn_random_numbers), *hash_rng_states(device)]
    count = len(own)
    every = all_gather_ints([*own, *extra_numbers_to_gather], axis)
    on_extra_numbers_gathered([numbers[count:] for numbers in every])
    if any(numbers[1:count] != own[1:] for numbers in every):
        set_rng_states(broadcast_object(get_rng_states(device), axis), device)
    return any(numbers[0] for numbers in every)


FileFingerprints = list[tuple[str, FileFingerprint]]


def check_ranks_read_same_weight_files(model: nn.Module, context: ParallelContext) -> None:
    """Raise ConfigError on every rank if the ranks read weight files with different contents.

    Paths may differ. The contents that most ranks have are assumed to be correct. Communicates one all-gather of paths
    and checksums.
    """
    every: dict[int, FileFingerprints] = dict(
        all_gather_over_mesh([(f.path, f.contents) for f in find_weight_files(model)], context)
    )
    if not all(every.values()):
        return  # a rank without weight files is reported by another check
    contents_of = {rank: tuple(contents for _, contents in files) for rank, files in every.items()}
    usual = Counter(contents_of.values()).most_common(1)[0][0]
    others = [rank for rank in contents_of if contents_of[rank] != usual]
    if not others:
        return
    rank, first = others[0], next(rank for rank in contents_of if contents_of[rank] == usual)
    passed, expected = (bool(contents.full_hash) for contents in (contents_of[rank][0], usual[0]))
    if passed != expected:
        raise ConfigError(
            f"Rank {rank} loaded its weights with all_bytes={passed}, but rank {first} used all_bytes={expected}.",
            remedy="Pass the same value of all_bytes on all ranks.",
        )
    difference = _describe_file_difference(rank, first, every)
    if len(others) > 1:
        difference += f". Rank {', '.join(map(str, others[1:]))} differs too"
    raise ConfigError(
        f"The ranks read different weight files: {difference}.",
        remedy=f"On rank {rank}, pass the folder that rank {first} reads, or a copy of it.",
    )


def _describe_file_difference(rank: int, reference_rank: int, fingerprints_by_rank: dict[int, FileFingerprints]) -> str:
    files, usual = fingerprints_by_rank[rank], fingerprints_by_rank[reference_rank]
    pairs = list(zip(files, usual, strict=False))
    (path, contents), (other, right) = next((pair for pair in pairs if pair[0][1] != pair[1][1]), pairs[0])
    if len(files) != len(usual):
        counts = [f"{len(found)} file{'s' * (len(found) > 1)}" for found in (files, usual)]
        return (
            f"rank {rank} reads {counts[0]} such as {path!r}, but rank {reference_rank} reads {counts[1]} such as "
            f"{other!r}"
        )
    what = contents.describe_difference(right)
    return f"rank {rank} reads {path!r}, rank {reference_rank} reads {other!r}, and they differ in their {what}"
