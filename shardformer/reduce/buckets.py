"""Agrees on gradients between ranks in buckets, while backward still runs.

The ``Reduction`` of each parameter says what is agreed on: its gradient is the sum over some axes, over a divisor. The
end of a bucket says what comes of the sum:

    WriteBack   the sum is written into ``.grad`` on every rank            one all-reduce a bucket
    HandOver    each rank gets its shard of the sum, for its optimizer     one reduce-scatter a bucket
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from shardformer.comm.collectives import start_reduce_scatter, start_sum
from shardformer.comm.values import numbers_in
from shardformer.errors import ConfigError
from shardformer.layout.split import Coords
from shardformer.layout.state import Entry
from shardformer.mesh.axis import Axis

BUCKET_BYTES = 25 * 1024 * 1024
FIRST_BUCKET_BYTES = 1024 * 1024


@dataclass(eq=False)
class Gradient:
    """The gradient of one parameter on this rank.

    Slices that several ranks of a cut parameter hold (a KV head that ranks share) are summed over their holders only:
    in the bucket the gradient stands in the full shape, with zeros for what this rank does not hold.

    Args:
        axis: all ranks whose gradients are summed.
        coords: this rank's place on the grid.
    """

    entry: Entry
    axis: Axis
    coords: Coords
    bucket: Bucket | None = None
    changed: bool = False  # since the last time that it was agreed on
    arrived: bool = False  # in this backward

    def __post_init__(self) -> None:
        self.divisor = self.entry.reduction.divisor
        spec = self.entry.spec
        self.is_shared = not spec.is_partition
        held = spec.multiplicity()
        num_places = len(spec.places()) if self.is_shared else 1
        self.copies = held * (self.axis.size // num_places)
        """How many of the ranks hold each number: a number, or one for each of the full tensor."""

    @property
    def param(self) -> Tensor:
        return self.entry.param

    @property
    def is_new(self) -> bool:
        """Whether the gradient here is one that the other ranks do not know."""
        return self.changed and self.param.grad is not None

    @property
    def numel(self) -> int:
        """Numbers that it takes in a bucket."""
        return torch.Size(self.entry.spec.shape).numel() if self.is_shared else self.param.numel()

    def pack(self, out: Tensor, divisor: Tensor | float) -> None:
        """Writes the gradient over ``divisor`` into its place in a bucket; zeros where there is none."""
        grad = self.param.grad
        if grad is None:
            out.zero_()
        elif not self.is_shared:
            torch.div(grad.reshape(-1), divisor, out=out)
        else:
            full = out.zero_().view(self.entry.spec.shape)
            self.entry.spec.place(grad, full, self.coords)
            full.div_(divisor.to(full) if isinstance(divisor, Tensor) else divisor)

    def unpack(self, flat: Tensor) -> Tensor:
        """This rank's gradient from its place in a bucket."""
        if not self.is_shared:
            return flat.view_as(self.param)
        return self.entry.spec.slice(flat.view(self.entry.spec.shape), self.coords)

    def local_copies(self) -> Tensor | float:
        """``copies`` of the numbers that this rank holds."""
        if not isinstance(self.copies, Tensor):
            return self.copies
        return self.entry.spec.slice(self.copies.expand(self.entry.spec.shape), self.coords)

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradient:
        memo[id(self)] = twin = Gradient(deepcopy(self.entry, memo), self.axis, self.coords)
        twin.divisor = self.divisor
        return twin


@dataclass(eq=False)
class Bucket:
    """Gradients that one collective sums, over ``axis``, in ``dtype``: by default that of the parameters."""

    axis: Axis
    dtype: torch.dtype | None = None
    gradients: list[Gradient] = field(default_factory=list)
    pending: int = 0
    work: Any = None
    flat: Tensor | None = None

    @property
    def had(self) -> list[float]:
        """For each gradient 1 where this rank has a new one."""
        return [1.0 if g.is_new else 0.0 for g in self.gradients]

    def places(self) -> Iterator[tuple[Gradient, slice]]:
        at = 0
        for gradient in self.gradients:
            yield gradient, slice(at, at + gradient.numel)
            at += gradient.numel

    def new_flat(self, numel: int) -> Tensor:
        first = self.gradients[0].param
        return torch.empty(numel, dtype=self.dtype or first.dtype, device=first.device)

    def reset(self) -> None:
        self.flat = self.work = None
        self.pending = len(self.gradients)
        for gradient in self.gradients:
            gradient.arrived = False


