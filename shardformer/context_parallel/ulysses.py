"""Ulysses: the ranks of a group exchange heads for positions, so that each has some heads of all their positions.

    (B, N, s, D), all heads of a stretch  <->  (B, n, S, D), some heads of all stretches

Jacobs et al. 2023, "DeepSpeed Ulysses". Any numbers of heads: query heads are cut as even as can be, and each rank is
given the key heads that its own read. A key head that several ranks read is sent to each; its gradients add up.

    4 (N + K) B s D (U - 1)/U numbers a rank sends, forward and backward, where heads divide
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardformer.comm.autograd_collectives import once_differentiable
from shardformer.comm.collectives import start_all_to_all
from shardformer.layout.shard_spec import even_bounds
from shardformer.mesh.parallel_context import Axis

# B batch, N heads, s positions of this rank, S positions of the group, D head dim

PURPOSE = "context"


@dataclass(frozen=True)
class HeadExchange:
    """One way of handing heads out.

    Args:
        axis: the group.
        heads: of each rank, the heads that it is given, ascending.
        stretches: how many positions each rank has.
        count: how many heads there are.
    """

    axis: Axis
    heads: tuple[tuple[int, ...], ...]
    stretches: tuple[int, ...]
    count: int


def query_heads(count: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Of each rank: as even as can be."""
    return tuple(tuple(range(a, b)) for a, b in pairwise(even_bounds(count, ranks)))


def key_heads(queries: tuple[tuple[int, ...], ...], count: int, num_keys: int) -> tuple[tuple[int, ...], ...]:
    """Of each rank: the key heads of its queries, each once where its queries then lie evenly over them.

    >>> key_heads(query_heads(4, 2), 4, 2), key_heads(query_heads(6, 4), 6, 2)
    (((0,), (1,)), ((0,), (0, 1), (1,), (1,)))
    >>> key_heads(query_heads(6, 2), 6, 4 // 2), key_heads(((0, 1, 2), (3, 4)), 5, 5)
    (((0,), (1,)), ((0, 1, 2), (3, 4)))
    """
    per_key = count // num_keys
    found = []
    for mine in queries:
        read = [query // per_key for query in mine]
        once = sorted(set(read))
        repeated = [key for key in once for _ in range(len(mine) // max(len(once), 1))]
        found.append(tuple(once if repeated == read else read))
    return tuple(found)


def to_heads(x: Tensor, exchange: HeadExchange) -> Tensor:
    """(B, N, s, D) -> (B, n, S, D). One all-to-all, and in the backward one back."""
    return x if exchange.axis.size == 1 else _Exchange.apply(x, exchange, True)


def to_positions(x: Tensor, exchange: HeadExchange) -> Tensor:
    """(B, n, S, D) -> (B, N, s, D). One all-to-all, and in the backward one back."""
    return x if exchange.axis.size == 1 else _Exchange.apply(x, exchange, False)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HeadExchange, is_there: bool) -> Tensor:
        ctx.exchange, ctx.is_there = exchange, is_there
        return _scattered(x, exchange) if is_there else _gathered(x, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_gathered if ctx.is_there else _scattered)(grad, ctx.exchange), None, None


def _scattered(x: Tensor, exchange: HeadExchange) -> Tensor:
    batch, _, _, width = x.shape
    mine = len(exchange.heads[exchange.axis.rank])
    shapes = [(batch, mine, stretch, width) for stretch in exchange.stretches]
    return torch.cat(_swapped([x[:, list(heads)] for heads in exchange.heads], shapes, exchange.axis), 2)


def _gathered(x: Tensor, exchange: HeadExchange) -> Tensor:
    batch, _, _, width = x.shape
    stretch = exchange.stretches[exchange.axis.rank]
    shapes = [(batch, len(heads), stretch, width) for heads in exchange.heads]
    parts = _swapped(list(x.split(exchange.stretches, 2)), shapes, exchange.axis)
    if [head for heads in exchange.heads for head in heads] == list(range(exchange.count)):
        return torch.cat(parts, 1)
    full = x.new_zeros(batch, exchange.count, stretch, width, dtype=torch.promote_types(x.dtype, torch.float32))
    for heads, part in zip(exchange.heads, parts, strict=True):
        full.index_add_(1, torch.tensor(heads, device=x.device, dtype=torch.int64), part.to(full.dtype))
    return full.to(x.dtype)


def _swapped(x: list[Tensor], shapes: Sequence[tuple[int, ...]], axis: Axis) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    joined = start_all_to_all([part.reshape(-1) for part in x], sizes, axis, PURPOSE).wait()
    return [part.view(shape) for part, shape in zip(joined.split(sizes), shapes, strict=True)]
