"""Where batches come from. Of data with a number for each sample a rank reads its own part of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from shardformer.comm.calls import number_of
from shardformer.engine.data_collate import collated
from shardformer.engine.data_random import Alike, drawing_from, put_back, seed_from, seed_of
from shardformer.engine.data_streams import Collate, Share, Stream, check_enough, length_of
from shardformer.errors import ConfigError, ShardFormerError

Key = tuple[Any, int, int, int]
"""Of a sample: its number in the data, the seed, the epoch, and its place in the epoch."""

KEPT = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "multiprocessing_context",
    "persistent_workers",
)  # fmt: skip
"""What a loader of the user's says that goes on in the loaders that are made here."""


class _Seeded(Dataset[Any]):
    """Samples by key, each of which draws its own random numbers."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitems__(self, keys: list[Key]) -> list[tuple[Key, Any]]:
        with put_back():  # once for all of them: that takes longer than to seed
            return [(key, self.sample(key)) for key in keys]

    def sample(self, key: Key) -> Any:
        index, *place = key
        seed_from(*place)
        return self._data[index]


class _Collated:
    """Puts samples together; random numbers that this draws are those of its first sample."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[tuple[Key, Any]]) -> Any:
        _, *place = samples[0][0]
        try:
            with drawing_from(*place, "batch"):
                return self._collate([sample for _, sample in samples])
        except ShardFormerError as error:
            return error  # raised in a worker process, it would come out as a RuntimeError


class _Parts:
    """This rank's parts of the batches that are left of an epoch, by the keys of their samples."""

    def __init__(self) -> None:
        self.left: Iterable[list[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.left)


class Samples:
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
        self._parts, self._generator = _Parts(), torch.Generator()
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
        return length_of(self._sampler) if self.makes_batches else None

    def batches(
        self, epoch: int, seed: int, whole: Callable[[Sequence[Any]], Iterable[Sequence[Any]]], share: Share, start: int
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

        def parts() -> Iterator[list[Key]]:
            for batch, place in zip(batches, accumulate(sizes, initial=start)):
                mine = share.of(len(batch))
                yield [(n, seed, epoch, place + i) for i, n in enumerate(batch[mine], mine.start)]

        self._parts.left = parts()
        self._generator.manual_seed(seed_of(seed, epoch, start))
        for size, part in zip(sizes, self._loader, strict=True):
            if isinstance(part, ShardFormerError):
                raise part
            yield size, part

    def read(self, index: int) -> Any:
        """A sample, by its number. Random numbers that it draws move no others."""
        with put_back():
            return _Seeded(self._data).sample((index, 0, 0, 0))

    def _order(self, epoch: int, seed: int) -> Sequence[Any]:
        if self._sampler is not None:
            with Alike(self._sampler, epoch, seed).drawing():
                found = list(self._sampler)
            return [[*map(_plain, batch)] for batch in found] if self.makes_batches else [*map(_plain, found)]
        count = len(self._data)
        return torch.randperm(count, generator=shuffled(seed, epoch)).tolist() if self._shuffle else range(count)


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, Tensor) else number


def shuffled(seed: int, epoch: int) -> torch.Generator:
    """What an epoch's order is drawn from."""
    return torch.Generator().manual_seed(seed_of(seed, epoch, "order"))


def source_of(data: Any, collate: Collate | None, num_workers: int, shuffle: bool | None) -> Samples | Stream:
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
        return Samples(data, collate or collated, {"num_workers": num_workers}, shuffle=shuffle is not False)
    if shuffle or num_workers:
        asked = "shuffle=True" if shuffle else f"num_workers={num_workers}"
        raise ConfigError(
            f"{asked} for a {type(data).__name__}",
            rule="An iterable is read in its own order, by the process itself",
            remedy="Shuffle where it is made; for workers give a DataLoader of your own",
        )
    return Stream(data, collate or collated)


def _has_numbers(data: Any) -> bool:
    """Whether each sample has a number. torch's streams inherit a ``__getitem__`` that they do not have."""
    return not isinstance(data, IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _of_loader(loader: DataLoader[Any], collate: Collate | None, shuffle: bool | None) -> Samples | Stream:
    if collate is not None:
        raise ConfigError(
            "collate_fn is given beside a DataLoader",
            rule="A loader says how its samples are put together",
            remedy="Give collate_fn to the DataLoader",
        )
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
            rule="A loader says in which order its samples come",
            remedy="Make the DataLoader with shuffle=True",
        )
    if not _has_numbers(loader.dataset) or batches is None:
        return Stream(loader, None)
    _check_count(len(loader.dataset), loader.dataset)  # type: ignore[arg-type]
    if type(batches) is BatchSampler and length_of(sampler) is None:
        raise ConfigError(
            f"The DataLoader has a {type(sampler).__name__} without a length",
            rule="A sampler says how many samples an epoch has",
            remedy="Give it a __len__, or give an IterableDataset",
        )
    data, make = loader.dataset, loader.collate_fn
    options = {name: getattr(loader, name) for name in KEPT}
    if type(batches) is not BatchSampler:
        return Samples(data, make, options, sampler=batches, makes_batches=True)
    count = length_of(sampler) or 0
    _check_count(count, sampler)
    if count == len(data):  # type: ignore[arg-type]
        if type(sampler) is SequentialSampler:
            return Samples(data, make, options, shuffle=False)
        if type(sampler) is RandomSampler and not sampler.replacement:
            return Samples(data, make, options, shuffle=shuffle is not False)
    return Samples(data, make, options, sampler=sampler)


def _check_count(count: int, data: Any) -> None:
    if count < 1:
        raise ConfigError(
            f"The training data, a {type(data).__name__}, is empty",
            rule="There is a sample for each data rank, or more",
            remedy="Look at what it was read from",
        )
