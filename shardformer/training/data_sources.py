"""Sources of batches: indexed and streamed data, collation, and the check that all ranks read the same data.

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

from shardformer.comm.collective_call import all_gather_from_grid, come, number_of
from shardformer.comm.collectives import checksum
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.layout.shard_spec import even_bounds
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.micro_batches import batch_size_of, rebuild_container, split_batch
from shardformer.random_state import SharedEpochRandomness, hash_seed, restore_cpu_generators, seed_generators, seeded

MOST, BUDGET_S = 4096, 0.2
"""Limits of the comparison: number of samples, and seconds."""
NEAR = 1e-3
"""Tolerance of floating-point samples, relative to their norm: machines round differently."""
SAME_DATA_REMEDY = (
    "Pass the full data in the same order on every rank. Remove rows[rank::world_size], split_dataset_by_node, and any "
    "random_split or shuffle seeded by rank, and sort items that come from a set or from os.listdir"
)


def check_same_data(
    settings: Mapping[str, Any], count: int | None, read: Callable[[int], Any] | None, context: ParallelContext
) -> None:
    """Raise ConfigError on every rank if their training data differ.

    ``settings`` must be equal on all ranks. ``read`` returns one of ``count`` samples by its index, and is None for a
    stream. Communicates three gathers of a few integers.
    """
    axes = context.base_axes
    if context.world is None or all(axis.size == 1 for axis in axes):
        return
    come("ShardedDataLoader.compare (by initialize, Trainer.fit or the first loop over the data)", *axes)
    found, sketches = ([], []) if read is None or not count else _fingerprint_samples(count, read)
    every = all_gather_from_grid((dict(settings), len(found)), context)
    first, reference = every[0][0], every[0][1][0]
    for rank, (values, _) in every:
        for name, value in values.items():
            if value != reference[name]:
                raise ConfigError(
                    f"The training data of rank {first} has {name}={reference[name]!r}, but that of rank {rank} has "
                    f"{name}={value!r}",
                    remedy=SAME_DATA_REMEDY,
                )
    least = min(number for _, (_, number) in every)
    numbers = all_gather_from_grid(number_of(found[:least]), context)
    near = all_gather_from_grid(sketches, context)
    differing = [rank for rank, number in numbers if number != numbers[0][1]]
    for rank, sketches in near:
        pairs = zip(sketches, near[0][1], strict=False)
        differing += [rank for (a, norm), (b, other) in pairs if abs(a - b) > NEAR * max(norm, other)]
    if differing:
        raise ConfigError(
            f"Ranks {first} and {differing[0]} have different samples at the same index of the training data, a "
            f"{settings['type']}",
            remedy=SAME_DATA_REMEDY,
        )


def _fingerprint_samples(count: int, read: Callable[[int], Any]) -> tuple[list[int], list[tuple[float, float]]]:
    """Return fingerprints and sketches of samples that are drawn identically on all ranks.

    The fingerprints or the sketches are empty if they change when a sample is read again.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:MOST].tolist()
    end = time.monotonic() + BUDGET_S
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
    """Return a random projection, equal on all ranks, and the norm of the floating-point numbers in a value."""
    decimals = list(_decimals(value))
    if not decimals:
        return 0.0, 0.0
    x = torch.cat(decimals).nan_to_num()
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8).double() * 2 - 1
    return float(x @ signs), float(x.norm())


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested containers; a list of integers is one leaf."""
    if isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and not _is_plain(value)):
        for each in [value[key] for key in sorted(value, key=str)] if isinstance(value, Mapping) else value:
            yield from _leaves(each)
    else:
        yield value


def _decimals(value: Any) -> Iterator[Tensor]:
    for leaf in _leaves(value):
        if isinstance(leaf, (numpy.ndarray, numpy.generic)) and numpy.asarray(leaf).dtype.kind == "f":
            yield torch.from_numpy(numpy.array(leaf, numpy.float64)).reshape(-1)
        elif isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout == torch.strided:
            yield leaf.detach().cpu().double().reshape(-1)
        elif isinstance(leaf, float):
            yield torch.tensor([leaf], dtype=torch.float64)


def fingerprint(*values: Any) -> int:
    """Return a fingerprint of the integers and strings in ``values``, or of all numbers if there are none.

    Integers take precedence because floating-point numbers are often augmented at random.
    """
    parts = [_leaf_content(leaf) for value in values for leaf in _leaves(value)]
    return number_of([part for is_exact, part in parts if is_exact] or [part for _, part in parts])


def _leaf_content(leaf: Any) -> tuple[bool, Any]:
    """Return whether a leaf consists of integers or strings, and its content."""
    if isinstance(leaf, Tensor):
        is_exact = not (leaf.is_floating_point() or leaf.is_complex()) and not leaf.is_quantized
        return is_exact, ("tensor", tuple(leaf.shape), checksum(leaf) if leaf.layout == torch.strided else None)
    if isinstance(leaf, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(leaf)
        is_exact = array.dtype.kind in "biuSU"
        return is_exact, ("array", array.shape, array.tobytes() if array.dtype.kind != "O" else None)
    if _is_plain(leaf):
        return not isinstance(leaf, float), leaf
    return False, type(leaf).__name__  # repr may contain an address


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(type(each) is int for each in value)
    return value is None or isinstance(value, (str, bytes, int, float))


def first_and_last_samples(batch: Any) -> list[Any]:
    """Return the first and the last sample of a batch, as far as they can be sliced."""
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
    other = next((sample for sample in samples if sample.keys() != first.keys()), None)
    if other is not None:
        raise InputError(
            f"The samples of a batch have different keys, {sorted(map(str, first))} and {sorted(map(str, other))}",
            remedy="Use the same keys in all samples, or pass collate_fn",
        )
    return {key: _column(str(key), [sample[key] for sample in samples]) for key in first}


def _column(key: str, values: list[Any]) -> Any:
    """Collate the values of one key."""
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
    """Convert lists or arrays of numbers to a tensor, keeping NumPy dtypes; return other values unchanged."""
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
    """Shard of a global batch that belongs to one data rank."""

    rank: int
    size: int

    def of(self, count: int) -> slice:
        bounds = even_bounds(count, self.size)
        return slice(bounds[self.rank], bounds[self.rank + 1])


class StreamedSource:
    """Source that every rank reads in full: an iterable of samples, or of global batches if ``collate`` is None."""

    def __init__(self, source: Any, collate: Collate | None) -> None:
        self._source, self._collate = source, collate
        self.name, self.makes_batches = type(source).__name__, collate is None
        self.shuffle = self.size = self.read = None  # samples have no index
        self.number = 0  # fingerprint of the last batch
        self.count = None if self.makes_batches else length_or_none(source)
        self._reader: _StreamReader | None = None

    @property
    def num_batches(self) -> int | None:
        """Number of batches per epoch; None if unknown or if the source yields samples."""
        return length_or_none(self._source) if self.makes_batches else None

    def batches(
        self, epoch: int, seed: int, size: int | None, share: DataShard, start: int, drop_last: bool, merge_last: bool
    ) -> Iterator[tuple[int, Any]]:
        """Yield pairs as ``IndexedSource.batches`` does. Samples before ``start`` are read again and skipped."""
        reading = self._start_reader(epoch, seed, start)
        if self._collate is None:
            for batch, count, part in reading.shard_batches(share, start):
                self.number = fingerprint(*first_and_last_samples(batch))
                yield count, part
        else:
            assert size is not None
            reading.skip(start)
            while samples := reading.take(size):
                if drop_last and len(samples) < size:
                    break
                if merge_last and not drop_last:
                    samples += reading.last(share.size)
                check_batch_size(len(samples), share)
                local = share.of(len(samples))
                self.number = fingerprint(samples[0], samples[-1])
                with seeded(seed, epoch, reading.count - len(samples) + local.start, "batch"):
                    part = self._collate(samples[local])
                yield len(samples), part
        self._reader = None

    def _start_reader(self, epoch: int, seed: int, start: int) -> _StreamReader:
        """Return a reader at the start of the stream, or the current reader of an iterator."""
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
    """One pass through a stream, with its own random state. ``count`` is the number of samples that were read."""

    def __init__(self, source: Any, epoch: int, seed: int) -> None:
        self.count = 0
        self._random = SharedEpochRandomness(source, epoch, seed)
        with self._random.drawing():
            self._iterator: Iterator[Any] = iter(source)

    def take(self, count: int) -> list[Any]:
        """Return the next ``count`` samples, or fewer at the end."""
        found = self._next(count)
        self.count += len(found)
        return found

    def _next(self, count: int) -> list[Any]:
        with self._random.drawing():
            return list(islice(self._iterator, count))

    def last(self, least: int) -> list[Any]:
        """Return all remaining samples if they are fewer than ``least``, and otherwise none."""
        found = self.take(least)
        if len(found) < least:
            return found
        self._iterator, self.count = chain(found, self._iterator), self.count - len(found)
        return []

    def skip(self, count: int) -> None:
        """Skip to sample ``count`` of the stream."""
        while self.count < count and self.take(min(count - self.count, 256)):
            pass

    def shard_batches(self, share: DataShard, start: int) -> Iterator[tuple[Any, int, Any]]:
        """Shard a stream of global batches after ``start`` samples, as triples (batch, samples, local shard)."""
        while found := self._next(1):
            (batch,) = found
            named = batch if isinstance(batch, Mapping) else {"batch": batch}
            count = batch_size_of(named)
            self.count += count
            left = min(self.count - start, count)
            if left <= 0:
                continue
            check_batch_size(left, share)
            sizes = [count - left, *(b - a for a, b in pairwise(even_bounds(left, share.size)))]
            part = split_batch(named, sizes)[1 + share.rank]
            yield batch, left, rebuild_container(batch, part) if named is batch else part["batch"]


def length_or_none(data: Any) -> int | None:
    """Return ``len(data)``, or None if it is unknown."""
    try:
        return len(data)
    except (TypeError, RuntimeError):
        return None


def check_batch_size(count: int, share: DataShard) -> None:
    """Raise InputError if a batch has fewer samples than there are data ranks."""
    if count < share.size:
        raise InputError(
            f"A batch of {count} samples is too small for {share.size} data ranks",
            remedy="Pass drop_last=True, or a batch size that leaves no such remainder",
        )


SampleKey = tuple[Any, int, int, int]
"""Index of a sample, seed, epoch, and position in the epoch."""

LOADER_OPTIONS = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "multiprocessing_context",
    "persistent_workers",
)  # fmt: skip
"""Options of the user's DataLoader that are passed to our own."""


