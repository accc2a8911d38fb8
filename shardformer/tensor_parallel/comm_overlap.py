"""All-gather and reduce-scatter in ring steps that overlap with matmuls.

On R ranks, each chunk takes R-1 steps; while one chunk is sent, the matmul of another runs (Wang et al. 2023, "Overlap
communication with dependent computation via decomposition"). Timeline for R = 2:

    rank 0   | send x0, multiply x0 | multiply x1 |        rank 0   | multiply for 1, send | multiply for 0, add |
    rank 1   | send x1, multiply x1 | multiply x0 |        rank 1   | multiply for 0, send | multiply for 1, add |

                all-gather, then matmul                            matmul, then reduce-scatter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shardformer.comm.recorder import do_not_record_wait, get_num_bytes, record_collective_start
from shardformer.layout.shard_spec import get_even_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.transport import Work


def all_gather_matmul(
    x_BsH: Tensor, axis: Axis, full_length: int, process_chunk: Callable[[Tensor, int, int], None]
) -> Tensor:
    """All-gather a tensor along dim 1 in ring steps, and process each chunk while the next one arrives.

    Calls ``process_chunk(chunk, start, end)`` for each chunk. Returns the gathered tensor (B, full_length, H).
    Communicates one all-gather of this tensor, in R-1 steps that overlap with ``process_chunk``.
    """
    bounds = get_even_bounds(full_length, axis.size)
    joined = x_BsH.new_empty((x_BsH.shape[0], full_length, *x_BsH.shape[2:]))
    record_end = record_collective_start("all_gather", axis, get_num_bytes(joined), "block")
    next_rank, previous_rank = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    current = x_BsH.contiguous()
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        start, end = bounds[source], bounds[source + 1]
        works: Sequence[Work] = ()
        arriving = current
        if step < axis.size - 1:
            following = (source - 1) % axis.size
            shape = (x_BsH.shape[0], bounds[following + 1] - bounds[following], *x_BsH.shape[2:])
            arriving = x_BsH.new_empty(shape)
            works = axis.transport.exchange({next_rank: current}, {previous_rank: arriving})
        joined[:, start:end] = current
        if end > start:
            process_chunk(current, start, end)
        for work in works:
            work.wait()
        current = arriving
    record_end()
    return joined


def matmul_reduce_scatter(compute_chunk: Callable[[int, int], Tensor], axis: Axis, full_length: int) -> Tensor:
    """Compute a tensor in chunks along dim 1, and reduce-scatter each chunk while the next one is computed.

    ``compute_chunk(start, end)`` computes the summand of this rank for one chunk. Returns the chunk of this rank,
    summed over the ranks. Communicates one reduce-scatter of the full tensor, in R-1 steps.
    """
    bounds = get_even_bounds(full_length, axis.size)
    next_rank, previous_rank = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    works: Sequence[Work] = ()
    record_end = do_not_record_wait
    arriving: Tensor | None = None
    kept: list[Tensor] = []
    for step in range(axis.size):
        owner = (axis.rank - 1 - step) % axis.size
        summand = compute_chunk(bounds[owner], bounds[owner + 1])
        if step == 0:
            per_index = get_num_bytes(summand) // max(summand.shape[1], 1)
            record_end = record_collective_start("reduce_scatter", axis, per_index * full_length, "block")
        for work in works:
            work.wait()
        if arriving is not None:
            summand = summand + arriving
        if step == axis.size - 1:
            record_end()
            return summand
        following = (owner - 1) % axis.size
        shape = (summand.shape[0], bounds[following + 1] - bounds[following], *summand.shape[2:])
        arriving = summand.new_empty(shape)
        kept = [summand.contiguous()]
        works = axis.transport.exchange({next_rank: kept[0]}, {previous_rank: arriving})
    raise AssertionError(f"The axis must have at least one rank, but has {axis.size}.")


# B batch, S sequence, H hidden; s: local slice of the sequence
