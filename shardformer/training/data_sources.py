"""Reads indexed or streamed training data, collates batches, and checks that all ranks read the same data.

The engine shards every batch over the data ranks. This requires that all ranks read the full data in the same order.
If a script has already sharded the data by rank, or if the order differs between processes (a set of strings,
``os.listdir``), samples are silently repeated or skipped. Therefore ranks compare their data before training starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import data as torch_data

from shardformer.comm.collective_call import all_gather_from_grid, hash_to_number, wait_for_all_ranks
from shardformer.comm.collectives import checksum
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.layout.shard_spec import even_bounds
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.micro_batches import batch_size_of, rebuild_container, split_batch
from shardformer.random_state import SharedEpochRandomness, hash_seed, restore_cpu_generators, seed_generators, seeded

MAX_SAMPLES, TIME_LIMIT_S = 4096, 0.2
"""Maximum number of samples that the ranks compare, and maximum time of the comparison in seconds."""
TOLERANCE = 1e-3
"""Tolerance for floating-point samples, relative to their norm, because machines round differently."""
SAME_DATA_REMEDY = (
    "Pass the full data in the same order on every rank. Remove rows[rank::world_size], split_dataset_by_node, and any "
    "random_split or shuffle seeded by rank, and sort items that come from a set or from os.listdir"
)


def check_same_data(
    settings: Mapping[str, Any], count: int | None, read: Callable[[int], Any] | None, context: ParallelContext
) -> None:
    """Raise ConfigError on all ranks if two ranks have different training data.

    ``settings`` must be equal on all ranks. ``read`` returns one of ``count`` samples by its index, and is None for a
    stream. Communicates three gathers: the settings, a hash, and two numbers for each compared sample.
    """
    axes = context.base_axes
    if context.world is None or all(axis.size == 1 for axis in axes):
        return
    wait_for_all_ranks("ShardedDataLoader.compare (by initialize, Trainer.fit or the first loop over the data)", *axes)
    found, sketches = ([], []) if read is None or not count else _fingerprint_samples(count, read)
    gathered = all_gather_from_grid((dict(settings), len(found)), context)
    first_rank, reference = gathered[0][0], gathered[0][1][0]
    for rank, (values, _) in gathered:
        for name, value in values.items():
            if value != reference[name]:
                raise ConfigError(
                    f"The training data of rank {first_rank} has {name}={reference[name]!r}, but the training data of "
                    f"rank {rank} has {name}={value!r}",
                    remedy=SAME_DATA_REMEDY,
                )
    num_compared = min(number for _, (_, number) in gathered)
    fingerprints = all_gather_from_grid(hash_to_number(found[:num_compared]), context)
    gathered_sketches = all_gather_from_grid(sketches, context)
    differing = [rank for rank, number in fingerprints if number != fingerprints[0][1]]
    for rank, sketches in gathered_sketches:
        pairs = zip(sketches, gathered_sketches[0][1], strict=False)
        differing += [rank for (a, norm), (b, other) in pairs if abs(a - b) > TOLERANCE * max(norm, other)]
    if differing:
        raise ConfigError(
            f"Ranks {first_rank} and {differing[0]} have different samples at the same index of the training data, a "
            f"{settings['type']}",
            remedy=SAME_DATA_REMEDY,
        )


def _fingerprint_samples(count: int, read: Callable[[int], Any]) -> tuple[list[int], list[tuple[float, float]]]:
    """Return fingerprints and random projections of a random subset of samples, which is the same on all ranks.

    Either list is empty if its values change when a sample is read a second time, as with random augmentation.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:MAX_SAMPLES].tolist()
    end = time.monotonic() + TIME_LIMIT_S
    found: list[int] = []
    sketches: list[tuple[float, float]] = []
    try:
        for index in [order[0], *order]:  # the first sample is read twice
            sample = read(index)
            found.append(fingerprint(sample))
            sketches.append(random_projection(sample))
            if len(found) > 1 and time.monotonic() > end:
                break
    except Exception:
        return found[1:], []  # training reads the sample too, and raises the error on all ranks
    return found[1:] if found[0] == found[1] else [], sketches[1:] if sketches[0] == sketches[1] else []


def random_projection(value: Any) -> tuple[float, float]:
    """Return a random projection of the floating-point numbers in a sample, equal on all ranks, and their norm."""
    decimals = list(_iterate_float_tensors(value))
    if not decimals:
        return 0.0, 0.0
    x = torch.cat(decimals).nan_to_num()
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8).double() * 2 - 1
    return float(x @ signs), float(x.norm())


