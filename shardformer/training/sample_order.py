"""Determines which samples each data-parallel rank reads in each step.

Every layout trains on the same global batches. The order of the samples depends on the seed and the epoch. The random
numbers of a sample also depend on its position. Each data-parallel rank reads a contiguous shard of each global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from shardformer.comm.collective_call import hash_to_int
from shardformer.consistency.training_data import get_first_and_last_samples, hash_samples
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.gradient_accumulation.micro_batches import get_batch_size, rebuild_container, split_batch
from shardformer.layout.shard_spec import get_even_bounds
from shardformer.random_state import (
    SharedEpochRandomness,
    hash_to_seed,
    preserve_cpu_random_states,
    seed_generators,
    temporarily_seed_generators,
)

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class ShardPosition:
    """Position of a rank among the data-parallel ranks, which determines its shard of each global batch."""

    rank: int
    size: int

    def get_local_slice(self, num_samples: int) -> slice:
        bounds = get_even_bounds(num_samples, self.size)
        return slice(bounds[self.rank], bounds[self.rank + 1])


class StreamedDataSource:
    """Training data that is read from an iterable. Every rank reads all samples and uses its own shard.

    The iterable yields samples, or global batches if ``collate`` is None.
    """

    def __init__(self, source: Any, collate: Collate | None) -> None:
        self._source, self._collate = source, collate
        self.name, self.makes_batches = type(source).__name__, collate is None
        self.shuffle = self.size = self.read = None  # samples have no index
        self.number = 0  # fingerprint of the last batch
        self.count = None if self.makes_batches else length_or_none(source)
        self._reader: _StreamReader | None = None

    @property
    def num_batches(self) -> int | None:
        """Number of batches per epoch if the iterable yields batches and has a length, and otherwise None."""
        return length_or_none(self._source) if self.makes_batches else None

    def iterate_batch_shards(
        self,
        epoch: int,
        seed: int,
        batch_size: int | None,
        shard: ShardPosition,
        first_sample: int,
        drop_last: bool,
        merge_last: bool,
    ) -> Iterator[tuple[int, Any]]:
        """Skip ``first_sample`` samples, and yield the size of each later global batch and this rank's shard."""
        reader = self._get_reader(epoch, seed, first_sample)
        if self._collate is None:
            for batch, count, part in reader.iterate_batches_with_shards(shard, first_sample):
                self.number = hash_samples(*get_first_and_last_samples(batch))
                yield count, part
        else:
            assert batch_size is not None
            reader.skip_to(first_sample)
            while samples := reader.read(batch_size):
                if drop_last and len(samples) < batch_size:
                    break
                if merge_last and not drop_last:
                    samples += reader.read_remaining_if_fewer(shard.size)
                check_batch_size(len(samples), shard)
                local_slice = shard.get_local_slice(len(samples))
                self.number = hash_samples(samples[0], samples[-1])
                with temporarily_seed_generators(seed, epoch, reader.count - len(samples) + local_slice.start, "batch"):
                    part = self._collate(samples[local_slice])
                yield len(samples), part
        self._reader = None

    def _get_reader(self, epoch: int, seed: int, start: int) -> _StreamReader:
        """Return a new reader for an iterable, or the existing reader for an iterator, which cannot restart."""
        if not isinstance(self._source, Iterator):
            return _StreamReader(self._source, epoch, seed)
        if self._reader is None:
            self._reader = _StreamReader(self._source, epoch, seed)
        elif self._reader.count > start:
            raise InputError(
                f"The iterator {self.name} is at sample {self._reader.count} and cannot go back to sample {start}.",
                remedy="Pass a list, or an iterable that can be read more than once.",
            )
        return self._reader


class _StreamReader:
    """Reads a stream from start to end with its own random state, and counts the samples."""

    def __init__(self, source: Any, epoch: int, seed: int) -> None:
        self.count = 0
        self._random = SharedEpochRandomness(source, epoch, seed)
        with self._random.activate():
            self._iterator: Iterator[Any] = iter(source)

    def read(self, count: int) -> list[Any]:
        """Return the next ``count`` samples of the stream, or fewer at its end."""
        found = self._read_without_counting(count)
        self.count += len(found)
        return found

    def _read_without_counting(self, count: int) -> list[Any]:
        with self._random.activate():
            return list(islice(self._iterator, count))

    def read_remaining_if_fewer(self, limit: int) -> list[Any]:
        """Return all remaining samples if there are fewer than ``limit``, and otherwise an empty list."""
        found = self.read(limit)
        if len(found) < limit:
            return found
        self._iterator, self.count = chain(found, self._iterator), self.count - len(found)
        return []

    def skip_to(self, position: int) -> None:
        """Read and discard samples until ``position`` samples have been read."""
        while self.count < position and self.read(min(position - self.count, 256)):
            pass

    def iterate_batches_with_shards(self, shard: ShardPosition, first_sample: int) -> Iterator[tuple[Any, int, Any]]:
        """Yield each global batch after ``first_sample`` samples, its number of samples, and this rank's shard."""
        while found := self._read_without_counting(1):
            (batch,) = found
            named = batch if isinstance(batch, Mapping) else {"batch": batch}
            count = get_batch_size(named)
            self.count += count
            left = min(self.count - first_sample, count)
            if left <= 0:
                continue
            check_batch_size(left, shard)
            sizes = [count - left, *(b - a for a, b in pairwise(get_even_bounds(left, shard.size)))]
            part = split_batch(named, sizes)[1 + shard.rank]
            yield batch, left, rebuild_container(batch, part) if named is batch else part["batch"]


