"""All ranks do the same, or none does anything: what they compare before a model is changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from shardformer.comm.collectives import all_gather, broadcast, gather_objects
from shardformer.context import Axis, ParallelContext
from shardformer.errors import ConfigError, LaunchError, ShardFormerError
from shardformer.policies.config import ShardConfig

BYSTANDER_S = 10.0
"""How long to wait for the word of processes outside of the group given: they may not shard anything at all."""

T = TypeVar("T")


def agree_on_group(config: ShardConfig) -> ParallelContext:
    """The grid to shard over, once the processes know that they gave groups that fit together.

    Before this no collective is possible, so the word goes through the launcher's store: each process says which group
    it gave. Raises LaunchError, on every process of the job that shards, when one of them is not in the group it gave;
    ConfigError when two members of a group gave different ones.
    """
    context, problem = None, None
    try:
        context = config.resolve_context()
    except ShardFormerError as error:
        problem = error
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return _or_raise(context, problem)
    kind = "the grid of launch_from_torch" if config.context is not None else "the process group"
    mine = f"{kind} {list(context.tensor.ranks)}" if context is not None else ""
    said = _exchange_words(json.dumps([mine, str(problem or "")]), context.tensor.ranks if context else ())
    checked = _or_raise(context, problem)
    for rank, word in said.items():
        theirs, trouble = json.loads(word)
        if trouble:
            raise LaunchError(
                f"Process {rank} cannot shard: {trouble}",
                rule="All processes of a job shard, or none does",
                remedy="See what that process says",
            )
        if rank in checked.tensor.ranks and theirs != mine:
            raise ConfigError(
                f"Process {dist.get_rank()} shards over {mine}, process {rank}, which is in it, over {theirs}",
                rule="The members of a group shard over the same group",
                remedy="Give every process the group that it belongs to, made by the same code on all of them",
            )
    return checked


def _exchange_words(word: str, members: Sequence[int]) -> dict[int, str]:
    """What the processes said, by global rank: all of ``members``, and of the others those that spoke in time."""
    store, rank = _get_default_store(), dist.get_rank()
    turn = store.add(f"shardformer/turn/{rank}", 1)  # the n-th model that a process shards meets the n-th of the others
    store.set(f"shardformer/group/{turn}/{rank}", word)
    if not members:
        return {}
    keys = {r: f"shardformer/group/{turn}/{r}" for r in range(dist.get_world_size())}
    store.wait([keys[r] for r in members])
    others = [r for r in keys if r not in members]
    if others:
        try:
            store.wait([keys[r] for r in others], timedelta(seconds=BYSTANDER_S))
        except (dist.DistStoreError, RuntimeError):  # a file store says RuntimeError
            others = [r for r in others if store.check([keys[r]])]
    return {r: store.get(keys[r]).decode() for r in (*members, *others)}


def _or_raise(context: ParallelContext | None, problem: ShardFormerError | None) -> ParallelContext:
    if problem is not None:
        raise problem
    assert context is not None
    return context


def agree(context: ParallelContext, make: Callable[[], T], lines_of: Callable[[T], list[str]] = lambda _: []) -> T:
    """What ``make`` gives on this rank, once it is known that no rank failed to make it and that all made the same.

    Args:
        lines_of: what was made, as lines that are equal on ranks that agree.

    Every rank raises when one of them cannot make it, or when they differ. Communicates one gather of a hash an axis.
    """
    made: T | None = None
    problem: Exception | None = None
    lines: list[str] = []
    try:
        made = make()
        lines = lines_of(made)
    except Exception as error:  # any failure of one rank must reach the others, which would wait for it
        problem = error
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers = _gather((digest, _said(problem)), context)
    if problem is not None:
        raise problem
    for rank, (_, said) in answers:
        if said is not None:
            raise ConfigError(
                f"Rank {rank} cannot shard this model: {said}",
                rule="All ranks shard the same model in the same way, or none does",
                remedy="See what that rank says",
            )
    if len({digest for _, (digest, _) in answers}) > 1:
        _raise_difference(_gather(lines, context))
    return made  # type: ignore[return-value]


def _said(problem: Exception | None) -> str | None:
    if problem is None or isinstance(problem, ShardFormerError):
        return str(problem) if problem else None
    return f"{type(problem).__name__}: {problem}"


def _gather(value: T, context: ParallelContext) -> list[tuple[int, T]]:
    """(global rank, value) of every rank of the grid's tensor and data axes."""
    mine = (dist.get_rank() if dist.is_initialized() else 0, value)
    return [pair for row in gather_objects(gather_objects(mine, context.tensor), context.data) for pair in row]


def _raise_difference(all_lines: list[tuple[int, list[str]]]) -> None:
    first, reference = all_lines[0]
    for rank, lines in all_lines:
        if lines != reference:
            pairs = zip(reference + [""] * len(lines), lines + [""] * len(reference), strict=False)
            ours, theirs = next((a, b) for a, b in pairs if a != b)
            raise ConfigError(
                f"Ranks disagree on what to do: rank {first} has {ours or 'nothing more'!r}, "
                f"rank {rank} has {theirs or 'nothing more'!r}",
                rule="All ranks shard the same model in the same way",
                remedy="Build the model and the config from the same settings on every rank",
            )


def model_lines(model: nn.Module) -> list[str]:
    """What a model is, as far as all ranks must have the same."""
    return [type(model).__name__] + [
        f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in model.named_parameters()
    ]


def agree_on_weights(model: nn.Module, axes: list[Axis]) -> list[str]:
    """Makes every rank hold the first rank's weights and buffers, when samples of them show that they differ.

    Returns notes of what was done. Communicates one gather of a few numbers a tensor; the tensors only if they differ.
    """
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.numel()]
    notes = []
    for axis in axes:
        if axis.size == 1 or not tensors:
            continue
        mine = torch.stack([_sample(t) for t in tensors])[None]
        every = all_gather(mine, axis, 0, purpose="check")
        if bool((every == every[0]).all()):
            continue
        for t in tensors:
            broadcast(t.data, axis)
        notes.append(f"The {axis.name} ranks held different weights: all took those of rank 0.")
    return notes


def _sample(t: Tensor) -> Tensor:
    flat: Any = t.detach().reshape(-1)
    some = flat[:: max(flat.numel() // 1024, 1)][:2048].cpu().double().nan_to_num()
    weights = torch.arange(1, some.numel() + 1, dtype=torch.float64)
    return torch.stack([some.sum(), (some * weights.cos()).sum()])
