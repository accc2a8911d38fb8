"""Check that all ranks read the same training data.

The engine shards every batch over the data ranks. This requires that all ranks read the full data in the same order.
If a script has already sharded the data by rank, or if the order differs between processes (a set of strings,
``os.listdir``), samples are silently repeated or skipped. Therefore ranks compare their data before training starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from shardformer.comm.collective_call import all_gather_over_mesh, hash_to_int, wait_for_all_ranks
from shardformer.comm.collectives import compute_numel_and_hash
from shardformer.errors import ConfigError
from shardformer.mesh.parallel_context import ParallelContext

MAX_SAMPLES, TIME_LIMIT_S = 4096, 0.2
"""Maximum number of samples that the ranks compare, and maximum time of the comparison in seconds."""
TOLERANCE = 1e-3
"""Tolerance for floating-point samples, relative to their norm, because machines round differently."""
SAME_DATA_HINT = (
    "Remove rows[rank::world_size], split_dataset_by_node, and any random_split or shuffle seeded by rank, and sort "
    "items that come from a set or from os.listdir"
)


def check_ranks_have_same_training_data(
    data_settings: Mapping[str, Any],
    num_samples: int | None,
    get_sample: Callable[[int], Any] | None,
    context: ParallelContext,
) -> None:
    """Raise ConfigError on all ranks if their training data differs.

    ``data_settings`` must be equal on all ranks. ``get_sample`` returns one of ``num_samples`` samples by its index,
    and is None for a stream. Communicates three all-gathers: the settings, a hash, and two numbers for each compared
    sample.
    """
    axes = context.base_axes
    if context.world is None or all(axis.size == 1 for axis in axes):
        return
    wait_for_all_ranks("ShardedDataLoader.compare (by initialize, Trainer.fit or the first loop over the data)", *axes)
    found, sketches = (
        ([], []) if get_sample is None or not num_samples else _fingerprint_samples(num_samples, get_sample)
    )
    gathered = all_gather_over_mesh((dict(data_settings), len(found)), context)
    first_rank, reference = gathered[0][0], gathered[0][1][0]
    for rank, (values, _) in gathered:
        for name, value in values.items():
            if value != (expected := reference[name]):
                raise ConfigError(
                    f"The training data has {name}={expected!r} on rank {first_rank}, but {name}={value!r} on rank "
                    f"{rank}.",
                    remedy=f"Pass the full data in the same order on all ranks. {SAME_DATA_HINT}",
                )
    num_compared = min(number for _, (_, number) in gathered)
    fingerprints = all_gather_over_mesh(hash_to_int(found[:num_compared]), context)
    gathered_sketches = all_gather_over_mesh(sketches, context)
    differing = [rank for rank, number in fingerprints if number != fingerprints[0][1]]
    for rank, sketches in gathered_sketches:
        pairs = zip(sketches, gathered_sketches[0][1], strict=False)
        differing += [rank for (a, norm), (b, other) in pairs if abs(a - b) > TOLERANCE * max(norm, other)]
    if differing:
        other, kind = differing[0], data_settings["type"]
        raise ConfigError(
            f"Ranks {first_rank} and {other} read different samples at the same index of the training data, a {kind}.",
            remedy=f"Pass the full data in the same order on all ranks. {SAME_DATA_HINT}",
        )


def _fingerprint_samples(
    num_samples: int, get_sample: Callable[[int], Any]
) -> tuple[list[int], list[tuple[float, float]]]:
    """Compute a hash and a random projection of random samples, whose indices are the same on all ranks.

    Either list is empty if its values change when a sample is read a second time, as with random augmentation.
    """
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(0))[:MAX_SAMPLES].tolist()
    end = time.monotonic() + TIME_LIMIT_S
    found: list[int] = []
    sketches: list[tuple[float, float]] = []
    try:
        for index in [order[0], *order]:  # the first sample is read twice
            sample = get_sample(index)
            found.append(hash_samples(sample))
            sketches.append(compute_sample_projection_and_norm(sample))
            if len(found) > 1 and time.monotonic() > end:
                break
    except Exception:
        return found[1:], []  # training reads the sample too, and raises the error on all ranks
    return found[1:] if found[0] == found[1] else [], sketches[1:] if sketches[0] == sketches[1] else []


def compute_sample_projection_and_norm(sample: Any) -> tuple[float, float]:
    """Compute the projection of a sample's floats onto a fixed random vector, and the norm of the floats."""
    decimals = list(_iter_float_tensors(sample))
    if not decimals:
        return 0.0, 0.0
    x = torch.cat(decimals).nan_to_num()
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8).double() * 2 - 1
    return float(x @ signs), float(x.norm())


def _iter_leaves(nested_sample: Any) -> Iterator[Any]:
    """Yield the leaves of nested dicts, lists and tuples. A list of integers counts as one leaf."""
    if isinstance(nested_sample, Mapping) or (
        isinstance(nested_sample, (list, tuple)) and not _is_plain_python_value(nested_sample)
    ):
        for each in (
            [nested_sample[key] for key in sorted(nested_sample, key=str)]
            if isinstance(nested_sample, Mapping)
            else nested_sample
        ):
            yield from _iter_leaves(each)
    else:
        yield nested_sample


def _iter_float_tensors(sample: Any) -> Iterator[Tensor]:
    for leaf in _iter_leaves(sample):
        if isinstance(leaf, (numpy.ndarray, numpy.generic)) and numpy.asarray(leaf).dtype.kind == "f":
            yield torch.from_numpy(numpy.array(leaf, numpy.float64)).reshape(-1)
        elif isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout == torch.strided:
            yield leaf.detach().cpu().double().reshape(-1)
        elif isinstance(leaf, float):
            yield torch.tensor([leaf], dtype=torch.float64)


def hash_samples(*samples: Any) -> int:
    """Hash the integers and strings of one or more samples.

    Without integers and strings, hash all numbers. Floating-point numbers are often augmented at random.
    """
    parts = [_make_hashable(leaf) for value in samples for leaf in _iter_leaves(value)]
    return hash_to_int([part for is_exact, part in parts if is_exact] or [part for _, part in parts])


def _make_hashable(leaf: Any) -> tuple[bool, Any]:
    """Return whether a value consists of integers or strings, and a hashable representation of the value."""
    if isinstance(leaf, Tensor):
        is_exact = not (leaf.is_floating_point() or leaf.is_complex()) and not leaf.is_quantized
        return is_exact, (
            "tensor",
            tuple(leaf.shape),
            compute_numel_and_hash(leaf) if leaf.layout == torch.strided else None,
        )
    if isinstance(leaf, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(leaf)
        is_exact = array.dtype.kind in "biuSU"
        return is_exact, ("array", array.shape, array.tobytes() if array.dtype.kind != "O" else None)
    if _is_plain_python_value(leaf):
        return not isinstance(leaf, float), leaf
    return False, type(leaf).__name__  # repr may contain an address


def _is_plain_python_value(leaf: Any) -> bool:
    if isinstance(leaf, (list, tuple)):
        return bool(leaf) and all(type(each) is int for each in leaf)
    return leaf is None or isinstance(leaf, (str, bytes, int, float))


def get_first_and_last_samples(batch: Any) -> list[Any]:
    """Return the first and last sample of each tensor in a batch. Other values are unchanged."""
    if isinstance(batch, Mapping):
        return [end for key in sorted(batch, key=str) for end in get_first_and_last_samples(batch[key])]
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return [end for each in batch for end in get_first_and_last_samples(each)]
    return [batch[:1], batch[-1:]] if isinstance(batch, (Tensor, numpy.ndarray)) and batch.ndim else [batch]
