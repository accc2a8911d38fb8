"""Distributed data loading uses every sample once, independently of the layout, and resumes at the next sample."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from shardformer.errors import ConfigError, InputError
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.data_loader import ShardedDataLoader


def place(rank: int = 0, ranks: int = 1, **others: int) -> ParallelContext:
    return ParallelContext.from_sizes({"data": ranks, "tensor": 2}, {"data": rank, **others})


def parts(make: Any, ranks: int, **options: Any) -> list[list[Any]]:
    """Return the local batches of an epoch for each rank."""
    return [list(ShardedDataLoader(make(), place(rank, ranks), **options)) for rank in range(ranks)]


def joined(found: list[list[Tensor]]) -> list[list[int]]:
    """Concatenate the local batches to global batches."""
    return [torch.cat(each).tolist() for each in zip(*found, strict=True)]


@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 12),
    ranks=st.integers(1, 4),
    drop=st.booleans(),
    seed=st.integers(0, 5),
)
def test_local_batches_form_the_global_batches_for_any_number_of_ranks(
    count: int, batch: int, ranks: int, drop: bool, seed: int
) -> None:
    options = {"batch_size": batch, "drop_last": drop, "seed": seed}
    rest = count % batch
    if batch < ranks or (drop and count < batch) or (not drop and 0 < rest < ranks):
        with pytest.raises(ConfigError):
            parts(lambda: list(range(count)), ranks, **options)
        return
    whole = joined(parts(lambda: list(range(count)), ranks, **options))
    assert whole == joined(parts(lambda: list(range(count)), 1, **options))
    seen = [sample for each in whole for sample in each]
    assert len(seen) == len(set(seen)) == (count - rest if drop else count)
    assert {len(each) for each in whole[:-1]} <= {batch}
    assert len(ShardedDataLoader(list(range(count)), place(), **options)) == len(whole)  # type: ignore[arg-type]


def test_ranks_of_the_same_data_rank_get_the_same_batches() -> None:
    first, second = (
        ShardedDataLoader(list(range(9)), place(1, 2, tensor=t), batch_size=4, drop_last=True) for t in (0, 1)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_every_epoch_is_shuffled_anew_unless_shuffle_is_false() -> None:
    batches = ShardedDataLoader(list(range(20)), place(), batch_size=20)
    one, other = (next(iter(list(batches))).tolist() for _ in range(2))
    assert one != other
    assert sorted(one) == sorted(other)
    plain = ShardedDataLoader(list(range(20)), place(), batch_size=20, shuffle=False)
    assert next(iter(plain)).tolist() == list(range(20))


def samples_of(batches: ShardedDataLoader, number: int) -> list[int]:
    """Return the samples of ``number`` batches over as many epochs as necessary."""
    found: list[int] = []
    while number:
        for batch in batches:
            found += batch.tolist()
            number -= 1
            if not number:
                break
    return found


@cache
def sample_order() -> list[int]:
    return samples_of(ShardedDataLoader(list(range(17)), place(), batch_size=1), 17 * 15)


@given(first=st.integers(1, 7), then=st.integers(1, 7), steps=st.integers(0, 12))
def test_a_resumed_run_continues_with_the_next_sample(first: int, then: int, steps: int) -> None:
    before = ShardedDataLoader(list(range(17)), place(), batch_size=first)
    found = samples_of(before, steps)
    after = ShardedDataLoader(list(range(17)), place(), batch_size=then, seed=99)
    after.load_state(before.state())
    found += samples_of(after, 4)
    assert found == sample_order()[: len(found)]


# ------------------------------------------------------------------------------------------------------- random numbers


class Noisy(Dataset[Tensor]):
    """Data set whose samples draw from all three random generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, float(torch.rand(())), numpy.random.rand(), random.random()])


