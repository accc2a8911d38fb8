"""Where batches come from: indexed and iterable data sets, collation, and the check that ranks read the same data.

The engine gives each data rank its part of every batch. That is right where all ranks hold the whole data in one order,
and silently wrong where a script has sharded the data by rank, or where the order differs by process (a set of strings,
``os.listdir``): samples would be trained on twice, or never. So ranks compare what they hold before training starts.
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
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from shardformer.comm.collective_call import all_gather_from_grid, come, number_of
from shardformer.comm.collectives import checksum
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.layout.shard_spec import even_bounds
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.micro_batches import batch_size_of, rebuild_container, split_batch
from shardformer.random_state import SameRandomOnAllRanks, hash_seed, restored_generators, seed_generators, seeded

MOST, BUDGET_S = 4096, 0.2
"""How many samples are read to compare them, and how long that may take."""
NEAR = 1e-3
"""How far the decimal numbers of a sample may differ, as a part of their norm: machines round differently."""
WHOLE = (
    "Pass the whole data on every rank, in one order: without rows[rank::world_size], split_dataset_by_node, or a "
    "random_split or shuffle seeded by rank; and sort what comes from a set or from os.listdir"
)


def compare_data(
    settings: Mapping[str, Any], count: int | None, read: Callable[[int], Any] | None, context: ParallelContext
) -> None:
    """Raises ConfigError, on all ranks, where they have other training data. Communicates three gathers of a few
    numbers.

    Args:
        settings: what is equal on all ranks: how many samples there are, the seed, the batch size.
        count: how many samples have a number.
        read: number -> sample, the same each time if the data draws nothing at random; None of a stream.
    """
    axes = context.base_axes
    if context.world is None or all(axis.size == 1 for axis in axes):
        return
    come("ShardedDataLoader.compare (by initialize, Trainer.fit or the first loop over the data)", *axes)
    found, sketches = ([], []) if read is None or not count else _contents(count, read)
    every = all_gather_from_grid((dict(settings), len(found)), context)
    first, reference = every[0][0], every[0][1][0]
    for rank, (theirs, _) in every:
        for name, value in theirs.items():
            if value != reference[name]:
                raise ConfigError(
                    f"Rank {first} has training data with {name} {reference[name]!r}, and rank {rank} with {value!r}",
                    remedy=WHOLE,
                )
    least = min(number for _, (_, number) in every)
    numbers = all_gather_from_grid(number_of(found[:least]), context)
    other = next((rank for rank, number in numbers if number != numbers[0][1]), None)
    near = all_gather_from_grid(sketches, context)
    if other is None:
        other = next((rank for rank, theirs in near if not _are_near(theirs, near[0][1])), None)
    if other is not None:
        raise ConfigError(
            f"Ranks {first} and {other} have different samples at the same places of the training data, a "
            f"{settings['type']}",
            remedy=WHOLE,
        )


def _contents(count: int, read: Callable[[int], Any]) -> tuple[list[int], list[tuple[float, float]]]:
    """A number for each of some samples, drawn identically on all ranks, and a sketch of its decimal numbers; none
    where these differ each time that a sample is read."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:MOST].tolist()
    end = time.monotonic() + BUDGET_S
    found: list[int] = []
    sketches: list[tuple[float, float]] = []
    try:
        first = read(order[0])
        again, sketch = content_of(first), sketch_of(first)
        for index in order:
            sample = read(index)
            found.append(content_of(sample))
            sketches.append(sketch_of(sample))
            if time.monotonic() > end:
                break
    except Exception:
        return found, []  # training reads it, too, and raises on all ranks
    return found if again == found[0] else [], sketches if sketch == sketches[0] else []


def sketch_of(value: Any) -> tuple[float, float]:
    """Of the decimal numbers in a value the sum under random signs, identical on all ranks, and the norm."""
    decimals = list(_decimals(value))
    if not decimals:
        return 0.0, 0.0
    x = torch.cat(decimals).nan_to_num()
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8).double() * 2 - 1
    return float(x @ signs), float(x.norm())