def _iterate_leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested dicts, lists and tuples. A list of integers is a single leaf."""
    if isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and not _is_plain_leaf(value)):
        for each in [value[key] for key in sorted(value, key=str)] if isinstance(value, Mapping) else value:
            yield from _iterate_leaves(each)
    else:
        yield value


def _iterate_float_tensors(value: Any) -> Iterator[Tensor]:
    for leaf in _iterate_leaves(value):
        if isinstance(leaf, (numpy.ndarray, numpy.generic)) and numpy.asarray(leaf).dtype.kind == "f":
            yield torch.from_numpy(numpy.array(leaf, numpy.float64)).reshape(-1)
        elif isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout == torch.strided:
            yield leaf.detach().cpu().double().reshape(-1)
        elif isinstance(leaf, float):
            yield torch.tensor([leaf], dtype=torch.float64)


def fingerprint(*values: Any) -> int:
    """Return a hash of the integers and strings in samples, or of all numbers if they contain no integers or strings.

    Integers take precedence because floating-point numbers are often augmented at random.
    """
    parts = [_describe_leaf(leaf) for value in values for leaf in _iterate_leaves(value)]
    return hash_to_number([part for is_exact, part in parts if is_exact] or [part for _, part in parts])


def _describe_leaf(leaf: Any) -> tuple[bool, Any]:
    """Return whether a leaf of a sample consists of integers or strings, and its hashable content."""
    if isinstance(leaf, Tensor):
        is_exact = not (leaf.is_floating_point() or leaf.is_complex()) and not leaf.is_quantized
        return is_exact, ("tensor", tuple(leaf.shape), checksum(leaf) if leaf.layout == torch.strided else None)
    if isinstance(leaf, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(leaf)
        is_exact = array.dtype.kind in "biuSU"
        return is_exact, ("array", array.shape, array.tobytes() if array.dtype.kind != "O" else None)
    if _is_plain_leaf(leaf):
        return not isinstance(leaf, float), leaf
    return False, type(leaf).__name__  # repr may contain an address


def _is_plain_leaf(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(type(each) is int for each in value)
    return value is None or isinstance(value, (str, bytes, int, float))


def first_and_last_samples(batch: Any) -> list[Any]:
    """Return the first and the last sample of each tensor or array in a batch, and other values unchanged."""
    if isinstance(batch, Mapping):
        return [end for key in sorted(batch, key=str) for end in first_and_last_samples(batch[key])]
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return [end for each in batch for end in first_and_last_samples(each)]
    return [batch[:1], batch[-1:]] if isinstance(batch, (Tensor, numpy.ndarray)) and batch.ndim else [batch]


def collate_samples(samples: list[Any]) -> Any:
    """Collate samples into a batch with torch's ``default_collate``, or by key if they are mappings.

    For mappings, numbers and lists of numbers become tensors of torch's default dtype, and strings stay in a list.

    >>> collate_samples([{"ids": [5, 6], "score": 0.5, "text": "a"}, {"ids": [7, 8], "score": 1.0, "text": "b"}])
    {'ids': tensor([[5, 6],
            [7, 8]]), 'score': tensor([0.5000, 1.0000]), 'text': ['a', 'b']}
    """
    first = samples[0]
    if not isinstance(first, Mapping):
        return torch_data.default_collate(samples)
    differing = next((sample for sample in samples if sample.keys() != first.keys()), None)
    if differing is not None:
        raise InputError(
            f"The samples of a batch have different keys, {sorted(map(str, first))} and {sorted(map(str, differing))}",
            remedy="Use the same keys in all samples, or pass collate_fn",
        )
    return {key: _collate_column(str(key), [sample[key] for sample in samples]) for key in first}


def _collate_column(key: str, values: list[Any]) -> Any:
    """Collate the values that the samples of a batch have for one key."""
    if all(isinstance(value, str) for value in values):
        return values
    if all(isinstance(value, (int, float)) and not isinstance(value, numpy.generic) for value in values):
        return torch.tensor(values)
    values = [_as_tensor(key, value) for value in values]
    sized = [value for value in values if isinstance(value, (Tensor, list, tuple))]
    shapes = {tuple(value.shape) if isinstance(value, Tensor) else (len(value),) for value in sized}
    if len(shapes) > 1:
        raise _shape_error(key, f"have different shapes, {' and '.join(map(str, sorted(shapes)[:2]))}")
    return torch_data.default_collate(values)


def _as_tensor(key: str, value: Any) -> Any:
    """Convert a list or array of numbers to a tensor, and return other values unchanged. NumPy dtypes are kept."""
    leaf = value  # the first number in nested lists and arrays, or the first empty list
    while (isinstance(leaf, (list, tuple)) and leaf) or (isinstance(leaf, numpy.ndarray) and leaf.ndim and leaf.size):
        leaf = leaf[0]
    is_numpy = isinstance(leaf, (numpy.number, numpy.bool_, numpy.ndarray))
    if not isinstance(value, (list, tuple, numpy.ndarray)) or not (is_numpy or isinstance(leaf, (int, float, list))):
        return value
    try:
        return torch.as_tensor(numpy.asarray(value)) if is_numpy else torch.tensor(value)
    except ValueError as error:
        raise _shape_error(key, f"cannot be converted to a tensor: {error}") from error


def _shape_error(key: str, problem: str) -> InputError:
    return InputError(
        f"The values of {key!r} in a batch {problem}",
        remedy="Pad them in the data, or pass a collate_fn such as transformers.DataCollatorWithPadding(tokenizer)",
    )


Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class DataShard:
    """Position of a data-parallel rank, which determines its shard of each global batch."""

    rank: int
    size: int

    def local_slice(self, count: int) -> slice:
        bounds = even_bounds(count, self.size)
        return slice(bounds[self.rank], bounds[self.rank + 1])


class StreamedSource:
    """Training data from an iterable, which every rank reads in full.

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
        """Number of batches per epoch, or None if it is unknown or if the iterable yields samples."""
        return length_or_none(self._source) if self.makes_batches else None

    def batches(
        self, epoch: int, seed: int, size: int | None, shard: DataShard, start: int, drop_last: bool, merge_last: bool
    ) -> Iterator[tuple[int, Any]]:
        """Yield the size of each global batch and its local shard. The first ``start`` samples are read and skipped."""
        reader = self._get_reader(epoch, seed, start)
        if self._collate is None:
            for batch, count, part in reader.read_shards(shard, start):
                self.number = fingerprint(*first_and_last_samples(batch))
                yield count, part
        else:
            assert size is not None
            reader.skip_to(start)
            while samples := reader.read(size):
                if drop_last and len(samples) < size:
                    break
                if merge_last and not drop_last:
                    samples += reader.read_end(shard.size)
                check_batch_size(len(samples), shard)
                local_slice = shard.local_slice(len(samples))
                self.number = fingerprint(samples[0], samples[-1])
                with seeded(seed, epoch, reader.count - len(samples) + local_slice.start, "batch"):
                    part = self._collate(samples[local_slice])
                yield len(samples), part
        self._reader = None

    def _get_reader(self, epoch: int, seed: int, start: int) -> _StreamReader:
        """Return a new reader of the stream, or the existing reader if the stream is an iterator."""
        if not isinstance(self._source, Iterator):
            return _StreamReader(self._source, epoch, seed)
        if self._reader is None:
            self._reader = _StreamReader(self._source, epoch, seed)
        elif self._reader.count > start:
            raise InputError(
                f"The iterator {self.name} cannot restart at sample {start} after {self._reader.count} samples",
                remedy="Pass a list, or an object whose __iter__ restarts",
            )
        return self._reader


