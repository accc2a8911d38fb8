"""Partitions contain each layer once and give each stage at least one; the balanced one is optimal."""

from __future__ import annotations

import doctest
import math
import re
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardformer.errors import ConfigError
from shardformer.pipeline import partition as balance
from shardformer.pipeline.partition import partition_balanced, partition_explicit, partition_uniform

COSTS = st.lists(st.one_of(st.integers(0, 5), st.floats(0, 10, width=32)), min_size=1, max_size=8)


def test_partition_doctests() -> None:
    assert doctest.testmod(balance).failed == 0


def counts_of(bounds: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(bounds)]


def peak(costs: Sequence[float], bounds: Sequence[int]) -> float:
    return max(math.fsum(costs[a:b]) for a, b in pairwise(bounds))


def all_cuts(layers: int, parts: int) -> list[list[int]]:
    return [[0, *inner, layers] for inner in combinations(range(1, layers), parts - 1)]


def assert_a_cut(bounds: list[int], layers: int, parts: int) -> None:
    assert bounds[0] == 0 and bounds[-1] == layers and len(bounds) == parts + 1
    assert all(a < b for a, b in pairwise(bounds))


@settings(deadline=None)
@given(COSTS, st.integers(1, 8))
def test_balanced_partition_has_smallest_peak(costs: list[float], parts: int) -> None:
    parts = min(parts, len(costs))
    bounds = partition_balanced(costs, parts)
    assert_a_cut(bounds, len(costs), parts)
    best = min(peak(costs, cut) for cut in all_cuts(len(costs), parts))
    assert peak(costs, bounds) == pytest.approx(best, rel=1e-12)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 8))
def test_ties_prefer_even_counts_and_lighter_early_stages(costs: list[int], parts: int) -> None:
    parts = min(parts, len(costs))

    def badness(cut: list[int]) -> tuple[float, int, list[int]]:
        return peak(costs, cut), sum(n * n for n in counts_of(cut)), counts_of(cut)

    assert partition_balanced(costs, parts) == min(all_cuts(len(costs), parts), key=badness)


def test_rounding_does_not_break_ties() -> None:
    assert counts_of(partition_balanced([0.1] * 12, 4)) == [3, 3, 3, 3]
    assert counts_of(partition_balanced([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], 2)) == [3, 3]


def test_equal_costs_give_equal_counts() -> None:
    assert partition_balanced([1] * 8, 4) == [0, 2, 4, 6, 8]


def test_partition_of_many_layers_is_fast() -> None:
    bounds = partition_balanced([1.0 + (i % 7) / 10 for i in range(200)], 16)
    assert_a_cut(bounds, 200, 16)


@given(st.integers(1, 60), st.integers(1, 12))
def test_uniform_counts_differ_by_one_and_end_stages_grow_last(layers: int, parts: int) -> None:
    parts = min(layers, parts)
    bounds = partition_uniform(layers, parts)
    assert_a_cut(bounds, layers, parts)
    counts = counts_of(bounds)
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)  # the head's stage never holds an extra one
    if counts[0] > min(counts):
        assert set(counts[:-1]) == {max(counts)}
    assert counts[1:-1] == sorted(counts[1:-1])  # of those between, the later hold the extra ones


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_explicit_counts_are_kept(asked: list[int]) -> None:
    bounds = partition_explicit(asked, sum(asked), len(asked))
    assert_a_cut(bounds, sum(asked), len(asked))
    assert counts_of(bounds) == asked


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ([3, 4, 5], "[3, 4, 5] must have one layer count for each of the 4 virtual pipeline stages, but has 3"),
        ([12], "[12] must have one layer count for each of the 4 virtual pipeline stages, but has 1"),
        ([3, 4, 3, 0], "assigns 0 layers to stage 3"),
        ([3, 4, -1, 6], "assigns -1 layers to stage 2"),
        ([3, 4, 4, 1.0], "assigns 1.0 layers to stage 3"),
        ([3, 4, 4, True], "assigns True layers to stage 3"),
        ([3, "4", 4, 1], "assigns '4' layers to stage 1"),
        ([3, 4, 3, 1], "[3, 4, 3, 1] assigns 11 layers, but the model has 12"),
        ([4, 4, 4, 2], "[4, 4, 4, 2] assigns 14 layers, but the model has 12"),
    ],
)
def test_invalid_explicit_counts_raise_with_valid_example(asked: list[Any], what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)) as error:
        partition_explicit(asked, 12, 4)
    assert "[3, 3, 3, 3]" in error.value.remedy


@pytest.mark.parametrize(
    "cut",
    [lambda n, p: partition_balanced([1.0] * n, p), partition_uniform, lambda n, p: partition_explicit([1] * p, n, p)],
)
@pytest.mark.parametrize(
    ("layers", "parts", "what", "remedy"),
    [
        (3, 4, "4 pipeline stages need at least one layer each, but the number of layers is 3", "at least 4 layers"),
        (1, 2, "2 pipeline stages need at least one layer each, but the number of layers is 1", "at least 2 layers"),
        (0, 2, "2 pipeline stages need at least one layer each, but the number of layers is 0", "at least 2 layers"),
        (3, 0, "positive integer, but got 0", "at least one stage"),
        (3, -1, "positive integer, but got -1", "at least one stage"),
    ],
)
def test_invalid_number_of_stages_raises_with_both_numbers(
    cut: Any, layers: int, parts: int, what: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)) as error:
        cut(layers, parts)
    assert remedy in str(error.value)


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf])
def test_invalid_cost_raises(bad: float) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"layer_costs[1] must be finite and not negative, but got {bad}")):
        partition_balanced([1, bad, 1], 2)
