"""Ulysses attention: an all-to-all gives each rank all positions of some attention heads.

    (B, N, s, D), all heads of some positions  <->  (B, n, S, D), some heads of all positions

Jacobs et al. 2023, "DeepSpeed Ulysses". Query heads are split as evenly as possible, and each rank receives the key
heads that its query heads need. A key head that several ranks need is sent to all of them, and its gradients are added.

    Numbers sent per rank, forward and backward, if the heads divide: 4 (N + K) B s D (U - 1)/U
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from shardformer.comm.collectives import start_all_to_all
from shardformer.layout.shard_spec import get_even_split_bounds
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.linear_communication import apply_with_custom_backward

# B batch, N heads, s positions of this rank, S positions of the group, D head dim

PURPOSE = "context"


@dataclass(frozen=True)
class UlyssesHeadExchange:
    """Attention heads and number of positions of each rank in a Ulysses group."""

    axis: Axis
    heads_by_rank: tuple[tuple[int, ...], ...]  # of each rank, in ascending order
    lengths_by_rank: tuple[int, ...]  # the number of positions of each rank
    num_heads: int  # the total number of heads


def assign_query_heads_to_ranks(num_heads: int, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Split the query heads as evenly as possible over the ranks of a Ulysses group."""
    return tuple(tuple(range(a, b)) for a, b in pairwise(get_even_split_bounds(num_heads, num_ranks)))


def assign_key_heads_to_ranks(
    query_heads_by_rank: tuple[tuple[int, ...], ...], num_query_heads: int, num_key_heads: int
) -> tuple[tuple[int, ...], ...]:
    """Return the key heads that each rank needs for its query heads.

    A key head appears once if its local query heads form equal groups, and once per query head otherwise.

    >>> assign_key_heads_to_ranks(assign_query_heads_to_ranks(4, 2), 4, 2)
    ((0,), (1,))
    >>> assign_key_heads_to_ranks(assign_query_heads_to_ranks(6, 4), 6, 2)
    ((0,), (0, 1), (1,), (1,))
    >>> assign_key_heads_to_ranks(((0, 1, 2), (3, 4)), 5, 5)
    ((0, 1, 2), (3, 4))
    """
    per_key = num_query_heads // num_key_heads
    found = []
    for local_heads in query_heads_by_rank:
        read = [query // per_key for query in local_heads]
        once = sorted(set(read))
        repeated = [key for key in once for _ in range(len(local_heads) // max(len(once), 1))]
        found.append(tuple(once if repeated == read else read))
    return tuple(found)


def scatter_heads_and_gather_positions(tensor: Tensor, exchange: UlyssesHeadExchange) -> Tensor:
    """Exchange heads for positions with an all-to-all: each rank gets all positions of some heads.

    (B, N, s, D) -> (B, n, S, D). Communicates one all-to-all, and another in the backward pass.
    """
    if exchange.axis.size == 1:
        return tensor
    return apply_with_custom_backward(
        tensor,
        partial(scatter_heads_without_autograd, exchange=exchange),
        partial(gather_heads_without_autograd, exchange=exchange),
    )


def gather_heads_and_scatter_positions(tensor: Tensor, exchange: UlyssesHeadExchange) -> Tensor:
    """Exchange positions for heads with an all-to-all: each rank gets all heads of some positions.

    (B, n, S, D) -> (B, N, s, D). Communicates one all-to-all, and another in the backward pass.
    """
    if exchange.axis.size == 1:
        return tensor
    return apply_with_custom_backward(
        tensor,
        partial(gather_heads_without_autograd, exchange=exchange),
        partial(scatter_heads_without_autograd, exchange=exchange),
    )


def scatter_heads_without_autograd(tensor: Tensor, exchange: UlyssesHeadExchange) -> Tensor:
    """Run ``scatter_heads_and_gather_positions`` without autograd. Communicates one all-to-all."""
    batch, _, _, width = tensor.shape
    num_heads = len(exchange.heads_by_rank[exchange.axis.rank])
    shapes = [(batch, num_heads, length, width) for length in exchange.lengths_by_rank]
    return torch.cat(
        _all_to_all([tensor[:, list(heads)] for heads in exchange.heads_by_rank], shapes, exchange.axis), 2
    )


def gather_heads_without_autograd(tensor: Tensor, exchange: UlyssesHeadExchange) -> Tensor:
    """Run ``gather_heads_and_scatter_positions`` without autograd. Communicates one all-to-all."""
    batch, _, _, width = tensor.shape
    length = exchange.lengths_by_rank[exchange.axis.rank]
    shapes = [(batch, len(heads), length, width) for heads in exchange.heads_by_rank]
    parts = _all_to_all(list(tensor.split(exchange.lengths_by_rank, 2)), shapes, exchange.axis)
    if [head for heads in exchange.heads_by_rank for head in heads] == list(range(exchange.num_heads)):
        return torch.cat(parts, 1)
    full = tensor.new_zeros(
        batch, exchange.num_heads, length, width, dtype=torch.promote_types(tensor.dtype, torch.float32)
    )
    for heads, part in zip(exchange.heads_by_rank, parts, strict=True):
        full.index_add_(1, torch.tensor(heads, device=tensor.device, dtype=torch.int64), part.to(full.dtype))
    return full.to(tensor.dtype)


def _all_to_all(send_tensors: list[Tensor], output_shapes: Sequence[tuple[int, ...]], axis: Axis) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in output_shapes]
    joined = start_all_to_all([part.reshape(-1) for part in send_tensors], sizes, axis, PURPOSE).wait()
    return [part.view(shape) for part, shape in zip(joined.split(sizes), output_shapes, strict=True)]
