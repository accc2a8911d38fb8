"""A collective and a matrix product in parts around a ring, so that communication runs under computation.

With R ranks a part is passed on R-1 times; while one is on the way, the matmul of the one that is here runs
(Wang et al. 2023, "Overlap communication with dependent computation via decomposition"). For R = 2, in time:

    rank 0   | send x0, multiply x0 | multiply x1 |        rank 0   | multiply for 1, send | multiply for 0, add |
    rank 1   | send x1, multiply x1 | multiply x0 |        rank 1   | multiply for 0, send | multiply for 1, add |

                  gather, then matmul                            matmul, then scatter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shardformer.comm.recorder import bytes_of, no_wait_event, record
from shardformer.layout.shard_spec import even_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.transport import Work


def all_gather_matmul(x_BsH: Tensor, axis: Axis, full: int, use: Callable[[Tensor, int, int], None]) -> Tensor:
    """Joins every rank's part of dim 1, and calls ``use(part, start, end)`` for each as soon as it is here.

    Returns the joined tensor (B, full, H). Communicates one all-gather of it, in R-1 steps under the calls of ``use``.
    """
    bounds = even_bounds(full, axis.size)
    joined = x_BsH.new_empty((x_BsH.shape[0], full, *x_BsH.shape[2:]))
    noted = record("all_gather", axis, bytes_of(joined), "block")
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    current = x_BsH.contiguous()
    for step in range(axis.size):
        holder = (axis.rank - step) % axis.size
        start, end = bounds[holder], bounds[holder + 1]
        works: Sequence[Work] = ()
        arriving = current
        if step < axis.size - 1:
            coming = (holder - 1) % axis.size
            shape = (x_BsH.shape[0], bounds[coming + 1] - bounds[coming], *x_BsH.shape[2:])
            arriving = x_BsH.new_empty(shape)
            works = axis.transport.exchange({after: current}, {before: arriving})
        joined[:, start:end] = current
        if end > start:
            use(current, start, end)
        for work in works:
            work.wait()
        current = arriving
    noted()
    return joined


def matmul_reduce_scatter(make: Callable[[int, int], Tensor], axis: Axis, full: int) -> Tensor:
    """Sums ``make(start, end)`` of all ranks for each part of dim 1; every rank keeps its own.

    ``make`` computes this rank's summand for one part, and runs while the sum of the one before is on its way.
    Communicates one reduce-scatter of the full tensor, in R-1 steps.
    """
    bounds = even_bounds(full, axis.size)
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    works: Sequence[Work] = ()
    noted = no_wait_event
    arriving: Tensor | None = None
    kept: list[Tensor] = []
    for step in range(axis.size):
        owner = (axis.rank - 1 - step) % axis.size
        summand = make(bounds[owner], bounds[owner + 1])
        if step == 0:
            per_index = bytes_of(summand) // max(summand.shape[1], 1)
            noted = record("reduce_scatter", axis, per_index * full, "block")
        for work in works:
            work.wait()
        if arriving is not None:
            summand = summand + arriving
        if step == axis.size - 1:
            noted()
            return summand
        following = (owner - 1) % axis.size
        shape = (summand.shape[0], bounds[following + 1] - bounds[following], *summand.shape[2:])
        arriving = summand.new_empty(shape)
        kept = [summand.contiguous()]
        works = axis.transport.exchange({after: kept[0]}, {before: arriving})
    raise AssertionError("a ring has at least one step")


# B batch, S sequence, H hidden; s: this rank's slice of the sequence
