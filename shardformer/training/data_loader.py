"""Data loader that shards each global batch over the data-parallel ranks, in the same order for every layout."""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import data as torch_data
from torch.utils.data import BatchSampler, DataLoader

from shardformer.comm.collective_call import hash_to_int, run_and_compare_across_ranks
from shardformer.consistency.training_data import check_ranks_have_same_training_data
from shardformer.errors import ConfigError, InputError, check_int
from shardformer.gradient_accumulation.micro_batches import TARGET_KEY
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.torch_compat import tree_map_only
from shardformer.training.sample_order import (
    Collate,
    DataParallelPosition,
    IterableDataSource,
    MapStyleDataSource,
    make_data_source,
)


class UnknownLengthError(ConfigError, TypeError):
    """Raised by ``len(loader)`` if the number of steps is unknown. As a TypeError, it does not affect ``list``."""


class ShardedDataLoader:
    """Data loader that shards each global batch over the data-parallel ranks, and yields this rank's shard.

    >>> batches = ShardedDataLoader(list(range(10)), ParallelContext.from_sizes({}), batch_size=4, shuffle=False)
    >>> [batch.tolist() for batch in batches]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

    An interrupted loop resumes at the next batch. Ranks with the same data-parallel rank get the same batch. The seed
    and the epoch determine the order of the samples. Random numbers that the data draws also depend on the position of
    the sample, but not on the layout or the number of workers. The global random generators are not changed.

    Args:
        source: Data with ``__getitem__`` and ``__len__``, such as a Dataset, a list or a Hugging Face data set; an
            iterable of samples, which every rank reads in full; or a DataLoader, whose batches are sharded.
        batch_size: Global batch size, summed over all data ranks. A DataLoader specifies its own.
        seed: Seed of the order and of random numbers drawn by the data.
        shuffle: Draw a new order for each epoch. None shuffles indexed data, and a DataLoader if it shuffles.
        drop_last: Drop the last batch of an epoch if it is incomplete.
        merge_last: Merge the last batch into the previous one if it has fewer samples than there are data ranks.
        collate_fn: Function that collates a list of samples into a batch.
        accumulate: Number of DataLoader batches per step. Each item is then a list of batches.
        num_workers: Number of worker processes that read samples.

    Attributes:
        epoch: Number of finished epochs.
        seen: Number of samples of the current epoch that all data ranks have returned so far.
        batch_samples: Size of the last global batch.
        on_epoch_end: Function that is called after the last batch of an epoch.

    Raises:
        ConfigError: The data cannot be sharded over the data ranks.
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
                f"accumulate={accumulate} combines batches of a DataLoader, but the training data is not a DataLoader.",
                remedy="Pass a larger batch_size instead, with micro_batch_size to limit memory.",
            )
        collate = collate_fn if is_loader else collate_fn or collate_samples
        self._source = make_data_source(source, collate, num_workers, shuffle)
        if is_loader:
            # a loader with an explicit BatchSampler has no batch_size and drop_last of its own
            own = source.batch_sampler if type(source.batch_sampler) is BatchSampler else source
            _check_option_matches_loader("num_workers", num_workers, 0, source.num_workers)
            _check_option_matches_loader("drop_last", drop_last, False, source.drop_last)
            _check_option_matches_loader("batch_size", batch_size, None, own.batch_size)
            batch_size, drop_last = own.batch_size, bool(own.drop_last)
        elif batch_size is None:
            raise ConfigError(
                f"Training data of type {self._source.name} was passed without batch_size.",
                remedy="Pass the size of the global batch, for example batch_size=32.",
            )
        else:
            check_int("batch_size", batch_size)
        self._is_compared, self._reading_thread = False, 0
        self.batch_size, self._drop_last = batch_size, drop_last
        self._merge_last, self._accumulate = merge_last, accumulate
        self.seed, self.collate_fn = seed, collate_fn
        self.epoch = self.seen = self.batch_samples = 0
        self.on_epoch_end: Callable[[], None] | None = None
        self.set_parallel_context(context)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's shard of each remaining batch in the current epoch."""
        self.check_same_data_on_all_ranks()
        batches = self._iter_local_batches()
        while group := list(itertools.islice(batches, self._accumulate)):
            self.batch_samples = sum(count for count, _ in group)
            self.seen += self.batch_samples
            self._reading_thread = threading.get_ident()
            yield group[0][1] if self._accumulate == 1 else [batch for _, batch in group]
        if not self.seen:
            raise InputError(
                f"The training data of type {self._source.name} yielded no batch in epoch {self.epoch + 1}.",
                remedy="Instead of a generator, pass data that can be read in every epoch, such as a list. With "
                "drop_last=True, pass at least as many samples as a batch has.",
            )
        self.epoch, self.seen = self.epoch + 1, 0
        if self.on_epoch_end is not None:
            self.on_epoch_end()

    def check_same_data_on_all_ranks(self) -> None:
        """Check once that all ranks read the same data in the same order. Raises ConfigError on all ranks otherwise."""
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
        check_ranks_have_same_training_data(settings, self._source.size, self._source.read, self._context)

    def get_data_position_hashes(self) -> dict[str, int]:
        """Hash the data position and the last samples, so that ranks can compare them.

        A hash is 0 if it is unknown, because a prefetching thread reads the batches ahead of the training step.
        """
        is_known = self._reading_thread in (0, threading.get_ident())
        position = hash_to_int((self.epoch, self.seen)) if is_known else 0
        seen = self._source.number if is_known and self._reading_thread else 0
        return {"position": position, "samples" if isinstance(self._source, IterableDataSource) else "order": seen}

    def _iter_local_batches(self) -> Iterator[tuple[int, Any]]:
        if isinstance(self._source, IterableDataSource):
            ends = (self._drop_last, self._merge_last)
            return self._source.iter_batch_shards(self.epoch, self.seed, self.batch_size, self._shard, self.seen, *ends)
        return self._source.iter_batch_shards(
            self.epoch, self.seed, self._split_into_global_batches, self._shard, self.seen
        )

    def _split_into_global_batches(self, epoch_order: Sequence[Any]) -> list[Sequence[Any]]:
        """Split the remaining samples of the current epoch into global batches."""
        if self._source.makes_batches:
            sums = itertools.accumulate(map(len, epoch_order), initial=0)
            batches = [batch for batch, start in zip(epoch_order, sums) if start >= self.seen]
        else:
            assert self.batch_size is not None
            starts = range(self.seen, len(epoch_order), self.batch_size)
            batches = [epoch_order[start : start + self.batch_size] for start in starts]
            if batches and self._drop_last and len(batches[-1]) < self.batch_size:
                batches.pop()
        if self._merge_last and len(batches) > 1 and len(batches[-1]) < self._shard.size:
            last = batches.pop()
            batches[-1] = [*batches[-1], *last]
        return batches

    def __len__(self) -> int:
        """Return the number of steps per epoch, or raise UnknownLengthError if it is unknown."""
        batches, count, size = self._source.num_batches, self._source.count, self.batch_size
        if batches is not None:
            return -(-batches // self._accumulate)
        if count is None or size is None:
            raise UnknownLengthError(
                "The length of the training data is unknown.",
                remedy="Pass the number of steps, as in steps=1000, or pass data that has a length.",
            )
        batches = count // size if self._drop_last else -(-count // size)
        merges = self._merge_last and batches > 1 and 0 < count % size < self._shard.size
        return -(-(batches - merges) // self._accumulate)

    def set_parallel_context(self, context: ParallelContext) -> None:
        """Shard later batches over the data-parallel ranks of a new parallel layout."""
        self.check_num_data_ranks(context.data.size)
        self._shard, self._context = DataParallelPosition(context.data.rank, context.data.size), context

    def get_example_batch(self) -> Any:
        """Return a batch of the first two samples, or None if the samples cannot be read by their index."""
        return self._source.get_example_batch() if isinstance(self._source, MapStyleDataSource) else None

    def rewind(self) -> None:
        """Reset the data position to the first batch of the first epoch."""
        self.epoch = self.seen = 0

    def state(self) -> dict[str, Any]:
        """Return the data position to store in a checkpoint: the epoch, the samples read and the seed."""
        return {"epoch": self.epoch, "seen": self.seen, "seed": self.seed, "samples": self._source.count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the data position from a checkpoint, or raise ConfigError if the data has a different length."""
        count, saved_count = self._source.count, state["samples"]
        if saved_count != count:
            raise ConfigError(
                f"The checkpoint was saved with {saved_count} training samples, but the data now has {count}.",
                remedy="Resume with the same data. For other data, load only the model with "
                "shardformer.load_checkpoint, or start a new run from the exported model (model.name).",
            )
        self.epoch, self.seen, self.seed = state["epoch"], state["seen"], state["seed"]

    # --- checks

    def check_num_data_ranks(self, num_data_ranks: int) -> None:
        """Raise ConfigError if a global batch would have fewer samples than there are data-parallel ranks."""
        count, size = self._source.count, self.batch_size
        if size is not None and size < num_data_ranks:
            raise ConfigError(
                f"batch_size={size} is smaller than the number of data-parallel ranks ({num_data_ranks}).",
                remedy=f"Use a batch_size of {num_data_ranks} or more, so that each rank gets a sample.",
            )
        if count is None or size is None:
            return
        if self._drop_last and count < size:
            raise ConfigError(
                f"drop_last=True drops all {count} samples, because they are fewer than batch_size={size}.",
                remedy=f"Use a batch_size of {count} or less, or remove drop_last.",
            )
        rest = count % size
        is_merged = self._merge_last and count > size
        if 0 < rest < num_data_ranks and not self._drop_last and not is_merged:
            raise ConfigError(
                f"batch_size={size} leaves only {rest} of the {count} samples for the last batch, which is too few for "
                f"{num_data_ranks} data-parallel ranks.",
                remedy="Pass drop_last=True (data.drop_last = true in a run configuration), or change batch_size.",
            )


def create_data_loader_on_all_ranks(
    dataset_or_loader: Any, context: ParallelContext, **loader_kwargs: Any
) -> ShardedDataLoader:
    """Create a data loader on each rank, and raise on all ranks if one rank fails or reads different data."""
    make = partial(ShardedDataLoader, dataset_or_loader, context, **loader_kwargs)
    loader: ShardedDataLoader = run_and_compare_across_ranks(context, make, action_description="create the data loader")
    loader.check_same_data_on_all_ranks()
    return loader


def make_example_forward_kwargs(
    dataset: Any, model: nn.Module, collate_fn: Collate | None = None
) -> dict[str, Any] | None:
    """Build example arguments for ``model.forward`` from the first two samples of a data set or DataLoader.

    Leaves out values that ``forward`` does not accept. Returns None if the samples cannot be read by their index.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    in_order = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    named = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    try:
        data = make_data_source(dataset, copy.copy(collate_fn), 0, None)
        batch = data.get_example_batch() if isinstance(data, MapStyleDataSource) else None
    except Exception:  # code of the user, for which the error of the model is more useful
        return None
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if takes_all or name in {*in_order, *named}}
    if isinstance(batch, Tensor):
        batch = (batch,)
    return dict(zip(in_order, batch, strict=False)) if isinstance(batch, (list, tuple)) else None


def _check_option_matches_loader(
    option_name: str, passed_value: object, default_value: object, loader_value: object
) -> None:
    if passed_value not in (default_value, loader_value):
        raise ConfigError(
            f"Got {option_name}={passed_value!r}, but the DataLoader already has {option_name}={loader_value!r}.",
            remedy=f"Pass {option_name} only to the DataLoader.",
        )


def batch_to_forward_kwargs(batch: Any, model: nn.Module, *, has_target: bool) -> dict[str, Any]:
    """Convert a batch to a dict of keyword arguments for ``model.forward``.

    A sequence contains positional arguments, or one dict of arguments by name. If ``has_target`` is True, the target of
    the loss function is at its end.
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, Tensor):
        batch = (batch,)
    if isinstance(batch, (list, tuple)) and has_target and len(batch) == 2 and isinstance(batch[0], Mapping):
        return {**batch[0], TARGET_KEY: batch[1]}
    if not isinstance(batch, (list, tuple)) or not batch or any(isinstance(each, Mapping) for each in batch):
        kind = _describe_batch_type(batch)
        raise InputError(
            f"A batch must be a dict or a tuple of arguments of the forward method, but got {kind}.",
            remedy="Pass a dict, as in engine({'input_ids': ids, 'labels': labels}). With a loss_fn, you can also pass "
            "a tuple, as in engine((inputs, targets)).",
        )
    inputs = batch[:-1] if has_target and len(batch) > 1 else batch
    parameters = [
        name
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(inputs) > len(parameters):
        alternative = "" if has_target else ", or pass loss_fn if the last item is the target of the loss"
        raise InputError(
            f"The batch has {len(inputs)} inputs, but the forward method of {type(model).__name__} accepts only "
            f"{len(parameters)}.",
            remedy=f"Pass the inputs by name in a dict{alternative}.",
        )
    named = dict(zip(parameters, inputs))
    return named if inputs is batch else {**named, TARGET_KEY: batch[-1]}


def _describe_batch_type(batch: Any) -> str:
    if not isinstance(batch, (list, tuple)):
        return type(batch).__name__
    return f"{type(batch).__name__} of {', '.join(type(each).__name__ for each in batch) or 'nothing'}"


def is_list_of_batches(batch: Any) -> bool:
    """Return whether ``batch`` is a list of batches, rather than a single batch of tensors."""
    return (
        isinstance(batch, (list, tuple)) and bool(batch) and all(isinstance(b, (Mapping, list, tuple)) for b in batch)
    )


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch to a device."""
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), batch)


