"""Data that differs between ranks raises on all ranks before the first step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, random_split

from shardformer.consistency.training_data import TOLERANCE, compute_sample_projection_and_norm, hash_samples
from shardformer.errors import ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.initialize import initialize

Pair = tuple[Tensor, Tensor]
SAMPLES: list[Pair] = [(torch.tensor([float(number)]), torch.zeros(1)) for number in range(24)]


def samples_used(rank: int, context: ParallelContext, data: Any, **options: Any) -> list[float] | None:
    """Return the samples that a rank uses in an epoch, or None if the data raises."""
    model, seen = nn.Linear(1, 1), []
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = initialize(model, optimizer, nn.MSELoss(), data, context=context, **options)
        for inputs, targets in engine.data:
            engine.train_step((inputs, targets))
            seen += inputs.flatten().tolist()
    except ShardFormerError:
        assert not seen, "refused before a step is made"
        return None
    return seen


class Stream(IterableDataset[Pair]):
    def __init__(self, samples: list[Pair]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.samples)


class OwnOrder(Sampler[int]):
    def __init__(self, seed: int) -> None:
        self.generator_of_its_own = numpy.random.default_rng(seed)

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator_of_its_own.permutation(24).tolist())


class Part(Sampler[list[int]]):
    """Batches of this rank only, as in data loaders of accelerate."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(start + self.rank, start + 6, 2)) for start in range(0, 24, 6)])


def _split(rank: int) -> Any:
    return random_split(SAMPLES, [12, 12], torch.Generator().manual_seed(rank))[0]  # type: ignore[arg-type]


