"""Reduce gradients over ranks in buckets during the backward pass, unless ``no_sync`` defers the reduction."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.gradients.buckets import (
    AllReduceToGrad,
    BucketReduction,
    GradientBucket,
    GradientSlot,
    ReduceScatterToShards,
)
from shardformer.layout.sharding_metadata import ConsistencyMonitorProtocol, get_sharding_metadata
from shardformer.torch_compat import at_end_of_backward


class PausableGradientReducer:
    """Base class of gradient reducers that can accumulate gradients over several backward passes."""

    is_paused = was_paused = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside this context, without reducing them over ranks.

        The next backward pass outside the context reduces them.
        """
        before, self.is_paused = self.is_paused, True
        self.was_paused = True  # until the reduction; known on all ranks, whether a gradient arrives or not
        try:
            yield
        finally:
            self.is_paused = before

    def _register_grad_hooks(self, grad_slot: GradientSlot) -> tuple[Any, ...]:
        # Hooks use weak references, because the garbage collector cannot traverse the autograd node that keeps them.
        # The model and its process groups would never be freed.
        reducer, slot = weakref.ref(self), weakref.ref(grad_slot)

        def grad_hook(grad: Tensor) -> Tensor | None:
            me, one = reducer(), slot()
            return me._grad_hook(one, grad) if me is not None and one is not None else None

        def post_accumulate_grad_hook(param: Tensor) -> None:
            me, one = reducer(), slot()
            if me is not None and one is not None:
                me._post_accumulate_grad_hook(one)

        param: Any = grad_slot.param
        return param.register_hook(grad_hook), param.register_post_accumulate_grad_hook(post_accumulate_grad_hook)

    def _grad_hook(self, grad_slot: GradientSlot, grad: Tensor) -> Tensor | None:
        """Handle a new gradient before autograd accumulates it. Return a replacement, or None to keep it."""
        return None

    def _post_accumulate_grad_hook(self, grad_slot: GradientSlot) -> None:
        """Handle a gradient after autograd has accumulated it into ``.grad``."""


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on each rank without reducing them over ranks.

    The next backward pass outside this context manager reduces them. For gradient accumulation, wrap all but the last
    backward pass of an optimizer step. Without ``no_sync``, the result is the same but requires more communication.

    >>> with no_sync(model):                    # doctest: +SKIP
    ...     model(**first_half).loss.backward()
    >>> model(**second_half).loss.backward()    # doctest: +SKIP
    """
    with get_sharding_metadata(model).no_sync():
        yield


BUCKET_BYTES = 25 * 1024 * 1024
FIRST_BUCKET_BYTES = 1024 * 1024
MAX_REDUCTIONS_IN_FLIGHT = 4
"""Maximum number of buckets that are being reduced at the same time. Each needs a second buffer."""


class GradientReducer(PausableGradientReducer):
    """Reduces gradients over ranks in buckets while the backward pass is still computing other gradients.

    Buckets of about 25 MB (the first of 1 MB) are filled in reverse order of the parameters. A full bucket is reduced
    immediately, in the same order on every rank. The remaining buckets follow at the end of the backward pass, with
    zeros for missing gradients. A parameter that has no gradient on any rank keeps ``grad=None``, as on one device. The
    model's ``ShardingMetadata`` owns the reducer.

    Attributes:
        sums: Whether any gradient is summed over several ranks.
        passes: Number of completed reductions.
    """

    def __init__(
        self,
        grad_slots: list[GradientSlot],
        bucket_bytes: int = BUCKET_BYTES,
        reduction: BucketReduction | None = None,
        consistency_monitor: ConsistencyMonitorProtocol | None = None,
    ) -> None:
        self.gradients, self._watch, self.passes = grad_slots, consistency_monitor, 0
        self.sums = any(gradient.axis.size > 1 for gradient in grad_slots)
        self._bucket_bytes, self._overlaps = bucket_bytes, True
        self._end = reduction or AllReduceToGrad()
        self._has_fixed_buckets = self._is_end_callback_registered = self._has_unreduced_gradients = False
        self._hooked: dict[int, Any] = {}
        self._buckets: list[GradientBucket] = []
        self._num_started = self._num_finished = 0  # number of buckets whose reduction started, and finished
        self.prepare_for_backward()

    def prepare_for_backward(self) -> None:
        """Register hooks on newly unfrozen parameters, and reset the buckets if a backward pass was interrupted."""
        if self._is_end_callback_registered:
            self._is_end_callback_registered = self._has_unreduced_gradients = False
            self._num_started = self._num_finished = 0
            for bucket in self._buckets:
                bucket.reset_after_backward()
        if self._hooked and not torch.is_grad_enabled():
            return  # a forward pass with other adapters, during which parameters may be frozen
        trainable = [g for g in self.gradients if g.param.requires_grad]
        unknown = [g for g in trainable if id(g.param) not in self._hooked]
        if not unknown and len(self._hooked) == len(trainable):
            return
        if self._has_fixed_buckets:
            if not unknown:
                return  # newly frozen parameters receive no gradients
            name = unknown[0].entry.name
            raise ConfigError(
                f"The parameter {name} was unfrozen after shard_optimizer was called.",
                remedy="Unfreeze parameters before you create the optimizer and call shard_optimizer.",
            )
        self.remove_grad_hooks()
        self._hooked = {id(g.param): self._register_grad_hooks(g) for g in trainable}
        self._buckets = _build_buckets(trainable, self._bucket_bytes)
        if self._buckets:
            self._buckets[-1].watch = self._watch  # the last bucket to be reduced

    def switch_to_sharded_reduction(
        self, reduction: ReduceScatterToShards, reduce_dtype: torch.dtype | None, bucket_bytes: int, overlap: bool
    ) -> Sequence[GradientBucket]:
        """Make each rank receive one shard of the reduced gradients, instead of all gradients.

        Args:
            bucket_bytes: Size of a bucket in bytes.
            overlap: True to reduce a bucket as soon as it is full, False to reduce it after the backward pass.

        Returns:
            The buckets, which no longer change. Unfreezing a parameter then raises ConfigError.
        """
        self.remove_grad_hooks()  # refill the buckets
        self._bucket_bytes, self._overlaps = bucket_bytes, overlap
        self.prepare_for_backward()
        self._end, self._has_fixed_buckets = reduction, True
        for bucket in self._buckets:
            bucket.dtype = reduce_dtype
        return self._buckets

    def remove_grad_hooks(self) -> None:
        """Remove the hooks from the parameters, so that gradients are no longer reduced."""
        for handles in self._hooked.values():
            for handle in handles:
                handle.remove()
        self._hooked = {}

    def start_reduction(self) -> None:
        """Start reducing the gradients that were accumulated inside ``no_sync``.

        All ranks must call this method, including ranks without gradients. ``finish_reduction`` waits for the result.
        """
        while self._num_started < len(self._buckets):
            self._start_reducing_next_bucket()

    def finish_reduction(self) -> None:
        """Wait until all buckets are reduced, and store the reduced gradients."""
        while self._num_finished < self._num_started:
            self._finish_next_bucket()
        for bucket in self._buckets:
            bucket.reset_after_backward()
        self._num_started = self._num_finished = 0
        self._has_unreduced_gradients = self.was_paused = False
        self.passes += 1
        self._end.on_backward_end()

    def _start_reducing_next_bucket(self) -> None:
        bucket = self._buckets[self._num_started]
        bucket.is_sent = True
        self._end.start_reduction(bucket)
        self._num_started += 1
        while (
            self._num_started - self._num_finished > MAX_REDUCTIONS_IN_FLIGHT
            or self._buckets[self._num_finished].is_reduced
        ):
            self._finish_next_bucket()
            if self._num_finished == self._num_started:
                return

    def _finish_next_bucket(self) -> None:
        bucket = self._buckets[self._num_finished]
        self._end.finish_reduction(bucket)
        for gradient in bucket.gradients:
            gradient.has_changed = False
        bucket.flat = bucket.work = None
        self._num_finished += 1

    def _grad_hook(self, grad_slot: GradientSlot, grad: Tensor) -> Tensor | None:
        if grad_slot.bucket is not None and grad_slot.bucket.is_sent:
            self._reduce_all_buckets()  # the second gradient in a backward pass must wait for the reduction in progress
        scale = self._end.get_grad_scale(grad_slot)
        if isinstance(scale, Tensor):
            return grad * scale.to(grad)
        return grad * scale if scale != 1 else None

    def _post_accumulate_grad_hook(self, grad_slot: GradientSlot) -> None:
        if not self.is_paused and self._overlaps:
            # earlier buckets only: other hooks of this parameter may still change its gradient
            while self._num_started < len(self._buckets) and self._buckets[self._num_started].num_pending == 0:
                self._start_reducing_next_bucket()
        grad_slot.has_changed = True
        if grad_slot.is_sparse and not self._end.supports_sparse:
            grad_slot.param.grad = grad_slot.param.grad.to_dense()  # type: ignore[union-attr]  # it is sparse
        if self.is_paused:
            return
        self._has_unreduced_gradients = True
        if not self._is_end_callback_registered:
            self._is_end_callback_registered = True
            at_end_of_backward(self._on_backward_end)
        if not grad_slot.has_arrived:
            grad_slot.has_arrived = True
            assert grad_slot.bucket is not None
            grad_slot.bucket.num_pending -= 1

    def _on_backward_end(self) -> None:
        self._is_end_callback_registered = False
        if self._has_unreduced_gradients:
            self._reduce_all_buckets()

    def _reduce_all_buckets(self) -> None:
        self.start_reduction()
        self.finish_reduction()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        end = None if self._has_fixed_buckets else self._end  # a copied model has no ZeroOptimizer
        return GradientReducer(deepcopy(self.gradients, memo), self._bucket_bytes, end, deepcopy(self._watch, memo))


def _build_buckets(grad_slots: list[GradientSlot], bucket_bytes: int) -> list[GradientBucket]:
    """Assign gradients to buckets of at most ``bucket_bytes``, in reverse order of the parameters.

    All gradients of a bucket have the same axis, dtype and device.
    """
    buckets: list[GradientBucket] = []
    open_ones: dict[tuple[Any, ...], tuple[GradientBucket, int]] = {}
    for gradient in reversed(grad_slots):
        param = gradient.param
        key = (gradient.axis.ranks, param.dtype, param.device, gradient.is_full, gradient.is_shared)
        bucket, used = open_ones.get(key, (None, 0))
        limit = bucket_bytes if buckets and bucket is not buckets[0] else min(bucket_bytes, FIRST_BUCKET_BYTES)
        if gradient.is_full:
            limit = bucket_bytes * gradient.axis.size  # each rank gets bucket_bytes
        size = gradient.numel * gradient.param.element_size()
        if bucket is None or used + size > limit:
            bucket, used = GradientBucket(gradient.axis), 0
            buckets.append(bucket)
        bucket.gradients.append(gradient)
        gradient.bucket, gradient.has_arrived = bucket, False
        bucket.num_pending = len(bucket.gradients)
        open_ones[key] = (bucket, used + size)
    return buckets
