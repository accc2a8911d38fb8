"""Collectives on plain tensors over one axis. On an axis of size 1 each is the identity.

The one place that chooses an algorithm. Where the transport exchanges directly (gloo), parts are sent from rank to rank
and added in rank order, which also makes the result the same to the bit on all ranks; large all-reduces are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardformer.comm.recorder import bytes_of, no_wait_event, record
from shardformer.layout.shard_spec import ShardSpec, even_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.transport import Work
from shardformer.torch_compat import has_data, without_fake_tensors

EXCHANGE_BELOW_BYTES = 512 * 1024
"""An all-reduce of two processes below this size is one exchange instead of gloo's two rounds (measured)."""


CHECKSUM_BYTES = 4096
"""Stretches of a tensor whose sums are told apart in a checksum."""


class PendingCollective:
    """A collective under way; ``wait()`` gives its result."""

    def __init__(
        self, works: Sequence[Work], finish: Callable[[], Tensor], noted: Callable[[], None] = no_wait_event
    ) -> None:
        self._works, self._finish, self._noted = works, finish, noted

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        self._noted()
        return self._finish()

    def then(self, use: Callable[[Tensor], Tensor]) -> PendingCollective:
        """The same, of which ``wait()`` gives what ``use`` makes of its result."""
        return PendingCollective(self._works, lambda: use(self._finish()), self._noted)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def start_all_reduce(x: Tensor, axis: Axis, *, op: str = "sum", purpose: str = "block") -> PendingCollective:
    """Starts the sum (or "max") of ``x`` over the axis; ``x`` may be overwritten, so hand over memory of your own.

    Communicates one all-reduce of x.
    """
    if axis.size == 1:
        return PendingCollective((), lambda: x)
    noted = record("all_reduce", axis, bytes_of(x), purpose)
    x = x.contiguous()
    small = axis.size == 2 and op == "sum" and bytes_of(x) < EXCHANGE_BELOW_BYTES
    if small and axis.transport.exchanges_directly(x):
        theirs = torch.empty_like(x)
        works = axis.transport.exchange({1 - axis.rank: x}, {1 - axis.rank: theirs})
        return PendingCollective(works, lambda: theirs.add_(x), noted)
    return PendingCollective([axis.transport.all_reduce(x, op)], lambda: x, noted)


def start_sum(x: Tensor, axis: Axis, purpose: str) -> PendingCollective:
    """Starts the sum of a contiguous ``x`` over the axis, in place. Communicates one all-reduce of x."""
    noted = record("all_reduce", axis, bytes_of(x), purpose)
    return PendingCollective([axis.transport.all_reduce(x, "sum")], lambda: x, noted)


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
) -> PendingCollective:
    """Starts joining every rank's ``x`` along ``dim``.

    Args:
        full: length of the joined dim, of which the ranks hold parts as even as can be; by default x's times R.
        lengths: each rank's length where the parts are not the even ones.

    Communicates one all-gather of the joined tensor.
    """
    if axis.size == 1:
        return PendingCollective((), lambda: x)
    x = x.contiguous()
    dim = dim % x.dim()
    if lengths is None:
        bounds = even_bounds(x.shape[dim] * axis.size if full is None else full, axis.size)
        lengths = [b - a for a, b in pairwise(bounds)]
    full_bytes = bytes_of(x) // max(x.shape[dim], 1) * sum(lengths)
    noted = record("all_gather", axis, full_bytes, purpose)
    parts = [x if r == axis.rank else x.new_empty(_with_length(x, dim, n)) for r, n in enumerate(lengths)]
    if axis.transport.exchanges_directly(x):
        peers = [r for r in range(axis.size) if r != axis.rank]
        works = axis.transport.exchange({r: x for r in peers}, {r: parts[r] for r in peers})
        return PendingCollective(works, lambda: torch.cat(parts, dim), noted)
    widest = max(lengths)
    padded = _padded(x, dim, widest)
    gathered = x.new_empty((axis.size * padded.shape[0], *padded.shape[1:]))
    work = axis.transport.all_gather(gathered, padded)

    def finish() -> Tensor:
        return torch.cat([p.narrow(dim, 0, n) for p, n in zip(gathered.chunk(axis.size), lengths, strict=True)], dim)

    return PendingCollective([work], finish, noted)


