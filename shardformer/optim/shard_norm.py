"""The norm of all gradients under ZeRO, from what each rank keeps of their sums; and which of them is not finite."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from shardformer.comm.collectives import all_reduce, gather_objects
from shardformer.comm.values import has_values
from shardformer.errors import ConfigError, InputError
from shardformer.layout.state import ShardedState
from shardformer.optim.shards import EDITS, Shard
from shardformer.reduce.bucket import Gradient

ALIKE = ("data", "sequence")
"""Axes along which ranks have parts of the same gradients."""
DIFFER = 2.0**32
"""Is added to the number of ranks with a problem where ranks differ."""


def norm_of_shards(
    shards: Sequence[Shard],
    table: ShardedState,
    stage: int,
    problem: Exception | None = None,
    only: Collection[int] | None = None,
    *,
    in_stage: bool = False,
) -> Tensor:
    """The norm of the gradients of the whole model, alike on all ranks. Communicates four numbers over each axis.

    Raises ConfigError, on all ranks, where scripts on them did other things to gradients.

    Args:
        problem: why this rank has none; all ranks then raise.
        only: of which parameters, by identity; None: of all.
        in_stage: whether the ranks of one pipeline stage alone call it.
    """
    device = table.context.device
    here, there = (torch.zeros(4, dtype=torch.float64, device=place) for place in (device, "cpu"))
    edits = float(sum(shard.edits for shard in shards) % EDITS)
    there[1:] += torch.tensor([float(problem is not None), edits, edits**2], dtype=torch.float64)
    for shard in shards if problem is None else ():
        total, found = here if shard.host is None else there, shard.sum
        for piece in shard.pieces:
            is_asked = only is None or id(piece.gradient.param) in only
            if found is not None and is_asked and shard.had[piece.number] and _counts(piece.gradient, table, stage):
                total[0] += torch.linalg.vector_norm(found[piece.at]).to(total) ** 2
    total, count = here + there.to(device), 1
    axes = sorted(table.context.own_axes, key=lambda axis: axis.name not in ALIKE)
    axes = [axis for axis in axes if not (in_stage and axis.name == "pipe")]
    for axis in axes:
        if axis.name in ALIKE:
            count *= axis.size
        else:
            total, count = _compared(total, count), 0
        total = all_reduce(total, axis, purpose="norm")
    total = _compared(total, count)
    if problem is not None:
        raise problem
    total, problems = total[0], total[1]
    if has_values(problems) and bool(problems >= DIFFER):
        raise ConfigError(
            "Ranks changed gradients in different ways since the last zero_grad",
            rule="Each rank has a part of a gradient, so that what a script does to p.grad it does on all ranks",
            remedy="Look for what one rank does alone: changes of p.grad under `if rank == 0:`, or where its own loss "
            "or batch decides",
        )
    if has_values(problems) and bool(problems):
        raise ConfigError(
            "Another rank refused its gradients or parameters, and no rank made the step",
            rule="All ranks make a step together, or none does",
            remedy="See what that rank reports",
        )
    is_wide = any(entry.param.dtype in (torch.float64, torch.complex128) for entry in table.entries)
    return total.sqrt() if is_wide else total.sqrt().float()


def _compared(total: Tensor, count: int) -> Tensor:
    """Of sums over so many ranks, what says whether all of them have one number of edits; of no ranks as it was."""
    differs = (count * total[3] - total[2] ** 2).clamp(min=0.0, max=1.0) * float(count > 0)
    return torch.stack([total[0], total[1] + DIFFER * differs, total[2], total[3]])


def _counts(gradient: Gradient, table: ShardedState, stage: int) -> bool:
    """Whether this rank counts what it has of a parameter: of what ranks hold alike, the first one does."""
    reduction, context = gradient.entry.reduction, table.context
    coords = context.coords
    if stage > 0:
        own = {*reduction.sum_over, *reduction.norm_over, *(["pipe"] if reduction.stages else [])}
    elif reduction.stages and coords["pipe"] != reduction.stages[0]:
        return False
    else:
        cut = gradient.entry.spec.axes if gradient.is_shared else ()
        own = {*reduction.norm_over} - {*reduction.sum_over, *cut}
    others = context.finest(context.grid.sizes) - context.finest(own)
    return all(coords[name] == 0 for name in others)


def nonfinite(shards: Sequence[Shard], table: ShardedState, norm: Tensor) -> InputError:
    """Names the first parameter whose gradient is not finite, and the first rank that keeps it. All ranks call it."""
    order = {id(entry): number for number, entry in enumerate(table.entries)}
    found = [
        (order[id(piece.entry)], table.context.rank, piece.entry.name)
        for shard in shards
        for piece in shard.pieces
        if shard.sum is not None and not bool(torch.isfinite(shard.sum[piece.at]).all())
    ]
    for axis in table.context.own_axes:
        found = [item for theirs in gather_objects(found, axis) for item in theirs]
    _, rank, name = min(found, default=(0, 0, "some parameter"))
    return InputError(
        f"The gradient of {name} is not finite, on rank {rank}, and so is the norm of all: {norm}",
        rule="A step with such gradients would make the weights NaN; nothing was changed",
        remedy="Look at the loss and the batch, call optimizer.zero_grad(), or write on_nonfinite='skip'",
    )
