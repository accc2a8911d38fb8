"""Data that is read in the order in which it comes: every rank reads all of it, and keeps its part of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any

from shardformer.engine.data_compare import content_of, ends_of
from shardformer.engine.data_random import Alike, drawing_from
from shardformer.errors import InputError
from shardformer.layout.split import even_bounds
from shardformer.pipeline.microbatches import batch_size_of, like, split_batch

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Share:
    """Which samples of a whole batch a rank gets."""

    rank: int
    size: int

    def of(self, count: int) -> slice:
        bounds = even_bounds(count, self.size)
        return slice(bounds[self.rank], bounds[self.rank + 1])


class Stream:
    """Data that is read in the order in which it comes: every rank reads all of it.

    Args:
        source: of samples, or of whole batches where ``collate`` is None.
    """

    def __init__(self, source: Any, collate: Collate | None) -> None:
        self._source, self._collate = source, collate
        self.name, self.makes_batches = type(source).__name__, collate is None
        self.shuffle = None
        self.number = 0  # of samples of the batch that was handed out last
        self.count = None if self.makes_batches else length_of(source)
        self._going: _Reading | None = None

    @property
    def num_batches(self) -> int | None:
        """Of an epoch, where the source makes them and knows."""
        return length_of(self._source) if self.makes_batches else None

    def batches(
        self, epoch: int, seed: int, batch_size: int | None, share: Share, start: int, drop_last: bool, merge_last: bool
    ) -> Iterator[tuple[int, Any]]:
        """As those of ``Samples``. What was handed out before is read once more, and left out."""
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
                with drawing_from(seed, epoch, reading.count - len(samples) + mine.start, "batch"):
                    part = self._collate(samples[mine])
                yield len(samples), part
        self._going = None

    def _begun(self, epoch: int, seed: int, start: int) -> _Reading:
        """A pass from the beginning; of what can be gone through once, the one that goes on."""
        if self._going is None:
            reading = _Reading(self._source, epoch, seed)
            self._going = reading if isinstance(self._source, Iterator) else None
            return reading
        if self._going.count > start:
            raise InputError(
                f"A {self.name} was read up to sample {self._going.count}, and was to go on at {start}",
                rule="It is gone through once, and does not go back",
                remedy="Give a list, or an object whose __iter__ begins anew",
            )
        return self._going


class _Reading:
    """One pass through a stream, with random numbers of its own. ``count``: samples that were read."""

    def __init__(self, source: Any, epoch: int, seed: int) -> None:
        self.count = 0
        self._alike = Alike(source, epoch, seed)
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

    def cut(self, share: Share, start: int) -> Iterator[tuple[Any, int, Any]]:
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
            yield batch, left, like(batch, part) if named is batch else part["batch"]

    def take_one(self) -> list[Any]:
        """The next batch of a stream of batches, in a list; nothing at the end."""
        with self._alike.drawing():
            return list(islice(self._iterator, 1))


def length_of(data: Any) -> int | None:
    """None where it is not known."""
    try:
        return len(data)
    except (TypeError, RuntimeError):
        return None


def check_enough(count: int, share: Share) -> None:
    """Raises InputError for a batch of fewer samples than there are data ranks."""
    if count < share.size:
        raise InputError(
            f"A batch of {count} samples for {share.size} data ranks",
            rule="Every data rank has a sample of each batch",
            remedy="Give drop_last=True, or a batch size that leaves no such rest",
        )
