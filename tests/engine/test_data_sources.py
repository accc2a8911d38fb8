"""Indexed data with loaders, samplers and workers of the user."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from shardformer import random_state
from shardformer.errors import ConfigError, InputError
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.data_loader import ShardedDataLoader


def place(rank: int = 0, ranks: int = 1) -> ParallelContext:
    return ParallelContext.from_sizes({"data": ranks}, {"data": rank})


class Process(Dataset[Any]):
    """Data set whose samples contain the process that read them and a random number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([os.getpid(), float(torch.rand(()))], dtype=torch.float64)


def test_an_explicit_batch_sampler_of_torch_chooses_the_samples() -> None:
    """Such a loader has no batch size, and an unused default sampler."""
    made = BatchSampler(range(9, -1, -1), 4, drop_last=False)
    parts = [list(ShardedDataLoader(DataLoader(range(10), batch_sampler=made), place(rank, 2))) for rank in range(2)]
    assert [part.tolist() for part in parts[0]] == [[9, 8], [5, 4], [1]]
    assert [part.tolist() for part in parts[1]] == [[7, 6], [3, 2], [0]]
    short = DataLoader(range(10), batch_sampler=BatchSampler(range(10), 4, drop_last=True))
    assert [part.tolist() for part in ShardedDataLoader(short, place())] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.slow
def test_persistent_workers_are_reused_in_every_epoch() -> None:
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 1}
    batches = ShardedDataLoader(DataLoader(Process(), persistent_workers=True, **options), place())
    next(iter(batches))  # a loop that is broken off
    rest, again = (torch.cat(list(batches)) for _ in range(2))
    assert len({*rest[:, 0].tolist(), *again[:, 0].tolist(), os.getpid()}) == 2
    plain = ShardedDataLoader(DataLoader(Process(), batch_size=2), place())
    expected = [torch.cat(list(plain))[:, 1] for _ in range(2)]
    assert torch.equal(rest[:, 1], expected[0][2:])
    assert torch.equal(again[:, 1], expected[1])


@pytest.mark.slow
def test_an_error_in_a_worker_keeps_its_type_and_text() -> None:
    samples = [{"ids": [1]}, {"ids": [1, 2]}]
    with pytest.raises(InputError, match=r"^The values of 'ids' in a batch must have the same shape"):
        list(ShardedDataLoader(samples, place(), batch_size=2, num_workers=1))


def test_small_batches_of_a_batch_sampler_raise() -> None:
    loader: DataLoader[Any] = DataLoader(list(range(5)), batch_sampler=[[0, 1], [2, 3], [4]])  # type: ignore[arg-type]
    assert len(ShardedDataLoader(loader, place())) == 3
    with pytest.raises(InputError, match="A batch of 1 samples cannot be split across 2 data-parallel ranks"):
        next(iter(ShardedDataLoader(loader, place(0, 2))))
    merged = [
        torch.cat(parts).tolist()
        for parts in zip(*(ShardedDataLoader(loader, place(r, 2), merge_last=True) for r in (0, 1)))
    ]
    assert merged == [[0, 1], [2, 3, 4]]


def test_a_remainder_smaller_than_the_number_of_ranks_raises() -> None:
    before = ShardedDataLoader(list(range(12)), place(0, 3), batch_size=3)
    for _ in zip(range(3), before):
        pass
    after = ShardedDataLoader(list(range(12)), place(3, 4), batch_size=4)
    after.load_state(before.state())
    with pytest.raises(InputError, match="A batch of 3 samples cannot be split across 4 data-parallel ranks"):
        next(iter(after))


def test_the_generator_of_a_user_loader_is_not_advanced() -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    data = list(range(6))
    sampler = RandomSampler(data, replacement=True, generator=generator)
    orders = [[b.tolist() for b in ShardedDataLoader(DataLoader(data, 3, sampler=sampler), place())] for _ in range(2)]  # type: ignore[arg-type]
    assert orders[0] == orders[1]
    assert sampler.generator is generator
    assert torch.equal(generator.get_state(), before)


def test_a_sampler_may_yield_strings_and_tensors() -> None:
    class Words(Dataset[str]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, key: str) -> str:
            return key * 2

    def numbers() -> Iterator[Tensor]:
        return iter(torch.tensor([2, 0]))

    class Numbers:
        def __len__(self) -> int:
            return 2

        __iter__ = staticmethod(numbers)

    assert list(ShardedDataLoader(DataLoader(Words(), 2, sampler=["a", "b"]), place())) == [["aa", "bb"]]  # type: ignore[arg-type]
    (batch,) = ShardedDataLoader(DataLoader([5, 6, 7], 2, sampler=Numbers()), place())  # type: ignore[arg-type]
    assert batch.tolist() == [7, 5]


def test_shuffle_false_disables_shuffling_of_a_loader() -> None:
    data: Any = list(range(6))
    found = ShardedDataLoader(DataLoader(data, 3, shuffle=True), place(), shuffle=False)
    assert [batch.tolist() for batch in found] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (DataLoader([1, 2], 2), {"shuffle": True}, "Got shuffle=True, but the DataLoader does not shuffle"),  # type: ignore[arg-type]
        (DataLoader([1, 2], 2), {"num_workers": 2}, "Got num_workers=2, but the DataLoader"),  # type: ignore[arg-type]
        (DataLoader([1, 2], 2), {"drop_last": True}, "Got drop_last=True, but the DataLoader"),  # type: ignore[arg-type]
        (DataLoader([1, 2], 2, sampler=[]), {}, r"is an empty list"),  # type: ignore[arg-type]
        (list, {"batch_size": 1}, "but got type"),
        ({"a", "b"}, {"batch_size": 1}, "but got set"),
        (torch.ones(3), {"batch_size": 1}, "but got Tensor.*TensorDataset"),
    ],
)
def test_arguments_without_effect_raise(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardedDataLoader(source, place(), **options)


def test_thread_ranks_draw_random_numbers_one_after_another() -> None:
    free: list[bool] = []

    def look() -> None:
        free.append(random_state._GENERATORS.acquire(blocking=False))
        if free[-1]:
            random_state._GENERATORS.release()

    def ask() -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    own = random_state.ResumableRNGState(1)
    with own.activate():
        ask()
        first = torch.rand(3)
    with own.activate(), random_state.fork_rng_with_hashed_seed(2):  # a data set that is made of another run's data
        ask()
    with own.activate():
        second = torch.rand(3)
    ask()
    assert free == [False, False, True]
    with random_state.fork_rng_with_hashed_seed(1):
        assert torch.equal(torch.cat([first, second]), torch.rand(6))
