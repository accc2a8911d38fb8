"""Whether all ranks have the same training data, in the same order.

The engine gives each data rank its part of every batch. That is right where all ranks hold the whole data in one order,
and silently wrong where a script has sharded the data by rank, or where the order differs by process (a set of strings,
``os.listdir``): samples would be trained on twice, or never. So ranks compare what they hold before training starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from shardformer.comm.collective_call import all_gather_from_grid, come, number_of
from shardformer.comm.collectives import checksum
from shardformer.errors import ConfigError
from shardformer.mesh.parallel_context import ParallelContext

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
    axes = context.own_axes
    if context.world is None or all(axis.size == 1 for axis in axes):
        return
    come("Batches.compare (by initialize, Trainer.fit or the first loop over the data)", *axes)
    found, sketches = ([], []) if read is None or not count else _contents(count, read)
    every = all_gather_from_grid((dict(settings), len(found)), context)
    first, reference = every[0][0], every[0][1][0]
    for rank, (theirs, _) in every:
        for name, value in theirs.items():
            if value != reference[name]:
                raise ConfigError(
                    f"Rank {first} has training data with {name} {reference[name]!r}, and rank {rank} with {value!r}",
                    rule="Each data rank trains on its part of every batch, so all ranks have the same data",
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
            rule="Each data rank trains on its part of every batch, so all ranks have the same data in the same order",
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


def _decimals(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _decimals(value[key])
    elif isinstance(value, (list, tuple)) and not _is_plain(value):
        for each in value:
            yield from _decimals(each)
    elif isinstance(value, (numpy.ndarray, numpy.generic)) and numpy.asarray(value).dtype.kind == "f":
        yield torch.from_numpy(numpy.array(value, numpy.float64)).reshape(-1)
    elif isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided:
        yield value.detach().cpu().double().reshape(-1)
    elif isinstance(value, float):
        yield torch.tensor([value], dtype=torch.float64)


def content_of(*values: Any) -> int:
    """A number of what values hold: of the whole numbers and words in them, or if there are none, of all numbers.

    Whole numbers come first since decimal ones are often augmented at random.
    """
    parts = [part for value in values for part in _parts(value)]
    exact = [part for is_exact, part in parts if is_exact]
    return number_of(exact or [part for _, part in parts])


def _parts(value: Any) -> Iterator[tuple[bool, Any]]:
    """(whether it is made of whole numbers or words, what it holds) for everything inside of a value."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _parts(value[key])
    elif isinstance(value, (list, tuple)) and not _is_plain(value):
        for each in value:
            yield from _parts(each)
    elif isinstance(value, Tensor):
        is_exact = not (value.is_floating_point() or value.is_complex()) and not value.is_quantized
        yield is_exact, ("tensor", tuple(value.shape), checksum(value) if value.layout == torch.strided else None)
    elif isinstance(value, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(value)
        is_exact = array.dtype.kind in "biuSU"
        yield is_exact, ("array", array.shape, array.tobytes() if array.dtype.kind != "O" else None)
    elif _is_plain(value):
        yield not isinstance(value, float), value
    else:
        yield False, type(value).__name__  # its print may hold an address


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
