"""The memory that a rank needs in training, in bytes by kind, computed from shapes without allocating.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3.1 and
figure 1. The activations are not in it: they depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.errors import check_int
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, ShardingMetadata, check_module
from shardformer.offload.disk import FileShard, FileStore
from shardformer.offload.host import DEVICE_TO_HOST, HOST_TO_DEVICE, HostMemory, OffloadConfig
from shardformer.torch_compat import memory_of
from shardformer.zero.config import BucketOptions, Stage3Options, StepOptions, ZeroOptions, as_optimizer_list
from shardformer.zero.flat_shards import FlatShard
from shardformer.zero.gradient_view import ShardedGradient
from shardformer.zero.matrix_optimizers import state_bytes
from shardformer.zero.mixed_precision import MixedPrecision
from shardformer.zero.stage3_parameters import ParamGroup, group_params

GB = 1e9


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, by kind. Print it.

    Args:
        gathered: under stage 3, of the two units that are whole at a time, where they are largest.
        gradients: whole under stages 0 and 1, which keep those of all backwards of a step (``no_sync``); else the sum
            of this rank's part, in fp32 at the least.
        masters: of parameters in 16 bits.
        states: what the optimizer keeps.
        host: masters, states, gradients and buffers in the memory of the host; the parameters, if they rest there.
        disk: masters and states in files, twice.
    """

    parameters: float
    gathered: float
    gradients: float
    masters: float
    states: float
    host: float = 0
    disk: float = 0

    @property
    def total(self) -> float:
        """On the device."""
        return self.parameters + self.gathered + self.gradients + self.masters + self.states

    def __str__(self) -> str:
        rows = {**self.__dict__, "host": 0, "disk": 0, "total": self.total, "on the host": self.host}
        rows["in files"] = self.disk
        return "\n".join(f"{kind:12}{format_bytes(value):>12}" for kind, value in rows.items() if value)


