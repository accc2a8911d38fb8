"""Estimate or measure the training memory of one rank, and decide which offloaded shards fit into GPU memory.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3.1 and
figure 1. Activations are not included, because they depend on the batch.

With partial offload, some optimizer shards and gathered ZeRO-3 layers stay in free GPU memory. The user sets the
amount, or ShardFormer measures the memory that is free after the first step. Optimizer shards whose gradients are
reduced last stay on the device, because the gradients of earlier shards can be copied to the host during the backward
pass. The host and the device update their shards at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.comm.collectives import all_gather_objects
from shardformer.errors import ConfigError, check_int, format_bytes
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, ShardingMetadata, check_is_module
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.disk import DiskShard, FileOffloadManager
from shardformer.offload.host import DEVICE_TO_HOST, FREE_MEMORY, HOST_TO_DEVICE, HostOffloadManager, OffloadConfig
from shardformer.torch_compat import get_storage_id
from shardformer.zero.config import ZeroOptions, as_optimizer_list
from shardformer.zero.elementwise_trial import estimate_optimizer_state_bytes
from shardformer.zero.flat_shards import FlatParamShard
from shardformer.zero.gradient_view import ShardedGradient
from shardformer.zero.mixed_precision import MixedPrecision
from shardformer.zero.stage3_parameters import Stage3ParamGroup, UnshardedGroupCache, group_params_by_layer


@dataclass(frozen=True)
class MemoryEstimate:
    """The training memory of one rank in bytes, for each kind of tensor. ``print`` shows a table.

    Args:
        gathered: Under stage 3, the largest two consecutive layers, which are gathered at the same time.
        gradients: Full gradients for stages 0 and 1, which accumulate under ``no_sync``. For stages 2 and 3, this
            rank's shard, in fp32 or wider.
        masters: Master weights of 16-bit parameters.
        states: Optimizer states.
        host: Host memory for offloaded master weights, optimizer states, gradients, buffers and parameters.
        disk: Files with two copies of the master weights and the optimizer states.
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
        """Total number of bytes on the device."""
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
    """Estimate the training memory of one rank under ZeRO, before ``shard_optimizer`` is called.

    Takes the same arguments as ``shard_optimizer``, and communicates nothing.

    >>> model = nn.Linear(1000, 1000, bias=False, device="meta")
    >>> print(estimate_memory(model, torch.optim.AdamW(model.parameters()), stage=2, precision="bf16", data=4))
    parameters        2.0 MB
    gradients         1.0 MB
    masters           1.0 MB
    states            2.0 MB
    total             6.0 MB

    Args:
        model: A sharded or unsharded model. Its parameters may be on the meta device.
        data: Number of data-parallel ranks. By default, that of the model's mesh, or 1 for an unsharded model.
    """
    options = ZeroOptions(stage, MixedPrecision.from_value(precision), OffloadConfig.from_argument(offload))
    check_is_module(model)
    optimizers = as_optimizer_list(optimizer)
    if data is not None:
        check_int("data", data, unit="data ranks", example=4)
    narrow = options.precision.param_dtype
    size = {id(p): (narrow or p.dtype).itemsize for p in model.parameters() if p.is_floating_point()}
    ranks = {key: n if stage > 0 else 1 for key, n in _count_shard_ranks_per_param(model, data).items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = sum(p.numel() * size.get(id(p), p.element_size()) for p in model.parameters() if not p.requires_grad)
    wide = {id(p): max(size[id(p)], 4) for p in trained}
    full = sum(p.numel() * size[id(p)] for p in trained)
    sharded = sum(p.numel() * size[id(p)] / ranks[id(p)] for p in trained)
    sharded_wide = sum(p.numel() * wide[id(p)] / ranks[id(p)] for p in trained)
    states = sum(
        estimate_optimizer_state_bytes(each, group, p, wide[id(p)]) / ranks[id(p)]
        for each in optimizers
        for group in each.param_groups
        for p in group["params"]
        if p.requires_grad
    )
    units = [sum(p.numel() * size[id(p)] for p in ps if p.requires_grad) for _, ps in group_params_by_layer(model)]
    found = MemoryEstimate(
        parameters=sharded if stage == 3 else full,
        gathered=max((a + b for a, b in pairwise([*units, 0])), default=0) if stage == 3 else 0,
        gradients=full if stage < 2 else sharded_wide,
        masters=sharded_wide * _MASTERS[options.precision.master_weights] if narrow is not None else 0,
        states=states,
    )
    if options.offload.to is not None:
        found = _adjust_estimate_for_offload(found, options, sharded_wide, sharded)
    return replace(found, parameters=found.parameters + frozen)


_MASTERS = {"fp32": 1.0, "kahan": 0.5, "stochastic": 0.0}
"""Size of the master weights relative to fp32 master weights."""


def _adjust_estimate_for_offload(
    estimate: MemoryEstimate, options: ZeroOptions, wide_shard_bytes: float, shard_bytes: float
) -> MemoryEstimate:
    """Count offloaded tensors as host or disk memory instead of device memory."""
    share = options.offload.on_device
    stays = share if isinstance(share, (int, float)) else 0.0
    parameters = estimate.parameters if options.offload.parameters else 0.0
    # under offload, master weights exist in every precision, and the reduced gradients have the same size
    moved = wide_shard_bytes + estimate.states
    return MemoryEstimate(
        estimate.parameters - parameters,
        estimate.gathered,
        estimate.gradients * stays if options.stage >= 2 else estimate.gradients,
        estimate.masters * stays,
        estimate.states * stays,
        host=parameters + (wide_shard_bytes + shard_bytes + (0 if options.offload.folder else moved)) * (1 - stays),
        disk=2 * moved * (1 - stays) if options.offload.folder else 0,
    )


def _count_shard_ranks_per_param(model: nn.Module, num_data_ranks: int | None) -> dict[int, int]:
    """Count the ranks over which ZeRO shards each parameter, by ``id(param)``."""
    state = model.__dict__.get(METADATA_ATTRIBUTE)
    if not isinstance(state, ShardingMetadata):
        return {id(p): num_data_ranks or 1 for p in model.parameters()}
    sizes = {**state.context.sizes, **({"data": num_data_ranks} if num_data_ranks else {})}
    return {
        id(e.param): prod(sizes[name] for name in {*e.reduction.sum_over, *(["data"] if num_data_ranks else [])})
        * max(len(e.reduction.stages), 1)
        for e in state.entries
    }


def measure_memory(
    metadata: ShardingMetadata,
    shards: Sequence[FlatParamShard],
    param_groups: Sequence[Stage3ParamGroup],
    optimizers: Sequence[Optimizer],
) -> MemoryEstimate:
    """Measure the memory that the model and its optimizers currently use on this rank. Shared memory counts once."""
    unit_shards = [shard for unit in param_groups for shard in unit.shards]
    in_units = {id(gradient.param) for shard in unit_shards for gradient in shard.gradient_slots}
    params = [entry.param for entry in metadata.entries if id(entry.param) not in in_units]
    params += [shard.local for shard in unit_shards if not shard.is_offloaded]
    here = [shard for shard in shards if shard.host is None]
    # gradients that accumulate under no_sync; others are views of a shard
    grads = [
        g for entry in metadata.entries if (g := entry.param.grad) is not None and not isinstance(g, ShardedGradient)
    ]
    on_host = [shard.local for shard in unit_shards if shard.is_offloaded]
    on_host += [x for shard in shards if shard.host is not None for x in shard.host.get_host_tensors()]
    on_host += [
        x for shard in shards if shard.host is not None for x in _get_optimizer_state_tensors(optimizers, shard)
    ]
    return MemoryEstimate(
        parameters=_sum_storage_bytes(params),
        gathered=_sum_storage_bytes([base for unit in param_groups for base in unit.bases]),
        gradients=_sum_storage_bytes([total for shard in here if (total := shard.reduced_grads) is not None] + grads),
        masters=_sum_storage_bytes([x for shard in here for x in _get_master_weights_or_residuals(shard)]),
        states=_sum_storage_bytes([x for shard in here for x in _get_optimizer_state_tensors(optimizers, shard)]),
        host=_sum_storage_bytes(on_host),
        disk=sum(shard.host.num_reserved_bytes for shard in shards if isinstance(shard.host, DiskShard)),
    )


def _sum_storage_bytes(tensors: Sequence[Tensor]) -> int:
    return sum({get_storage_id(x): x.untyped_storage().nbytes() for x in tensors}.values())


def _get_master_weights_or_residuals(shard: FlatParamShard) -> list[Tensor]:
    if shard.rounded is not None:
        return [shard.rounded.rest] if shard.rounded.rest is not None else []
    return [p.value for p in shard.slices] if shard.has_masters else []


def _get_optimizer_state_tensors(optimizers: Sequence[Optimizer], shard: FlatParamShard) -> list[Tensor]:
    states = [o.state[p.value] for o in optimizers for p in shard.slices if p.value in o.state]
    return [x for state in states for x in state.values() if isinstance(x, Tensor) and x.dim()]


def format_memory_report(
    zero_options: ZeroOptions,
    optimizers: Sequence[Optimizer],
    memory_estimate: MemoryEstimate,
    host_manager: HostOffloadManager | None,
) -> str:
    """Format the ZeRO options, memory use and offload bandwidth as text for ``describe_sharding``."""
    precision, offload = zero_options.precision, zero_options.offload
    title = [f"ZeRO stage {zero_options.stage}", precision.parameters, *(type(o).__name__ for o in optimizers)]
    if precision.weight_rounding_mode is not None:
        title.append(f"no master weights: {precision.weight_rounding_mode}")
    if offload.to is not None:
        title.append(f"offload to {offload.to}")
    reduced = "in every backward pass, even under no_sync" if zero_options.stage >= 2 else "once per step under no_sync"
    found = [", ".join(title), f"gradients are reduced {reduced}", "", "memory of this rank", str(memory_estimate)]
    speeds: dict[str, float | None] = {}
    if host_manager is not None:
        speeds = {
            f"copied {way}": host_manager.link.get_measured_bandwidth(way) for way in (DEVICE_TO_HOST, HOST_TO_DEVICE)
        }
    if isinstance(host_manager, FileOffloadManager):
        speeds |= {
            f"{way}, {host_manager.disk.buffers} buffers": host_manager.disk.get_measured_bandwidth(way)
            for way in host_manager.disk.moved
        }
    return "\n".join([*found, *(f"{name}: {format_bytes(n)} per second" for name, n in speeds.items() if n)])


MARGIN = 0.9
"""Fraction of the free memory to use. The remaining fraction allows for memory fragmentation."""


def check_free_memory_option(zero_options: ZeroOptions, device: torch.device) -> None:
    """Raise ConfigError if an option is "free" on a device that is not a CUDA device."""
    brings = zero_options.offload.on_device == FREE_MEMORY
    stays = zero_options.stage == 3 and zero_options.reshard_after_forward == FREE_MEMORY
    if (brings or stays) and device.type != "cuda":
        option, example = ("on_device", "0.5") if brings else ("reshard_after_forward", "2**30")
        raise ConfigError(
            f"{option}='free' requires a CUDA device, but the device is {device}.",
            remedy=f"Set {option} to a number, such as {example}.",
        )


class DevicePlacementManager:
    """Keeps as many offloaded optimizer shards and gathered layers on the device as a memory limit permits.

    A limit that the user has set applies immediately. "free" applies after the first step.

    Args:
        shards: The offloaded shards, in reverse order of their gradient reduction.
        unsharded_cache: Cache for the gathered layers of stage 3, or None for other stages.
    """

    def __init__(
        self,
        zero_options: ZeroOptions,
        shards: Sequence[FlatParamShard],
        unsharded_cache: UnshardedGroupCache | None,
        optimizers: Sequence[Optimizer],
        context: ParallelContext,
    ) -> None:
        on_device = zero_options.offload.on_device
        self._shards, self._optimizers, self._context = shards, optimizers, context
        self._moves_shards = on_device == FREE_MEMORY and bool(shards)
        self._unsharded_cache = unsharded_cache if zero_options.reshard_after_forward == FREE_MEMORY else None
        self._is_open = self._moves_shards or self._unsharded_cache is not None
        if self._is_open:
            torch.cuda.reset_peak_memory_stats(context.device)
        if not isinstance(on_device, str):
            self._move_shards_to_device(
                on_device * sum(shard.length for shard in shards), [shard.length for shard in shards]
            )

    def fill_free_device_memory(self) -> None:
        """Fill the GPU memory that is free after the first step with optimizer shards and gathered layers.

        The first call communicates the free memory and, with ``on_device="free"``, the size of each offloaded shard.
        """
        if not self._is_open:
            return
        self._is_open = False
        max_bytes: float = get_free_bytes_at_peak(self._context.device) * MARGIN
        for axis in self._context.base_axes:
            max_bytes = min(all_gather_objects(max_bytes, axis))
        if self._moves_shards:
            max_bytes = self._move_shards_to_device(
                max_bytes, [self._compute_shard_device_bytes(shard) for shard in self._shards]
            )
        if self._unsharded_cache is not None:
            self._unsharded_cache.max_bytes = max_bytes

    def _move_shards_to_device(self, max_bytes: float, shard_bytes: Sequence[float]) -> float:
        """Move as many offloaded shards to the device as fit into ``max_bytes``, and return the remaining bytes."""
        for shard, size in zip(self._shards, shard_bytes, strict=True):
            if size <= max_bytes:
                max_bytes -= size
                move_shard_to_device(shard, self._optimizers)
        return max_bytes

    def _compute_shard_device_bytes(self, shard: FlatParamShard) -> float:
        found = shard.length * shard.wide_dtype.itemsize * (1 + (shard.wide_dtype != shard.dtype))
        for param_slice in shard.slices:
            states = (optimizer.state.get(param_slice.value, {}) for optimizer in self._optimizers)
            found += sum(x.nbytes for state in states for x in state.values() if isinstance(x, Tensor))
        most: float = max(all_gather_objects(found, shard.axis))
        return most


def get_free_bytes_at_peak(device: torch.device) -> float:
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


def move_shard_to_device(shard: FlatParamShard, optimizers: Sequence[Optimizer]) -> None:
    """Move a shard's offloaded master weights and optimizer states to the device between two steps."""
    shard.move_master_weights_to_device()
    values = {id(p.value): p.value for p in shard.slices}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            counts_there: Any = group.get("fused") or group.get("capturable")
            for value in (values[id(p)] for p in group["params"] if id(p) in values):
                state = optimizer.state.get(value, {})
                for name, x in state.items():
                    if isinstance(x, Tensor) and (x.dim() or counts_there):
                        state[name] = x.to(shard.device)
