"""Ring implementations equal the collective followed by the matmul, for uneven shards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardformer.comm.collectives import all_gather, get_local_chunk, reduce_scatter
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.linear_communication import all_gather_matmul, matmul_reduce_scatter
from tests.pools import WorkerPools

B, H, F = 2, 3, 5


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _both(length: int) -> tuple[float, float, float, list[str]]:
    axis = Axis.of(None)
    weight = _random(5, H, F)
    x = get_local_chunk(_random(1, B, length, H), axis, 1)
    product = torch.zeros(B, length, F, dtype=torch.float64)

    def use(stretch: Tensor, start: int, end: int) -> None:
        product[:, start:end] = stretch @ weight

    partial = _random(10 + axis.rank, B, length, H)
    with CollectiveRecorder(axis) as recorder:
        joined = all_gather_matmul(x, axis, length, use)
        mine = matmul_reduce_scatter(lambda a, b: partial[:, a:b] @ weight, axis, length)
    whole = all_gather(x, axis, 1, length)
    return (
        float((joined - whole).abs().max()),
        float((product - whole @ weight).abs().max()),
        float((mine - reduce_scatter(partial @ weight, axis, 1)).abs().sum()),
        [c.op for c in recorder.calls],
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("length", [8, 7, 3, 1])
def test_ring_equals_collective_and_matmul(pools: WorkerPools, ranks: int, length: int) -> None:
    for joined, product, scattered, calls in pools(ranks).run(_both, length):
        assert (joined, calls) == (0.0, ["all_gather", "reduce_scatter"])
        assert product < 1e-12 and scattered < 1e-12
