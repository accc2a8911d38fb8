"""Buckets of gradients, and what is done with the sum of a bucket over its ranks.

tensor=2, data=2, one matrix of N numbers that rank 3 owns: three ranks send it N/2 each, and it sends them N/2 each;
as a reduce-scatter and an all-gather of the full matrix these would be N each.

WriteBack   the sum is written into ``.grad`` on every rank            one all-reduce a bucket
HandOver    each rank gets its shard of the sum, for its optimizer     one reduce-scatter a bucket
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from shardformer.comm.collectives import (
    PendingCollective,
    all_gather_objects,
    start_all_to_all,
    start_reduce_scatter,
    start_sum,
)
from shardformer.errors import InputError
from shardformer.layout.shard_spec import Coords
from shardformer.layout.sharding_metadata import ConsistencyMonitorProtocol, ParamEntry
from shardformer.mesh.parallel_context import Axis
from shardformer.torch_compat import to_list


class ShardedGradient(Protocol):
    """The gradient of a cut parameter, all of which one rank of ``axis`` gets."""

    entry: ParamEntry
    axis: Axis
    divisor: float

    @property
    def param(self) -> Tensor: ...

    @property
    def numel(self) -> int: ...


class SlicesToOwners:
    """The slices of some gradients that each rank of their axis holds.

    Args:
        holders: the coordinates of each rank of the axis.
    """

    def __init__(self, gradients: Sequence[ShardedGradient], holders: Sequence[Coords]) -> None:
        self._gradients, self._holders = gradients, holders
        self._axis = gradients[0].axis

    def start_sum(self, each: int, places: Sequence[slice], had: Tensor) -> PendingCollective:
        """Starts to sum the gradients for their owners.

        Args:
            each: numbers that a rank owns.
            places: where each gradient lies among those of all ranks.
            had: a number for each gradient, whose sums every owner gets behind its part.

        Communicates each slice once, to the owner of its parameter, and ``had`` to all ranks.
        """
        packed = [self._packed(gradient, had) for gradient in self._gradients]
        outgoing = [torch.cat([*(packed[n] for n in self._of(r, each, places)), had]) for r in self._ranks]
        mine = self._of(self._axis.rank, each, places)
        arriving = [sum(self._sizes(n, mine)) + len(had) for n in self._ranks]

        def added(received: Tensor) -> Tensor:
            shard = had.new_zeros(each + len(had))
            for rank, part in enumerate(received.split(arriving)):
                for n, local in zip(mine, part[: -len(had)].split(self._sizes(rank, mine)), strict=True):
                    begin = places[n].start - self._axis.rank * each
                    spec = self._gradients[n].entry.spec
                    full = shard[begin : begin + self._gradients[n].numel].view(spec.shape)
                    local = local.view(spec.local_shape(self._holders[rank]))
                    for box in spec.boxes(self._holders[rank]):
                        box.of_full(full).add_(box.of_local(local))
                shard[each:] += part[-len(had) :]
            return shard

        return start_all_to_all(outgoing, arriving, self._axis, "gradients").then(added)

    def start_share(self, own: Tensor, whole: Tensor, places: Sequence[slice]) -> PendingCollective:
        """Starts to give each rank its slices of what this one owns.

        Of ``whole`` only the numbers that this rank holds are written. Communicates each slice once, to each holder.
        """
        each = len(own)
        mine = self._of(self._axis.rank, each, places)
        outgoing = [torch.cat([own[:0], *(self._slice(own, n, r, each, places) for n in mine)]) for r in self._ranks]
        theirs = [self._of(r, each, places) for r in self._ranks]
        arriving = [sum(self._sizes(self._axis.rank, numbers)) for numbers in theirs]

        def placed(received: Tensor) -> Tensor:
            coords = self._holders[self._axis.rank]
            for numbers, part in zip(theirs, received.split(arriving), strict=True):
                for n, local in zip(numbers, part.split(self._sizes(self._axis.rank, numbers)), strict=True):
                    spec = self._gradients[n].entry.spec
                    spec.place(local.view(spec.local_shape(coords)), whole[places[n]].view(spec.shape), coords)
            return whole

        return start_all_to_all(outgoing, arriving, self._axis, "parameters").then(placed)

    @property
    def _ranks(self) -> range:
        return range(self._axis.size)

    def _of(self, rank: int, each: int, places: Sequence[slice]) -> list[int]:
        """The numbers of the gradients that a rank owns."""
        return [n for n, place in enumerate(places) if each and place.start // each == rank]

    def _sizes(self, rank: int, numbers: Sequence[int]) -> list[int]:
        """Numbers that a rank holds of each."""
        return [prod(self._gradients[n].entry.spec.local_shape(self._holders[rank])) for n in numbers]

    def _packed(self, gradient: ShardedGradient, like: Tensor) -> Tensor:
        grad = gradient.param.grad
        if grad is None:
            return like.new_zeros(gradient.param.numel())
        return torch.div(grad.reshape(-1), gradient.divisor).to(like.dtype)

    def _slice(self, own: Tensor, n: int, rank: int, each: int, places: Sequence[slice]) -> Tensor:
        begin, gradient = places[n].start - self._axis.rank * each, self._gradients[n]
        full = own[begin : begin + gradient.numel].view(gradient.entry.spec.shape)
        return gradient.entry.spec.slice(full, self._holders[rank]).reshape(-1)


ALIGNMENT_ELEMENTS = 32
"""Numbers, which are 64 bytes in 16 bit: no kernel looks further."""


@dataclass(eq=False)
class GradientSlot:
    """The gradient of one parameter on this rank.

    Slices that several ranks of a cut parameter hold (a KV head that ranks share) are summed over their holders only:
    in the bucket the gradient stands in the full shape, with zeros for what this rank does not hold.

    Args:
        axis: all ranks whose gradients are summed.
        coords: this rank's place on the grid.
    """

    entry: ParamEntry
    axis: Axis
    coords: Coords
    bucket: Bucket | None = None
    shard_coords: Sequence[
        Coords
    ] = ()  # the coordinates of each rank of the axis, of a cut one that is brought together
    is_full: bool = False  # whether one rank gets all of it, for an optimizer that looks at whole matrices
    changed: bool = False  # since the last time that it was agreed on
    arrived: bool = False  # in this backward

    def __post_init__(self) -> None:
        self.divisor = self.entry.reduction.divisor
        self._look(not self.entry.spec.is_partition)

    def _look(self, is_shared: bool) -> None:
        spec = self.entry.spec
        self.is_shared = is_shared
        summed = [size for name, size in spec.axes.items() if self.is_full or name in self.entry.reduction.sum_over]
        self.copies = spec.num_copies() * (self.axis.size // (prod(summed) if is_shared else 1))
        """How many of the ranks hold each number: a number, or one for each of the full tensor."""

    def gather_to_owner(self, axis: Axis | None, holders: Sequence[Coords] = ()) -> None:
        """From now on one rank gets all of it: of a cut parameter the full one, out of the slices of ``axis``.

        Args:
            holders: the coordinates of each rank of the axis.
        """
        self.is_full = True
        if axis is not None:
            self.axis, self.shard_coords = axis, holders
            self._look(True)

    @property
    def shape(self) -> torch.Size:
        """In the bucket."""
        return torch.Size(self.entry.spec.shape) if self.is_shared else self.param.shape

    @property
    def param(self) -> Tensor:
        return self.entry.param

    @property
    def is_new(self) -> bool:
        """Whether the gradient here is one that the other ranks do not know."""
        return self.changed and self.param.grad is not None

    @property
    def is_sparse(self) -> bool:
        """Whether the gradient here has some rows alone, as ``nn.Embedding(sparse=True)`` gives it."""
        return self.param.grad is not None and self.param.grad.is_sparse

    @property
    def numel(self) -> int:
        """Numbers that it takes in a bucket."""
        return self.shape.numel()

    def pack(self, out: Tensor, divisor: Tensor | float) -> None:
        """Writes the gradient over ``divisor`` into its place in a bucket; zeros where there is none."""
        grad = _dense(self.param.grad)
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
            return flat.view(self.param.shape)
        return self.entry.spec.slice(flat.view(self.entry.spec.shape), self.coords)

    def local_copies(self) -> Tensor | float:
        """``copies`` of the numbers that this rank holds."""
        if not isinstance(self.copies, Tensor):
            return self.copies
        return self.entry.spec.slice(self.copies.expand(self.entry.spec.shape), self.coords)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientSlot:
        memo[id(self)] = twin = GradientSlot(deepcopy(self.entry, memo), self.axis, self.coords)
        twin.divisor = self.divisor
        return twin


@dataclass(eq=False)
class Bucket:
    """Gradients that one collective sums, over ``axis``, in ``dtype``: by default that of the parameters."""

    axis: Axis
    dtype: torch.dtype | None = None
    gradients: list[GradientSlot] = field(default_factory=list)
    pending: int = 0
    work: Any = None
    flat: Tensor | None = None
    is_sent: bool = False  # in this backward
    memory: Callable[[int, torch.dtype, torch.device], Tensor] | None = None  # what gives it; None: new memory
    watch: ConsistencyMonitorProtocol | None = None  # whose numbers go behind the gradients

    @property
    def is_summed(self) -> bool:
        """Whether the sum is there already."""
        return self.work is None or self.work.is_completed()

    @property
    def slices(self) -> SlicesToOwners | None:
        """Where ranks hold slices of parameters that one of them has whole, and send directly: who has which."""
        first = self.gradients[0]
        is_direct = self.axis.size > 1 and self.axis.transport.exchanges_directly(first.param)
        if not is_direct or not all(gradient.shard_coords for gradient in self.gradients):
            return None
        return SlicesToOwners(self.gradients, first.shard_coords)

    @property
    def has_gradient(self) -> list[float]:
        """For each gradient 1 where this rank has a new one, -1 where that is sparse."""
        return [(-1.0 if g.is_sparse else 1.0) if g.is_new else 0.0 for g in self.gradients]

    def extra_values(self) -> list[float]:
        """What goes behind the gradients, and is summed with them: ``had``, and the bits of the watch."""
        return self.has_gradient + (
            self.watch.values_to_reduce(self.axis) if self.watch is not None and self.axis.size > 1 else []
        )

    def check_extra_values(self, tail: Tensor) -> Tensor:
        """The sums of ``had``. Raises InputError, on every rank, where ranks have come apart."""
        count, tail = len(self.gradients), tail.real if tail.is_complex() else tail
        if self.watch is not None and len(tail) > count:
            self.watch.check_reduced(tail[count:], self.axis)
        return tail[:count]

    def offsets(self, ranks: int = 1) -> tuple[int, list[slice]]:
        """How many numbers each rank has of the bucket, and where each gradient lies among those of all ranks.

        Gradients follow each other; those that one rank gets whole lie in its part, the largest given out first, each
        to the rank that has least. Each begins at a multiple of ``ALIGNMENT_ELEMENTS``: parameters lie in the same
        places, and a
        kernel that looks at where one begins would round otherwise on a rank whose other parameters are smaller.
        """
        sizes = [gradient.numel for gradient in self.gradients]
        if ranks == 1 or not any(gradient.is_full for gradient in self.gradients):
            *begins, end = accumulate(map(_with_gap, sizes), initial=0)
            end -= _with_gap(sizes[-1]) - sizes[-1]
            each = max(1, -(-end // ranks))  # where no parameter has a number too: no collective is of nothing
            return each, [slice(at, at + size) for at, size in zip(begins, sizes, strict=True)]
        used, starts = [0] * ranks, [(0, 0)] * len(sizes)
        for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
            rank = min(range(ranks), key=lambda rank: used[rank])
            starts[n] = rank, used[rank]
            used[rank] += _with_gap(sizes[n])
        each = max(1, *used)
        return each, [slice(r * each + at, r * each + at + n) for (r, at), n in zip(starts, sizes, strict=True)]

    def new_flat(self, numel: int) -> Tensor:
        first = self.gradients[0].param
        dtype = first.dtype if self.dtype is None else torch.promote_types(first.dtype, self.dtype)
        if self.memory is not None:
            return self.memory(numel, dtype, first.device)
        return torch.empty(numel, dtype=dtype, device=first.device)

    def reset(self) -> None:
        self.flat = self.work = None
        self.is_sent = False
        self.pending = len(self.gradients)
        for gradient in self.gradients:
            gradient.arrived = False


OnReduced = Callable[[Bucket, Tensor, Tensor], None]


class BucketReduction(Protocol):
    """What comes of a bucket.

    Attributes:
        takes_sparse: whether ``.grad`` may be sparse; else it is made a full one as it arrives.
    """

    takes_sparse: bool

    def scale(self, gradient: GradientSlot) -> Tensor | float:
        """What a gradient is multiplied by as it arrives, before it is accumulated."""

    def start(self, bucket: Bucket) -> None:
        """Starts to sum the bucket over its ranks."""

    def finish(self, bucket: Bucket) -> None:
        """Waits for the sum and hands it on."""

    def end_pass(self) -> None:
        """All that was started is finished: a backward is through."""


class AllReduceToGrad:
    """Every rank gets the sum in ``.grad``. Communicates one all-reduce of the gradients and one number each.

    ``.grad`` may hold what earlier backwards agreed on, which all ranks hold alike, beside what this one added. So what
    arrives is scaled by copies / divisor, and the mean over all copies is taken of the two together: what was agreed on
    stays as it is, and what arrived becomes its sum over the divisor. Accumulation is right by itself, whether the
    backwards before were paused or not.

    A sparse gradient is summed as a full one, and then has the rows that it has on any rank. Communicates their indices
    at the end of the backward.
    """

    takes_sparse = True

    def __init__(self) -> None:
        self._sparse: list[tuple[GradientSlot, Tensor]] = []  # gradients that ranks have some rows of, and their sums

    def scale(self, gradient: GradientSlot) -> Tensor | float:
        return gradient.local_copies() / gradient.divisor

    def start(self, bucket: Bucket) -> None:
        total, places = _packed_offsets(bucket)
        tail = bucket.extra_values()
        bucket.flat = flat = bucket.new_flat(total + len(tail))
        for gradient, place in zip(bucket.gradients, places, strict=True):
            gradient.pack(flat[place], gradient.copies)
        flat[total:] = torch.tensor(tail, dtype=flat.dtype, device=flat.device)
        if bucket.axis.size > 1:
            bucket.work = start_sum(flat, bucket.axis, "gradients")

    def finish(self, bucket: Bucket) -> None:
        flat = bucket.flat
        assert flat is not None
        if bucket.work is not None:
            bucket.work.wait()
        total, places = _packed_offsets(bucket)
        counts = bucket.check_extra_values(flat[total:])
        # a gradient that arrived here needs no count, which a GPU would have to be waited for
        had = None if all(n > 0 for n in bucket.has_gradient) else to_list(counts)
        for i, (gradient, place) in enumerate(zip(bucket.gradients, places, strict=True)):
            if had is None or had[i]:
                value = gradient.unpack(flat[place])
                if had is not None and had[i] < 0:
                    self._sparse.append((gradient, value))
                elif gradient.param.grad is None:
                    gradient.param.grad = value.clone()
                else:
                    gradient.param.grad.copy_(value)

            elif gradient.is_new:
                raise InputError(
                    f"The gradient of {gradient.entry.name} is sparse on one rank, and is not on another",
                    remedy="Use the parameter in the same way on all ranks, or leave sparse=True out",
                )

    def end_pass(self) -> None:
        """Sparse sums get the rows of all ranks: at the end, where ranks are at the same place."""
        sparse, self._sparse = self._sparse, []
        for gradient, value in sparse:
            grad = gradient.param.grad
            mine = grad.coalesce().indices() if grad is not None and grad.is_sparse else None
            rows = [theirs.to(value.device) for theirs in all_gather_objects(mine, gradient.axis) if theirs is not None]
            indices = torch.cat(rows, 1).unique(dim=1)
            checks = torch.sparse.check_sparse_tensor_invariants
            with checks(checks.is_enabled()):  # type: ignore[no-untyped-call]  # torch 2.11 warns if this is not set
                gradient.param.grad = torch.sparse_coo_tensor(
                    indices, value[tuple(indices)], value.shape, is_coalesced=True
                )


class ReduceScatterToShards:
    """Every rank gets its shard of the sum: as many numbers of the bucket in a row as any other, zeros behind the last.

    ``.grad`` is taken away, so that what is in it is new each time. Communicates one reduce-scatter of the gradients,
    with one number for each gradient behind every shard; of slices for owners: see ``SlicesToOwners``.

    Args:
        receive: (the bucket, this rank's shard, for each gradient how many ranks had one).
        arrives: called when a gradient arrives, before it is accumulated.
        takes: called before ``.grad`` is read for a sum: what else is shown there is taken away.
        ends: called at the end of a backward.
    """

    takes_sparse = False

    def __init__(
        self,
        receive: OnReduced,
        arrives: Callable[[GradientSlot], None] = lambda _: None,
        takes: Callable[[GradientSlot], None] = lambda _: None,
        ends: Callable[[], None] = lambda: None,
    ) -> None:
        self._receive, self._arrives, self._takes, self.end_pass = receive, arrives, takes, ends

    def scale(self, gradient: GradientSlot) -> Tensor | float:
        self._arrives(gradient)
        self._takes(gradient)
        return 1.0

    def _take(self, bucket: Bucket) -> None:
        for gradient in bucket.gradients:
            self._takes(gradient)

    def start(self, bucket: Bucket) -> None:
        self._take(bucket)
        ranks, tail = bucket.axis.size, bucket.extra_values()
        each, places = bucket.offsets(ranks)
        if (slices := bucket.slices) is not None:
            behind = bucket.new_flat(len(tail))
            bucket.work = slices.start_sum(each, places, behind.copy_(torch.tensor(tail)))
            for gradient in bucket.gradients:
                gradient.param.grad = None
            return
        bucket.flat = bucket.new_flat(ranks * (each + len(tail)))
        rows = bucket.flat.view(ranks, each + len(tail))
        rows[:, each:] = torch.tensor(tail, dtype=rows.dtype, device=rows.device)
        for gap in _gaps(places, ranks * each):
            for rank in range(gap.start // each, -(-gap.stop // each)):
                rows[rank, max(gap.start - rank * each, 0) : min(gap.stop - rank * each, each)] = 0
        for gradient, place in zip(bucket.gradients, places, strict=True):
            _pack_rows(gradient, place, rows[:, :each])
            gradient.param.grad = None
        bucket.work = start_reduce_scatter(bucket.flat, bucket.axis, 0, purpose="gradients")

    def finish(self, bucket: Bucket) -> None:
        shard = bucket.work.wait()
        each = self._length(bucket)
        self._receive(bucket, shard[:each], bucket.check_extra_values(shard[each:]))

    def _length(self, bucket: Bucket) -> int:
        """Numbers of the gradients that a rank gets."""
        return bucket.offsets(bucket.axis.size)[0]


class AllReduceToShards(ReduceScatterToShards):
    """Every rank gets the whole sum. Communicates one all-reduce of the gradients, with one number for each behind."""

    def start(self, bucket: Bucket) -> None:
        self._take(bucket)
        total, tail = self._length(bucket), bucket.extra_values()
        bucket.flat = flat = bucket.new_flat(total + len(tail))
        for gap in _gaps(bucket.offsets()[1], total):
            flat[gap] = 0
        flat[total:] = torch.tensor(tail, dtype=flat.dtype, device=flat.device)
        for gradient, place in zip(bucket.gradients, bucket.offsets()[1], strict=True):
            gradient.pack(flat[place], gradient.divisor)
            gradient.param.grad = None
        bucket.work = (
            start_sum(flat, bucket.axis, "gradients") if bucket.axis.size > 1 else PendingCollective((), lambda: flat)
        )

    def _length(self, bucket: Bucket) -> int:
        return bucket.offsets()[0]


def _packed_offsets(bucket: Bucket) -> tuple[int, list[slice]]:
    """How many numbers the gradients have, and where each lies where they follow each other without a gap."""
    *begins, end = accumulate((gradient.numel for gradient in bucket.gradients), initial=0)
    return end, [slice(at, at + gradient.numel) for at, gradient in zip(begins, bucket.gradients, strict=True)]


def _dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def _with_gap(numel: int) -> int:
    return -(-numel // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


def _gaps(places: Sequence[slice], total: int) -> Iterator[slice]:
    """What no gradient fills of so many numbers."""
    end = 0
    for place in sorted(places, key=lambda place: place.start):
        if place.start > end:
            yield slice(end, place.start)
        end = max(end, place.stop)
    if total > end:
        yield slice(end, total)


def _pack_rows(gradient: GradientSlot, place: slice, rows: Tensor) -> None:
    """Writes a gradient over its divisor into its place in rows that follow each other."""
    each, grad = rows.shape[1], gradient.param.grad
    ranks = range(place.start // each, -(-place.stop // each))
    if len(ranks) == 1:
        start = place.start - ranks[0] * each
        gradient.pack(rows[ranks[0], start : start + gradient.numel], gradient.divisor)
        return
    if grad is None or gradient.is_shared:
        values = rows.new_empty(gradient.numel)
        gradient.pack(values, gradient.divisor)
    else:
        values = grad.reshape(-1)
    divisor = 1.0 if grad is None or gradient.is_shared else gradient.divisor
    for rank in ranks:
        low, high = max(place.start, rank * each), min(place.stop, (rank + 1) * each)
        part = values[low - place.start : high - place.start]
        torch.div(part, divisor, out=rows[rank, low - rank * each : high - rank * each])
