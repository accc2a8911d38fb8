"""The full tensor of which every rank holds a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from shardformer.comm.collectives import all_gather
from shardformer.layout.spec import ShardSpec
from shardformer.mesh.axis import Axis


def gather_full(local: Tensor, spec: ShardSpec, axis: Callable[[str], Axis]) -> Tensor:
    """The full tensor, on every rank; a copy where nothing is cut.

    Communicates one all-gather for each axis that the tensor is cut over, the innermost first.

    Args:
        axis: name of an axis -> the axis.
    """
    return gather_all([local], [spec], axis)[0]


def gather_all(tensors: Sequence[Tensor], specs: Sequence[ShardSpec], axis: Callable[[str], Axis]) -> list[Tensor]:
    """The full tensors of several, on every rank, gathered together: one message for all that are cut alike.

    Communicates one all-gather for each axis that tensors are cut over, for all of these axes and dtype at once.
    """
    full, alike = dict[int, Tensor](), dict[object, list[int]]()
    for i, (local, spec) in enumerate(zip(tensors, specs, strict=True)):
        if spec.is_sharded:
            alike.setdefault((tuple(spec.axes.items()), local.dtype), []).append(i)
        else:
            full[i] = local.detach().clone()
    for group in alike.values():
        joined = _gather_alike([tensors[i] for i in group], [specs[i] for i in group], axis)
        full.update(zip(group, joined, strict=True))
    return [full[i] for i in range(len(tensors))]


def _gather_alike(tensors: Sequence[Tensor], specs: Sequence[ShardSpec], axis: Callable[[str], Axis]) -> list[Tensor]:
    """The full tensors of some that are cut over the same axes."""
    places, axes = specs[0].places(), specs[0].axes
    flat = torch.cat([local.detach().reshape(-1) for local in tensors])
    held = [[prod(spec.local_shape(c)) for spec in specs] for c in places]
    sizes = {tuple(c.items()): sum(of_place) for c, of_place in zip(places, held, strict=True)}
    names = list(axes)
    for at in range(len(names) - 1, -1, -1):
        own = {name: axis(name).rank for name in names[:at]}
        line = [tuple({**own, names[at]: rank}.items()) for rank in range(axes[names[at]])]
        flat = all_gather(flat, axis(names[at]), 0, lengths=[sizes[place] for place in line], purpose="gather")
        merged: dict[tuple[tuple[str, int], ...], int] = {}
        for place, size in sizes.items():  # what each rank holds, then what it has gathered
            merged[place[:at]] = merged.get(place[:at], 0) + size
        sizes = merged
    pieces = iter(flat.split([size for of_place in held for size in of_place]))
    parts = [[next(pieces).view(spec.local_shape(c)) for spec in specs] for c in places]
    return [spec.join(of_tensor) for spec, of_tensor in zip(specs, zip(*parts, strict=True), strict=True)]