@dataclass(frozen=True, eq=False)
class _Seeded(torch_data.Dataset[Any]):
    """Data set whose samples are read by key, each with its own random seed."""

    data: Any

    def __getitems__(self, keys: list[SampleKey]) -> list[tuple[SampleKey, Any]]:
        with restore_cpu_generators():  # once per batch, since restoring takes longer than seeding
            return [(key, self.sample(key)) for key in keys]

    def sample(self, key: SampleKey) -> Any:
        index, *place = key
        seed_generators(*place)
        return self.data[index]


@dataclass(frozen=True, eq=False)
class _Collated:
    """Collate function that seeds random numbers from the first sample of the batch."""

    collate: Collate

    def __call__(self, samples: list[tuple[SampleKey, Any]]) -> Any:
        _, *place = samples[0][0]
        try:
            with seeded(*place, "batch"):
                return self.collate([sample for _, sample in samples])
        except ShardFormerError as error:
            return error  # a worker process would replace its type by RuntimeError


class _LocalBatchSampler:
    """Sampler of the local shards of the remaining batches of an epoch."""

    left: Iterable[list[SampleKey]] = ()

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return iter(self.left)


class IndexedSource:
    """Source of samples with an index, in the order of an optional sampler that may also yield batches."""

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
        self.count: int | None = None if makes_batches else len(data) if sampler is None else len(sampler)
        self._parts, self._generator = _LocalBatchSampler(), torch.Generator()
        self._loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            _Seeded(data),
            batch_sampler=self._parts,
            collate_fn=_Collated(collate),
            generator=self._generator,
            **options,
        )

    @property
    def num_batches(self) -> int | None:
        """Number of batches per epoch; None if unknown or if the sampler yields samples."""
        return length_or_none(self._sampler) if self.makes_batches else None

    def batches(
        self,
        epoch: int,
        seed: int,
        global_batches: Callable[[Sequence[Any]], Iterable[Sequence[Any]]],
        share: DataShard,
        start: int,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the size of each global batch and its local shard, after the first ``start`` samples.

        ``global_batches`` splits the order of an epoch into batches.
        """
        order = self._order(epoch, seed)
        self.number = 0 if self._sampler is None else number_of(order)
        batches = list(global_batches(order))
        sizes = [len(batch) for batch in batches]
        for size in sizes:
            check_batch_size(size, share)

        def parts() -> Iterator[list[SampleKey]]:
            for batch, place in zip(batches, accumulate(sizes, initial=start)):
                local = share.of(len(batch))
                yield [(n, seed, epoch, place + i) for i, n in enumerate(batch[local], local.start)]

        self._parts.left = parts()
        self._generator.manual_seed(hash_seed(seed, epoch, start))
        for size, part in zip(sizes, self._loader, strict=True):
            if isinstance(part, ShardFormerError):
                raise part
            yield size, part

    def read(self, index: int) -> Any:
        """Return a sample by its index, and leave the random state unchanged."""
        with restore_cpu_generators():
            return _Seeded(self._data).sample((index, 0, 0, 0))

    def _order(self, epoch: int, seed: int) -> Sequence[Any]:
        if self._sampler is not None:
            with SharedEpochRandomness(self._sampler, epoch, seed).drawing():
                found = list(self._sampler)
            return [[*map(_plain, batch)] for batch in found] if self.makes_batches else [*map(_plain, found)]
        count = len(self._data)
        return torch.randperm(count, generator=epoch_generator(seed, epoch)).tolist() if self._shuffle else range(count)


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, Tensor) else number


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the generator with which ``torch.randperm`` draws the order of an epoch."""
    return torch.Generator().manual_seed(hash_seed(seed, epoch, "order"))


def make_source(
    data: Any, collate: Collate | None, num_workers: int, shuffle: bool | None
) -> IndexedSource | StreamedSource:
    """Create the source for the user's training data, or raise ConfigError if its type is not supported."""
    if isinstance(data, torch_data.DataLoader):
        return _loader_source(data, collate, shuffle)
    is_unsupported = isinstance(data, (Mapping, str, bytes, Tensor, type, set, frozenset))
    if is_unsupported or not (_is_indexed(data) or hasattr(data, "__iter__")):
        raise ConfigError(
            f"Training data of type {type(data).__name__} is not supported",
            rule="Supported are a Dataset, a list, a Hugging Face data set, a DataLoader, and an ordered iterable",
            remedy="Pass a list of samples, one dict each, or torch.utils.data.TensorDataset(inputs, targets)",
        )
    collate = collate or collate_samples
    if _is_indexed(data):
        _check_count(len(data), data)
        return IndexedSource(data, collate, {"num_workers": num_workers}, shuffle=shuffle is not False)
    if shuffle or num_workers:
        option = "shuffle=True" if shuffle else f"num_workers={num_workers}"
        raise ConfigError(
            f"{option} is not supported for streamed data ({type(data).__name__})",
            remedy="Shuffle the stream itself, or pass a DataLoader with workers",
        )
    return StreamedSource(data, collate)


def _is_indexed(data: Any) -> bool:
    """Return whether samples have an index. ``IterableDataset`` inherits a ``__getitem__`` that does not work."""
    return (
        not isinstance(data, torch_data.IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    )


def _loader_source(loader: Any, collate: Collate | None, shuffle: bool | None) -> IndexedSource | StreamedSource:
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
    _check_count(len(loader.dataset), loader.dataset)
    if type(batches) is torch_data.BatchSampler and length_or_none(sampler) is None:
        raise ConfigError(
            f"The sampler of the DataLoader, {type(sampler).__name__}, has no length",
            remedy="Add a __len__, or pass an IterableDataset",
        )
    data, make = loader.dataset, loader.collate_fn
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    if type(batches) is not torch_data.BatchSampler:
        return IndexedSource(data, make, options, sampler=batches, makes_batches=True)
    count = length_or_none(sampler) or 0
    _check_count(count, sampler)
    is_random = type(sampler) is torch_data.RandomSampler and not sampler.replacement
    if count == len(data) and (is_random or type(sampler) is torch_data.SequentialSampler):
        return IndexedSource(data, make, options, shuffle=is_random and shuffle is not False)
    return IndexedSource(data, make, options, sampler=sampler)


def _check_count(count: int, data: Any) -> None:
    if count < 1:
        raise ConfigError(
            f"The training data ({type(data).__name__}) is empty", remedy="Check the files that it was read from"
        )