def _are_near(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> bool:
    """Whether sketches are of the same samples, as far as both ranks have some."""
    return all(abs(a - b) <= NEAR * max(norm, other) for (a, norm), (b, other) in zip(some, others, strict=False))


def _leaves(value: Any) -> Iterator[Any]:
    """What is inside of mappings, lists and tuples; lists of whole numbers as one."""
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


def content_of(*values: Any) -> int:
    """A number of what values hold: of the whole numbers and words in them, or if there are none, of all numbers.

    Whole numbers come first since decimal ones are often augmented at random.
    """
    parts = [_part(leaf) for value in values for leaf in _leaves(value)]
    exact = [part for is_exact, part in parts if is_exact]
    return number_of(exact or [part for _, part in parts])


def _part(leaf: Any) -> tuple[bool, Any]:
    """(Whether it is made of whole numbers or words, what it holds.)"""
    if isinstance(leaf, Tensor):
        is_exact = not (leaf.is_floating_point() or leaf.is_complex()) and not leaf.is_quantized
        return is_exact, ("tensor", tuple(leaf.shape), checksum(leaf) if leaf.layout == torch.strided else None)
    if isinstance(leaf, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(leaf)
        is_exact = array.dtype.kind in "biuSU"
        return is_exact, ("array", array.shape, array.tobytes() if array.dtype.kind != "O" else None)
    if _is_plain(leaf):
        return not isinstance(leaf, float), leaf
    return False, type(leaf).__name__  # its print may hold an address


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(type(each) is int for each in value)
    return value is None or isinstance(value, (str, bytes, int, float))


def ends_of(batch: Any) -> list[Any]:
    """The first and the last sample of a batch, as far as its tensors show them."""
    if isinstance(batch, Mapping):
        return [end for key in sorted(batch, key=str) for end in ends_of(batch[key])]
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return [end for each in batch for end in ends_of(each)]
    return [batch[:1], batch[-1:]] if isinstance(batch, (Tensor, numpy.ndarray)) and batch.ndim else [batch]


def collate_samples(samples: list[Any]) -> Any:
    """Samples as a batch: as torch does it, and of mappings as a model takes them.

    There numbers and lists of numbers become tensors of torch's default dtype, and words stay a list.

    >>> collate_samples([{"ids": [5, 6], "score": 0.5, "text": "a"}, {"ids": [7, 8], "score": 1.0, "text": "b"}])
    {'ids': tensor([[5, 6],
            [7, 8]]), 'score': tensor([0.5000, 1.0000]), 'text': ['a', 'b']}

    Raises InputError for samples that do not fit together.
    """
    first = samples[0]
    if not isinstance(first, Mapping):
        return default_collate(samples)
    other = next((sample for sample in samples if sample.keys() != first.keys()), None)
    if other is not None:
        raise InputError(
            f"The samples of a batch have the keys {sorted(map(str, first))} and {sorted(map(str, other))}",
            remedy="Give all samples the same keys, or give collate_fn",
        )
    return {key: _column(str(key), [sample[key] for sample in samples]) for key in first}


def _column(key: str, values: list[Any]) -> Any:
    """The values of all samples under one key."""
    if all(isinstance(value, str) for value in values):
        return values
    if all(isinstance(value, (int, float)) and not isinstance(value, numpy.generic) for value in values):
        return torch.tensor(values)
    values = [_as_tensor(key, value) for value in values]
    sized = [value for value in values if isinstance(value, (Tensor, list, tuple))]
    shapes = {tuple(value.shape) if isinstance(value, Tensor) else (len(value),) for value in sized}
    if len(shapes) > 1:
        raise _of_other_lengths(key, " and ".join(map(str, sorted(shapes)[:2])))
    return default_collate(values)


def _as_tensor(key: str, value: Any) -> Any:
    """Numbers in lists or arrays as a tensor, those of numpy in their own dtype; anything else as it is."""
    leaf = _leaf(value)
    is_numpy = isinstance(leaf, (numpy.number, numpy.bool_, numpy.ndarray))
    if not isinstance(value, (list, tuple, numpy.ndarray)) or not (is_numpy or isinstance(leaf, (int, float, list))):
        return value
    try:
        return torch.as_tensor(numpy.asarray(value)) if is_numpy else torch.tensor(value)
    except ValueError as error:
        raise _of_other_lengths(key, f"that no tensor has: {error}") from error


def _leaf(value: Any) -> Any:
    """The first number in lists and arrays, or the first of them that is empty."""
    while (isinstance(value, (list, tuple)) and value) or (
        isinstance(value, numpy.ndarray) and value.ndim and value.size
    ):
        value = value[0]
    return value


def _of_other_lengths(key: str, shapes: str) -> InputError:
    return InputError(
        f"The samples of a batch have {key!r} of the shapes {shapes}",
        remedy="Pad it in the data, or give collate_fn, such as transformers.DataCollatorWithPadding(tokenizer)",
    )


Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class DataShard:
    """Which samples of a whole batch a rank gets."""

    rank: int
    size: int

    def of(self, count: int) -> slice:
        bounds = even_bounds(count, self.size)
        return slice(bounds[self.rank], bounds[self.rank + 1])


class StreamedSource:
    """Data that is read in the order in which it comes: every rank reads all of it.

    Args:
        source: of samples, or of whole batches where ``collate`` is None.
    """

    def __init__(self, source: Any, collate: Collate | None) -> None:
        self._source, self._collate = source, collate
        self.name, self.makes_batches = type(source).__name__, collate is None
        self.shuffle = None
        self.number = 0  # of samples of the batch that was handed out last
        self.count = None if self.makes_batches else known_length(source)
        self._going: _StreamReader | None = None

    @property
    def num_batches(self) -> int | None:
        """Of an epoch, where the source makes them and knows."""
        return known_length(self._source) if self.makes_batches else None

    def batches(
        self,
        epoch: int,
        seed: int,
        batch_size: int | None,
        share: DataShard,
        start: int,
        drop_last: bool,
        merge_last: bool,
    ) -> Iterator[tuple[int, Any]]:
        """As those of ``IndexedSource``. What was handed out before is read once more, and left out."""
        reading = self._begun(epoch, seed, start)
        if self._collate is None:
            for whole, count, part in reading.cut(share, start):
                self.number = content_of(*ends_of(whole))
                yield count, part
        else:
            assert batch_size is not None
            reading.skip(start)
            while samples := reading.take(batch_size):
                if drop_last and len(samples) < batch_size:
                    break
                if merge_last and not drop_last:
                    samples += reading.last(share.size)
                check_enough(len(samples), share)
                mine = share.of(len(samples))
                self.number = content_of(samples[0], samples[-1])
                with seeded(seed, epoch, reading.count - len(samples) + mine.start, "batch"):
                    part = self._collate(samples[mine])
                yield len(samples), part
        self._going = None

    def _begun(self, epoch: int, seed: int, start: int) -> _StreamReader:
        """A pass from the beginning; of what can be gone through once, the one that goes on."""
        if self._going is None:
            reading = _StreamReader(self._source, epoch, seed)
            self._going = reading if isinstance(self._source, Iterator) else None
            return reading
        if self._going.count > start:
            raise InputError(
                f"A {self.name} was read up to sample {self._going.count}, and was to go on at {start}",
                remedy="Give a list, or an object whose __iter__ begins anew",
            )
        return self._going


class _StreamReader:
    """One pass through a stream, with random numbers of its own. ``count``: samples that were read."""

    def __init__(self, source: Any, epoch: int, seed: int) -> None:
        self.count = 0
        self._alike = SameRandomOnAllRanks(source, epoch, seed)
        with self._alike.drawing():
            self._iterator: Iterator[Any] = iter(source)

    def take(self, count: int) -> list[Any]:
        """The next samples; fewer at the end."""
        with self._alike.drawing():
            found = list(islice(self._iterator, count))
        self.count += len(found)
        return found

    def last(self, least: int) -> list[Any]:
        """What is left, if that is less than so many samples; else nothing."""
        found = self.take(least)
        if len(found) < least:
            return found
        self._iterator, self.count = chain(found, self._iterator), self.count - len(found)
        return []

    def skip(self, count: int) -> None:
        """Goes on behind so many samples of the stream."""
        while self.count < count and self.take(min(count - self.count, 256)):
            pass

    def cut(self, share: DataShard, start: int) -> Iterator[tuple[Any, int, Any]]:
        """A rank's parts of what is a stream of whole batches, behind ``start`` samples: (batch, samples, part)."""
        while found := self.take_one():
            (batch,) = found
            named = batch if isinstance(batch, Mapping) else {"batch": batch}
            count = batch_size_of(named)
            self.count += count
            left = min(self.count - start, count)
            if left <= 0:
                continue
            check_enough(left, share)
            sizes = [count - left, *(b - a for a, b in pairwise(even_bounds(left, share.size)))]
            part = split_batch(named, sizes)[1 + share.rank]
            yield batch, left, rebuild_container(batch, part) if named is batch else part["batch"]

    def take_one(self) -> list[Any]:
        """The next batch of a stream of batches, in a list; nothing at the end."""
        with self._alike.drawing():
            return list(islice(self._iterator, 1))


def known_length(data: Any) -> int | None:
    """None where it is not known."""
    try:
        return len(data)
    except (TypeError, RuntimeError):
        return None


def check_enough(count: int, share: DataShard) -> None:
    """Raises InputError for a batch of fewer samples than there are data ranks."""
    if count < share.size:
        raise InputError(
            f"A batch of {count} samples for {share.size} data ranks",
            remedy="Give drop_last=True, or a batch size that leaves no such rest",
        )


SampleKey = tuple[Any, int, int, int]
"""Of a sample: its number in the data, the seed, the epoch, and its place in the epoch."""

LOADER_OPTIONS = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "multiprocessing_context",
    "persistent_workers",
)  # fmt: skip
"""What a loader of the user's says that goes on in the loaders that are made here."""


class _Seeded(Dataset[Any]):
    """Samples by key, each of which draws its own random numbers."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitems__(self, keys: list[SampleKey]) -> list[tuple[SampleKey, Any]]:
        with restored_generators():  # once for all of them: that takes longer than to seed
            return [(key, self.sample(key)) for key in keys]

    def sample(self, key: SampleKey) -> Any:
        index, *place = key
        seed_generators(*place)
        return self._data[index]


class _Collated:
    """Puts samples together; random numbers that this draws are those of its first sample."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[tuple[SampleKey, Any]]) -> Any:
        _, *place = samples[0][0]
        try:
            with seeded(*place, "batch"):
                return self._collate([sample for _, sample in samples])
        except ShardFormerError as error:
            return error  # raised in a worker process, it would come out as a RuntimeError


class _LocalBatchSampler:
    """This rank's parts of the batches that are left of an epoch, by the keys of their samples."""

    def __init__(self) -> None:
        self.left: Iterable[list[SampleKey]] = ()

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return iter(self.left)


class IndexedSource:
    """Data with a number for each sample.

    Args:
        shuffle: whether the order of an epoch is drawn; without a sampler.
        sampler: of the user's, which says the order.
        makes_batches: whether the sampler gives batches.
    """

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
        self.number = 0  # of the order of the epoch, where a sampler chose it
        self.count: int | None = None if makes_batches else len(data) if sampler is None else len(sampler)
        self._parts, self._generator = _LocalBatchSampler(), torch.Generator()
        made: DataLoader[Any] = DataLoader(
            _Seeded(data),
            batch_sampler=self._parts,
            collate_fn=_Collated(collate),
            generator=self._generator,
            **options,
        )
        self._loader = made

    @property
    def num_batches(self) -> int | None:
        """Of an epoch, where the source makes them and knows."""
        return known_length(self._sampler) if self.makes_batches else None

    def batches(
        self,
        epoch: int,
        seed: int,
        whole: Callable[[Sequence[Any]], Iterable[Sequence[Any]]],
        share: DataShard,
        start: int,
    ) -> Iterator[tuple[int, Any]]:
        """(samples of the whole batch, this rank's part of it).

        Args:
            whole: the order -> whole batches.
            start: samples that were handed out.
        """
        order = self._order(epoch, seed)
        self.number = 0 if self._sampler is None else number_of(order)
        batches = list(whole(order))
        sizes = [len(batch) for batch in batches]
        for size in sizes:
            check_enough(size, share)

        def parts() -> Iterator[list[SampleKey]]:
            for batch, place in zip(batches, accumulate(sizes, initial=start)):
                mine = share.of(len(batch))
                yield [(n, seed, epoch, place + i) for i, n in enumerate(batch[mine], mine.start)]

        self._parts.left = parts()
        self._generator.manual_seed(hash_seed(seed, epoch, start))
        for size, part in zip(sizes, self._loader, strict=True):
            if isinstance(part, ShardFormerError):
                raise part
            yield size, part

    def read(self, index: int) -> Any:
        """A sample, by its number. Random numbers that it draws move no others."""
        with restored_generators():
            return _Seeded(self._data).sample((index, 0, 0, 0))

    def _order(self, epoch: int, seed: int) -> Sequence[Any]:
        if self._sampler is not None:
            with SameRandomOnAllRanks(self._sampler, epoch, seed).drawing():
                found = list(self._sampler)
            return [[*map(_plain, batch)] for batch in found] if self.makes_batches else [*map(_plain, found)]
        count = len(self._data)
        return torch.randperm(count, generator=epoch_seed(seed, epoch)).tolist() if self._shuffle else range(count)


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, Tensor) else number


