"""A sum over all bits of a tensor to which ranks can add up what each has read of it.

Each number, as an integer, is multiplied by an odd 64-bit number that belongs to its place in the full tensor; the sum
of all, modulo 2^64, is the checksum. Pieces of any shape, read by different ranks, give parts of it, so that a load
checks all that was saved while each rank reads only what it will hold. A number that differs always changes the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from shardformer.layout.spec import Place

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""


def weighted_sum(values: Tensor, start: Place) -> int:
    """The part of a tensor's checksum that these values give, which begin at ``start`` in it. From 0 to 2^64 - 1."""
    if values.numel() == 0:
        return 0
    numbers: Any = values.detach().cpu().contiguous()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
        start = (*start, 0)
    numbers = numbers.view(_INTEGERS[numbers.element_size()]).numpy()
    factors = [_factors(dim, first, n) for dim, (first, n) in enumerate(zip(start, numbers.shape, strict=True))]
    with numpy.errstate(over="ignore"):
        return int(_contracted(numbers, factors)) % 2**64


def _contracted(numbers: Any, factors: Sequence[Any]) -> Any:
    """The sum of all numbers, each times the factors of its indices."""
    if not factors:
        return numbers.astype(numpy.int64)
    *outer, last = factors
    sums = numpy.einsum("ij,j->i", numbers.reshape(-1, len(last)), last)  # which widens a cache's worth at a time
    for factor in reversed(outer):
        sums = sums.reshape(-1, len(factor)) @ factor
    return sums.reshape(())


def _factors(dim: int, first: int, count: int) -> Any:
    """An odd number for each of ``count`` indices of a dim."""
    x = numpy.arange(first + 1, first + count + 1, dtype=numpy.uint64) * numpy.uint64(_MIX[0])
    x += numpy.uint64(_mixed(dim))
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        x = (x ^ (x >> numpy.uint64(shift))) * numpy.uint64(factor)
    return (x | numpy.uint64(1)).view(numpy.int64)


def _mixed(dim: int) -> int:
    return (dim + 1) * _MIX[1] % 2**64
