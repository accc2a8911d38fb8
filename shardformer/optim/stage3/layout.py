"""Lays a model out for ZeRO stage 3: units, their shards, and the walk through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardformer.comm.calls import come
from shardformer.comm.collectives import gather_numbers, gather_objects
from shardformer.layout.state import ShardedState
from shardformer.optim.offload.host import Host
from shardformer.optim.settings import Settings
from shardformer.optim.shards import Gathered, Shard
from shardformer.optim.stage3.gradients import UnitReducer
from shardformer.optim.stage3.memory import Chunks
from shardformer.optim.stage3.units import Unit, group_params
from shardformer.optim.stage3.walk import Walk
from shardformer.reduce.bucket import Bucket, Gradient, HandOver
from shardformer.reduce.buckets import GradientReducer
from shardformer.transformers_compat import decode_together


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
    own = [r for r in table.reducers if isinstance(r, GradientReducer) and not _is_of_stages(r)]
    rest = [r for r in table.reducers if r not in own]
    gradients = {id(g.param): g for reducer in own for g in reducer.gradients}
    for reducer in own:
        reducer.close()
    members = [
        (name, [gradients[id(p)] for p in params if _is_cut(p, settings.layout.keep_frozen) and id(p) in gradients])
        for name, params in group_params(model)
    ]
    chunks = Chunks()
    units, buckets = _make_units([each for each in members if each[1]], settings, host, chunks)
    walk = _make_walk(model, table, units, settings)
    overlaps = settings.sending.overlap
    trained = [index for index, made in buckets.items() if made]
    if trained:
        buckets[min(trained)][-1].watch = table.watch
    walk.reducer = UnitReducer(units, buckets, end, walk.arrived, table.entries, overlaps=overlaps, memory=chunks)
    table.reducers = [walk.reducer, *rest]
    table.parameters = walk
    axis = walk.axis
    decode_together(
        model, lambda: come("generate", axis), lambda mine: any(row[0] for row in gather_numbers([int(mine)], axis))
    )
    return walk, [shard for unit in units for shard in unit.shards if shard.gradients[0].param.requires_grad]


def _make_units(
    members: Sequence[tuple[str, list[Gradient]]], settings: Settings, host: Host | None, chunks: Chunks
) -> tuple[list[Unit], dict[int, list[Bucket]]]:
    """The units, whose parameters are hidden from now on, and by their numbers the buckets of what trains."""
    precision = settings.precision
    gathered = Gathered(chunks.take, host.link if host is not None and settings.offload.parameters else None)
    units: list[Unit] = []
    buckets: dict[int, list[Bucket]] = {}
    sizes: list[int] = []
    for name, found in members:
        params: list[Any] = [g.param for g in found]
        unit = Unit(len(units), name, params)
        unit.give_back = chunks.give_back
        made = _buckets(found, precision.reduce_dtype)
        for bucket in made:
            trains = bucket.gradients[0].param.requires_grad
            bucket.memory = chunks.take
            there, rounding = (host, precision.rounding) if trains else (None, None)
            unit.shards.append(Shard(bucket, precision.dtype, gathered=gathered, host=there, rounding=rounding))
        buckets[unit.index] = [bucket for bucket in made if bucket.gradients[0].param.requires_grad]
        parts = [_bytes_of(shard) for shard in unit.shards]
        unit.size = sum(parts)
        sizes += parts
        unit.hide()
        units.append(unit)
    chunks.fit(sizes)
    return units, buckets


def _bytes_of(shard: Shard) -> int:
    """Of what is gathered, and of its gradients: behind each rank's part of these stands a count for each."""
    return (shard.length + len(shard.gradients)) * shard.axis.size * shard.dtype.itemsize


def _make_walk(model: nn.Module, table: ShardedState, units: Sequence[Unit], settings: Settings) -> Walk:
    wide = [name for name, size in table.context.grid.sizes.items() if size > 1 and name != "pipe"]
    axis = table.context.merged(*(wide or ["data"]))
    for unit, sizes in zip(units, zip(*gather_objects([unit.size for unit in units], axis), strict=True), strict=True):
        unit.size = max(sizes)
    asked = settings.layout.reshard_after_forward
    frees = table.context.pipe.size == 1 if asked is None else asked is not False
    stage_forward = None if table.stages is None else table.stages.stage_forward

    def part() -> Any:
        run = stage_forward.now if stage_forward is not None else None
        return None if run is None else run.span.start

    walk = Walk(model, units, axis, frees=frees, gathers_ahead=settings.sending.overlap, part=part)
    walk.residents.room = asked if isinstance(asked, int) and not isinstance(asked, bool) else 0
    if stage_forward is not None:
        stage_forward.when_left.append(walk.leave_early)
    return walk


def _is_of_stages(reducer: GradientReducer) -> bool:
    return any(gradient.entry.reduction.stages for gradient in reducer.gradients)


def _is_cut(param: nn.Parameter, keep_frozen: bool) -> bool:
    return param.requires_grad or (not keep_frozen and (param.is_floating_point() or param.is_complex()))


def _buckets(gradients: Sequence[Gradient], dtype: torch.dtype | None) -> list[Bucket]:
    """One for each set of ranks, dtype and device, of what trains and of what does not."""
    found: dict[tuple[Any, ...], Bucket] = {}
    for gradient in gradients:
        param = gradient.param
        kind = (gradient.axis.ranks, param.dtype, param.device, param.requires_grad)
        bucket = found.setdefault((*kind, gradient.is_whole, gradient.is_shared), Bucket(gradient.axis, dtype))
        bucket.gradients.append(gradient)
        gradient.bucket, gradient.arrived = bucket, False
    return list(found.values())