def epoch_seed(seed: int, epoch: int) -> torch.Generator:
    """What an epoch's order is drawn from."""
    return torch.Generator().manual_seed(hash_seed(seed, epoch, "order"))


def make_source(
    data: Any, collate: Collate | None, num_workers: int, shuffle: bool | None
) -> IndexedSource | StreamedSource:
    """What was given as training data. Raises ConfigError for what is none."""
    if isinstance(data, DataLoader):
        return _of_loader(data, collate, shuffle)
    strange = isinstance(data, (Mapping, str, bytes, Tensor, type, set, frozenset))
    if strange or not (_has_numbers(data) or hasattr(data, "__iter__")):
        raise ConfigError(
            f"The training data is a {type(data).__name__}",
            rule="It is a Dataset, a list of samples, a HF data set, a DataLoader, or an iterable in one order",
            remedy="Make a list of samples, one dict each; of tensors torch.utils.data.TensorDataset(inputs, targets)",
        )
    if _has_numbers(data):
        _check_count(len(data), data)
        return IndexedSource(
            data, collate or collate_samples, {"num_workers": num_workers}, shuffle=shuffle is not False
        )
    if shuffle or num_workers:
        asked = "shuffle=True" if shuffle else f"num_workers={num_workers}"
        raise ConfigError(
            f"{asked} for a {type(data).__name__}",
            remedy="Shuffle where it is made; for workers give a DataLoader of your own",
        )
    return StreamedSource(data, collate or collate_samples)


