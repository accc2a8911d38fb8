"""The norm of all gradients under ZeRO, from what each rank keeps of their sums; and which of them is not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardformer.comm.collectives import all_reduce, gather_objects
from shardformer.errors import InputError
from shardformer.layout.state import ShardedState
from shardformer.optim.shards import Shard
from shardformer.reduce.bucket import Gradient


def norm_of_shards(shards: Sequence[Shard], table: ShardedState, stage: int) -> Tensor:
    """The norm of the gradients of the whole model, alike on all ranks. Communicates one number over each axis."""
    device = table.context.device
    here, there = (torch.zeros((), dtype=torch.float64, device=place) for place in (device, "cpu"))
    for shard in shards:
        total, found = here if shard.host is None else there, shard.sum
        for piece in shard.pieces:
            if found is not None and shard.had[piece.number] and _counts(piece.gradient, table, stage):
                total += torch.linalg.vector_norm(found[piece.at]).to(total) ** 2
    total = here + there.to(device)
    for axis in table.context.own_axes:
        total = all_reduce(total, axis, purpose="norm")
    is_wide = any(entry.param.dtype == torch.float64 for entry in table.entries)
    return total.sqrt() if is_wide else total.sqrt().float()


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
