"""Memory of the device for the units of stage 3: chunks that are used again and again, and which units stay in them.

Fang et al., "PatrickStar: Parallel Training of Pre-trained Models via Chunk-based Dynamic Memory Management" (2022):
parameters lie in chunks of one size, gradients take the chunks of the parameters that they belong to, and what is
needed last is evicted first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from shardformer.comm.values import has_values, memory_of
from shardformer.optim.stage3.units import Unit

FREE_CHUNKS = 3
LEAST = 0.5
"""Of a chunk, the part that must be filled."""
OURS = 2
"""Counts of a chunk's storage where nobody else looks at it: the chunk's, and that of looking."""


class Chunks:
    """Gives memory for gathered units, and for their gradients when these are sent.

    What has about the size that most units have gets a chunk that was used before; anything else gets new memory. A
    chunk that somebody still looks at is left to them.

    """

    def __init__(self) -> None:
        self._size = 0
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def fit(self, sizes: Sequence[int]) -> None:
        """Chunks are as large as most of these, in bytes."""
        counts = Counter(sizes)
        self._size = max(counts, key=lambda size: (counts[size] * size, size), default=0)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = numel * dtype.itemsize
        if not 0 < LEAST * self._size <= size <= self._size or not has_values(torch.empty(0)):
            return torch.empty(numel, dtype=dtype, device=device)
        found = next((chunk for chunk in self._free if chunk.device == device), None)
        if found is None:
            found = torch.empty(self._size, dtype=torch.uint8, device=device)
        else:
            self._free = [chunk for chunk in self._free if chunk is not found]
        self._lent[memory_of(found)] = found
        return found[:size].view(dtype)

    def give_back(self, memory: int) -> None:
        """Nobody wants the values in this memory any more: see ``memory_of``."""
        chunk = self._lent.pop(memory, None)
        if chunk is None or len(self._free) >= FREE_CHUNKS:
            return
        if torch._C._storage_Use_Count(chunk.untyped_storage()._cdata) <= OURS:
            self._free.append(chunk)


class Residents:
    """Units that stay on the device behind their use in a forward, since its backward reads them first.

    A backward goes through the layers from the last one, so that the unit that was used longest ago is needed last.

    Args:
        room: bytes that they may take.
    """

    def __init__(self, room: float = 0.0) -> None:
        self.room = room
        self._kept: deque[Unit] = deque()

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._kept

    def leave(self, unit: Unit) -> list[Unit]:
        """A unit's turn is over in a forward. Returns those that have to go. All ranks call it alike."""
        if unit in self._kept:
            self._kept.remove(unit)
        self._kept.append(unit)
        gone = []
        while sum(each.size for each in self._kept) > self.room:
            gone.append(self._kept.popleft())
        return gone

    def clear(self) -> None:
        self._kept.clear()
