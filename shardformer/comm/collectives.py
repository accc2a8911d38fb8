"""Collectives on plain tensors over one axis. An axis of size 1 makes each of them the identity.

The one place that chooses an algorithm and knows a backend's names. gloo's own reduce-scatter sends as many bytes as an
all-reduce and its small messages wait for two rounds, so between CPU processes parts are exchanged directly and added
in rank order, which also makes the result the same to the bit on all ranks; large all-reduces are left to gloo's ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardformer.comm.recorder import bytes_of, record
from shardformer.comm.threads import ThreadGroup
from shardformer.layout.spec import even_bounds
from shardformer.mesh.axis import Axis

EXCHANGE_BELOW_BYTES = 512 * 1024
"""An all-reduce of two processes below this size is one exchange instead of gloo's two rounds (measured)."""


CHECKSUM_BYTES = 4096
"""Stretches of a tensor whose sums are told apart in a checksum."""


class Pending:
    """A collective under way; ``wait()`` gives its result."""

    def __init__(self, works: Sequence[Any], finish: Any) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> Tensor:
        for work in self._works:
            if work is not None:
                work.wait()
        result: Tensor = self._finish()
        return result


def _uses_gloo(axis: Axis, x: Tensor) -> bool:
    return x.device.type == "cpu" or dist.get_backend(axis.group) == "gloo"


def start_all_reduce(x: Tensor, axis: Axis, *, op: str = "sum", purpose: str = "block") -> Pending:
    """Starts the sum (or "max") of ``x`` over the axis; ``x`` may be overwritten, so hand over memory of your own.

    Communicates one all-reduce of x.
    """
    if axis.size == 1:
        return Pending((), lambda: x)
    record("all_reduce", axis, bytes_of(x), purpose)
    x = x.contiguous()
    if axis.size == 2 and op == "sum" and bytes_of(x) < EXCHANGE_BELOW_BYTES and _uses_gloo(axis, x):
        theirs = torch.empty_like(x)
        works = start_exchange(axis, {1 - axis.rank: x}, {1 - axis.rank: theirs})
        return Pending(works, lambda: theirs.add_(x))
    return Pending([_start_reduction(x, axis, op)], lambda: x)


def start_sum(x: Tensor, axis: Axis) -> Any:
    """Starts the sum of ``x`` over the axis, in place, and returns the work to wait for. Nothing is recorded."""
    return _start_reduction(x, axis, "sum")


def _start_reduction(x: Tensor, axis: Axis, op: str) -> Any:
    if isinstance(axis.group, ThreadGroup):
        parts = axis.group.meet(axis.rank, x.clone())
        x.copy_(sum(parts[1:], parts[0]) if op == "sum" else torch.stack(parts).amax(0))
        return None
    reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    return dist.all_reduce(x, op=reduce_op, group=axis.group, async_op=True)


def all_reduce(x: Tensor, axis: Axis, *, op: str = "sum", purpose: str = "block") -> Tensor:
    """The sum (or "max") of ``x`` over the axis. ``x`` may be overwritten. One all-reduce of x."""
    return start_all_reduce(x, axis, op=op, purpose=purpose).wait()


def start_all_gather(
    x: Tensor,
    axis: Axis,
    dim: int,
    full: int | None = None,
    *,
    purpose: str = "block",
    lengths: Sequence[int] | None = None,
) -> Pending:
    """Starts joining every rank's ``x`` along ``dim``.

    Args:
        full: length of the joined dim, of which the ranks hold stretches as even as can be; by default x's times R.
        lengths: each rank's length where the stretches are not the even ones.

    Communicates one all-gather of the joined tensor.
    """
    if axis.size == 1:
        return Pending((), lambda: x)
    x = x.contiguous()
    dim = dim % x.dim()
    if lengths is None:
        bounds = even_bounds(x.shape[dim] * axis.size if full is None else full, axis.size)
        lengths = [b - a for a, b in pairwise(bounds)]
    full_bytes = bytes_of(x) // max(x.shape[dim], 1) * sum(lengths)
    record("all_gather", axis, full_bytes, purpose)
    parts = [x if r == axis.rank else x.new_empty(_with_length(x, dim, n)) for r, n in enumerate(lengths)]
    if _uses_gloo(axis, x):
        peers = [r for r in range(axis.size) if r != axis.rank]
        works = start_exchange(axis, {r: x for r in peers}, {r: parts[r] for r in peers})
        return Pending(works, lambda: torch.cat(parts, dim))
    widest = max(lengths)
    padded = _padded(x, dim, widest)
    gathered = x.new_empty((axis.size * padded.shape[0], *padded.shape[1:]))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(gathered, padded, group=axis.group, async_op=True)

    def finish() -> Tensor:
        return torch.cat([p.narrow(dim, 0, n) for p, n in zip(gathered.chunk(axis.size), lengths, strict=True)], dim)

    return Pending([work], finish)