LABELLED = [(torch.full((3,), float(number)), torch.zeros(1, dtype=torch.int64)) for number in range(16)]
"""Whole numbers are no difference between these."""
DIFFERENT: dict[str, Callable[[int], dict[str, Any]]] = {
    "every second sample": lambda rank: {"data": SAMPLES[rank::2], "batch_size": 6},
    "a half": lambda rank: {"data": SAMPLES[12 * rank :][:12], "batch_size": 6},
    "another order": lambda rank: {"data": SAMPLES[::-1] if rank else SAMPLES, "batch_size": 6},
    "two swapped": lambda rank: {"data": [*SAMPLES[:22], *SAMPLES[22:][:: 1 - 2 * rank]], "batch_size": 6},
    "another length": lambda rank: {"data": SAMPLES[: 24 - 6 * rank], "batch_size": 6},
    "a stream of a half": lambda rank: {"data": Stream(SAMPLES[rank::2]), "batch_size": 6},
    "a generator": lambda rank: {"data": (sample for sample in SAMPLES[rank::2]), "batch_size": 6},
    "a loader over a stream": lambda rank: {"data": DataLoader(Stream(SAMPLES[rank::2]), batch_size=6)},
    "a loader over a half": lambda rank: {"data": DataLoader(SAMPLES[rank::2], batch_size=6)},  # type: ignore[arg-type]
    "a sampler of its own": lambda rank: {
        "data": DataLoader(SAMPLES, batch_size=6, sampler=OwnOrder(rank))  # type: ignore[arg-type]
    },
    "batches of a part": lambda rank: {"data": DataLoader(SAMPLES, batch_sampler=Part(rank))},  # type: ignore[arg-type]
    "a split by rank": lambda rank: {"data": _split(rank), "batch_size": 6},
    "a seed by rank": lambda rank: {"data": SAMPLES, "batch_size": 6, "data_options": {"seed": rank}},
    "shuffled on one": lambda rank: {"data": SAMPLES, "batch_size": 6, "data_options": {"shuffle": rank == 0}},
    "another batch size": lambda rank: {"data": SAMPLES, "batch_size": 6 - 2 * rank},
    "a half with labels that are the same": lambda rank: {"data": LABELLED[8 * rank :][:8], "batch_size": 4},
    "refused on one": lambda rank: {"data": SAMPLES, "batch_size": 6 if rank else 0},
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_data_raises_on_all_ranks(kind: str) -> None:
    made = [DIFFERENT[kind](rank) for rank in range(2)]
    assert run_as_threads(lambda c: samples_used(c.rank, c, **made[c.rank]), data=2) == [None, None]


SAME: dict[str, Callable[[], dict[str, Any]]] = {
    "a list": lambda: {"data": SAMPLES, "batch_size": 6},
    "a stream": lambda: {"data": Stream(SAMPLES), "batch_size": 6},
    "a loader over a stream": lambda: {"data": DataLoader(Stream(SAMPLES), batch_size=6)},
    "a sampler with one seed": lambda: {
        "data": DataLoader(SAMPLES, batch_size=6, sampler=OwnOrder(3))  # type: ignore[arg-type]
    },
}


@pytest.mark.parametrize("kind", SAME)
def test_each_sample_of_equal_data_is_used_once(kind: str) -> None:
    made = [SAME[kind]() for _ in range(2)]
    used = run_as_threads(lambda c: samples_used(c.rank, c, **made[c.rank]), data=2)
    assert sorted(x for each in used for x in each or ()) == list(range(24))


class Noisy(Dataset[dict[str, Any]]):
    """Samples that differ each time they are read, as with random augmentation."""

    def __init__(self, rank: int) -> None:
        self.generator = numpy.random.default_rng(rank)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Pair:
        return torch.tensor([float(index)]) + self.generator.random() / 4, torch.zeros(1)


def test_randomly_augmented_samples_are_not_compared() -> None:
    data = [Noisy(rank) for rank in range(2)]
    used = run_as_threads(lambda c: samples_used(c.rank, c, data[c.rank], batch_size=4), data=2)
    assert sorted(int(x) for each in used for x in each) == list(range(8))


def test_fingerprint_compares_integers_strings_and_shapes() -> None:
    noise = torch.rand(3)
    assert hash_samples({"label": 1, "image": noise}) == hash_samples({"image": noise + 1, "label": 1})
    assert hash_samples({"label": 1, "image": noise}) != hash_samples({"image": noise, "label": 2})
    assert hash_samples([0.5, noise]) != hash_samples([0.5, noise + 1])
    assert hash_samples(object()) == hash_samples(object()), "an address is not content"


def test_floating_point_samples_are_compared_up_to_rounding() -> None:
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    values = [
        {"x": x, "y": 0.5},
        {"x": x * (1 + 1e-5), "y": 0.5},
        {"x": x.roll(1), "y": 0.5},
        {"x": x.numpy(), "y": 0.5},
    ]
    (sum_, norm), *others = map(compute_sample_projection_and_norm, values)
    assert [abs(other - sum_) < TOLERANCE * norm for other, _ in others] == [True, False, True]
    assert compute_sample_projection_and_norm({"label": 3, "text": "a"}) == (0.0, 0.0)


def skipped(context: ParallelContext, where: int) -> str:
    """Skip a batch on rank 1, and return the error of all ranks."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = initialize(model, optimizer, nn.MSELoss(), SAMPLES, context=context, batch_size=6)
    try:
        for number, batch in enumerate(engine.data):
            if number == where and context.rank == 1:
                continue
            engine.train_step(batch)
        engine.evaluate(SAMPLES[0])
    except ShardFormerError as error:
        assert engine.steps == where, "no step is made with batches that do not belong together"
        return str(error)
    return ""


@pytest.mark.parametrize(("where", "what"), [(1, "different positions"), (3, "engine.train_step")])
def test_a_batch_skipped_by_one_rank_raises_on_all_ranks(where: int, what: str) -> None:
    assert all(what in error for error in run_as_threads(lambda c: skipped(c, where), data=2))


def test_batches_prefetched_by_a_thread_are_used() -> None:
    def train(context: ParallelContext) -> int:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = initialize(model, optimizer, nn.MSELoss(), SAMPLES, context=context, batch_size=6)
        batches: list[Any] = []

        def fetch(count: int) -> None:
            batches.extend(batch for _, batch in zip(range(count), engine.data or ()))

        thread = threading.Thread(target=fetch, args=(2 + context.rank,))
        thread.start()
        thread.join()
        for batch in batches[:2]:
            engine.train_step(batch)
        return engine.steps

    assert run_as_threads(train, data=2) == [2, 2]