def wrap_loss_fn_for_micro_batches(loss_fn: Callable[..., Any]) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Wrap a user's loss function so that it can be called with the model output and a micro-batch."""

    def wrapped_loss_fn(output: Any, micro_batch: Mapping[str, Any]) -> Any:
        try:
            return loss_fn(output, micro_batch.get(TARGET_KEY, micro_batch))
        except TypeError as error:  # the function may have the signature of another function
            second = "target" if TARGET_KEY in micro_batch else "batch"
            reason = str(error).splitlines()[-1][-120:].strip()
            raise InputError(
                f"loss_fn(output, {second}) raised TypeError for an output of type {type(output).__name__}: {reason}.",
                remedy="Fix loss_fn. To see where the error was raised, set SHARDFORMER_TRACEBACK=1.",
            ) from error

    return wrapped_loss_fn


def collate_samples(samples: list[Any]) -> Any:
    """Collate samples into a batch with torch's ``default_collate``, or key by key if the samples are mappings.

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
        keys, other_keys = sorted(map(str, first)), sorted(map(str, differing))
        raise InputError(
            f"All samples of a batch must have the same keys, but got {keys} and {other_keys}.",
            remedy="Use the same keys in all samples, or pass your own collate_fn.",
        )
    return {key: _collate_values(str(key), [sample[key] for sample in samples]) for key in first}


def _collate_values(key: str, values: list[Any]) -> Any:
    """Collate the values of one key, such as ``input_ids``, in all samples of a batch."""
    if all(isinstance(value, str) for value in values):
        return values
    if all(isinstance(value, (int, float)) and not isinstance(value, numpy.generic) for value in values):
        return torch.tensor(values)
    values = [_convert_numbers_to_tensor(key, value) for value in values]
    sized = [value for value in values if isinstance(value, (Tensor, list, tuple))]
    shapes = {tuple(value.shape) if isinstance(value, Tensor) else (len(value),) for value in sized}
    if len(shapes) > 1:
        shape, other_shape = sorted(shapes)[:2]
        raise InputError(
            f"The values of {key!r} in a batch must have the same shape, but got {shape} and {other_shape}.",
            remedy="Pad the values, or pass a collate_fn such as transformers.DataCollatorWithPadding(tokenizer).",
        )
    return torch_data.default_collate(values)


def _convert_numbers_to_tensor(key: str, value: Any) -> Any:
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
        raise InputError(
            f"The values of {key!r} in a batch cannot be converted to a tensor: {error}.",
            remedy="Pad the values, or pass a collate_fn such as transformers.DataCollatorWithPadding(tokenizer).",
        ) from error
