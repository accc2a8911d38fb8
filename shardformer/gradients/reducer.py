"""Reduces gradients over ranks in buckets while the backward still runs; ``no_sync`` postpones it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.gradients.buckets import AllReduceToGrad, Bucket, BucketReduction, GradientSlot, ReduceScatterToShards
from shardformer.layout.sharding_metadata import ConsistencyMonitorProtocol, metadata_of
from shardformer.torch_compat import at_end_of_backward


class PausableReducer:
    """A reducer whose backwards may accumulate this rank's own gradients."""

    _paused = was_paused = False

    @property
    def is_paused(self) -> bool:
        return self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward in here accumulates this rank's own gradients; the first one after it agrees on all of them."""
        before, self._paused = self._paused, True
        self.was_paused = True  # until all is agreed on; ranks know it alike, whether a gradient arrives or not
        try:
            yield
        finally:
            self._paused = before


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward in here accumulates gradients without agreeing on them with other ranks; the first one after it does.

    For all but the last of the backwards of one optimizer step. Leaving it out is right too, and only costs traffic.

    >>> with no_sync(model):                    # doctest: +SKIP
    ...     model(**first_half).loss.backward()
    >>> model(**second_half).loss.backward()    # doctest: +SKIP
    """
    with metadata_of(model).paused():
        yield


BUCKET_BYTES = 25 * 1024 * 1024
FIRST_BUCKET_BYTES = 1024 * 1024
MAX_REDUCTIONS_IN_FLIGHT = 4
"""Buckets whose sums are under way at a time: each takes its memory a second time."""


class GradientReducer(PausableReducer):
    """Agrees on the gradients during each backward.

    Buckets of about 25 MB (the first of 1 MB) are filled in reverse order of the parameters and sent, in the same order
    on every rank, as soon as they are full; what is left, with zeros for parameters that got no gradient here, follows
    when backward ends. A parameter that got a gradient on no rank keeps ``grad=None``, as on one device.
    It ends when nobody holds it: the model's ``ShardingMetadata`` does.

    Attributes:
        sums: whether any gradient is the sum of those of several ranks.
        passes: how often ranks agreed on what backwards left.
    """

    def __init__(
        self,
        gradients: list[GradientSlot],
        bucket_bytes: int = BUCKET_BYTES,
        end: BucketReduction | None = None,
        watch: ConsistencyMonitorProtocol | None = None,
    ) -> None:
        self.gradients, self._watch, self.passes = gradients, watch, 0
        self.sums = any(gradient.axis.size > 1 for gradient in gradients)
        self._bucket_bytes, self._overlaps = bucket_bytes, True
        self._end = end or AllReduceToGrad()
        self._is_laid_out = False
        self._queued = False
        self._dirty = False
        self._hooked: dict[int, Any] = {}
        self._buckets: list[Bucket] = []
        self._next = self._landed = 0  # buckets before these are under way, or done
        self.refresh()

    def refresh(self) -> None:
        """Before a forward: takes up parameters that were frozen before, forgets a backward that was broken off."""
        if self._queued:
            self._queued = self._dirty = False
            self._next = self._landed = 0
            for bucket in self._buckets:
                bucket.reset()
        trainable = [g for g in self.gradients if g.param.requires_grad]
        unknown = [g for g in trainable if id(g.param) not in self._hooked]
        if not unknown and len(self._hooked) == len(trainable):
            return
        if self._is_laid_out:
            if not unknown:
                return  # frozen since: no gradient of it arrives
            raise ConfigError(
                f"{unknown[0].entry.name} requires a gradient, which it did not when zero was called",
                remedy="Unfreeze it first, then make the optimizer, then call zero",
            )
        self.close()
        self._hooked = {id(g.param): self._hook(g) for g in trainable}
        self._buckets = _fill_buckets(trainable, self._bucket_bytes)
        if self._buckets:
            self._buckets[-1].watch = self._watch  # the last one that is sent

    def reduce_to_shards(
        self, end: ReduceScatterToShards, dtype: torch.dtype | None, size: int, overlaps: bool
    ) -> Sequence[Bucket]:
        """From now on each rank gets its shard of every bucket, summed in ``dtype``: see ``ReduceScatterToShards``.

        Args:
            size: of a bucket in bytes.
            overlaps: whether a bucket is sent as soon as it is full; else all are when the backward ends.

        Returns the buckets, which stay as they are: a parameter that is unfrozen from now on is refused.
        """
        self.close()  # buckets are filled anew
        self._bucket_bytes, self._overlaps = size, overlaps
        self.refresh()
        self._end, self._is_laid_out = end, True
        for bucket in self._buckets:
            bucket.dtype = dtype
        return self._buckets

    def close(self) -> None:
        """Gradients are agreed on no longer."""
        for handles in self._hooked.values():
            for handle in handles:
                handle.remove()
        self._hooked = {}

    def start(self) -> None:
        """After backwards that were all paused: starts to agree on what they left. ``finish`` waits for it.

        All ranks call it, also one on which no gradient arrived.
        """
        while self._next < len(self._buckets):
            self._start_next()

    def finish(self) -> None:
        """Waits for all buckets, and hands on what they give."""
        while self._landed < self._next:
            self._land_next()
        for bucket in self._buckets:
            bucket.reset()
        self._next = self._landed = 0
        self._dirty = self.was_paused = False
        self.passes += 1
        self._end.end_pass()

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        bucket.is_sent = True
        self._end.start(bucket)
        self._next += 1
        while self._next - self._landed > MAX_REDUCTIONS_IN_FLIGHT or self._buckets[self._landed].is_summed:
            self._land_next()
            if self._landed == self._next:
                return

    def _land_next(self) -> None:
        bucket = self._buckets[self._landed]
        self._end.finish(bucket)
        for gradient in bucket.gradients:
            gradient.changed = False
        bucket.flat = bucket.work = None
        self._landed += 1

    def _hook(self, gradient: GradientSlot) -> tuple[Any, ...]:
        # The parameter is reached from its hooks by weak references alone: the collector does not see through the node
        # of autograd that keeps them, and a model that nobody holds any more, with its groups, would stay.
        reducer, held = weakref.ref(self), weakref.ref(gradient)

        def arriving(grad: Tensor) -> Tensor | None:
            me, one = reducer(), held()
            return me._arriving(one, grad) if me is not None and one is not None else None

        def accumulated(param: Tensor) -> None:
            me, one = reducer(), held()
            if me is not None and one is not None:
                me._accumulated(one)

        param: Any = gradient.param
        return param.register_hook(arriving), param.register_post_accumulate_grad_hook(accumulated)

    def _arriving(self, gradient: GradientSlot, grad: Tensor) -> Tensor | None:
        if gradient.bucket is not None and gradient.bucket.is_sent:
            self._flush()  # a second gradient in one backward: what is on its way must land first
        scale = self._end.scale(gradient)
        if isinstance(scale, Tensor):
            return grad * scale.to(grad)
        return grad * scale if scale != 1 else None

    def _accumulated(self, gradient: GradientSlot) -> None:
        if not self._paused:
            self._send_full()  # those that were full before: hooks of this parameter may still change its gradient
        gradient.changed = True
        if gradient.is_sparse and not self._end.takes_sparse:
            gradient.param.grad = gradient.param.grad.to_dense()  # type: ignore[union-attr]  # it is sparse
        if self._paused:
            return
        self._dirty = True
        if not self._queued:
            self._queued = True
            at_end_of_backward(self._end_backward)
        if not gradient.arrived:
            gradient.arrived = True
            assert gradient.bucket is not None
            gradient.bucket.pending -= 1

    def _send_full(self) -> None:
        while self._overlaps and self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
            self._start_next()

    def _end_backward(self) -> None:
        self._queued = False
        if self._dirty:
            self._flush()

    def _flush(self) -> None:
        """Sends what is left, waits for all, and hands on what they give."""
        self.start()
        self.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        end = None if self._is_laid_out else self._end  # a copied model has no optimizer that keeps its gradients
        return GradientReducer(deepcopy(self.gradients, memo), self._bucket_bytes, end, deepcopy(self._watch, memo))


def _fill_buckets(gradients: list[GradientSlot], bucket_bytes: int) -> list[Bucket]:
    """Buckets of one set of ranks, dtype and device each, in reverse order of the parameters."""
    buckets: list[Bucket] = []
    open_ones: dict[tuple[Any, ...], tuple[Bucket, int]] = {}
    for gradient in reversed(gradients):
        param = gradient.param
        key = (gradient.axis.ranks, param.dtype, param.device, gradient.is_full, gradient.is_shared)
        bucket, used = open_ones.get(key, (None, 0))
        limit = bucket_bytes if buckets and bucket is not buckets[0] else min(bucket_bytes, FIRST_BUCKET_BYTES)
        if gradient.is_full:
            limit = bucket_bytes * gradient.axis.size  # so that the ranks get as much
        size = gradient.numel * gradient.param.element_size()
        if bucket is None or used + size > limit:
            bucket, used = Bucket(gradient.axis), 0
            buckets.append(bucket)
        bucket.gradients.append(gradient)
        gradient.bucket = bucket
        gradient.arrived = False
        bucket.pending = len(bucket.gradients)
        open_ones[key] = (bucket, used + size)
    return buckets
