"""ShardSpec over arbitrary axes: slices, boxes and the number of copies."""

from __future__ import annotations

import doctest
import itertools
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardformer.errors import ConfigError
from shardformer.layout import shard_spec as spec_module
from shardformer.layout import shard_spec as split_module
from shardformer.layout.shard_spec import (
    AttentionHeadLayout,
    EvenSplit,
    ShardSpec,
    Split,
    count_ranks_per_range,
    get_even_split_bounds,
)

AXES = ("tensor", "data", "column")


def test_docstring_examples() -> None:
    names = {"Split": Split, "EvenSplit": EvenSplit}
    assert doctest.testmod(split_module).failed == doctest.testmod(spec_module, extraglobs=names).failed == 0


@given(st.integers(1, 40), st.integers(1, 8))
def test_even_bounds_differ_by_at_most_one(count: int, ranks: int) -> None:
    bounds = get_even_split_bounds(count, ranks)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == count and len(sizes) == ranks
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@st.composite
def splits(draw: Any, length: int, axes: list[str]) -> Any:
    """Draw a split over one or two of ``axes`` and remove them: uneven, interleaved, shared or empty slices."""
    kind = draw(st.sampled_from(["even", "fused", "free", "product"] if len(axes) > 1 else ["even", "fused", "free"]))
    axis, ranks = axes.pop(), draw(st.integers(1, 4))
    if kind == "product":
        sizes = (ranks, draw(st.integers(1, 2)))
        return Split.even(length, prod(sizes), axes=(axis, axes.pop()), sizes=sizes)
    if kind == "even":
        return Split.even(length, ranks).with_axis(axis)
    if kind == "fused":
        at = draw(st.integers(0, length))
        return Split.fused([at, length - at], ranks).with_axis(axis)
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
    pieces = [(a, b) for a, b in itertools.pairwise([0, *cuts, length]) if a < b]
    held: list[list[Any]] = [[] for _ in range(ranks)]
    for piece in draw(st.permutations(pieces)):
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(piece)
    return Split(tuple(map(tuple, held)), (axis,))


@st.composite
def specs(draw: Any, shape: tuple[int, ...] | None = None) -> ShardSpec:
    """Draw a layout of one to three dims over one to three axes."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)) if shape is None else shape
    axes = list(draw(st.permutations(AXES)))[: draw(st.integers(1, 3))]
    cut: dict[int, list[Any]] = {}
    while axes:
        dim = draw(st.integers(0, len(shape) - 1))
        if dim in cut:
            cut[dim].append(EvenSplit(axes.pop(), draw(st.integers(1, 3)), draw(st.integers(1, 2))))
        else:
            cut[dim] = [draw(splits(shape[dim], axes))]
    return ShardSpec(shape, cut)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(prod(shape)).reshape(shape)


@settings(deadline=None, max_examples=80)
@given(specs())
def test_join_is_the_inverse_of_slice(spec: ShardSpec) -> None:
    full = numbered(spec.shape)
    parts = [spec.slice_full_tensor(full, coords) for coords in spec.get_all_rank_coords()]
    assert [tuple(p.shape) for p in parts] == [spec.get_local_shape(coords) for coords in spec.get_all_rank_coords()]
    assert torch.equal(spec.assemble_full_tensor(parts), full)


@settings(deadline=None, max_examples=80)
@given(specs())
def test_boxes_cover_a_shard_once_in_local_order(spec: ShardSpec) -> None:
    full = numbered(spec.shape)
    for coords in spec.get_all_rank_coords():
        local = spec.slice_full_tensor(full, coords)
        seen = torch.zeros(local.shape, dtype=torch.int)
        for box in spec.boxes(coords):
            assert torch.equal(box.view_in_full(full), box.view_in_local(local))
            box.view_in_local(seen).add_(1)
        assert bool((seen == 1).all())


@settings(deadline=None, max_examples=80)
@given(specs())
def test_num_copies_counts_every_copy(spec: ShardSpec) -> None:
    """Each copy weighted by 1 / num_copies, every element counts once."""
    ones, total = torch.ones(spec.shape, dtype=torch.float64), torch.zeros(spec.shape, dtype=torch.float64)
    for coords in spec.get_all_rank_coords():
        share = spec.slice_full_tensor(ones, coords) / spec.count_copies_per_element(coords)
        for box in spec.boxes(coords):
            box.view_in_full(total).add_(box.view_in_local(share))
    assert torch.allclose(total, ones)
    held = sum(prod(spec.get_local_shape(coords)) for coords in spec.get_all_rank_coords())
    assert held == int((ones * spec.count_copies_per_element()).sum())
    assert spec.stores_each_element_once == (held == prod(spec.shape))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 3))
def test_every_rank_has_the_kv_heads_of_its_query_heads(kv: int, group: int, ranks: int, width: int) -> None:
    heads = kv * group
    if heads < ranks:
        with pytest.raises(ConfigError, match="attention heads"):
            AttentionHeadLayout(heads, kv, width, ranks)
        return
    layout = AttentionHeadLayout(heads, kv, width, ranks)
    assert sum(layout.get_num_query_heads(r) for r in range(ranks)) == heads
    for rank in range(ranks):
        wanted = [h // group for h in range(layout.query_head_bounds[rank], layout.query_head_bounds[rank + 1])]
        held = layout.get_stored_kv_heads(rank)
        seen = [held[i] for i in layout.get_local_kv_head_per_query(rank) or range(len(held))]
        repeated = [h for h in seen for _ in range(layout.get_local_head_and_feature_counts(rank)["groups"])]
        assert repeated == wanted  # what the forward pass pairs with each local query head
    assert layout.get_kv_split().full == kv * width and all(c >= 1 for c in layout.get_kv_split().multiplicity)


def test_a_slice_on_two_ranks_counts_twice() -> None:
    split = Split((((0, 2),), ((1, 3),)))
    spec = ShardSpec((3, 2), {0: split})
    assert split.multiplicity == (1, 2, 1) and not split.stores_each_index_once and not spec.stores_each_element_once
    held = spec.count_copies_per_element({"tensor": 1})
    assert isinstance(held, torch.Tensor) and held.tolist() == [[2], [1]]


def test_count_holders_does_not_iterate_over_indices() -> None:
    assert count_ranks_per_range([[(0, 10**9)], [(0, 10)]]) == [(0, 10, 2), (10, 10**9, 1)]


def test_a_split_of_wrong_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="dimension 0 has 4 elements"):
        ShardSpec((5,), {0: Split.even(4, 2)})


def test_a_split_that_omits_indices_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not cover all indices"):
        ShardSpec((5,), {0: Split((((3, 5),), ((0, 2),)))})


def test_an_axis_that_shards_two_dims_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sharded twice over the axis 'tensor'.*Use a different axis"):
        ShardSpec((4, 4), {0: Split.even(4, 2), 1: Split.even(4, 2)})


def test_slicing_a_shard_is_refused() -> None:
    with pytest.raises(ConfigError, match="full tensor"):
        ShardSpec((4,), {0: Split.even(4, 2)}).slice_full_tensor(torch.zeros(2), {"tensor": 0})
