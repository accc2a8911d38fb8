"""Pairwise selection of test cases: every pair of values occurs, but not every combination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, product
from typing import Any


def in_turn(cases: Iterable[Any], *ways: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Pair the cases with the ways in turn, so that neighboring cases of a family use different ways."""
    return [(*(case if isinstance(case, tuple) else (case,)), *way) for case, way in zip(cases, cycle(ways))]


def pairwise(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Return each pair of the first two lists with a value of the third, such that these also form all pairs.

    The third list may not be longer than the others. A Latin square then covers all pairs.
    """
    assert len(third) <= min(len(first), len(second))
    return [(a, b, third[(i + j) % len(third)]) for i, a in enumerate(first) for j, b in enumerate(second)]


def all_pairs(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return few cases of several parameters that cover each pair of values of any two parameters."""
    names = list(values)
    missing = {
        (a, x, b, y) for i, a in enumerate(names) for b in names[i + 1 :] for x, y in product(values[a], values[b])
    }
    every = [dict(zip(names, case, strict=True)) for case in product(*values.values())]

    def met(case: dict[str, Any]) -> set[tuple[Any, ...]]:
        return {(a, case[a], b, case[b]) for i, a in enumerate(names) for b in names[i + 1 :]} & missing

    found = []
    while missing:
        best = max(every, key=lambda case: len(met(case)))
        found.append(best)
        missing -= met(best)
    return found
