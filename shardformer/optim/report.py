"""What a rank keeps under ZeRO, in bytes by kind, and how fast what it keeps elsewhere comes and goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from shardformer.comm.link import DOWN, UP
from shardformer.comm.values import memory_of
from shardformer.layout.state import ShardedState
from shardformer.optim.memory import Memory, said_bytes
from shardformer.optim.offload.host import Host
from shardformer.optim.offload.paged import Files, PagedPart
from shardformer.optim.settings import Settings
from shardformer.optim.sharded_gradient import ShardedGradient
from shardformer.optim.shards import Shard
from shardformer.optim.stage3.units import Unit


def held(
    table: ShardedState, shards: Sequence[Shard], units: Sequence[Unit], optimizers: Sequence[Optimizer]
) -> Memory:
    """What is there now: counted, each memory once."""
    cut_ones = [shard for unit in units for shard in unit.shards]
    cut = {id(gradient.param) for shard in cut_ones for gradient in shard.gradients}
    resting = [shard.own for shard in cut_ones if shard.rests_on_host]
    lasting = [entry.param for entry in table.entries if id(entry.param) not in cut]
    gathered = [base for unit in units for base in unit.bases]
    here = [shard for shard in shards if shard.host is None]
    states = {id(piece.value): piece for shard in here for piece in shard.pieces}
    return Memory(
        parameters=_bytes([*lasting, *(shard.own for shard in cut_ones if not shard.rests_on_host)]),
        gathered=_bytes(gathered),
        gradients=_bytes([s.sum for s in here if s.sum is not None] + _grads(table)),
        masters=_bytes([x for shard in here for x in _masters_of(shard)]),
        states=_bytes(_states(optimizers, states)),
        host=_bytes([*resting, *(x for s in shards if s.host is not None for x in _on_host(s, optimizers))]),
        disk=sum(s.host.bytes_in_file for s in shards if isinstance(s.host, PagedPart)),
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum({memory_of(x): x.untyped_storage().nbytes() for x in tensors}.values())


def _grads(table: ShardedState) -> list[Tensor]:
    """What backwards left that are in ``no_sync``; else ``.grad`` shows what shards have."""
    grads = [entry.param.grad for entry in table.entries]
    return [grad for grad in grads if grad is not None and not isinstance(grad, ShardedGradient)]


def _masters_of(shard: Shard) -> list[Tensor]:
    if shard.rounded is not None:
        return [shard.rounded.rest] if shard.rounded.rest is not None else []
    return [piece.value for piece in shard.pieces] if shard.has_masters else []


def _states(optimizers: Sequence[Optimizer], pieces: Mapping[int, object]) -> list[Tensor]:
    found = (state for o in optimizers for value, state in o.state.items() if id(value) in pieces)
    return [x for state in found for x in state.values() if isinstance(x, Tensor) and x.dim()]


def _on_host(shard: Shard, optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    assert shard.host is not None
    yield from shard.host.tensors()
    yield from _states(optimizers, {id(piece.value): piece for piece in shard.pieces})


def lines(settings: Settings, optimizers: Sequence[Optimizer], memory: Memory, host: Host | None) -> str:
    """For ``describe``."""
    precision, offload = settings.precision, settings.offload
    title = [f"ZeRO stage {settings.stage}", precision.parameters, *(type(o).__name__ for o in optimizers)]
    if precision.rounding is not None:
        title.append(f"no masters: {precision.rounding}")
    if offload.to is not None:
        title.append(f"offload to {offload.to}")
    agrees = "in every backward, also under no_sync" if settings.stage >= 2 else "once a step under no_sync"
    found = [", ".join(title), f"gradients are agreed on {agrees}", "", "on this rank now", str(memory)]
    speeds = {f"copied {way}": host.link.bandwidth(way) for way in (DOWN, UP)} if host is not None else {}
    if isinstance(host, Files):
        speeds |= {f"{way}, {host.disk.buffers} buffers": host.disk.bandwidth(way) for way in host.disk.moved}
    measured = [f"{name}: {said_bytes(speed)} a second" for name, speed in speeds.items() if speed]
    return "\n".join([*found, *measured])
