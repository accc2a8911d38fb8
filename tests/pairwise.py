"""Which cases of several parameters are run: every pair of values is there, not every combination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any


def in_turn(cases: Iterable[Any], *ways: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Each case in one of the ways and its neighbours in the others, so that a family of several goes all ways."""
    return [(*(case if isinstance(case, tuple) else (case,)), *way) for case, way in zip(cases, cycle(ways))]


def pairwise(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Each pair of the first two with one of the third, such that those meet every one of the first and the second.

    The third has no more values than either: then a Latin square holds all pairs.
    """
    assert len(third) <= min(len(first), len(second))
    return [(a, b, third[(i + j) % len(third)]) for i, a in enumerate(first) for j, b in enumerate(second)]
