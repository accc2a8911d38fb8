"""Averages gradients over groups of ranks in buckets, while backward still runs.

One operation serves every reason why a gradient must be agreed on:

- over ``data``, every parameter's gradient is the mean of the ranks' gradients;
- over ``tensor``, a replicated parameter that sees a part of the sequence or of the heads has only a summand of its
  gradient. A sum is the mean of R times the summand, so its summand is multiplied by R as it arrives;
- a slice that c ranks hold (a KV head shared by ranks) is the sum over its c holders, so its summand is multiplied by
  c and averaged over them.

Because everything is a mean of ``.grad`` as it stands after accumulation, gradient accumulation is right by itself:
what earlier backwards left is equal on all ranks, and the mean of equal numbers is that number. ``paused()`` skips the
averaging for the backwards of all but the last micro-batch, which is right for the same reason and saves the traffic.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardformer.comm.collectives import start_sum
from shardformer.comm.recorder import bytes_of, record
from shardformer.mesh.axis import Axis

BUCKET_BYTES = 25 * 1024 * 1024
FIRST_BUCKET_BYTES = 1024 * 1024


@dataclass(eq=False)
class Entry:
    """One parameter: the axis its gradient is averaged over, and which indices of the full dim it holds if shared.

    Args:
        scale: what a summand is multiplied by as it arrives; a number, or a tensor that broadcasts.
        shared: (dim, indices of the full dim held here, full shape) of a parameter some of whose slices others hold.
        holders: how many ranks of other axes have a summand of it too (stages that share it), which ``scale`` counts.
        divisor: by what the sum over ``axis`` is divided to give the mean; a number, or a tensor like the full shape.
    """

    param: Tensor
    axis: Axis
    scale: Tensor | float = 1
    divisor: Tensor | float = 1
    shared: tuple[int, Tensor, tuple[int, ...]] | None = None
    holders: int = 1
    bucket: _Bucket | None = None
    changed: bool = False  # since the last mean
    arrived: bool = False  # in this backward

    @property
    def is_new(self) -> bool:
        """Whether the gradient here is one that the other ranks do not know, not what is left of an earlier mean."""
        return self.changed and self.param.grad is not None

    @property
    def numel(self) -> int:
        return self.param.numel() if self.shared is None else int(torch.Size(self.shared[2]).numel())

    def pack(self, out: Tensor) -> None:
        """Writes the gradient, divided for the mean, into its place in the bucket; zeros when there is none."""
        grad = self.param.grad
        if grad is None:
            out.zero_()
        elif self.shared is None:
            torch.div(grad.reshape(-1), self.divisor, out=out)
        else:
            dim, indices, shape = self.shared
            full = out.zero_().view(shape)
            full.index_copy_(dim, indices.to(grad.device), grad)
            full.div_(self.divisor.to(full.device) if isinstance(self.divisor, Tensor) else self.divisor)

    def unpack(self, mean: Tensor) -> None:
        if self.shared is None:
            value = mean.view_as(self.param)
        else:
            dim, indices, shape = self.shared
            value = mean.view(shape).index_select(dim, indices.to(mean.device))
        if self.param.grad is None:
            self.param.grad = value.clone()
        else:
            self.param.grad.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        memo[id(self)] = twin = Entry(deepcopy(self.param, memo), self.axis, self.scale, self.divisor, self.shared)
        twin.holders = self.holders
        return twin


@dataclass(eq=False)
class _Bucket:
    axis: Axis
    entries: list[Entry] = field(default_factory=list)
    pending: int = 0
    flat: Tensor | None = None
    work: Any = None

    def launch(self) -> None:
        """Starts one all-reduce of the gradients and, behind them, of how many ranks had each of them."""
        first = self.entries[0].param
        total = sum(e.numel for e in self.entries)
        self.flat = torch.empty(total + len(self.entries), dtype=first.dtype, device=first.device)
        at = 0
        for entry in self.entries:
            entry.pack(self.flat[at : at + entry.numel])
            at += entry.numel
        had = [1.0 if e.is_new else 0.0 for e in self.entries]
        self.flat[total:] = torch.tensor(had, dtype=first.dtype, device=first.device)
        record("all_reduce", self.axis, bytes_of(self.flat), "gradients")
        self.work = start_sum(self.flat, self.axis)

    def finish(self) -> None:
        assert self.flat is not None
        if self.work is not None:
            self.work.wait()
        total = self.flat.numel() - len(self.entries)
        # a gradient that arrived here needs no count, which a GPU would have to be waited for
        had = None if all(e.is_new for e in self.entries) else self.flat[total:].tolist()
        at = 0
        for i, entry in enumerate(self.entries):
            if had is None or had[i] > 0:
                entry.unpack(self.flat[at : at + entry.numel])
            at += entry.numel
            entry.changed = False
        self.reset()

    def reset(self) -> None:
        self.flat = self.work = None
        self.pending = len(self.entries)
        for entry in self.entries:
            entry.arrived = False


class GradientAverager:
    """Agrees on the gradients of ``entries`` during each backward.

    Buckets of about 25 MB (the first of 1 MB) are filled in reverse order of the parameters and sent, in the same order
    on every rank, as soon as they are full; what is left, with zeros for parameters that got no gradient here, follows
    when backward ends. A parameter that got a gradient on no rank keeps ``grad=None``, as on one device.
    It ends when nobody holds it; see ``live_with``.

    Communicates one all-reduce a bucket, of its gradients and one number a parameter.
    """

    def __init__(self, entries: list[Entry], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._entries = entries
        self._bucket_bytes = bucket_bytes
        self._paused = False
        self._queued = False
        self._dirty = False
        self._hooked: dict[int, Any] = {}
        self._buckets: list[_Bucket] = []
        self._next = 0
        self.refresh()

    def live_with(self, module: nn.Module) -> None:
        """Goes on as long as the module is there: the parameters alone do not keep what agrees on their gradients."""
        module.__dict__.setdefault("_gradient_averagers", []).append(self)

    def refresh(self) -> None:
        """Before a forward: takes up parameters that were frozen before, forgets a backward that was broken off."""
        if self._queued:
            self._queued = self._dirty = False
            self._next = 0
            for bucket in self._buckets:
                bucket.reset()
        trainable = [e for e in self._entries if e.param.requires_grad]
        if all(id(e.param) in self._hooked for e in trainable) and len(self._hooked) == len(trainable):
            return
        for handles in self._hooked.values():
            for handle in handles:
                handle.remove()
        self._hooked = {id(e.param): self._hook(e) for e in trainable}
        self._buckets = _fill_buckets(trainable, self._bucket_bytes)

    @property
    def is_paused(self) -> bool:
        return self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward in here accumulates this rank's own gradients; the first one after it averages them all."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def start(self) -> None:
        """After backwards that were all paused: starts to agree on what they left. ``finish`` waits for it.

        All ranks call it, also one on which no gradient arrived.
        """
        for bucket in self._buckets[self._next :]:
            bucket.launch()
        self._next = len(self._buckets)

    def finish(self) -> None:
        """Waits for all, and writes the means back."""
        for bucket in self._buckets:
            bucket.finish()
        self._next = 0
        self._dirty = False

    def _hook(self, entry: Entry) -> tuple[Any, ...]:
        # The parameter is reached from its hooks by weak references alone: the collector does not see through the node
        # of autograd that keeps them, and a model that nobody holds any more, with its groups, would stay.
        averager, held = weakref.ref(self), weakref.ref(entry)

        def arriving(grad: Tensor) -> Tensor | None:
            me, one = averager(), held()
            return me._arriving(one, grad) if me is not None and one is not None else None

        def accumulated(param: Tensor) -> None:
            me, one = averager(), held()
            if me is not None and one is not None:
                me._accumulated(one)

        param: Any = entry.param
        return param.register_hook(arriving), param.register_post_accumulate_grad_hook(accumulated)

    def _arriving(self, entry: Entry, grad: Tensor) -> Tensor | None:
        if entry.bucket is not None and entry.bucket.flat is not None:
            self._flush()  # a second gradient in one backward: what is on its way must land first
        if isinstance(entry.scale, Tensor):
            return grad * entry.scale.to(grad)
        return grad * entry.scale if entry.scale != 1 else None

    def _accumulated(self, entry: Entry) -> None:
        entry.changed = True
        if self._paused:
            return
        self._dirty = True
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._end_backward)
        if not entry.arrived:
            entry.arrived = True
            assert entry.bucket is not None
            entry.bucket.pending -= 1
        self._launch_full()

    def _launch_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
            self._buckets[self._next].launch()
            self._next += 1

    def _end_backward(self) -> None:
        self._queued = False
        if self._dirty:
            self._flush()

    def _flush(self) -> None:
        """Sends what is left, waits for all, and writes the means back."""
        self.start()
        self.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientAverager:
        return GradientAverager(deepcopy(self._entries, memo), self._bucket_bytes)


def _fill_buckets(entries: list[Entry], bucket_bytes: int) -> list[_Bucket]:
    """Buckets of one axis, dtype and device each, in reverse order of the parameters."""
    buckets: list[_Bucket] = []
    open_ones: dict[tuple[int, torch.dtype, torch.device], tuple[_Bucket, int]] = {}
    for entry in reversed(entries):
        key = (id(entry.axis), entry.param.dtype, entry.param.device)
        bucket, used = open_ones.get(key, (None, 0))
        limit = bucket_bytes if buckets and bucket is not buckets[0] else min(bucket_bytes, FIRST_BUCKET_BYTES)
        size = entry.numel * entry.param.element_size()
        if bucket is None or used + size > limit:
            bucket, used = _Bucket(entry.axis), 0
            buckets.append(bucket)
        bucket.entries.append(entry)
        entry.bucket = bucket
        entry.arrived = False
        bucket.pending = len(bucket.entries)
        open_ones[key] = (bucket, used + size)
    return buckets
