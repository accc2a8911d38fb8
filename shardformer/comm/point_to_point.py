"""Sending a tensor to one other rank of an axis, and receiving one: what pipeline stages hand to each other."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardformer.comm.recorder import Collective, bytes_of
from shardformer.mesh.axis import Axis

UP, DOWN = 1, 2
"""Towards a higher rank, and towards a lower one; tags that no exchange has, which sends without one."""


class PointToPoint:
    """Both ways between the ranks of an axis. What is sent one way arrives in the order in which it was sent.

    NCCL runs what two ranks send each other on one stream in turn, so that each way needs a communicator of its own;
    gloo tells them apart by a tag. All processes make their point_to_point at one time.
    """

    def __init__(self, axis: Axis, all_ranks: list[list[int]]) -> None:
        self.axis = axis
        self._groups = {UP: axis.group, DOWN: axis.group}
        if axis.size > 1 and dist.get_backend(axis.group) == "nccl":
            self._groups[DOWN], _ = dist.new_subgroups_by_enumeration(all_ranks)

    def send(self, x: Tensor, to: int, purpose: str) -> Any:
        """Starts sending a contiguous tensor, which stays as it is until the work that is returned is done."""
        if self.axis.traffic.enabled[0]:
            self.axis.traffic.calls.append(Collective("send", self.axis.name, 2, bytes_of(x), purpose))
        way = UP if to > self.axis.rank else DOWN
        return dist.isend(x, self.axis.ranks[to], group=self._groups[way], tag=way)

    def receive(self, x: Tensor, source: int) -> Any:
        """Starts receiving into ``x``."""
        way = UP if source < self.axis.rank else DOWN
        return dist.irecv(x, self.axis.ranks[source], group=self._groups[way], tag=way)
