"""Sending a tensor to one other rank of the pipe axis, and receiving one: what pipeline stages hand to each other."""

from __future__ import annotations

from torch import Tensor

from shardformer.comm.collectives import Pending
from shardformer.comm.recorder import bytes_of, record
from shardformer.mesh.context import ParallelContext

UP, DOWN = 1, 2
"""Towards a higher rank, and towards a lower one; tags that no exchange has, which sends without one."""


class PointToPoint:
    """Both ways between the ranks of the pipe axis. What is sent one way arrives in the order in which it was sent.

    Where a transport runs what two ranks send each other in turn, each way gets one of its own, so that neither waits
    for the other. All processes make their PointToPoint at one time.
    """

    def __init__(self, context: ParallelContext) -> None:
        self.axis = context.pipe
        self._transports = {UP: self.axis.transport, DOWN: self.axis.transport}
        if self.axis.size > 1 and self.axis.transport.sends_in_turn(context.device) and context.world is not None:
            self._transports[DOWN] = context.world.connect(context.grid.lines("pipe"))

    def send(self, x: Tensor, to: int, purpose: str) -> Pending:
        """Starts sending a contiguous tensor, which stays as it is until what is returned is done."""
        way = UP if to > self.axis.rank else DOWN
        noted = record("send", self.axis, bytes_of(x), purpose, ranks=2)
        return Pending([self._transports[way].send(x, to, way)], lambda: x, noted)

    def receive(self, x: Tensor, source: int, purpose: str) -> Pending:
        """Starts receiving into ``x``."""
        way = UP if source < self.axis.rank else DOWN
        noted = record("receive", self.axis, bytes_of(x), purpose, ranks=2)
        return Pending([self._transports[way].receive(x, source, way)], lambda: x, noted)