def noisy_collate(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + torch.rand(())


@pytest.mark.slow
def test_random_augmentation_is_independent_of_layout_workers_and_restarts() -> None:
    def rows(ranks: int, **options: Any) -> list[list[float]]:
        found = parts(Noisy, ranks, batch_size=4, **options)
        return [row for each in zip(*found, strict=True) for part in each for row in part.tolist()]

    expected = rows(1)
    assert len({tuple(row[1:]) for row in expected}) == 12
    assert rows(2) == expected
    assert rows(4) == expected
    assert rows(1, num_workers=2) == expected
    begun, goes_on = (
        ShardedDataLoader(Noisy(), place(), batch_size=4),
        ShardedDataLoader(Noisy(), place(), batch_size=4),
    )
    next(iter(begun))
    goes_on.load_state(begun.state())
    assert [row for batch in goes_on for row in batch.tolist()] == expected[4:]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_reading_data_keeps_the_random_state_of_training(workers: int) -> None:
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    expected = (float(torch.rand(())), numpy.random.rand(), random.random())
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    list(ShardedDataLoader(Noisy(), place(), batch_size=4, num_workers=workers, collate_fn=noisy_collate))
    list(ShardedDataLoader(DataLoader(Noisy(), 4, shuffle=True), place()))
    list(ShardedDataLoader(Rows(Noisy()), place(), batch_size=4))
    assert (float(torch.rand(())), numpy.random.rand(), random.random()) == expected


# -------------------------------------------------------------------------------------------------------------- sources


class Rows(IterableDataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))


class Stepping:
    """User-defined sampler."""

    def __init__(self, count: int, epoch: int = 0) -> None:
        self.count, self.epoch = count, epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % self.count for i in range(self.count)])


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(11)), **options)  # type: ignore[arg-type]


def firsts(found: list[list[Any]]) -> list[list[int]]:
    return joined([[batch[0] for batch in each] for each in found])


