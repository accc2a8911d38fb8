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
from shardformer.layout.shard_spec import get_even_split_bounds
from shardformer.random_state import (
    EpochSeededRNG,
    fork_rng_with_hashed_seed,
    hash_to_seed,
    preserve_cpu_rng_states,
    seed_cpu_generators,
)

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class DataParallelPosition:
    """Position of a rank among the data-parallel ranks, which determines its shard of each global batch."""

    rank: int
    size: int

    def get_local_slice(self, num_samples: int) -> slice:
        bounds = get_even_split_bounds(num_samples, self.size)
        return slice(bounds[self.rank], bounds[self.rank + 1])


class IterableDataSource:
    """Training data that is read from an iterable. Every rank reads all samples and uses its own shard.

    The iterable yields samples, or global batches if ``collate_fn`` is None.
    """

    def __init__(self, source: Any, collate_fn: Collate | None) -> None:
        self._source, self._collate = source, collate_fn
        self.name, self.makes_batches = type(source).__name__, collate_fn is None
        self.shuffle = self.size = self.read = None  # samples have no index
        self.number = 0  # fingerprint of the last batch
        self.count = None if self.makes_batches else get_length_or_none(source)
        self._reader: _CountingStreamReader | None = None

    @property
    def num_batches(self) -> int | None:
        """Number of batches per epoch if the iterable yields batches and has a length, and otherwise None."""
        return get_length_or_none(self._source) if self.makes_batches else None

    def iter_batch_shards(
        self,
        epoch: int,
        seed: int,
        batch_size: int | None,
        data_parallel_position: DataParallelPosition,
        num_samples_to_skip: int,
        drop_last: bool,
        merge_last: bool,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the size of each global batch after ``num_samples_to_skip`` samples, and this rank's shard of it."""
        reader = self._get_or_create_reader(epoch, seed, num_samples_to_skip)
        if self._collate is None:
            for batch, count, part in reader.iter_batches_with_sizes_and_shards(
                data_parallel_position, num_samples_to_skip
            ):
                self.number = hash_samples(*get_first_and_last_samples(batch))
                yield count, part
        else:
            assert batch_size is not None
            reader.skip_to_sample(num_samples_to_skip)
            while samples := reader.read(batch_size):
                if drop_last and len(samples) < batch_size:
                    break
                if merge_last and not drop_last:
                    samples += reader.read_rest_if_fewer_than(data_parallel_position.size)
                check_batch_can_be_sharded(len(samples), data_parallel_position)
                local_slice = data_parallel_position.get_local_slice(len(samples))
                self.number = hash_samples(samples[0], samples[-1])
                with fork_rng_with_hashed_seed(seed, epoch, reader.count - len(samples) + local_slice.start, "batch"):
                    part = self._collate(samples[local_slice])
                yield len(samples), part
        self._reader = None

    def _get_or_create_reader(self, epoch: int, seed: int, start_sample: int) -> _CountingStreamReader:
        """Create a reader for the data, or reuse the reader of an iterator, because an iterator cannot restart."""
        if not isinstance(self._source, Iterator):
            return _CountingStreamReader(self._source, epoch, seed)
        if self._reader is None:
            self._reader = _CountingStreamReader(self._source, epoch, seed)
        elif self._reader.count > start_sample:
            raise InputError(
                f"The iterator {self.name} is at sample {self._reader.count} and cannot go back to sample "
                f"{start_sample}.",
                remedy="Pass a list, or an iterable that can be read more than once.",
            )
        return self._reader


class _CountingStreamReader:
    """Reads a stream from start to end with its own random state, and counts the samples."""

    def __init__(self, source: Any, epoch: int, seed: int) -> None:
        self.count = 0
        self._random = EpochSeededRNG(source, epoch, seed)
        with self._random.use_epoch_seed():
            self._iterator: Iterator[Any] = iter(source)

    def read(self, num_samples: int) -> list[Any]:
        """Return the next ``num_samples`` samples of the stream, or fewer at its end."""
        found = self._read_without_counting(num_samples)
        self.count += len(found)
        return found

    def _read_without_counting(self, num_samples: int) -> list[Any]:
        with self._random.use_epoch_seed():
            return list(islice(self._iterator, num_samples))

    def read_rest_if_fewer_than(self, num_samples: int) -> list[Any]:
        """Return all remaining samples if there are fewer than ``num_samples``, and otherwise an empty list."""
        found = self.read(num_samples)
        if len(found) < num_samples:
            return found
        self._iterator, self.count = chain(found, self._iterator), self.count - len(found)
        return []

    def skip_to_sample(self, sample_position: int) -> None:
        """Read and discard samples until ``sample_position`` samples have been read."""
        while self.count < sample_position and self.read(min(sample_position - self.count, 256)):
            pass

    def iter_batches_with_sizes_and_shards(
        self, data_parallel_position: DataParallelPosition, num_samples_to_skip: int
    ) -> Iterator[tuple[Any, int, Any]]:
        """Yield each global batch after ``num_samples_to_skip`` samples, its size, and this rank's shard of it."""
        while found := self._read_without_counting(1):
            (batch,) = found
            named = batch if isinstance(batch, Mapping) else {"batch": batch}
            count = get_batch_size(named)
            self.count += count
            left = min(self.count - num_samples_to_skip, count)
            if left <= 0:
                continue
            check_batch_can_be_sharded(left, data_parallel_position)
            sizes = [
                count - left,
                *(b - a for a, b in pairwise(get_even_split_bounds(left, data_parallel_position.size))),
            ]
            part = split_batch(named, sizes)[1 + data_parallel_position.rank]
            yield batch, left, rebuild_container(batch, part) if named is batch else part["batch"]


def get_length_or_none(data: Any) -> int | None:
    """Return ``len(data)``, or None if the data has no length."""
    try:
        return len(data)
    except (TypeError, RuntimeError):
        return None


def check_batch_can_be_sharded(num_samples: int, data_parallel_position: DataParallelPosition) -> None:
    """Raise InputError if a global batch has fewer samples than there are data-parallel ranks."""
    if num_samples < data_parallel_position.size:
        raise InputError(
            f"A batch of {num_samples} samples cannot be split across {data_parallel_position.size} data-parallel "
            "ranks.",
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
        with preserve_cpu_rng_states():  # once per batch, since restoring takes longer than seeding
            return [(key, self.get_seeded_sample(key)) for key in keys]

    def get_seeded_sample(self, sample_key: SampleKey) -> Any:
        index, *place = sample_key
        seed_cpu_generators(*place)
        return self.data[index]


@dataclass(frozen=True, eq=False)
class _SeededCollateFn:
    """Collate function that first sets a random seed, derived from the position of the batch in the epoch."""

    collate_fn: Collate

    def __call__(self, samples: list[tuple[SampleKey, Any]]) -> Any:
        _, *place = samples[0][0]
        try:
            with fork_rng_with_hashed_seed(*place, "batch"):
                return self.collate_fn([sample for _, sample in samples])
        except ShardFormerError as error:
            return error  # a worker process would replace its type by RuntimeError


class _LocalBatchSampler:
    """Batch sampler that yields this rank's shard of each remaining batch in an epoch."""

    remaining: Iterable[list[SampleKey]] = ()

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return iter(self.remaining)


class MapStyleDataSource:
    """Training data whose samples are read by index, in sequential order, random order or the order of a sampler."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate,
        loader_options: Mapping[str, Any],
        *,
        shuffle: bool = True,
        sampler: Any = None,
        is_batch_sampler: bool = False,
    ) -> None:
        self._data, self._shuffle, self._sampler, self.makes_batches = dataset, shuffle, sampler, is_batch_sampler
        self.name, self.shuffle, self.size = type(dataset).__name__, shuffle if sampler is None else None, len(dataset)
        self.number = 0  # fingerprint of the epoch's order, if a sampler chose it
        self._collate = collate_fn
        self.count: int | None = None if is_batch_sampler else len(dataset) if sampler is None else len(sampler)
        self._local_sampler, self._generator = _LocalBatchSampler(), torch.Generator()
        self._loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            _SeededDataset(dataset),
            batch_sampler=self._local_sampler,
            collate_fn=_SeededCollateFn(collate_fn),
            generator=self._generator,
            **loader_options,
        )

    @property
    def num_batches(self) -> int | None:
        """Number of batches per epoch if the sampler yields batches and has a length, and otherwise None."""
        return get_length_or_none(self._sampler) if self.makes_batches else None

    def iter_batch_shards(
        self,
        epoch: int,
        seed: int,
        split_into_batches: Callable[[Sequence[Any]], Iterable[Sequence[Any]]],
        rank_position: DataParallelPosition,
        num_samples_to_skip: int,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the size of each global batch after ``num_samples_to_skip`` samples, and this rank's shard of it.

        ``split_into_batches`` splits the order of an epoch into batches.
        """
        order = self._get_sample_order(epoch, seed)
        self.number = 0 if self._sampler is None else hash_to_int(order)
        batches = list(split_into_batches(order))
        sizes = [len(batch) for batch in batches]
        for size in sizes:
            check_batch_can_be_sharded(size, rank_position)

        def iter_local_sample_keys() -> Iterator[list[SampleKey]]:
            for batch, place in zip(batches, accumulate(sizes, initial=num_samples_to_skip)):
                local_slice = rank_position.get_local_slice(len(batch))
                yield [(n, seed, epoch, place + i) for i, n in enumerate(batch[local_slice], local_slice.start)]

        self._local_sampler.remaining = iter_local_sample_keys()
        self._generator.manual_seed(hash_to_seed(seed, epoch, num_samples_to_skip))
        for size, part in zip(sizes, self._loader, strict=True):
            if isinstance(part, ShardFormerError):
                raise part
            yield size, part

    def read(self, index: int) -> Any:
        """Read a sample by its index without changing the random state."""
        with preserve_cpu_rng_states():
            return _SeededDataset(self._data).get_seeded_sample((index, 0, 0, 0))

    def get_example_batch(self) -> Any:
        """Return a batch of the first two samples, or None if the sampler yields batches. Keeps the random state."""
        if self.makes_batches or not self.size:
            return None
        with preserve_cpu_rng_states():
            return self._collate([self.read(index % self.size) for index in range(2)])

    def _get_sample_order(self, epoch: int, seed: int) -> Sequence[Any]:
        if self._sampler is not None:
            with EpochSeededRNG(self._sampler, epoch, seed).use_epoch_seed():
                found = list(self._sampler)
            plain = _to_python_index
            return [[*map(plain, batch)] for batch in found] if self.makes_batches else [*map(plain, found)]
        count = len(self._data)
        return (
            torch.randperm(count, generator=make_shuffle_generator(seed, epoch)).tolist()
            if self._shuffle
            else range(count)
        )


def _to_python_index(sample_index: Any) -> Any:
    return sample_index.item() if isinstance(sample_index, Tensor) else sample_index


def make_shuffle_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the random generator that shuffles the samples of an epoch."""
    return torch.Generator().manual_seed(hash_to_seed(seed, epoch, "order"))


def make_data_source(
    data: Any, collate_fn: Collate | None, num_workers: int, shuffle: bool | None
) -> MapStyleDataSource | IterableDataSource:
    """Create a map-style or iterable data source. Raises ConfigError if the type of the data is not supported."""
    if isinstance(data, torch_data.DataLoader):
        return _make_source_from_data_loader(data, collate_fn, shuffle)
    is_unsupported = isinstance(data, (Mapping, str, bytes, Tensor, type, set, frozenset))
    if is_unsupported or not (_is_map_style(data) or hasattr(data, "__iter__")):
        raise ConfigError(
            "Training data must be a Dataset, a Hugging Face dataset, a DataLoader, a list or an ordered iterable, but "
            f"got {type(data).__name__}.",
            remedy="For example, pass a list with one dict per sample, or TensorDataset(inputs, targets).",
        )
    assert collate_fn is not None  # only a DataLoader has its own
    if _is_map_style(data):
        _check_data_not_empty(len(data), data)
        return MapStyleDataSource(data, collate_fn, {"num_workers": num_workers}, shuffle=shuffle is not False)
    if shuffle or num_workers:
        option = "shuffle=True" if shuffle else f"num_workers={num_workers}"
        raise ConfigError(
            f"Streamed data of type {type(data).__name__} does not support {option}.",
            remedy=f"Remove {option}, and instead shuffle the stream itself, or pass a DataLoader with num_workers.",
        )
    return IterableDataSource(data, collate_fn)


def _is_map_style(dataset: Any) -> bool:
    """Return whether samples can be read by index. An ``IterableDataset`` inherits an unusable ``__getitem__``."""
    return (
        not isinstance(dataset, torch_data.IterableDataset)
        and hasattr(dataset, "__getitem__")
        and hasattr(dataset, "__len__")
    )


def _make_source_from_data_loader(
    data_loader: Any, user_collate_fn: Collate | None, shuffle: bool | None
) -> MapStyleDataSource | IterableDataSource:
    if user_collate_fn is not None:
        raise ConfigError(
            "The argument collate_fn has no effect, because the training data is a DataLoader.",
            remedy="Pass collate_fn to the DataLoader instead.",
        )
    batches = data_loader.batch_sampler
    sampler = batches.sampler if type(batches) is torch_data.BatchSampler else data_loader.sampler
    for each in (sampler, batches, getattr(batches, "sampler", None)):
        if each is not None and hasattr(each, "num_replicas"):
            raise ConfigError(
                f"The DataLoader uses a {type(each).__name__}, but ShardFormer already splits batches across ranks.",
                remedy="Create the DataLoader without this sampler, with shuffle=True and the global batch size.",
            )
    if shuffle and not isinstance(sampler, torch_data.RandomSampler):
        raise ConfigError(
            "Got shuffle=True, but the DataLoader does not shuffle.",
            remedy="Create the DataLoader with shuffle=True.",
        )
    if not _is_map_style(data_loader.dataset) or batches is None:
        return IterableDataSource(data_loader, None)
    _check_data_not_empty(len(data_loader.dataset), data_loader.dataset)
    if type(batches) is torch_data.BatchSampler and get_length_or_none(sampler) is None:
        raise ConfigError(
            f"The sampler {type(sampler).__name__} of the DataLoader has no length.",
            remedy="Add a __len__ method to the sampler, or use an IterableDataset.",
        )
    data, collate_fn = data_loader.dataset, data_loader.collate_fn
    options = {name: getattr(data_loader, name) for name in LOADER_OPTIONS}
    if type(batches) is not torch_data.BatchSampler:
        return MapStyleDataSource(data, collate_fn, options, sampler=batches, is_batch_sampler=True)
    count = get_length_or_none(sampler) or 0
    _check_data_not_empty(count, sampler)
    is_random = type(sampler) is torch_data.RandomSampler and not sampler.replacement
    if count == len(data) and (is_random or type(sampler) is torch_data.SequentialSampler):
        return MapStyleDataSource(data, collate_fn, options, shuffle=is_random and shuffle is not False)
    return MapStyleDataSource(data, collate_fn, options, sampler=sampler)


def _check_data_not_empty(num_samples: int, data: Any) -> None:
    if num_samples < 1:
        raise ConfigError(
            f"The training data is an empty {type(data).__name__}.", remedy="Check the data files and any filters."
        )