class _StreamReader:
    """Reads a stream once, with its own random state, and counts the samples that were read."""

    def __init__(self, source: Any, epoch: int, seed: int) -> None:
        self.count = 0
        self._random = SharedEpochRandomness(source, epoch, seed)
        with self._random.drawing():
            self._iterator: Iterator[Any] = iter(source)

    def read(self, count: int) -> list[Any]:
        """Return the next ``count`` samples, or fewer at the end of the stream."""
        found = self._read_next(count)
        self.count += len(found)
        return found

    def _read_next(self, count: int) -> list[Any]:
        with self._random.drawing():
            return list(islice(self._iterator, count))

    def read_end(self, limit: int) -> list[Any]:
        """Return all remaining samples if there are fewer than ``limit``. Otherwise return an empty list."""
        found = self.read(limit)
        if len(found) < limit:
            return found
        self._iterator, self.count = chain(found, self._iterator), self.count - len(found)
        return []

    def skip_to(self, position: int) -> None:
        """Read and discard samples until ``position`` samples have been read."""
        while self.count < position and self.read(min(position - self.count, 256)):
            pass

    def read_shards(self, shard: DataShard, start: int) -> Iterator[tuple[Any, int, Any]]:
        """Yield each global batch after the first ``start`` samples, its number of samples, and its local shard."""
        while found := self._read_next(1):
            (batch,) = found
            named = batch if isinstance(batch, Mapping) else {"batch": batch}
            count = batch_size_of(named)
            self.count += count
            left = min(self.count - start, count)
            if left <= 0:
                continue
            check_batch_size(left, shard)
            sizes = [count - left, *(b - a for a, b in pairwise(even_bounds(left, shard.size)))]
            part = split_batch(named, sizes)[1 + shard.rank]
            yield batch, left, rebuild_container(batch, part) if named is batch else part["batch"]