def estimate_memory(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    stage: int = 1,
    precision: str | MixedPrecision = "fp32",
    offload: str | OffloadConfig | None = None,
    data: int | None = None,
) -> MemoryEstimate:
    """What ``shard_optimizer`` with the same arguments makes each rank keep. Allocates and communicates nothing.

    >>> model = nn.Linear(1000, 1000, bias=False, device="meta")
    >>> print(estimate_memory(model, torch.optim.AdamW(model.parameters()), stage=2, precision="bf16", data=4))
    parameters        2.0 MB
    gradients         1.0 MB
    masters           1.0 MB
    states            2.0 MB
    total             6.0 MB

    Args:
        model: sharded or plain; it may be on the meta device, or wait for its weights.
        data: data ranks; by default those of the grid of a sharded model, else one.
    """
    asked = ZeroOptions(
        stage, MixedPrecision.of(precision), StepOptions(), BucketOptions(), Stage3Options(), OffloadConfig.of(offload)
    )
    check_module(model)
    optimizers = as_optimizer_list(optimizer)
    if data is not None:
        check_int("data", data, unit="data ranks", example=4)
    parts = _ranks_per_parameter(model, data)
    narrow = asked.precision.dtype
    size = {id(p): (narrow or p.dtype).itemsize for p in model.parameters() if p.is_floating_point()}
    cut = {key: n if stage > 0 else 1 for key, n in parts.items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = sum(p.numel() * size.get(id(p), p.element_size()) for p in model.parameters() if not p.requires_grad)
    wide = {id(p): max(size[id(p)], 4) for p in trained}

    def total(bytes_of: dict[int, int], over: dict[int, int] | None) -> float:
        return sum(p.numel() * bytes_of[id(p)] / (over[id(p)] if over else 1) for p in trained)

    units = [sum(p.numel() * size[id(p)] for p in ps if p.requires_grad) for _, ps in group_params(model)]
    found = MemoryEstimate(
        total(size, cut if stage == 3 else None),
        max((a + b for a, b in pairwise([*units, 0])), default=0) if stage == 3 else 0,
        total(size, None) if stage < 2 else total(wide, cut),
        total(wide, cut) * _MASTERS[asked.precision.master_weights] if narrow is not None else 0,
        sum(
            state_bytes(each, group, p, wide[id(p)]) / cut[id(p)]
            for each in optimizers
            for group in each.param_groups
            for p in group["params"]
            if p.requires_grad
        ),
    )
    if asked.offload.to is not None:
        found = _offloaded(found, asked, total(wide, cut), total(size, cut))
    return replace(found, parameters=found.parameters + frozen)


_MASTERS = {"fp32": 1.0, "kahan": 0.5, "stochastic": 0.0}
"""Of the memory of masters in fp32."""


def _offloaded(here: MemoryEstimate, asked: ZeroOptions, masters: float, gradients: float) -> MemoryEstimate:
    """What goes to the host, or into files.

    Args:
        masters: bytes of all, which offload has in any precision; a sum of the gradients takes as much.
        gradients: bytes of this rank's part as it comes down.
    """
    share = asked.offload.on_device
    stays = share if isinstance(share, (int, float)) else 0.0
    rests = here.parameters if asked.offload.parameters else 0.0
    gone = masters + here.states
    return MemoryEstimate(
        here.parameters - rests,
        here.gathered,
        here.gradients * stays if asked.stage >= 2 else here.gradients,
        here.masters * stays,
        here.states * stays,
        host=rests + (masters + gradients + (0 if asked.offload.folder else gone)) * (1 - stays),
        disk=2 * gone * (1 - stays) if asked.offload.folder else 0,
    )


def _ranks_per_parameter(model: nn.Module, data: int | None) -> dict[int, int]:
    """By the identity of a parameter, over how many ranks ZeRO cuts it."""
    state = model.__dict__.get(METADATA_ATTRIBUTE)
    if not isinstance(state, ShardingMetadata):
        return {id(p): data or 1 for p in model.parameters()}
    sizes = {**state.context.sizes, **({"data": data} if data else {})}
    return {
        id(e.param): prod(sizes[name] for name in {*e.reduction.sum_over, *(["data"] if data else [])})
        * max(len(e.reduction.stages), 1)
        for e in state.entries
    }


def format_bytes(value: float) -> str:
    for unit, scale in (("GB", GB), ("MB", 1e6), ("KB", 1e3)):
        if value >= scale:
            return f"{value / scale:,.1f} {unit}"
    return f"{value:,.0f} B"


def measure_memory(
    table: ShardingMetadata, shards: Sequence[FlatShard], units: Sequence[ParamGroup], optimizers: Sequence[Optimizer]
) -> MemoryEstimate:
    """What is there now: counted, each memory once."""
    cut_ones = [shard for unit in units for shard in unit.shards]
    cut = {id(gradient.param) for shard in cut_ones for gradient in shard.gradients}
    resting = [shard.local for shard in cut_ones if shard.rests_on_host]
    lasting = [entry.param for entry in table.entries if id(entry.param) not in cut]
    gathered = [base for unit in units for base in unit.bases]
    here = [shard for shard in shards if shard.host is None]
    states = {id(piece.value): piece for shard in here for piece in shard.slices}
    return MemoryEstimate(
        parameters=_bytes([*lasting, *(shard.local for shard in cut_ones if not shard.rests_on_host)]),
        gathered=_bytes(gathered),
        gradients=_bytes([s.sum for s in here if s.sum is not None] + _grads(table)),
        masters=_bytes([x for shard in here for x in _masters_of(shard)]),
        states=_bytes(_states(optimizers, states)),
        host=_bytes([*resting, *(x for s in shards if s.host is not None for x in _on_host(s, optimizers))]),
        disk=sum(s.host.bytes_in_file for s in shards if isinstance(s.host, FileShard)),
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum({memory_of(x): x.untyped_storage().nbytes() for x in tensors}.values())


def _grads(table: ShardingMetadata) -> list[Tensor]:
    """What backwards left that are in ``no_sync``; else ``.grad`` shows what shards have."""
    grads = [entry.param.grad for entry in table.entries]
    return [grad for grad in grads if grad is not None and not isinstance(grad, ShardedGradient)]


def _masters_of(shard: FlatShard) -> list[Tensor]:
    if shard.rounded is not None:
        return [shard.rounded.rest] if shard.rounded.rest is not None else []
    return [piece.value for piece in shard.slices] if shard.has_masters else []


def _states(optimizers: Sequence[Optimizer], pieces: Mapping[int, object]) -> list[Tensor]:
    found = (state for o in optimizers for value, state in o.state.items() if id(value) in pieces)
    return [x for state in found for x in state.values() if isinstance(x, Tensor) and x.dim()]


def _on_host(shard: FlatShard, optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    assert shard.host is not None
    yield from shard.host.tensors()
    yield from _states(optimizers, {id(piece.value): piece for piece in shard.slices})


def memory_lines(
    settings: ZeroOptions, optimizers: Sequence[Optimizer], memory: MemoryEstimate, host: HostMemory | None
) -> str:
    """For ``describe_sharding``."""
    precision, offload = settings.precision, settings.offload
    title = [f"ZeRO stage {settings.stage}", precision.parameters, *(type(o).__name__ for o in optimizers)]
    if precision.rounding is not None:
        title.append(f"no masters: {precision.rounding}")
    if offload.to is not None:
        title.append(f"offload to {offload.to}")
    agrees = "in every backward, also under no_sync" if settings.stage >= 2 else "once a step under no_sync"
    found = [", ".join(title), f"gradients are agreed on {agrees}", "", "on this rank now", str(memory)]
    speeds = (
        {f"copied {way}": host.link.bandwidth(way) for way in (DEVICE_TO_HOST, HOST_TO_DEVICE)}
        if host is not None
        else {}
    )
    if isinstance(host, FileStore):
        speeds |= {f"{way}, {host.disk.buffers} buffers": host.disk.bandwidth(way) for way in host.disk.moved}
    measured = [f"{name}: {format_bytes(speed)} a second" for name, speed in speeds.items() if speed]
    return "\n".join([*found, *measured])
