"""Keep some of the offloaded optimizer shards and gathered ZeRO-3 layers in free GPU memory.

The user sets the amount, or ShardFormer measures the memory that is free after the first step. Optimizer shards whose
gradients are reduced last stay on the device, because the gradients of earlier shards can be copied to the host during
the backward pass. The host and the device update their shards at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardformer.comm.collectives import all_gather_objects
from shardformer.errors import ConfigError
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.host import FREE_MEMORY
from shardformer.zero.config import ZeroOptions
from shardformer.zero.flat_shards import FlatShard
from shardformer.zero.stage3_parameters import UnshardedGroupCache

MARGIN = 0.9
"""Fraction of the free memory to use. The remaining fraction allows for memory fragmentation."""


def check_free_memory_option(settings: ZeroOptions, device: torch.device) -> None:
    """Raise ConfigError if an option is "free", but the free memory of the device is unknown."""
    brings = settings.offload.on_device == FREE_MEMORY
    stays = settings.stage == 3 and settings.reshard_after_forward == FREE_MEMORY
    if (brings or stays) and device.type != "cuda":
        option, example = ("on_device", "0.5") if brings else ("reshard_after_forward", "2**30")
        raise ConfigError(
            f"{option}='free' requires a CUDA device, but the device is {device}.",
            remedy=f"Set {option} to a number, such as {example}.",
        )


class DevicePlacement:
    """Moves offloaded optimizer shards and gathered layers to the device, up to a memory limit.

    A limit that the user has set applies immediately. "free" applies after the first step.

    Args:
        shards: The offloaded shards, in reverse order of their gradient reduction.
        unsharded_cache: Cache for the gathered layers of stage 3, or None for other stages.
    """

    def __init__(
        self,
        settings: ZeroOptions,
        shards: Sequence[FlatShard],
        unsharded_cache: UnshardedGroupCache | None,
        optimizers: Sequence[Optimizer],
        context: ParallelContext,
    ) -> None:
        on_device = settings.offload.on_device
        self._shards, self._optimizers, self._context = shards, optimizers, context
        self._moves_shards = on_device == FREE_MEMORY and bool(shards)
        self._unsharded_cache = unsharded_cache if settings.reshard_after_forward == FREE_MEMORY else None
        self._is_open = self._moves_shards or self._unsharded_cache is not None
        if self._is_open:
            torch.cuda.reset_peak_memory_stats(context.device)
        if not isinstance(on_device, str):
            self._move_shards_to_device(
                on_device * sum(shard.length for shard in shards), [shard.length for shard in shards]
            )

    def after_step(self) -> None:
        """Move optimizer shards and layers into the free GPU memory after the first step.

        The first call communicates the free memory and, with ``on_device="free"``, the size of each offloaded shard.
        """
        if not self._is_open:
            return
        self._is_open = False
        max_bytes: float = get_min_free_bytes(self._context.device) * MARGIN
        for axis in self._context.base_axes:
            max_bytes = min(all_gather_objects(max_bytes, axis))
        if self._moves_shards:
            max_bytes = self._move_shards_to_device(
                max_bytes, [self._compute_device_bytes(shard) for shard in self._shards]
            )
        if self._unsharded_cache is not None:
            self._unsharded_cache.max_bytes = max_bytes

    def _move_shards_to_device(self, max_bytes: float, shard_sizes: Sequence[float]) -> float:
        """Move the offloaded shards that fit into ``max_bytes`` to the device, and return how many bytes are left."""
        for shard, size in zip(self._shards, shard_sizes, strict=True):
            if size <= max_bytes:
                max_bytes -= size
                move_shard_to_device(shard, self._optimizers)
        return max_bytes

    def _compute_device_bytes(self, shard: FlatShard) -> float:
        found = shard.length * shard.wide_dtype.itemsize * (1 + (shard.wide_dtype != shard.dtype))
        for param_slice in shard.slices:
            states = (optimizer.state.get(param_slice.value, {}) for optimizer in self._optimizers)
            found += sum(x.nbytes for state in states for x in state.values() if isinstance(x, Tensor))
        most: float = max(all_gather_objects(found, shard.axis))
        return most


def get_min_free_bytes(device: torch.device) -> float:
    """Return how many bytes of GPU memory were free at the peak of memory use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


def move_shard_to_device(shard: FlatShard, optimizers: Sequence[Optimizer]) -> None:
    """Move the offloaded master weights and optimizer states of a shard to the device between two steps."""
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