class End(Protocol):
    """What comes of a bucket."""

    def scale(self, gradient: Gradient) -> Tensor | float:
        """What a gradient is multiplied by as it arrives, before it is accumulated."""

    def start(self, bucket: Bucket) -> None:
        """Starts to sum the bucket over its ranks."""

    def finish(self, bucket: Bucket) -> None:
        """Waits for the sum and hands it on."""


class WriteBack:
    """Every rank gets the sum in ``.grad``. Communicates one all-reduce of the gradients and one number each.

    ``.grad`` may hold what earlier backwards agreed on, which all ranks hold alike, beside what this one added. So what
    arrives is scaled by copies / divisor, and the mean over all copies is taken of the two together: what was agreed on
    stays as it is, and what arrived becomes its sum over the divisor. Accumulation is right by itself, whether the
    backwards before were paused or not.
    """

    def scale(self, gradient: Gradient) -> Tensor | float:
        return gradient.local_copies() / gradient.divisor

    def start(self, bucket: Bucket) -> None:
        total = sum(g.numel for g in bucket.gradients)
        bucket.flat = flat = bucket.new_flat(total + len(bucket.gradients))
        for gradient, place in bucket.places():
            gradient.pack(flat[place], gradient.copies)
        flat[total:] = torch.tensor(bucket.had, dtype=flat.dtype, device=flat.device)
        if bucket.axis.size > 1:
            bucket.work = start_sum(flat, bucket.axis, "gradients")

    def finish(self, bucket: Bucket) -> None:
        flat = bucket.flat
        assert flat is not None
        if bucket.work is not None:
            bucket.work.wait()
        # a gradient that arrived here needs no count, which a GPU would have to be waited for
        had = None if all(bucket.had) else numbers_in(flat[-len(bucket.gradients) :])
        for i, (gradient, place) in enumerate(bucket.places()):
            if had is None or had[i] > 0:
                value = gradient.unpack(flat[place])
                if gradient.param.grad is None:
                    gradient.param.grad = value.clone()
                else:
                    gradient.param.grad.copy_(value)