def length_or_none(data: Any) -> int | None:
    """Return ``len(data)``, or None if the data has no length."""
    try:
        return len(data)
    except (TypeError, RuntimeError):
        return None


def check_batch_size(num_samples: int, shard: ShardPosition) -> None:
    """Raise InputError if a global batch has fewer samples than there are data-parallel ranks."""
    if num_samples < shard.size:
        raise InputError(
            f"A batch of {num_samples} samples cannot be split across {shard.size} data-parallel ranks.",
            remedy="Increase batch_size, or drop the last batch with drop_last=True (data.drop_last = true in TOML).",
        )


SampleKey = tuple[Any, int, int, int]
"""Index of a sample, seed, epoch, and position of the sample in the epoch."""

LOADER_OPTIONS = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "multiprocessing_context",
    "persistent_workers",
)  # fmt: skip
"""Options that are copied from the user's DataLoader to the internal DataLoader."""


@dataclass(frozen=True, eq=False)
class _SeededDataset(torch_data.Dataset[Any]):
    """Data set that sets a random seed for each sample before reading it."""

    data: Any

    def __getitems__(self, keys: list[SampleKey]) -> list[tuple[SampleKey, Any]]:
        with preserve_cpu_random_states():  # once per batch, since restoring takes longer than seeding
            return [(key, self.get_seeded_sample(key)) for key in keys]

    def get_seeded_sample(self, key: SampleKey) -> Any:
        index, *place = key
        seed_generators(*place)
        return self.data[index]


@dataclass(frozen=True, eq=False)
class _SeededCollate:
    """Collate function that first sets a random seed, derived from the position of the batch in the epoch."""

    collate: Collate

    def __call__(self, samples: list[tuple[SampleKey, Any]]) -> Any:
        _, *place = samples[0][0]
        try:
            with temporarily_seed_generators(*place, "batch"):
                return self.collate([sample for _, sample in samples])
        except ShardFormerError as error:
            return error  # a worker process would replace its type by RuntimeError


class _LocalBatchSampler:
    """Batch sampler that yields this rank's shard of each remaining batch in an epoch."""

    remaining: Iterable[list[SampleKey]] = ()

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return iter(self.remaining)


