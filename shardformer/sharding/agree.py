"""All ranks do the same, or none does anything: what they compare before a model is changed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from shardformer.comm.collectives import broadcast, broadcast_object, checksum, gather_objects
from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, LaunchError, ShardFormerError
from shardformer.lazy.materialize import named_tensors
from shardformer.lazy.recipe import place_of, random_steps, text_of
from shardformer.mesh.axis import Axis
from shardformer.mesh.context import ParallelContext
from shardformer.mesh.lost import LostPeerError
from shardformer.mesh.process_group import ENDED
from shardformer.mesh.processes import launcher_store
from shardformer.policies.paths import configs_in

ANNOUNCEMENTS = "shardformer/word"
FIRST_PAUSE_S, LAST_PAUSE_S = 0.002, 0.25
BYSTANDER_S = 10.0
"""How long to wait for the word of processes outside of the group given: they may not shard anything at all."""

T = TypeVar("T")


def agree_on_group(config: ShardConfig) -> ParallelContext:
    """The grid to shard over, once the processes know that they gave groups that fit together.

    Before this no collective is possible, so the word goes through the launcher's store: each process writes down which
    group it gave, and reads on in what each of the others wrote.

    Raises LaunchError, on every process that shards just now, when one of them is not in the group it gave, and when a
    member of the group does not come, or an error ended it before; ConfigError when two members gave different groups.
    """
    context, problem = None, None
    try:
        context = config.resolve_context()
    except ShardFormerError as error:
        problem = error
    store = launcher_store() if context is None or context.world is None else context.world.store
    if store is not None:
        ranks = list(context.tensor.ranks) if context is not None else []
        kind = "the grid of launch_from_torch" if config.context is not None else "the process group"
        word = _Announcement(ranks, f"{kind} {ranks}", str(problem or ""))
        rank = dist.get_rank()
        store.set(f"{ANNOUNCEMENTS}/{rank}/{store.add(f'{ANNOUNCEMENTS}/{rank}', 1)}", json.dumps(astuple(word)))
        deadline = time.monotonic() + BYSTANDER_S
        # all are heard before anything is raised, so that a next call does not meet words of this one
        heard = [
            _read_announcements(store, other, word, deadline) for other in range(dist.get_world_size()) if other != rank
        ]
        problem = problem or next((trouble for trouble in heard if trouble is not None), None)
    if problem is not None:
        raise problem
    assert context is not None
    return context


@dataclass(frozen=True)
class _Announcement:
    """What a process wrote: the ranks of the group it gave, the group in words, and why it cannot shard if so."""

    ranks: list[int]
    group: str
    trouble: str


def _read_announcements(store: Any, other: int, mine: _Announcement, deadline: float) -> ShardFormerError | None:
    """Reads on in what process ``other`` wrote, to the next word that is about this process too. Returns what is wrong.

    A member of this one's group is waited for, others until the deadline. What they wrote about groups without this
    process is passed over; a word of theirs for a later call of ours stays.
    """
    me, is_member = dist.get_rank(), other in mine.ranks
    place = f"{ANNOUNCEMENTS}/{me}/of/{other}"
    while True:
        key = f"{ANNOUNCEMENTS}/{other}/{store.add(place, 0) + 1}"
        has_come, why = _comes(store, key, None if is_member else deadline, other)
        if not has_come:
            if is_member and why:
                return LaunchError(
                    f"Process {other} ended before it came to shard, by {why}",
                    rule="Processes that shard at one time all go on, or none does",
                    remedy="See what that process says",
                )
            said = f"Process {other} did not come to shard over {mine.group}, as process {me} did"
            return _other_group(LostPeerError, said) if is_member else None
        theirs = _Announcement(*json.loads(store.get(key)))
        is_about_us = me in theirs.ranks
        if is_about_us and not is_member and not mine.trouble:
            return None
        store.add(place, 1)
        if mine.trouble:
            return None  # one word for one; what is wrong here is known
        if theirs.trouble:
            return LaunchError(
                f"Process {other} cannot shard: {theirs.trouble}",
                rule="Processes that shard at one time all go on, or none does",
                remedy="See what that process says",
            )
        if is_about_us and theirs != mine:
            said = f"Process {me} shards over {mine.group}, process {other}, which is in it, over {theirs.group}"
            return _other_group(ConfigError, said)
        if is_about_us or not is_member:
            return None


def _other_group(kind: type[ShardFormerError], said: str) -> ShardFormerError:
    return kind(
        said,
        rule="The members of a group shard over the same group, in the same order",
        remedy="Give every process the group that it belongs to, made by the same code on all of them",
    )


def _comes(store: Any, key: str, deadline: float | None, other: int) -> tuple[bool, str]:
    """(whether ``key`` is written, the error that ended process ``other`` before, if it said so).

    Waits until the deadline, or the store's own timeout. It asks in place of ``store.wait``, which hears nothing of a
    process that has ended, and leaves a warning of torch's for each wait that was cut short.
    """
    end = time.monotonic() + store.timeout.total_seconds() if deadline is None else deadline
    pause_s = FIRST_PAUSE_S
    with suppress(RuntimeError):  # the process that has the store is gone
        while not store.check([key]):
            why = store.get(f"{ENDED}/{other}").decode() if store.check([f"{ENDED}/{other}"]) else ""
            if why or time.monotonic() >= end:
                return bool(store.check([key])), why
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return True, ""
    return False, ""


def model_lines(model: nn.Module) -> list[str]:
    """What a model is, as far as all ranks must have the same."""
    return (
        [type(model).__name__]
        + [f"{path or 'model'}: {_settings_of(module)}" for path, module in model.named_modules()]
        + [f"config.{name}={value}" for config in configs_in(model) for name, value in _fields_of(config)]
        + [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in model.named_parameters()]
        + [f"{n}: {text_of(place)}" for n, t in named_tensors(model) if (place := place_of(t)) is not None]
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


def agree_on_weights(model: nn.Module, axes: list[Axis]) -> list[str]:
    """Makes every rank hold the first rank's weights and buffers, when their checksums differ.

    And draw the first rank's random numbers for those that wait for their values. Returns notes of what was done.
    Communicates two numbers a tensor; the tensors, or the states of random numbers, only if they differ.
    """
    tensors = [t for _, t in named_tensors(model) if t.numel() and not t.is_meta]
    places = [place for _, t in named_tensors(model) if (place := place_of(t)) is not None]
    steps = [step for place in places for step in random_steps(place)]
    notes = []
    for axis in axes:
        states = b"".join(step.state.numpy().tobytes() for step in steps if step.state is not None)
        if differs(hashlib.sha256(states).hexdigest(), axis):
            for step, state in zip(steps, broadcast_object([step.state for step in steps], axis), strict=True):
                step.state = state
            notes.append(f"The {axis.name} ranks would have drawn different weights: all drew those of rank 0.")
        if axis.size > 1 and tensors and differs([checksum(t) for t in tensors], axis):
            for t in tensors:
                broadcast(t.data, axis)
            notes.append(f"The {axis.name} ranks held different weights: all took those of rank 0.")
    return notes


def differs(value: Any, axis: Axis) -> bool:
    """Whether ranks of an axis have another value than its first. Communicates one gather of it."""
    every = gather_objects(value, axis)
    return any(theirs != every[0] for theirs in every)