class HandOver:
    """Every rank gets its shard of the sum: as many numbers of the bucket in a row as any other, zeros behind the last.

    ``.grad`` is taken away, so that what is in it is new each time. Communicates one reduce-scatter of the gradients,
    with one number for each gradient behind every shard.

    Args:
        receive: (the bucket, this rank's shard, for each gradient how many ranks had one).
    """

    def __init__(self, receive: Callable[[Bucket, Tensor, Tensor], None]) -> None:
        self._receive = receive

    def scale(self, gradient: Gradient) -> Tensor | float:
        return 1.0

    def start(self, bucket: Bucket) -> None:
        ranks, count = bucket.axis.size, len(bucket.gradients)
        total = sum(g.numel for g in bucket.gradients)
        each = -(-total // ranks)
        flat = bucket.new_flat(each * ranks)
        flat[total:] = 0
        had = torch.tensor(bucket.had, dtype=flat.dtype, device=flat.device)
        for gradient, place in bucket.places():
            gradient.pack(flat[place], gradient.divisor)
            gradient.param.grad = None
        bucket.flat = torch.cat([flat.view(ranks, each), had.expand(ranks, count)], 1).view(-1)
        bucket.work = start_reduce_scatter(bucket.flat, bucket.axis, 0, purpose="gradients")

    def finish(self, bucket: Bucket) -> None:
        shard = bucket.work.wait()
        count = len(bucket.gradients)
        self._receive(bucket, shard[:-count], shard[-count:])


class GradientReducer:
    """Agrees on the gradients during each backward.

    Buckets of about 25 MB (the first of 1 MB) are filled in reverse order of the parameters and sent, in the same order
    on every rank, as soon as they are full; what is left, with zeros for parameters that got no gradient here, follows
    when backward ends. A parameter that got a gradient on no rank keeps ``grad=None``, as on one device.
    It ends when nobody holds it: the model's ``ShardedState`` does.
    """

    def __init__(self, gradients: list[Gradient], bucket_bytes: int = BUCKET_BYTES, end: End | None = None) -> None:
        self.gradients = gradients
        self._bucket_bytes = bucket_bytes
        self._end = end or WriteBack()
        self._paused = self.was_paused = self._is_laid_out = False
        self._queued = False
        self._dirty = False
        self._hooked: dict[int, Any] = {}
        self._buckets: list[Bucket] = []
        self._next = 0
        self.refresh()

    def refresh(self) -> None:
        """Before a forward: takes up parameters that were frozen before, forgets a backward that was broken off."""
        if self._queued:
            self._queued = self._dirty = False
            self._next = 0
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
                rule="The optimizer's parts of the parameters are laid out once, of those that train",
                remedy="Unfreeze it first, then make the optimizer, then call zero",
            )
        self.close()
        self._hooked = {id(g.param): self._hook(g) for g in trainable}
        self._buckets = _fill_buckets(trainable, self._bucket_bytes)

    def hand_over(
        self, receive: Callable[[Bucket, Tensor, Tensor], None], dtype: torch.dtype | None = None
    ) -> Sequence[Bucket]:
        """From now on each rank gets its shard of every bucket, summed in ``dtype``: see ``HandOver``.

        Returns the buckets, which stay as they are: a parameter that is unfrozen from now on is refused.
        """
        self.refresh()
        self._end, self._is_laid_out = HandOver(receive), True
        for bucket in self._buckets:
            bucket.dtype = dtype
        return self._buckets

    def close(self) -> None:
        """Gradients are agreed on no longer."""
        for handles in self._hooked.values():
            for handle in handles:
                handle.remove()
        self._hooked = {}

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

    def start(self) -> None:
        """After backwards that were all paused: starts to agree on what they left. ``finish`` waits for it.

        All ranks call it, also one on which no gradient arrived.
        """
        while self._next < len(self._buckets):
            self._start_next()

    def finish(self) -> None:
        """Waits for all buckets, and hands on what they give."""
        for bucket in self._buckets:
            self._end.finish(bucket)
            for gradient in bucket.gradients:
                gradient.changed = False
            bucket.reset()
        self._next = 0
        self._dirty = self.was_paused = False

    def _start_next(self) -> None:
        self._end.start(self._buckets[self._next])
        self._next += 1

    def _hook(self, gradient: Gradient) -> tuple[Any, ...]:
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

    def _arriving(self, gradient: Gradient, grad: Tensor) -> Tensor | None:
        if gradient.bucket is not None and gradient.bucket.flat is not None:
            self._flush()  # a second gradient in one backward: what is on its way must land first
        scale = self._end.scale(gradient)
        if isinstance(scale, Tensor):
            return grad * scale.to(grad)
        return grad * scale if scale != 1 else None

    def _accumulated(self, gradient: Gradient) -> None:
        gradient.changed = True
        if self._paused:
            return
        self._dirty = True
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._end_backward)
        if not gradient.arrived:
            gradient.arrived = True
            assert gradient.bucket is not None
            gradient.bucket.pending -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
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
        return GradientReducer(deepcopy(self.gradients, memo), self._bucket_bytes, end)


def _fill_buckets(gradients: list[Gradient], bucket_bytes: int) -> list[Bucket]:
    """Buckets of one set of ranks, dtype and device each, in reverse order of the parameters."""
    buckets: list[Bucket] = []
    open_ones: dict[tuple[Any, ...], tuple[Bucket, int]] = {}
    for gradient in reversed(gradients):
        key = (gradient.axis.ranks, gradient.param.dtype, gradient.param.device)
        bucket, used = open_ones.get(key, (None, 0))
        limit = bucket_bytes if buckets and bucket is not buckets[0] else min(bucket_bytes, FIRST_BUCKET_BYTES)
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