def _has_numbers(data: Any) -> bool:
    """Whether each sample has a number. torch's streams inherit a ``__getitem__`` that they do not have."""
    return not isinstance(data, IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _of_loader(
    loader: DataLoader[Any], collate: Collate | None, shuffle: bool | None
) -> IndexedSource | StreamedSource:
    if collate is not None:
        raise ConfigError("collate_fn is given beside a DataLoader", remedy="Give collate_fn to the DataLoader")
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler  # of one that was given, too
    for each in (sampler, batches, getattr(batches, "sampler", None)):
        if each is not None and hasattr(each, "num_replicas"):
            raise ConfigError(
                f"The DataLoader has a {type(each).__name__}",
                rule="Each data rank gets its part of a batch here; a sampler that does so too would do it twice",
                remedy="Make the DataLoader without it, with shuffle=True and the batch size of the whole batch",
            )
    if shuffle and not isinstance(sampler, RandomSampler):
        raise ConfigError(
            "shuffle=True is given beside a DataLoader that does not shuffle",
            remedy="Make the DataLoader with shuffle=True",
        )
    if not _has_numbers(loader.dataset) or batches is None:
        return StreamedSource(loader, None)
    _check_count(len(loader.dataset), loader.dataset)  # type: ignore[arg-type]
    if type(batches) is BatchSampler and known_length(sampler) is None:
        raise ConfigError(
            f"The DataLoader has a {type(sampler).__name__} without a length",
            remedy="Give it a __len__, or give an IterableDataset",
        )
    data, make = loader.dataset, loader.collate_fn
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    if type(batches) is not BatchSampler:
        return IndexedSource(data, make, options, sampler=batches, makes_batches=True)
    count = known_length(sampler) or 0
    _check_count(count, sampler)
    if count == len(data):  # type: ignore[arg-type]
        if type(sampler) is SequentialSampler:
            return IndexedSource(data, make, options, shuffle=False)
        if type(sampler) is RandomSampler and not sampler.replacement:
            return IndexedSource(data, make, options, shuffle=shuffle is not False)
    return IndexedSource(data, make, options, sampler=sampler)


def _check_count(count: int, data: Any) -> None:
    if count < 1:
        raise ConfigError(
            f"The training data, a {type(data).__name__}, is empty", remedy="Look at what it was read from"
        )