def test_a_user_loader_keeps_its_order_and_batch_size() -> None:
    assert firsts(parts(lambda: loader(batch_size=4), 2)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert firsts(parts(lambda: loader(batch_size=4, drop_last=True), 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    shuffled = firsts(parts(lambda: loader(batch_size=4, shuffle=True), 2))
    assert sorted(i for batch in shuffled for i in batch) == list(range(11))
    assert shuffled == firsts(parts(lambda: loader(batch_size=4, shuffle=True), 1))


def test_a_user_sampler_determines_the_order() -> None:
    batches = ShardedDataLoader(loader(batch_size=6, sampler=Stepping(11)), place(0, 2))
    assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [6, 7, 8]]
    assert [batch[0].tolist() for batch in batches] == [[1, 2, 3], [7, 8, 9]]
    weighted = WeightedRandomSampler([1.0] * 11, 8, generator=torch.Generator())
    drawn = [firsts(parts(lambda: loader(batch_size=4, sampler=weighted), ranks)) for ranks in (1, 2, 2)]
    assert drawn[0] == drawn[1] == drawn[2]


def test_batches_of_a_batch_sampler_are_sharded() -> None:
    own = [[3, 1, 2], [5, 4], [6, 7, 8, 9]]
    assert firsts(parts(lambda: loader(batch_sampler=own), 2)) == own
    begun, goes_on = (ShardedDataLoader(loader(batch_sampler=own), place()) for _ in range(2))
    next(iter(begun))
    goes_on.load_state(begun.state())
    assert [batch[0].tolist() for batch in goes_on] == own[1:]


def test_accumulate_returns_lists_of_batches() -> None:
    found = parts(lambda: loader(batch_size=2, drop_last=True), 2, accumulate=2)
    assert [[[b[0].tolist() for b in step] for step in rank] for rank in found] == [
        [[[0], [2]], [[4], [6]], [[8]]],
        [[[1], [3]], [[5], [7]], [[9]]],
    ]


def test_streams_are_sharded_in_order() -> None:
    data = [{"x": i, "words": f"no. {i}"} for i in range(9)]
    found = parts(lambda: Rows(data), 2, batch_size=4, drop_last=True)
    assert [batch["x"].tolist() for batch in found[0]] == [[0, 1], [4, 5]]
    assert found[1][0]["words"] == ["no. 2", "no. 3"]
    whole = parts(lambda: DataLoader(Rows(data), batch_size=3), 3)
    assert [batch["x"].tolist() for batch in whole[2]] == [[2], [5], [8]]
    begun, goes_on = (ShardedDataLoader(Rows(data), place(), batch_size=3) for _ in range(2))
    next(iter(begun))
    goes_on.load_state(begun.state())
    assert [batch["x"].tolist() for batch in goes_on] == [[3, 4, 5], [6, 7, 8]]


def test_lists_of_numbers_become_tensors() -> None:
    data = [{"ids": [1, 2, 3], "label": 1, "array": numpy.ones(2), "word": "a"} for _ in range(4)]
    (batch,) = ShardedDataLoader(data, place(), batch_size=4)
    assert batch["ids"].shape == (4, 3)
    assert batch["array"].shape == (4, 2)
    assert batch["label"].tolist() == [1] * 4
    assert batch["word"] == ["a"] * 4


def test_a_small_last_batch_can_be_merged() -> None:
    found = joined(parts(lambda: list(range(9)), 2, batch_size=4, merge_last=True, shuffle=False))
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    assert len(ShardedDataLoader(list(range(9)), place(0, 2), batch_size=4, merge_last=True)) == 2


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (list(range(4)), {}, "type list was passed without batch_size"),
        (list(range(4)), {"batch_size": 0}, "batch_size=0"),
        (list(range(4)), {"batch_size": True}, "batch_size=True"),
        (list(range(4)), {"batch_size": 1}, "batch_size=1 is smaller than the number of data-parallel ranks .2."),
        (list(range(5)), {"batch_size": 4}, "only 1 of the"),
        (list(range(3)), {"batch_size": 4, "drop_last": True}, "drops all 3 samples"),
        (list(range(4)), {"batch_size": 4, "accumulate": 2}, "accumulate=2"),
        (list(range(4)), {"batch_size": 4, "num_workers": -1}, "num_workers=-1"),
        ([], {"batch_size": 4}, "is an empty list"),
        ({"x": [1]}, {"batch_size": 4}, "ordered iterable, but got dict"),
        ("text", {"batch_size": 4}, "ordered iterable, but got str"),
        (3, {"batch_size": 4}, "ordered iterable, but got int"),
        (iter([1]), {"batch_size": 4, "shuffle": True}, "shuffle=True"),
        (iter([1]), {"batch_size": 4, "num_workers": 2}, "num_workers=2"),
        (loader(batch_size=4), {"batch_size": 8}, "Got batch_size=8, but the DataLoader"),
        (loader(batch_size=4), {"collate_fn": list}, "collate_fn has no effect"),
        (loader(batch_size=4, sampler=DistributedSampler([1, 2], 2, 0)), {}, "DistributedSampler"),  # type: ignore[arg-type]
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)
def test_data_that_cannot_be_sharded_raises(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardedDataLoader(source, place(0, 2), **options)


def test_errors_found_during_iteration_raise() -> None:
    with pytest.raises(InputError, match=r"'ids' .* must have the same shape"):
        list(ShardedDataLoader([{"ids": [1]}, {"ids": [1, 2]}], place(), batch_size=2))
    once = ShardedDataLoader(iter([1, 2]), place(), batch_size=2)
    assert len(list(once)) == 1
    with pytest.raises(InputError, match="yielded no batch in epoch 2"):
        list(once)
    with pytest.raises(ConfigError, match="length of the training data is unknown"):
        len(once)
    with pytest.raises(InputError, match="A batch of 1 samples cannot be split across 2 data-parallel ranks"):
        list(ShardedDataLoader(Rows([1, 2, 3]), place(0, 2), batch_size=2))
    with pytest.raises(ConfigError, match="Resume with the same data"):
        ShardedDataLoader([1, 2], place(), batch_size=1).load_state(
            ShardedDataLoader([1], place(), batch_size=1).state()
        )