class IndexedDataSource:
    """Training data whose samples are read by index, in sequential order, random order or the order of a sampler."""

    def __init__(
        self,
        data: Any,
        collate: Collate,
        options: Mapping[str, Any],
        *,
        shuffle: bool = True,
        sampler: Any = None,
        makes_batches: bool = False,
    ) -> None:
        self._data, self._shuffle, self._sampler, self.makes_batches = data, shuffle, sampler, makes_batches
        self.name, self.shuffle, self.size = type(data).__name__, shuffle if sampler is None else None, len(data)
        self.number = 0  # fingerprint of the epoch's order, if a sampler chose it
        self._collate = collate
        self.count: int | None = None if makes_batches else len(data) if sampler is None else len(sampler)
        self._local_sampler, self._generator = _LocalBatchSampler(), torch.Generator()
        self._loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            _SeededDataset(data),
            batch_sampler=self._local_sampler,
            collate_fn=_SeededCollate(collate),
            generator=self._generator,
            **options,
        )

    @property
    def num_batches(self) -> int | None:
        """Number of batches per epoch if the sampler yields batches and has a length, and otherwise None."""
        return length_or_none(self._sampler) if self.makes_batches else None

    def iterate_batch_shards(
        self,
        epoch: int,
        seed: int,
        global_batches: Callable[[Sequence[Any]], Iterable[Sequence[Any]]],
        shard: ShardPosition,
        first_sample: int,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the size of each global batch after the first ``first_sample`` samples, and this rank's shard of it.

        ``global_batches`` splits the order of an epoch into batches.
        """
        order = self._get_epoch_order(epoch, seed)
        self.number = 0 if self._sampler is None else hash_to_int(order)
        batches = list(global_batches(order))
        sizes = [len(batch) for batch in batches]
        for size in sizes:
            check_batch_size(size, shard)

        def parts() -> Iterator[list[SampleKey]]:
            for batch, place in zip(batches, accumulate(sizes, initial=first_sample)):
                local_slice = shard.get_local_slice(len(batch))
                yield [(n, seed, epoch, place + i) for i, n in enumerate(batch[local_slice], local_slice.start)]

        self._local_sampler.remaining = parts()
        self._generator.manual_seed(hash_to_seed(seed, epoch, first_sample))
        for size, part in zip(sizes, self._loader, strict=True):
            if isinstance(part, ShardFormerError):
                raise part
            yield size, part

    def read(self, index: int) -> Any:
        """Read a sample by its index without changing the random state."""
        with preserve_cpu_random_states():
            return _SeededDataset(self._data).get_seeded_sample((index, 0, 0, 0))

    def get_example_batch(self) -> Any:
        """Return a batch of the first two samples, or None if the sampler yields batches. Keeps the random state."""
        if self.makes_batches or not self.size:
            return None
        with preserve_cpu_random_states():
            return self._collate([self.read(index % self.size) for index in range(2)])

    def _get_epoch_order(self, epoch: int, seed: int) -> Sequence[Any]:
        if self._sampler is not None:
            with SharedEpochRandomness(self._sampler, epoch, seed).activate():
                found = list(self._sampler)
            plain = _to_python_number
            return [[*map(plain, batch)] for batch in found] if self.makes_batches else [*map(plain, found)]
        count = len(self._data)
        return (
            torch.randperm(count, generator=make_shuffle_generator(seed, epoch)).tolist()
            if self._shuffle
            else range(count)
        )


def _to_python_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def make_shuffle_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the random generator that shuffles the samples of an epoch."""
    return torch.Generator().manual_seed(hash_to_seed(seed, epoch, "order"))


def make_data_source(
    data: Any, collate: Collate | None, num_workers: int, shuffle: bool | None
) -> IndexedDataSource | StreamedDataSource:
    """Create the object that reads the training data. Raises ConfigError if the type of the data is not supported."""
    if isinstance(data, torch_data.DataLoader):
        return _make_source_from_dataloader(data, collate, shuffle)
    is_unsupported = isinstance(data, (Mapping, str, bytes, Tensor, type, set, frozenset))
    if is_unsupported or not (_is_indexed(data) or hasattr(data, "__iter__")):
        raise ConfigError(
            "Training data must be a Dataset, a Hugging Face dataset, a DataLoader, a list or an ordered iterable, but "
            f"got {type(data).__name__}.",
            remedy="For example, pass a list with one dict per sample, or TensorDataset(inputs, targets).",
        )
    assert collate is not None  # only a DataLoader has its own
    if _is_indexed(data):
        _check_not_empty(len(data), data)
        return IndexedDataSource(data, collate, {"num_workers": num_workers}, shuffle=shuffle is not False)
    if shuffle or num_workers:
        option = "shuffle=True" if shuffle else f"num_workers={num_workers}"
        raise ConfigError(
            f"{option} is not supported for streamed data of type {type(data).__name__}.",
            remedy="Remove it, and shuffle the stream itself or pass a DataLoader with num_workers.",
        )
    return StreamedDataSource(data, collate)


def _is_indexed(data: Any) -> bool:
    """Return whether samples can be read by index. An ``IterableDataset`` inherits an unusable ``__getitem__``."""
    return (
        not isinstance(data, torch_data.IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    )


def _make_source_from_dataloader(
    loader: Any, collate: Collate | None, shuffle: bool | None
) -> IndexedDataSource | StreamedDataSource:
    if collate is not None:
        raise ConfigError("collate_fn has no effect on a DataLoader.", remedy="Pass it to the DataLoader instead.")
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is torch_data.BatchSampler else loader.sampler
    for each in (sampler, batches, getattr(batches, "sampler", None)):
        if each is not None and hasattr(each, "num_replicas"):
            raise ConfigError(
                f"The DataLoader uses a {type(each).__name__}, but ShardFormer already shards the batches.",
                remedy="Create the DataLoader without this sampler, with shuffle=True and the global batch size.",
            )
    if shuffle and not isinstance(sampler, torch_data.RandomSampler):
        raise ConfigError(
            "shuffle=True has no effect on a DataLoader that does not shuffle.",
            remedy="Create the DataLoader with shuffle=True.",
        )
    if not _is_indexed(loader.dataset) or batches is None:
        return StreamedDataSource(loader, None)
    _check_not_empty(len(loader.dataset), loader.dataset)
    if type(batches) is torch_data.BatchSampler and length_or_none(sampler) is None:
        raise ConfigError(
            f"The sampler {type(sampler).__name__} of the DataLoader has no length.",
            remedy="Add a __len__ method to the sampler, or use an IterableDataset.",
        )
    data, collate_fn = loader.dataset, loader.collate_fn
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    if type(batches) is not torch_data.BatchSampler:
        return IndexedDataSource(data, collate_fn, options, sampler=batches, makes_batches=True)
    count = length_or_none(sampler) or 0
    _check_not_empty(count, sampler)
    is_random = type(sampler) is torch_data.RandomSampler and not sampler.replacement
    if count == len(data) and (is_random or type(sampler) is torch_data.SequentialSampler):
        return IndexedDataSource(data, collate_fn, options, shuffle=is_random and shuffle is not False)
    return IndexedDataSource(data, collate_fn, options, sampler=sampler)


def _check_not_empty(length: int, data: Any) -> None:
    if length < 1:
        raise ConfigError(
            f"The training data is an empty {type(data).__name__}.", remedy="Check the data files and any filters."
        )
