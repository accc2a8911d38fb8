"""Collectives over uneven shards against their definition, and their bytes against the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardformer.comm import collectives
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.layout.shard_spec import get_even_split_bounds
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis
from tests.pools import WorkerPools

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def _values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _all_reduce(shape: tuple[int, ...], dtype: torch.dtype, op: str) -> Tensor:
    axis = Axis.of(None)
    return collectives.all_reduce(_values(axis.rank, shape, dtype), axis, op=op)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_all_reduce(pools: WorkerPools, ranks: int, dtype: torch.dtype, op: str) -> None:
    shape = (5, 3)
    every = torch.stack([_values(r, shape, dtype) for r in range(ranks)])
    want = {"sum": every.sum(0).to(dtype), "max": every.amax(0)}[op]
    for got in pools(ranks).run(_all_reduce, shape, dtype, op):
        assert torch.equal(got, want)


def _large_all_reduce() -> tuple[Tensor, Tensor]:
    axis = Axis.of(None)
    count = collectives.EXCHANGE_BELOW_BYTES  # four times the bytes: the other algorithm
    x = torch.full((count,), float(axis.rank + 1))
    return collectives.all_reduce(x, axis)[:4], collectives.all_reduce(x.new_ones(4), axis)


def test_large_and_small_all_reduce_agree(pool2: WorkerPool) -> None:
    for large, small in pool2.run(_large_all_reduce):
        assert torch.equal(large, torch.full((4,), 3.0))
        assert torch.equal(small, torch.full((4,), 2.0))


def _stretch(x: Tensor, axis: Axis, dim: int) -> Tensor:
    bounds = get_even_split_bounds(x.shape[dim], axis.size)
    return x.narrow(dim, bounds[axis.rank], bounds[axis.rank + 1] - bounds[axis.rank])


def _gather_and_scatter(length: int, dim: int) -> tuple[bool, bool, bool]:
    axis = Axis.of(None)
    shape = tuple(length if d == dim else 3 for d in range(3))
    whole = _values(99, shape, torch.float32)
    joined = collectives.all_gather(_stretch(whole, axis, dim), axis, dim, length)
    summed = sum(_values(r, shape, torch.float32) for r in range(axis.size))
    assert isinstance(summed, Tensor)
    mine = collectives.reduce_scatter(_values(axis.rank, shape, torch.float32), axis, dim)
    taken = collectives.get_local_chunk(whole, axis, dim)
    return (
        torch.equal(joined, whole),
        torch.equal(mine, _stretch(summed, axis, dim)),
        torch.equal(taken, _stretch(whole, axis, dim)),
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("length", [8, 7, 3, 1])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gather_and_scatter_of_uneven_shards(pools: WorkerPools, ranks: int, length: int, dim: int) -> None:
    assert pools(ranks).run(_gather_and_scatter, length, dim) == [(True, True, True)] * ranks


def _sixteen_bit_sum() -> Tensor:
    axis = Axis.of(None)
    x = torch.tensor([256.0, 1.0, 1.0, 1.0][axis.rank]).to(torch.bfloat16).repeat(4)
    return collectives.reduce_scatter(x, axis, 0)


def test_16_bit_reduce_scatter_accumulates_in_fp32(pool4: WorkerPool) -> None:
    # in bf16 256 + 1 is 256, one by one: 256; in fp32 the sum is 259, which rounds to 260
    for part in pool4.run(_sixteen_bit_sum):
        assert part.float().tolist() == [260.0]


def _traffic() -> dict[str, tuple[int, int]]:
    axis = Axis.of(None)
    x = torch.zeros(4, 6)
    with CollectiveRecorder(axis) as recorder:
        collectives.all_reduce(x.clone(), axis)
        collectives.all_gather(x, axis, 0)
        collectives.reduce_scatter(x, axis, 0)
    collectives.all_reduce(x.clone(), axis)  # the recorder has ended
    return {op: (recorder.count(op), recorder.wire_bytes(op)) for op in ("all_reduce", "all_gather", "reduce_scatter")}


@pytest.mark.parametrize("ranks", [2, 4])
def test_recorded_bytes_match_formula(pools: WorkerPools, ranks: int) -> None:
    full = 4 * 6 * 4
    want = {
        "all_reduce": (1, 2 * (ranks - 1) * full),
        "all_gather": (1, (ranks - 1) * full * ranks),
        "reduce_scatter": (1, (ranks - 1) * full),
    }
    assert pools(ranks).run(_traffic) == [want] * ranks


def test_axis_of_size_1_does_not_communicate() -> None:
    axis, x = Axis("tensor"), torch.ones(3)
    with CollectiveRecorder(axis) as recorder:
        assert collectives.all_reduce(x, axis) is x
        assert collectives.all_gather(x, axis, 0) is x
        assert collectives.reduce_scatter(x, axis, 0) is x
    assert recorder.calls == []


def _objects() -> tuple[list[int], str]:
    axis = Axis.of(None)
    return collectives.all_gather_objects(axis.rank * 10, axis), collectives.broadcast_object(
        f"from {axis.rank}", axis, 1
    )


def test_object_collectives(pool2: WorkerPool) -> None:
    assert pool2.run(_objects) == [([0, 10], "from 1")] * 2


def test_checksum_of_unaligned_view_equals_copy() -> None:
    numbers = torch.arange(5000) % 251
    for stretch in (numbers.to(torch.uint8)[3:], numbers.bool()[1:], numbers.to(torch.bfloat16)[1:]):
        assert collectives.compute_numel_and_hash(stretch) == collectives.compute_numel_and_hash(stretch.clone())
