"""Lays a model out for ZeRO stage 3: units, their shards, and the walk through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardformer.layout.state import ShardedState
from shardformer.optim.offload.host import Host
from shardformer.optim.settings import Settings
from shardformer.optim.shards import Shard
from shardformer.optim.stage3.gradients import UnitReducer
from shardformer.optim.stage3.units import Unit, group_params
from shardformer.optim.stage3.walk import Walk
from shardformer.reduce.bucket import Bucket, Gradient, HandOver
from shardformer.reduce.buckets import GradientReducer


def lay_out_units(
    model: nn.Module,
    table: ShardedState,
    settings: Settings,
    end: HandOver,
    host: Host | None,
) -> tuple[Walk, list[Shard]]:
    """The walk, and the shards of what trains. What several stages hold together is left to its own reducer.

    Args:
        end: what becomes of the gradients.
        host: where what trains has its masters; None: on the device.
    """
    precision, layout = settings.precision, settings.layout
    own = [r for r in table.reducers if isinstance(r, GradientReducer) and not _is_of_stages(r)]
    rest = [r for r in table.reducers if r not in own]
    gradients = {id(g.param): g for reducer in own for g in reducer.gradients}
    for reducer in own:
        reducer.close()
    found = [
        (name, [gradients[id(p)] for p in params if _is_cut(p, layout.keep_frozen) and id(p) in gradients])
        for name, params in group_params(model)
    ]
    units: list[Unit] = []
    shards: list[Shard] = []
    buckets: dict[int, list[Bucket]] = {}
    for name, members in found:
        if members:
            params: list[Any] = [g.param for g in members]
            unit = Unit(len(units), name, params)
            buckets[unit.index] = []
            for bucket in _buckets(members, precision.reduce_dtype):
                trains = bucket.gradients[0].param.requires_grad
                shard = Shard(bucket, precision.dtype, keeps=True, host=host if trains else None)
                unit.shards.append(shard)
                if trains:
                    buckets[unit.index].append(bucket)
                    shards.append(shard)
            unit.hide()
            units.append(unit)
    wide = [name for name, size in table.context.grid.sizes.items() if size > 1 and name != "pipe"]
    axis = table.context.merged(*(wide or ["data"]))
    asked = layout.reshard_after_forward
    frees = table.context.pipe.size == 1 if asked is None else asked
    stage_forward = None if table.stages is None else table.stages.stage_forward

    def part() -> Any:
        run = stage_forward.now if stage_forward is not None else None
        return None if run is None else run.span.start

    overlaps = settings.sending.overlap
    walk = Walk(model, units, axis, frees=frees, gathers_ahead=overlaps, part=part)
    if stage_forward is not None:
        stage_forward.when_left.append(walk.leave_early)
    walk.reducer = UnitReducer(units, buckets, end, walk.arrived, table.entries, overlaps=overlaps)
    table.reducers = [walk.reducer, *rest]
    table.parameters = walk
    return walk, shards


def _is_of_stages(reducer: GradientReducer) -> bool:
    return any(gradient.entry.reduction.stages for gradient in reducer.gradients)


def _is_cut(param: nn.Parameter, keep_frozen: bool) -> bool:
    return param.is_floating_point() and (param.requires_grad or not keep_frozen)


def _buckets(gradients: Sequence[Gradient], dtype: torch.dtype | None) -> list[Bucket]:
    """One for each set of ranks, dtype and device, of what trains and of what does not."""
    found: dict[tuple[Any, ...], Bucket] = {}
    for gradient in gradients:
        param = gradient.param
        bucket = found.setdefault(
            (gradient.axis.ranks, param.dtype, param.device, param.requires_grad, gradient.is_whole),
            Bucket(gradient.axis, dtype),
        )
        bucket.gradients.append(gradient)
        gradient.bucket, gradient.arrived = bucket, False
    return list(found.values())
