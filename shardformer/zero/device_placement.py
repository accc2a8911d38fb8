"""What stays on the device as far as there is room: masters and states under offload, gathered layers under stage 3.

How much that is, is set, or it is what the first step left free of a GPU. Of masters and states those stay whose
gradients arrive last: those of the others have had time to come down. Both sides update at the same time.
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
from shardformer.zero.stage3_parameters import UnshardedCache

MARGIN = 0.9
"""The part of what is free that is taken: memory of a GPU is handed out in blocks."""


def check_free(settings: ZeroOptions, device: torch.device) -> None:
    """Raises ConfigError where what is free was asked for, and is not known."""
    brings = settings.offload.on_device == FREE_MEMORY
    stays = settings.stage == 3 and settings.layout.reshard_after_forward == FREE_MEMORY
    if (brings or stays) and device.type != "cuda":
        raise ConfigError(
            f"{'on_device' if brings else 'reshard_after_forward'}='free' on {device}",
            rule="What is free is known of a GPU; of the CPU, host and device are the same memory",
            remedy="Write on_device=0.5, which is a share, or reshard_after_forward=2**30, which is bytes",
        )


class DevicePlacement:
    """Brings shards back to the device, and lets layers stay there: what was set now, the rest after the first step.

    Args:
        shards: what is on the host; those whose gradients arrive last come first.
        residents: what stays of stage 3; None: another stage.
    """

    def __init__(
        self,
        settings: ZeroOptions,
        shards: Sequence[FlatShard],
        residents: UnshardedCache | None,
        optimizers: Sequence[Optimizer],
        context: ParallelContext,
    ) -> None:
        asked = settings.offload.on_device
        self._shards, self._optimizers, self._context = shards, optimizers, context
        self._brings = asked == FREE_MEMORY and bool(shards)
        self._residents = residents if settings.layout.reshard_after_forward == FREE_MEMORY else None
        self._is_open = self._brings or self._residents is not None
        if self._is_open:
            torch.cuda.reset_peak_memory_stats(context.device)
        if not isinstance(asked, str):
            self._bring(asked * sum(shard.length for shard in shards), [shard.length for shard in shards])

    def after_step(self) -> None:
        """Takes up what the first step left free. Communicates one number over each axis, once."""
        if not self._is_open:
            return
        self._is_open = False
        room: float = free_bytes(self._context.device) * MARGIN
        for axis in self._context.base_axes:
            room = min(all_gather_objects(room, axis))
        if self._brings:
            room = self._bring(room, [self._bytes(shard) for shard in self._shards])
        if self._residents is not None:
            self._residents.room = room

    def _bring(self, room: float, sizes: Sequence[float]) -> float:
        """Returns the room that is left."""
        for shard, size in zip(self._shards, sizes, strict=True):
            if size <= room:
                room -= size
                move_shard_to_device(shard, self._optimizers)
        return room

    def _bytes(self, shard: FlatShard) -> float:
        """What a shard takes on the device: masters, the sum of the gradients, states."""
        found = shard.length * shard.wide.itemsize * (1 + (shard.wide != shard.dtype))
        for piece in shard.slices:
            states = (optimizer.state.get(piece.value, {}) for optimizer in self._optimizers)
            found += sum(x.nbytes for state in states for x in state.values() if isinstance(x, Tensor))
        most: float = max(all_gather_objects(found, shard.axis))
        return most


def free_bytes(device: torch.device) -> float:
    """Of a GPU, what nothing took when most was taken."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


def move_shard_to_device(shard: FlatShard, optimizers: Sequence[Optimizer]) -> None:
    """Moves a shard's masters, and the optimizers' states of them, to the device, between two steps."""
    shard.move_to_device()
    values = {id(piece.value): piece.value for piece in shard.slices}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            counts_there: Any = group.get("fused") or group.get("capturable")
            for value in (values[id(p)] for p in group["params"] if id(p) in values):
                state = optimizer.state.get(value, {})
                for name, x in state.items():
                    if isinstance(x, Tensor) and (x.dim() or counts_there):
                        state[name] = x.to(shard.device)
