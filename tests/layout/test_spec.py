"""Slicing and joining are each other's inverse for any split, and the examples of the docstrings hold."""

from __future__ import annotations

import doctest
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardformer.errors import ConfigError
from shardformer.layout import spec as layout
from shardformer.layout.spec import ShardSpec, Split, even_bounds
from shardformer.policies.heads import HeadLayout


def test_the_examples_of_the_docstrings() -> None:
    assert doctest.testmod(layout).failed == 0


@given(st.integers(1, 40), st.integers(1, 8))
def test_even_bounds_cover_and_differ_by_one_at_most(count: int, ranks: int) -> None:
    bounds = even_bounds(count, ranks)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == count and len(sizes) == ranks
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(4, 9), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1))
def test_join_is_the_inverse_of_slice(blocks: list[int], ranks: int, unit: int, dim: int) -> None:
    sizes = [b * unit for b in blocks]
    split = Split.fused(sizes, ranks, unit)
    shape = tuple(sum(sizes) if d == dim else 3 for d in range(2))
    full = torch.arange(shape[0] * shape[1]).reshape(shape).float()
    spec = ShardSpec(shape, {dim: split})
    parts = [spec.slice(full, rank) for rank in range(ranks)]
    assert [tuple(p.shape) for p in parts] == [spec.local_shape(rank) for rank in range(ranks)]
    assert torch.equal(spec.join(parts), full)
    assert split.is_partition and spec.multiplicity(0) == 1


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 3))
def test_every_rank_holds_the_kv_heads_that_its_query_heads_read(kv: int, group: int, ranks: int, width: int) -> None:
    heads = kv * group
    if heads < ranks:
        with pytest.raises(ConfigError, match="attention heads"):
            HeadLayout(heads, kv, width, ranks)
        return
    layout = HeadLayout(heads, kv, width, ranks)
    assert sum(layout.heads(r) for r in range(ranks)) == heads
    for rank in range(ranks):
        wanted = [h // group for h in range(layout.query_bounds[rank], layout.query_bounds[rank + 1])]
        held = layout.held(rank)
        seen = [held[i] for i in layout.expand(rank) or range(len(held))]
        repeated = [h for h in seen for _ in range(layout.values(rank)["groups"])]
        assert repeated == wanted  # what the forward pairs with each local query head
    assert layout.kv_split().full == kv * width and all(c >= 1 for c in layout.kv_split().multiplicity)


def test_a_slice_that_two_ranks_hold_is_counted_for_both() -> None:
    split = Split((((0, 2),), ((1, 3),)))
    spec = ShardSpec((3, 2), {0: split})
    assert split.multiplicity == (1, 2, 1) and not split.is_partition
    held = spec.multiplicity(1)
    assert isinstance(held, torch.Tensor) and held.tolist() == [[2], [1]]


def test_a_split_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="length 4"):
        ShardSpec((5,), {0: Split.even(4, 2)})


def test_a_split_that_leaves_a_part_to_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves out a part"):
        ShardSpec((5,), {0: Split((((3, 5),), ((0, 2),)))})


def test_a_part_is_not_sliced_again() -> None:
    with pytest.raises(ConfigError, match="full tensor"):
        ShardSpec((4,), {0: Split.even(4, 2)}).slice(torch.zeros(2), 0)
