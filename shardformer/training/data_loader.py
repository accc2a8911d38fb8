"""Batches of a training run: this process's part of each batch, in an order that does not depend on the layout."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from shardformer.comm.collective_call import collective_call, number_of
from shardformer.errors import ConfigError, InputError, check_int
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.micro_batches import TARGET_KEY
from shardformer.torch_compat import tree_map_only
from shardformer.training.data_sources import Collate, DataShard, StreamedSource, compare_data, epoch_seed, make_source


class NoLengthError(ConfigError, TypeError):
    """What ``len`` raises; ``list`` goes on without a length where it is a TypeError."""


class ShardedDataLoader:
    """Goes through data in whole batches, of which each data rank gets its part: what ``engine.data`` is.

    >>> batches = ShardedDataLoader(list(range(10)), ParallelContext.of({}), batch_size=4, shuffle=False)
    >>> [batch.tolist() for batch in batches]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

    A loop that was broken off goes on where it was. Ranks that differ along other axes than data get the same.
    The order of an epoch comes from the seed and the number of the epoch; random numbers that the data draw come from
    these and the place of the sample, whatever the layout and the number of workers, and move no others.

    Args:
        source: a Dataset, a list, a HF data set or anything with ``__getitem__`` and ``__len__``; an iterable of
            samples, which every rank reads as a whole; or a DataLoader, whose batches are shared out.
        batch_size: samples of the whole batch, over all data ranks; a DataLoader has its own.
        seed: of the order, and of random numbers that the data draws.
        shuffle: whether each epoch has an order of its own; None: yes, where samples have numbers, and of a DataLoader
            if it shuffles.
        drop_last: whether what remains at the end of an epoch, and is less than a batch, is left out.
        merge_last: whether it is joined with the batch before it where it has fewer samples than there are data ranks.
        collate_fn: list of samples -> batch.
        accumulate: how many batches of a DataLoader make a step; what is handed out is then a list of them.
        num_workers: processes that read samples.

    Attributes:
        epoch: epochs that were finished.
        seen: samples of the whole batches of this epoch that were handed out.
        batch_samples: of the whole batch that was handed out last.
        on_epoch_end: is called behind the last batch of an epoch.

    Raises ConfigError for data that cannot be shared out.
    """

    def __init__(
        self,
        source: Any,
        context: ParallelContext,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        merge_last: bool = False,
        collate_fn: Collate | None = None,
        accumulate: int = 1,
        num_workers: int = 0,
    ) -> None:
        for name, value, least in (("accumulate", accumulate, 1), ("num_workers", num_workers, 0)):
            check_int(name, value, least)
        is_loader = isinstance(source, DataLoader)
        if accumulate > 1 and not is_loader:
            raise ConfigError(
                f"accumulate={accumulate} without a DataLoader",
                remedy="Say batch_size=, of the whole step; micro_batch_size= says how much runs at a time",
            )
        if is_loader:
            _check_loader_arguments(source, num_workers, drop_last)
        self._source = make_source(source, collate_fn, num_workers, shuffle)
        self._share, self._context = DataShard(context.data.rank, context.data.size), context
        self._is_compared, self._thread = False, 0
        # a BatchSampler that was given to a loader has the size and the rest of it
        makes = source.batch_sampler if is_loader and type(source.batch_sampler) is BatchSampler else source
        self._drop_last = bool(makes.drop_last) if is_loader else drop_last
        self._merge_last, self._accumulate = merge_last, accumulate
        self.batch_size = self._size(batch_size, makes.batch_size if is_loader else None, is_loader=is_loader)
        self.seed, self.collate_fn = seed, collate_fn
        self.epoch = self.seen = self.batch_samples = 0
        self.on_epoch_end: Callable[[], None] | None = None
        self.check_ranks(context.data.size)

    def __iter__(self) -> Iterator[Any]:
        """What is left of this epoch."""
        self.compare()
        found = self._found()
        while group := self._group(found):
            self.batch_samples = sum(count for count, _ in group)
            self.seen += self.batch_samples
            self._thread = threading.get_ident()
            yield group[0][1] if self._accumulate == 1 else [batch for _, batch in group]
        if not self.seen:
            raise InputError(
                f"The training data, a {self._source.name}, gave nothing in epoch {self.epoch + 1}",
                remedy="Give a list, or an object whose __iter__ begins anew, which a generator does not; and with"
                " drop_last=True enough samples for a batch",
            )
        self.epoch, self.seen = self.epoch + 1, 0
        if self.on_epoch_end is not None:
            self.on_epoch_end()

    def compare(self) -> None:
        """Compares the data of all ranks; the first loop does it if ``initialize`` has not.

        Raises ConfigError, on all ranks, where they differ: see ``compare_data``. Each rank reads some samples.
        """
        if self._is_compared:
            return
        self._is_compared = True
        settings = {
            "type": self._source.name,
            "length": self._source.count,
            "batches": self._source.num_batches,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self._source.shuffle,
            "drop_last": self._drop_last,
            "merge_last": self._merge_last,
            "accumulate": self._accumulate,
        }
        if isinstance(self._source, StreamedSource):
            compare_data(settings, None, None, self._context)
        else:
            compare_data(settings, self._source.size, self._source.read, self._context)

    def facts(self) -> dict[str, int]:
        """Where a training step is in the data, in numbers that are equal on all ranks; 0 for what is not known.

        Nothing is known where another thread than that of the step fetches the batches, ahead of it.
        """
        is_known = self._thread in (0, threading.get_ident())
        position = number_of((self.epoch, self.seen)) if is_known else 0
        seen = self._source.number if is_known and self._thread else 0
        return {"position": position, "samples" if isinstance(self._source, StreamedSource) else "order": seen}

    def _group(self, found: Iterator[tuple[int, Any]]) -> list[tuple[int, Any]]:
        return [pair for _, pair in zip(range(self._accumulate), found)]

    def _found(self) -> Iterator[tuple[int, Any]]:
        if isinstance(self._source, StreamedSource):
            ends = (self._drop_last, self._merge_last)
            return self._source.batches(self.epoch, self.seed, self.batch_size, self._share, self.seen, *ends)
        return self._source.batches(self.epoch, self.seed, self._whole, self._share, self.seen)

    def _whole(self, order: Sequence[Any]) -> list[Sequence[Any]]:
        """What is left of an epoch's order, in whole batches."""
        if self._source.makes_batches:
            batches = list(_batches_after(order, self.seen))
        else:
            assert self.batch_size is not None
            starts = range(self.seen, len(order), self.batch_size)
            batches = [order[start : start + self.batch_size] for start in starts]
            if batches and self._drop_last and len(batches[-1]) < self.batch_size:
                batches.pop()
        if self._merge_last and len(batches) > 1 and len(batches[-1]) < self._share.size:
            last = batches.pop()
            batches[-1] = [*batches[-1], *last]
        return batches

    def __len__(self) -> int:
        """Steps of a whole epoch. Raises NoLengthError where that is not known."""
        batches, count, size = self._source.num_batches, self._source.count, self.batch_size
        if batches is not None:
            return -(-batches // self._accumulate)
        if count is None or size is None:
            raise NoLengthError(
                "The training data does not know its length",
                remedy="Say how many steps are to be made (steps=), or give data with a length",
            )
        batches = count // size if self._drop_last else -(-count // size)
        merges = self._merge_last and batches > 1 and 0 < count % size < self._share.size
        return -(-(batches - merges) // self._accumulate)

    def generator(self, epoch: int) -> torch.Generator:
        """What the order of an epoch is drawn from, by ``torch.randperm``."""
        return epoch_seed(self.seed, epoch)

    def share_among(self, context: ParallelContext) -> None:
        """From the next loop on the data ranks are those of another grid. Raises ConfigError as the first time."""
        self.check_ranks(context.data.size)
        self._share, self._context = DataShard(context.data.rank, context.data.size), context

    def rewind(self) -> None:
        """The next loop begins with the first batch of the first epoch."""
        self.epoch = self.seen = 0

    def state(self) -> dict[str, Any]:
        """Where this run is in its data, in plain values."""
        return {"epoch": self.epoch, "seen": self.seen, "seed": self.seed, "samples": self._source.count}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was. Raises ConfigError for that of other data."""
        if state["samples"] != self._source.count:
            raise ConfigError(
                f"A position in {state['samples']} samples was to be loaded, and there are {self._source.count}",
                remedy="Give the same data; shardformer.load_checkpoint loads the model without a position",
            )
        self.epoch, self.seen, self.seed = state["epoch"], state["seen"], state["seed"]

    # --- checks

    def _size(self, asked: int | None, of_loader: int | None, *, is_loader: bool) -> int | None:
        if not is_loader:
            if asked is None:
                raise ConfigError("The training data is given without batch_size", remedy="Write batch_size=32")
            check_int("batch_size", asked)
            return asked
        if asked is not None and asked != of_loader:
            raise ConfigError(
                f"batch_size={asked} beside a DataLoader with batch_size={of_loader}", remedy="Leave one of the two out"
            )
        return of_loader

    def check_ranks(self, ranks: int) -> None:
        """Raises ConfigError for so many data ranks that one of them would have no sample of a batch."""
        count, size = self._source.count, self.batch_size
        if size is not None and size < ranks:
            raise ConfigError(
                f"batch_size={size} for {ranks} data ranks",
                rule="It is the size of the whole batch, and every data rank has a sample of it",
                remedy=f"Use {ranks} or more",
            )
        if count is None or size is None:
            return
        if self._drop_last and count < size:
            raise ConfigError(
                f"{count} samples for batches of {size}, of which the last is dropped",
                remedy=f"Use a batch size of {count} or less, or leave drop_last out",
            )
        rest = count % size
        merges = self._merge_last and count > size
        if 0 < rest < ranks and not self._drop_last and not merges:
            raise ConfigError(
                f"{count} samples in batches of {size} leave a last one of {rest}, for {ranks} data ranks",
                remedy="Give drop_last=True, or another batch size",
            )


def batches_of(source: Any, context: ParallelContext, **options: Any) -> ShardedDataLoader:
    """``ShardedDataLoader`` that all ranks make together. Raises, on all, what one of them raises, or where their
    data differ."""
    made = collective_call(
        context, lambda: ShardedDataLoader(source, context, **options), action="divide the training data"
    )
    made.compare()
    return made


def _batches_after(batches: Sequence[Sequence[Any]], seen: int) -> Iterator[Sequence[Any]]:
    """The batches behind those of ``seen`` samples."""
    for batch in batches:
        if seen <= 0:
            yield batch
        seen -= len(batch)


def _check_loader_arguments(loader: DataLoader[Any], num_workers: int, drop_last: bool) -> None:
    """What is given beside a loader is what the loader has."""
    for name, value in (("num_workers", num_workers), ("drop_last", drop_last)):
        if value and value != getattr(loader, name):
            raise ConfigError(
                f"{name}={value!r} beside a DataLoader with {name}={getattr(loader, name)!r}",
                remedy=f"Give {name} to the DataLoader",
            )


def named_batch(batch: Any, model: nn.Module, *, has_target: bool) -> dict[str, Any]:
    """A batch by name.

    Args:
        batch: a mapping, or a row of what the forward takes in order, as loaders give it: ``(inputs, targets)``.
        has_target: whether the last of a row is what a loss function compares with.

    Raises InputError for what is neither.
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, Tensor):
        batch = (batch,)
    if not isinstance(batch, (list, tuple)) or not batch:
        raise InputError(
            f"The batch is a {type(batch).__name__}",
            rule="A batch is a dict of what the model's forward takes, by name, or a row of it, in order",
            remedy="Write engine({'input_ids': ids, 'labels': labels}), or engine((inputs, targets)) with a loss_fn",
        )
    inputs = batch[:-1] if has_target and len(batch) > 1 else batch
    takes = [
        name
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(inputs) > len(takes):
        raise InputError(
            f"The batch has {len(inputs)} inputs, and the forward of {type(model).__name__} takes {len(takes)}",
            rule="The parts of a batch are what the forward takes, in order"
            + (", and behind them the target of the loss" if has_target else ""),
            remedy="Give a dict by name"
            if has_target
            else "Give loss_fn=, which gets the last part, or a dict by name",
        )
    named = dict(zip(takes, inputs))
    return named if inputs is batch else {**named, TARGET_KEY: batch[-1]}


def is_batch_list(batch: Any) -> bool:
    """Whether this is a list of batches, and not a row of tensors that is one."""
    return (
        isinstance(batch, (list, tuple)) and bool(batch) and all(isinstance(b, (Mapping, list, tuple)) for b in batch)
    )


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch, its tensors on the device."""
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), batch)


def loss_of_target(loss_fn: Callable[..., Any]) -> Callable[[Any, Mapping[str, Any]], Any]:
    """(output, micro-batch) -> loss, where the loss function may expect (output, target)."""

    def loss(output: Any, part: Mapping[str, Any]) -> Any:
        return loss_fn(output, part.get(TARGET_KEY, part))

    return loss
