"""Tensors without values: of the meta device, or torch's fake ones, under which a step is traced and not computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily


def has_values(x: Tensor) -> bool:
    """Whether there are numbers in ``x`` to look at."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def numbers_in(x: Tensor) -> Any:
    """What ``x.tolist()`` gives; ones where there are no values."""
    if has_values(x):
        return x.tolist()
    ones: Any = 1
    for size in reversed(x.shape):
        ones = [ones] * size
    return ones


def is_true(x: Tensor) -> bool:
    """What ``bool(x)`` gives; True where there are no values: a check of numbers finds nothing wrong in a trace."""
    return bool(x) if has_values(x) else True


def memory_of(x: Tensor) -> int:
    """A number of the memory of ``x``, which no other memory has while it is held; also where it has no address."""
    number: int = x.untyped_storage()._cdata
    return number


with_values = unset_fake_temporarily
"""In here, or in what it decorates, what is made has values, also while a step is traced: something is tried out."""
