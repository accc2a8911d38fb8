"""The Ulysses exchange of heads for positions: values, and gradients of heads that several ranks read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardformer.context_parallel.ulysses import (
    UlyssesHeadExchange,
    assign_key_heads_to_ranks,
    assign_query_heads_to_ranks,
    gather_heads_and_scatter_positions,
    scatter_heads_and_gather_positions,
)
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext

B, WIDTH = 2, 3


@pytest.mark.parametrize(
    ("queries", "keys", "ranks"),
    [
        (4, 4, 2),  # each key head on one rank
        (4, 1, 4),  # one key head on all
        (4, 2, 3),  # the second on two
        (8, 2, 3),  # the second rank repeats its second
        (5, 5, 4),  # ranks with one head more than others
    ],
)
def test_ulysses_exchange_and_its_gradients(queries: int, keys: int, ranks: int) -> None:
    torch.manual_seed(0)
    stretches = tuple(range(2, 2 + ranks))
    heads = assign_key_heads_to_ranks(assign_query_heads_to_ranks(queries, ranks), queries, keys)
    full = torch.randn(B, keys, sum(stretches), WIDTH, dtype=torch.float64, requires_grad=True)
    grads = [torch.randn_like(full[:, list(mine)]) for mine in heads]
    (expected,) = torch.autograd.grad([full[:, list(mine)] for mine in heads], [full], [grad.clone() for grad in grads])

    def exchange(context: ParallelContext) -> tuple[Tensor, Tensor]:
        axis = context.sequence
        own = full.detach().split(stretches, 2)[axis.rank].clone().requires_grad_()
        there = scatter_heads_and_gather_positions(own, UlyssesHeadExchange(axis, heads, stretches, keys))
        there.backward(grads[axis.rank])
        assert own.grad is not None
        return there.detach(), own.grad

    found = run_as_threads(exchange, sequence=ranks)
    for mine, (there, _) in zip(heads, found, strict=True):
        assert torch.equal(there, full[:, list(mine)])
    torch.testing.assert_close(torch.cat([grad for _, grad in found], 2), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("count", "ranks"), [(4, 2), (5, 3)])
def test_exchanging_heads_twice_is_the_identity(count: int, ranks: int) -> None:
    stretches = tuple(range(1, 1 + ranks))
    full = torch.randn(B, count, sum(stretches), WIDTH)

    def back(context: ParallelContext) -> bool:
        own = full.split(stretches, 2)[context.sequence.rank]
        exchange = UlyssesHeadExchange(context.sequence, assign_query_heads_to_ranks(count, ranks), stretches, count)
        return torch.equal(
            gather_heads_and_scatter_positions(scatter_heads_and_gather_positions(own, exchange), exchange), own
        )

    assert all(run_as_threads(back, sequence=ranks))