def length_or_none(data: Any) -> int | None:
    """Return ``len(data)``, or None if it is unknown."""
    try:
        return len(data)
    except (TypeError, RuntimeError):
        return None


def check_batch_size(num_samples: int, shard: DataShard) -> None:
    """Raise InputError if a global batch has fewer samples than there are data-parallel ranks."""
    if num_samples < shard.size:
        raise InputError(
            f"A batch of {num_samples} samples is too small for {shard.size} data ranks",
            remedy="Pass drop_last=True, or choose a batch size that divides the number of samples",
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
    """Data set that sets the random seed of each sample before it reads the sample."""

    data: Any

    def __getitems__(self, keys: list[SampleKey]) -> list[tuple[SampleKey, Any]]:
        with restore_cpu_generators():  # once per batch, since restoring takes longer than seeding
            return [(key, self.sample(key)) for key in keys]

    def sample(self, key: SampleKey) -> Any:
        index, *place = key
        seed_generators(*place)
        return self.data[index]


@dataclass(frozen=True, eq=False)
class _SeededCollate:
    """Collate function that sets the random seed of each batch, derived from its first sample."""

    collate: Collate

    def __call__(self, samples: list[tuple[SampleKey, Any]]) -> Any:
        _, *place = samples[0][0]
        try:
            with seeded(*place, "batch"):
                return self.collate([sample for _, sample in samples])
        except ShardFormerError as error:
            return error  # a worker process would replace its type by RuntimeError


class _LocalBatchSampler:
    """Batch sampler that yields the local shards of the remaining batches of an epoch."""

    remaining: Iterable[list[SampleKey]] = ()

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return iter(self.remaining)


class IndexedSource:
    """Training data that is read by index, in random or sequential order or in the order of a sampler."""

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
        """Number of batches per epoch, or None if it is unknown or if the sampler yields samples."""
        return length_or_none(self._sampler) if self.makes_batches else None

    def batches(
        self,
        epoch: int,
        seed: int,
        global_batches: Callable[[Sequence[Any]], Iterable[Sequence[Any]]],
        shard: DataShard,
        start: int,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the size of each global batch and its local shard, starting after the first ``start`` samples.

        ``global_batches`` splits the order of an epoch into batches.
        """
        order = self._epoch_order(epoch, seed)
        self.number = 0 if self._sampler is None else hash_to_number(order)
        batches = list(global_batches(order))
        sizes = [len(batch) for batch in batches]
        for size in sizes:
            check_batch_size(size, shard)

        def parts() -> Iterator[list[SampleKey]]:
            for batch, place in zip(batches, accumulate(sizes, initial=start)):
                local_slice = shard.local_slice(len(batch))
                yield [(n, seed, epoch, place + i) for i, n in enumerate(batch[local_slice], local_slice.start)]

        self._local_sampler.remaining = parts()
        self._generator.manual_seed(hash_seed(seed, epoch, start))
        for size, part in zip(sizes, self._loader, strict=True):
            if isinstance(part, ShardFormerError):
                raise part
            yield size, part

    def read(self, index: int) -> Any:
        """Read a sample by its index without changing the random state."""
        with restore_cpu_generators():
            return _SeededDataset(self._data).sample((index, 0, 0, 0))

    def example(self) -> Any:
        """Return a batch of the first two samples without changing the random state, or None if keys are batches."""
        if self.makes_batches or not self.size:
            return None
        return self._collate([self.read(index % self.size) for index in range(2)])

    def _epoch_order(self, epoch: int, seed: int) -> Sequence[Any]:
        if self._sampler is not None:
            with SharedEpochRandomness(self._sampler, epoch, seed).drawing():
                found = list(self._sampler)
            plain = _to_python_number
            return [[*map(plain, batch)] for batch in found] if self.makes_batches else [*map(plain, found)]
        count = len(self._data)
        return torch.randperm(count, generator=epoch_generator(seed, epoch)).tolist() if self._shuffle else range(count)


def _to_python_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the random generator that determines the sample order of an epoch."""
    return torch.Generator().manual_seed(hash_seed(seed, epoch, "order"))


def make_source(
    data: Any, collate: Collate | None, num_workers: int, shuffle: bool | None
) -> IndexedSource | StreamedSource:
    """Create the source that reads training data, or raise ConfigError if the type of the data is not supported."""
    if isinstance(data, torch_data.DataLoader):
        return _source_from_loader(data, collate, shuffle)
    is_unsupported = isinstance(data, (Mapping, str, bytes, Tensor, type, set, frozenset))
    if is_unsupported or not (_is_indexed(data) or hasattr(data, "__iter__")):
        raise ConfigError(
            f"Training data of type {type(data).__name__} is not supported",
            rule="Supported are a Dataset, a list, a Hugging Face data set, a DataLoader, and an ordered iterable",
            remedy="Pass a list of samples, one dict each, or torch.utils.data.TensorDataset(inputs, targets)",
        )
    collate = collate or collate_samples
    if _is_indexed(data):
        _check_not_empty(len(data), data)
        return IndexedSource(data, collate, {"num_workers": num_workers}, shuffle=shuffle is not False)
    if shuffle or num_workers:
        option = "shuffle=True" if shuffle else f"num_workers={num_workers}"
        raise ConfigError(
            f"{option} is not supported for streamed data ({type(data).__name__})",
            remedy="Shuffle the stream itself, or pass a DataLoader with workers",
        )
    return StreamedSource(data, collate)


def _is_indexed(data: Any) -> bool:
    """Return whether data can be read by index. ``IterableDataset`` inherits a ``__getitem__`` that does not work."""
    return (
        not isinstance(data, torch_data.IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    )


def _source_from_loader(loader: Any, collate: Collate | None, shuffle: bool | None) -> IndexedSource | StreamedSource:
    if collate is not None:
        raise ConfigError("collate_fn has no effect on a DataLoader", remedy="Pass collate_fn to the DataLoader")
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is torch_data.BatchSampler else loader.sampler
    for each in (sampler, batches, getattr(batches, "sampler", None)):
        if each is not None and hasattr(each, "num_replicas"):
            raise ConfigError(
                f"The DataLoader uses a {type(each).__name__}, which would shard the batches a second time",
                remedy="Create the DataLoader without this sampler, with shuffle=True and the global batch size",
            )
    if shuffle and not isinstance(sampler, torch_data.RandomSampler):
        raise ConfigError(
            "shuffle=True conflicts with the DataLoader, which does not shuffle",
            remedy="Create the DataLoader with shuffle=True",
        )
    if not _is_indexed(loader.dataset) or batches is None:
        return StreamedSource(loader, None)
    _check_not_empty(len(loader.dataset), loader.dataset)
    if type(batches) is torch_data.BatchSampler and length_or_none(sampler) is None:
        raise ConfigError(
            f"The sampler of the DataLoader, {type(sampler).__name__}, has no length",
            remedy="Add a __len__, or pass an IterableDataset",
        )
    data, collate_fn = loader.dataset, loader.collate_fn
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    if type(batches) is not torch_data.BatchSampler:
        return IndexedSource(data, collate_fn, options, sampler=batches, makes_batches=True)
    count = length_or_none(sampler) or 0
    _check_not_empty(count, sampler)
    is_random = type(sampler) is torch_data.RandomSampler and not sampler.replacement
    if count == len(data) and (is_random or type(sampler) is torch_data.SequentialSampler):
        return IndexedSource(data, collate_fn, options, shuffle=is_random and shuffle is not False)
    return IndexedSource(data, collate_fn, options, sampler=sampler)


def _check_not_empty(length: int, data: Any) -> None:
    if length < 1:
        raise ConfigError(
            f"The training data ({type(data).__name__}) is empty", remedy="Check the files that it was read from"
        )