def all_gather(
    x: Tensor,
    axis: Axis,
    dim: int,
    full: int | None = None,
    *,
    purpose: str = "block",
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Every rank's ``x`` joined along ``dim``: see ``start_all_gather``."""
    return start_all_gather(x, axis, dim, full, purpose=purpose, lengths=lengths).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int, *, purpose: str = "block") -> Pending:
    """Starts summing ``x`` over the axis, of which this rank keeps its stretch (as even as can be) of ``dim``.

    Communicates one reduce-scatter of x.
    """
    if axis.size == 1:
        return Pending((), lambda: x)
    record("reduce_scatter", axis, bytes_of(x), purpose)
    dim = dim % x.dim()
    bounds = even_bounds(x.shape[dim], axis.size)
    parts = [x.narrow(dim, bounds[r], bounds[r + 1] - bounds[r]) for r in range(axis.size)]
    mine = parts[axis.rank].contiguous()
    if _uses_gloo(axis, x):
        peers = [r for r in range(axis.size) if r != axis.rank]
        outgoing = {r: parts[r].contiguous() for r in peers}
        arriving = {r: torch.empty_like(mine) for r in peers}
        works = start_exchange(axis, outgoing, arriving)
        return Pending(works, lambda: _sum_in_rank_order([arriving.get(r, mine) for r in range(axis.size)]))
    widest = max(p.shape[dim] for p in parts)
    stacked = torch.cat([_padded(p, dim, widest) for p in parts])
    out = x.new_empty((stacked.shape[0] // axis.size, *stacked.shape[1:]))
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work = scatter(out, stacked, group=axis.group, async_op=True)
    return Pending([work], lambda: out.narrow(dim, 0, mine.shape[dim]).contiguous())


def reduce_scatter(x: Tensor, axis: Axis, dim: int, *, purpose: str = "block") -> Tensor:
    """This rank's stretch of the sum of ``x``: see ``start_reduce_scatter``."""
    return start_reduce_scatter(x, axis, dim, purpose=purpose).wait()


def local_chunk(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's stretch of a tensor that all ranks hold. Communicates nothing."""
    if axis.size == 1:
        return x
    bounds = even_bounds(x.shape[dim], axis.size)
    return x.narrow(dim, bounds[axis.rank], bounds[axis.rank + 1] - bounds[axis.rank]).contiguous()


def broadcast_object(value: Any, axis: Axis, source: int = 0) -> Any:
    """Rank ``source``'s picklable value, on every rank of the axis."""
    if axis.size == 1:
        return value
    if isinstance(axis.group, ThreadGroup):
        return axis.group.meet(axis.rank, value)[source]
    box = [value]
    dist.broadcast_object_list(box, src=axis.ranks[source], group=axis.group)
    return box[0]


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Every rank's picklable value, in rank order, on every rank of the axis."""
    if axis.size == 1:
        return [value]
    if isinstance(axis.group, ThreadGroup):
        return axis.group.meet(axis.rank, value)
    out: list[Any] = [None] * axis.size
    dist.all_gather_object(out, value, group=axis.group)
    return out


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Rank ``source``'s values into ``x`` on every rank of the axis."""
    if isinstance(axis.group, ThreadGroup):
        x.copy_(axis.group.meet(axis.rank, x.clone())[source])
    elif axis.size > 1:
        dist.broadcast(x, src=axis.ranks[source], group=axis.group)
    return x


def start_exchange(axis: Axis, outgoing: dict[int, Tensor], arriving: dict[int, Tensor]) -> list[Any]:
    """Starts sending tensors to, and receiving tensors from, some ranks of the axis; empty ones are not sent.

    Both must stay as they are until the returned works are waited for. Between two ranks this is one all-to-all, which
    gloo gives less to do than a send and a receive (measured: half the time under computation).
    """
    if isinstance(axis.group, ThreadGroup):
        sent = axis.group.meet(axis.rank, {r: x.clone() for r, x in outgoing.items()})
        for r, x in arriving.items():
            if x.numel():
                x.copy_(sent[r][axis.rank].view(x.shape))
        return []
    if axis.size == 2:
        other = 1 - axis.rank
        out, into = outgoing.get(other), arriving.get(other)
        give, take = (0 if t is None else t.numel() for t in (out, into))
        if give + take == 0:
            return []
        like = out if out is not None else into
        assert like is not None
        given = like.new_empty(0) if out is None else out.view(-1)
        taken = like.new_empty(0) if into is None else into.view(-1)
        take_by_rank, give_by_rank = ([take, 0], [give, 0]) if axis.rank == 1 else ([0, take], [0, give])
        return [dist.all_to_all_single(taken, given, take_by_rank, give_by_rank, group=axis.group, async_op=True)]
    works = [dist.irecv(x, axis.ranks[r], group=axis.group) for r, x in arriving.items() if x.numel()]
    works += [dist.isend(x, axis.ranks[r], group=axis.group) for r, x in outgoing.items() if x.numel()]
    return works


def checksum(t: Tensor) -> tuple[int, int]:
    """The number of elements, and a number of all their bits. Two tensors that differ seldom have the same."""
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 4:  # a stretch of bytes, which is read four at a time
        flat = flat.clone()
    whole = flat.numel() // CHECKSUM_BYTES * CHECKSUM_BYTES
    sums = torch.cat(
        [
            flat[:whole].view(torch.int32).view(-1, CHECKSUM_BYTES // 4).sum(1),
            (flat[whole:] * torch.arange(1, flat.numel() - whole + 1, device=t.device)).sum()[None],
        ]
    )
    return t.numel(), int((sums * torch.arange(1, len(sums) + 1, device=t.device)).sum())


def _sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum; of more than two 16-bit parts accumulated in fp32, which for two changes nothing."""
    if parts[0].element_size() >= 4 or len(parts) == 2:
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total
    return torch.stack(list(parts)).sum(0, dtype=torch.float32).to(parts[0].dtype)


def _with_length(x: Tensor, dim: int, length: int) -> list[int]:
    return [length if d == dim else n for d, n in enumerate(x.shape)]


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    if x.shape[dim] == length:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(_with_length(x, dim, length - x.shape[dim]))], dim)
