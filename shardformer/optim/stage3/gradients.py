"""Agrees on the gradients of stage 3: those of a unit together, when the walk through the units says so."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardformer.comm.values import memory_of
from shardformer.errors import ConfigError
from shardformer.layout.state import Entry
from shardformer.optim.stage3.memory import Chunks
from shardformer.optim.stage3.units import Unit
from shardformer.reduce.bucket import Bucket, Gradient, HandOver
from shardformer.reduce.pause import Pausable


class UnitReducer(Pausable):
    """Sends the gradients of one unit after the other, each when it is told to.

    Args:
        buckets: by the unit's index.
        arrived: called when a parameter of a unit got its gradient.
        entries: all parameters of the model; those that do not train now may not do so later.
        overlaps: whether what is sent travels while others are computed.
        memory: which the buckets take, and give back when they were sent.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Mapping[int, Sequence[Bucket]],
        end: HandOver,
        arrived: Callable[[Unit], None],
        entries: Sequence[Entry],
        *,
        overlaps: bool = True,
        memory: Chunks | None = None,
    ) -> None:
        self._units, self._buckets, self._end, self._arrived = units, buckets, end, arrived
        self._overlaps, self._memory = overlaps, memory
        self._frozen = [entry for entry in entries if not entry.param.requires_grad]
        self._under_way: list[Bucket] = []
        self.sent: set[int] = set()
        self.is_sealed = False  # whether what was sent is complete, so that nothing may come behind it
        for index, found in buckets.items():
            for gradient in (g for bucket in found for g in bucket.gradients):
                self._hook(gradient, index)

    def _hook(self, gradient: Gradient, index: int) -> None:
        # by weak references alone: the collector does not see through the node of autograd that keeps hooks
        reducer, held = weakref.ref(self), weakref.ref(gradient)

        def arriving(grad: Tensor) -> None:
            me, one = reducer(), held()
            if me is not None and one is not None:
                me._end.scale(one)

        def accumulated(param: Tensor) -> None:
            me, one = reducer(), held()
            if me is not None and one is not None:
                one.changed = one.arrived = True
                if one.is_sparse:
                    one.param.grad = one.param.grad.to_dense()  # type: ignore[union-attr]  # it is sparse
                me._check(one, me._units[index])
                me._arrived(me._units[index])

        param: Any = gradient.param
        param.register_hook(arriving)
        param.register_post_accumulate_grad_hook(accumulated)

    def _check(self, gradient: Gradient, unit: Unit) -> None:
        if self.is_sealed and unit.index in self.sent:
            raise ConfigError(
                f"A gradient of {gradient.entry.name} arrived after those of {unit.name} had been sent",
                rule="When a layer has all of its gradients is learnt in the first backward, and all ranks follow that",
                remedy="Train with stage=2, which waits for the end of the backward",
            )

    def is_complete(self, unit: Unit) -> bool:
        """Whether all parameters of a unit got their gradients here, and these were not sent."""
        found = self._buckets.get(unit.index, ())
        return bool(found) and unit.index not in self.sent and all(g.arrived for b in found for g in b.gradients)

    def has_new(self, unit: Unit) -> bool:
        """Whether there are gradients here that were not sent."""
        return any(gradient.is_new for bucket in self._buckets.get(unit.index, ()) for gradient in bucket.gradients)

    def send(self, unit: Unit) -> None:
        """Starts to sum the gradients of a unit. All ranks call it for the same units in the same order.

        Communicates one reduce-scatter for each bucket.
        """
        self.wait()
        self.sent.add(unit.index)
        self._under_way = list(self._buckets.get(unit.index, ()))
        for bucket in self._under_way:
            self._end.start(bucket)
            for gradient in bucket.gradients:
                gradient.changed = False
        if not self._overlaps:
            self.wait()

    def wait(self) -> None:
        """Waits for what was sent last, and hands it on."""
        for bucket in self._under_way:
            self._end.finish(bucket)
            flat, bucket.flat, bucket.work = bucket.flat, None, None
            if self._memory is not None and flat is not None:
                memory = memory_of(flat)
                del flat
                self._memory.give_back(memory)
        self._under_way = []

    def end_pass(self) -> None:
        """What a backward brought is all sent."""
        self.wait()
        self.sent = set()
        for gradient in (g for found in self._buckets.values() for bucket in found for g in bucket.gradients):
            gradient.arrived = False
        self._end.end_pass()

    def start(self) -> None:
        """After backwards that were all paused: sends what they left."""
        for unit in reversed(self._units):
            self.send(unit)

    def finish(self) -> None:
        self.end_pass()
        self.was_paused = False

    def refresh(self) -> None:
        """Before a forward: forgets a backward that was broken off, refuses parameters that train only now."""
        for found in self._buckets.values():
            for bucket in found:
                bucket.reset()
        self.sent, self._under_way = set(), []
        if late := next((entry.name for entry in self._frozen if entry.param.requires_grad), None):
            raise ConfigError(
                f"{late} requires a gradient, which it did not when zero was called",
                rule="The optimizer's parts of the parameters are laid out once, of those that train",
                remedy="Unfreeze it first, then make the optimizer, then call zero",
            )