def start_all_gather_into(out: Tensor, x: Tensor, axis: Axis, purpose: str) -> PendingCollective:
    """Starts joining every rank's ``x``, of one length, in ``out``, which has one dim and is R times as long.

    ``x`` may be this rank's part of ``out``, which then takes no copy.

    Communicates one all-gather of the joined tensor.
    """
    own = out.view(axis.size, -1)[axis.rank]
    if own.data_ptr() != x.data_ptr() or not has_data(x):
        own.copy_(x)
    if axis.size == 1:
        return PendingCollective((), lambda: out)
    noted = record("all_gather", axis, bytes_of(out), purpose)
    if not axis.transport.exchanges_directly(x):
        return PendingCollective([axis.transport.all_gather(out, own)], lambda: out, noted)
    parts = out.view(axis.size, -1)
    peers = [r for r in range(axis.size) if r != axis.rank]
    return PendingCollective(
        axis.transport.exchange({r: x for r in peers}, {r: parts[r] for r in peers}), lambda: out, noted
    )


def all_gather(x: Tensor, axis: Axis, dim: int, full: int | None = None, **options: Any) -> Tensor:
    """Every rank's ``x`` joined along ``dim``: see ``start_all_gather``, whose options it takes."""
    return start_all_gather(x, axis, dim, full, **options).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int, *, purpose: str = "block") -> PendingCollective:
    """Starts summing ``x`` over the axis, of which this rank keeps its part (as even as can be) of ``dim``.

    Communicates one reduce-scatter of x.
    """
    if axis.size == 1:
        return PendingCollective((), lambda: x)
    noted = record("reduce_scatter", axis, bytes_of(x), purpose)
    dim = dim % x.dim()
    bounds = even_bounds(x.shape[dim], axis.size)
    parts = [x.narrow(dim, bounds[r], bounds[r + 1] - bounds[r]) for r in range(axis.size)]
    mine = parts[axis.rank].contiguous()
    if axis.transport.exchanges_directly(x):
        peers = [r for r in range(axis.size) if r != axis.rank]
        arriving = {r: torch.empty_like(mine) for r in peers}
        works = axis.transport.exchange({r: parts[r].contiguous() for r in peers}, arriving)
        return PendingCollective(
            works, lambda: _sum_in_rank_order([arriving.get(r, mine) for r in range(axis.size)]), noted
        )
    widest = max(p.shape[dim] for p in parts)
    stacked = torch.cat([_padded(p, dim, widest) for p in parts])
    out = x.new_empty((stacked.shape[0] // axis.size, *stacked.shape[1:]))
    work = axis.transport.reduce_scatter(out, stacked)
    return PendingCollective([work], lambda: out.narrow(dim, 0, mine.shape[dim]).contiguous(), noted)


def start_all_to_all(x: Sequence[Tensor], sizes: Sequence[int], axis: Axis, purpose: str) -> PendingCollective:
    """Starts sending ``x[r]`` to rank r, each of one dim; ``wait`` joins what comes, in rank order.

    Args:
        sizes: how many numbers come from each rank.

    Communicates one all-to-all. Where ranks send unlike amounts it is noted as if all sent what this one does.
    """
    mine = x[axis.rank]
    if axis.size == 1:
        return PendingCollective((), lambda: mine)
    sent = sum(bytes_of(part) for r, part in enumerate(x) if r != axis.rank)
    noted = record("all_to_all", axis, sent * axis.size // (axis.size - 1), purpose)
    peers = [r for r in range(axis.size) if r != axis.rank]
    arriving = {r: mine.new_empty(sizes[r]) for r in peers}
    works = axis.transport.exchange({r: x[r].contiguous() for r in peers}, arriving)
    return PendingCollective(works, lambda: torch.cat([arriving.get(r, mine) for r in range(axis.size)]), noted)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, *, purpose: str = "block") -> Tensor:
    """This rank's part of the sum of ``x``: see ``start_reduce_scatter``."""
    return start_reduce_scatter(x, axis, dim, purpose=purpose).wait()


def local_chunk(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part of a tensor that all ranks hold. Communicates nothing."""
    if axis.size == 1:
        return x
    bounds = even_bounds(x.shape[dim], axis.size)
    return x.narrow(dim, bounds[axis.rank], bounds[axis.rank + 1] - bounds[axis.rank]).contiguous()


def broadcast_object(value: Any, axis: Axis, source: int = 0) -> Any:
    """Rank ``source``'s picklable value, on every rank of the axis."""
    return value if axis.size == 1 else axis.transport.broadcast_object(value, source)


def all_gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Every rank's picklable value, in rank order, on every rank of the axis."""
    return [value] if axis.size == 1 else axis.transport.gather_objects(value)


@without_fake_tensors()
def all_gather_numbers(numbers: Sequence[int], axis: Axis) -> list[list[int]]:
    """Every rank's numbers of 64 bits, as many from each, in rank order, on every rank of the axis."""
    return [list(numbers)] if axis.size == 1 else axis.transport.gather_numbers(numbers)


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Rank ``source``'s values into ``x`` on every rank of the axis."""
    if axis.size > 1:
        axis.transport.broadcast(x, source)
    return x


def checksum(t: Tensor) -> tuple[int, int]:
    """The number of elements, and a number of all their bits. Two tensors that differ seldom have the same.

    Tensors without values are told apart by their number of elements alone.
    """
    return t.numel(), int(digest(t)) if has_data(t) else 0


def digest(t: Tensor) -> Tensor:
    """A number of all bits of ``t``, on its device: nothing waits for it."""
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 4:  # a part of bytes, which is read four at a time
        flat = flat.clone()
    whole = flat.numel() // CHECKSUM_BYTES * CHECKSUM_BYTES
    sums = torch.cat(
        [
            flat[:whole].view(torch.int32).view(-1, CHECKSUM_BYTES // 4).sum(1),
            (flat[whole:] * torch.arange(1, flat.numel() - whole + 1, device=t.device)).sum()[None],
        ]
    )
    return (sums * torch.arange(1, len(sums) + 1, device=t.device)).sum()


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


def gather_full(local: Tensor, spec: ShardSpec, axis: Callable[[str], Axis]) -> Tensor:
    """The full tensor, on every rank; a copy where nothing is cut.

    Communicates one all-gather for each axis that the tensor is cut over, the innermost first.

    Args:
        axis: name of an axis -> the axis.
    """
    return gather_full_tensors([local], [spec], axis)[0]


def gather_full_tensors(
    tensors: Sequence[Tensor], specs: Sequence[ShardSpec], axis: Callable[[str], Axis]
) -> list[Tensor]:
    """The full tensors of several, on every rank, gathered together: one message for all that are cut alike.

    Communicates one all-gather for each axis that tensors are cut over, for all of these axes and dtype at once.
    """
    full, alike = dict[int, Tensor](), dict[object, list[int]]()
    for i, (local, spec) in enumerate(zip(tensors, specs, strict=True)):
        if spec.is_sharded:
            alike.setdefault((tuple(spec.axes.items()), local.dtype), []).append(i)
        else:
            full[i] = local.detach().clone()
    for group in alike.values():
        joined = _gather_same_layout([tensors[i] for i in group], [specs[i] for i in group], axis)
        full.update(zip(group, joined, strict=True))
    return [full[i] for i in range(len(tensors))]


def _gather_same_layout(
    tensors: Sequence[Tensor], specs: Sequence[ShardSpec], axis: Callable[[str], Axis]
) -> list[Tensor]:
    """The full tensors of some that are cut over the same axes."""
    places, axes = specs[0].rank_coords(), specs[0].axes
    flat = torch.cat([local.detach().reshape(-1) for local in tensors])
    held = [[prod(spec.local_shape(c)) for spec in specs] for c in places]
    sizes = {tuple(c.items()): sum(of_place) for c, of_place in zip(places, held, strict=True)}
    names = list(axes)
    for at in range(len(names) - 1, -1, -1):
        own = {name: axis(name).rank for name in names[:at]}
        line = [tuple({**own, names[at]: rank}.items()) for rank in range(axes[names[at]])]
        flat = all_gather(flat, axis(names[at]), 0, lengths=[sizes[place] for place in line], purpose="gather")
        merged: dict[tuple[tuple[str, int], ...], int] = {}
        for place, size in sizes.items():  # what each rank holds, then what it has gathered
            merged[place[:at]] = merged.get(place[:at], 0) + size
        sizes = merged
    pieces = iter(flat.split([size for of_place in held for size in of_place]))
    parts = [[next(pieces).view(spec.local_shape(c)) for spec in specs] for c in places]
    return [spec.join(of_tensor) for spec, of_tensor in zip(specs, zip(*parts, strict=True), strict=True)]
