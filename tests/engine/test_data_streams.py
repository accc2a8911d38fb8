"""Streamed data: no sample is lost or read twice, and all ranks draw the same random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shardformer.errors import InputError
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.data_loader import ShardedDataLoader


def place(rank: int = 0, ranks: int = 1) -> ParallelContext:
    return ParallelContext.from_sizes({"data": ranks}, {"data": rank})


class Count(IterableDataset[Any]):
    """Stream of increasing numbers whose samples draw from all three random generators."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.count):
            yield torch.tensor([i, float(torch.rand(())), numpy.random.rand(), random.random()])


class Counted(Count):
    """Stream with a length, and with the inherited ``__getitem__`` of torch's Dataset, which raises."""

    def __len__(self) -> int:
        return self.count


def rows(batches: Any) -> list[list[float]]:
    return [row for batch in batches for row in batch.tolist()]


MAKES: dict[str, Callable[[int, int], tuple[Any, dict[str, Any]]]] = {
    "samples": lambda count, size: (Count(count), {"batch_size": size}),
    "samples of a known number": lambda count, size: (Counted(count), {"batch_size": size}),
    "an iterator": lambda count, size: (iter(Count(count)), {"batch_size": size}),
    "batches": lambda count, size: (DataLoader(Count(count), size), {}),
    "batches of a known number": lambda count, size: (DataLoader(Counted(count), size), {}),
}


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("kind", MAKES)
@given(first=st.integers(2, 5), then=st.integers(2, 5), steps=st.integers(0, 2))
def test_a_resumed_run_continues_with_the_next_sample(kind: str, first: int, then: int, steps: int) -> None:
    def made(size: int) -> ShardedDataLoader:
        source, options = MAKES[kind](10, size)
        return ShardedDataLoader(source, place(), **options)

    expected = rows(made(first))
    begun, goes_on = made(first), made(then)
    found = [row for _, batch in zip(range(steps), begun) for row in batch.tolist()]
    goes_on.load_state(begun.state())
    found += rows(goes_on)
    assert [row[0] for row in found] == list(range(10))
    assert found == expected


@pytest.mark.parametrize("kind", MAKES)
def test_an_interrupted_loop_continues(kind: str) -> None:
    source, options = MAKES[kind](10, 4)
    batches = ShardedDataLoader(source, place(), **options)
    found = [row for _, batch in zip(range(1), batches) for row in batch.tolist()]
    assert [row[0] for row in [*found, *rows(batches)]] == list(range(10))
    assert batches.epoch == 1


def test_an_iterator_cannot_restart() -> None:
    batches = ShardedDataLoader(iter(range(10)), place(), batch_size=4)
    next(iter(batches))
    batches.rewind()
    with pytest.raises(InputError, match="is at sample 4 and cannot go back to sample 0"):
        next(iter(batches))


def test_collating_draws_different_random_numbers_on_each_rank() -> None:
    def noise(samples: list[Any]) -> Tensor:
        return torch.rand(3)

    one, other = (next(iter(ShardedDataLoader(Count(4), place(r, 2), batch_size=4, collate_fn=noise))) for r in (0, 1))
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({"merge_last": True}, [[0, 1, 2, 3], [4, 5, 6, 7, 8]]),
        ({"drop_last": True}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"drop_last": True, "merge_last": True}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
@pytest.mark.parametrize("make", [lambda: Count(9), lambda: Counted(9), lambda: iter(Count(9)), lambda: list(Count(9))])
def test_the_last_batches_of_a_stream_equal_those_of_a_list(ends: dict[str, bool], expected: Any, make: Any) -> None:
    found = [ShardedDataLoader(make(), place(r, 2), batch_size=4, shuffle=None, **ends) for r in (0, 1)]
    whole = [torch.cat(parts)[:, 0].tolist() for parts in zip(*found, strict=True)]
    if isinstance(make(), list):
        assert [len(batch) for batch in whole] == [len(batch) for batch in expected]
    else:
        assert whole == expected


def test_merging_the_last_batch_loses_no_samples_of_an_interrupted_loop() -> None:
    batches = ShardedDataLoader(iter(range(9)), place(0, 2), batch_size=4, merge_last=True)
    assert next(iter(batches)).tolist() == [0, 1]
    assert [batch.tolist() for batch in batches] == [[4, 5, 6]]


def test_a_stream_without_batches_raises() -> None:
    with pytest.raises(InputError, match="yielded no batch in epoch 1"):
        list(ShardedDataLoader(Count(0), place(), batch_size=4))
    with pytest.raises(InputError, match="yielded no batch in epoch 1"):
        list(ShardedDataLoader(Count(3), place(), batch_size=4, drop_last=True))


def test_length_of_streams() -> None:
    assert len(ShardedDataLoader(Counted(9), place(), batch_size=4)) == 3
    assert len(ShardedDataLoader(DataLoader(Counted(9), 4), place())) == 3
    assert len(ShardedDataLoader(DataLoader(Counted(9), 4), place(), accumulate=2)) == 2


def test_a_streamed_loader_has_its_own_random_state_equal_on_all_ranks() -> None:
    """A map-style data set without batching is a stream of global batches."""
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    data = [torch.arange(4) + 4 * i for i in range(5)]

    def found(ranks: int) -> list[list[int]]:
        made = (DataLoader(data, batch_size=None, shuffle=True, generator=generator) for _ in range(ranks))  # type: ignore[arg-type]
        parts = zip(*(ShardedDataLoader(loader, place(r, ranks)) for r, loader in enumerate(made)), strict=True)
        return [torch.cat(each).tolist() for each in parts]

    assert found(1) == found(2)
    assert sorted(found(1)) == [x.tolist() for x in data]
    assert torch.equal(generator.get_state(), before)
