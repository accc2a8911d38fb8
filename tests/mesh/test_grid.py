"""Rank arithmetic: groups partition the ranks, and views reshape them."""

from __future__ import annotations

import doctest
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardformer.errors import ConfigError
from shardformer.mesh import parallel_context, rank_grid, tensor_grid
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.mesh.rank_grid import AXES, RankGrid

SIZES = st.fixed_dictionaries({name: st.integers(1, 4) for name in AXES})


def test_docstring_examples() -> None:
    assert [doctest.testmod(each).failed for each in (parallel_context, rank_grid, tensor_grid)] == [0, 0, 0]


@st.composite
def views(draw: st.DrawFn) -> tuple[RankGrid, list[str], dict[str, int]]:
    """Draw a grid with a view, the axes that it reshapes, and its sizes."""
    sizes = draw(SIZES)
    of = [name for name in AXES if draw(st.booleans())] or ["tensor"]
    left, folded = prod(sizes[name] for name in of), {}
    for name in ("row", "column"):
        folded[name] = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        left //= folded[name]
    folded["depth"] = left
    return RankGrid.from_sizes(sizes).with_reshaped_axes(of, folded), of, folded


NAMES = st.sets(st.sampled_from(AXES), min_size=1)


@settings(deadline=None, max_examples=60)
@given(SIZES, NAMES)
def test_groups_partition_the_ranks(sizes: dict[str, int], names: set[str]) -> None:
    grid = RankGrid.from_sizes(sizes)
    lines = grid.get_rank_groups(*names)
    assert sorted(rank for line in lines for rank in line) == list(grid.ranks)
    assert {len(line) for line in lines} == {prod(sizes[name] for name in names)}
    for line in lines:
        coords = [grid.get_coords(rank) for rank in line]
        assert all(len({at[name] for at in coords}) == 1 for name in set(AXES) - names)
        assert sorted(line) == list(line)


@settings(deadline=None, max_examples=60)
@given(SIZES)
def test_coordinates_are_unique(sizes: dict[str, int]) -> None:
    grid = RankGrid.from_sizes(sizes)
    assert [grid.get_rank_at(grid.get_coords(rank)) for rank in grid.ranks] == list(grid.ranks)


@settings(deadline=None, max_examples=60)
@given(views(), NAMES)
def test_flattened_view_equals_its_axes(viewed: tuple[RankGrid, list[str], dict[str, int]], others: set[str]) -> None:
    grid, of, folded = viewed
    others -= set(of)
    assert grid.get_rank_groups(*folded, *others) == grid.get_rank_groups(*of, *others)
    part = list(folded)[:2]
    lines = grid.get_rank_groups(*part, *others)
    assert sorted(rank for line in lines for rank in line) == list(grid.ranks)
    assert {len(line) for line in lines} == {prod({**grid.sizes, **folded}[name] for name in [*part, *others])}
    assert prod(grid.sizes.values()) == len(grid.ranks)


@settings(deadline=None, max_examples=60)
@given(views())
def test_view_keeps_coordinates(viewed: tuple[RankGrid, list[str], dict[str, int]]) -> None:
    grid, of, folded = viewed
    for rank in grid.ranks:
        coords = grid.get_coords(rank)
        assert {name: coords[name] for name in AXES} == RankGrid.from_sizes(grid.sizes).get_coords(rank)
        place, seen = 0, 0
        for name in of:
            place = place * grid.sizes[name] + coords[name]
        for name, size in folded.items():
            seen = seen * size + coords[name]
        assert place == seen


def test_groups_over_some_ranks_of_an_axis() -> None:
    grid = RankGrid.from_sizes({"data": 2, "pipe": 3, "tensor": 2})
    assert grid.get_rank_groups("pipe", only_coords={"pipe": (0, 2)}) == ((0, 4), (1, 5), (6, 10), (7, 11))
    assert grid.get_rank_groups("data", "pipe", only_coords={"pipe": (0, 2)}) == ((0, 4, 6, 10), (1, 5, 7, 11))


def test_expert_axis_over_data_and_tensor() -> None:
    grid = RankGrid.from_sizes({"data": 4, "pipe": 2, "tensor": 2}).with_reshaped_axes(
        ["data", "tensor"], {"replica": 2, "expert": 4}
    )
    assert grid.get_rank_groups("expert")[0] == (0, 1, 4, 5)
    assert grid.get_rank_groups("replica")[0] == (0, 8)
    assert grid.get_rank_groups("pipe", "replica")[0] == (0, 2, 8, 10)


CUBE = RankGrid.from_sizes({"data": 2, "tensor": 8}).with_reshaped_axes(["tensor"], {"row": 2, "column": 2, "depth": 2})


@pytest.mark.parametrize(
    ("of", "sizes", "said"),
    [
        (["tensor"], {"a": 2, "b": 3}, r"a=2 times b=3 must have as many ranks in total as tensor=8.*product is 8"),
        (["tensor"], {}, r"The new axes \{\} must have as many ranks in total as tensor=8"),
        (["tensor"], {"a": 8.0}, r"a=8.0 is not an integer"),
        (["tensor"], {"row": 8}, r"new axis 'row' has the same name as an existing axis"),
        (
            ["tensor", "data"],
            {"a": 16},
            r"The axes \['tensor', 'data'\] cannot be reshaped.*data, pipe, sequence, tensor in this order",
        ),
        (["tensor", "tensor"], {"a": 64}, r"The axes \['tensor', 'tensor'\] cannot be reshaped"),
        (["row"], {"a": 2}, r"The axes \['row'\] cannot be reshaped"),
        ([], {"a": 1}, r"The axes \[\] cannot be reshaped"),
        (["tensro"], {"a": 8}, r"no axis 'tensro'.*data, pipe, sequence, tensor, row, column, depth.*'tensor'"),
    ],
    ids=str,
)
def test_invalid_view_is_refused(of: list[str], sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CUBE.with_reshaped_axes(of, sizes)


def test_overlapping_axes_are_refused() -> None:
    grid = CUBE.with_reshaped_axes(["data", "tensor"], {"replica": 4, "expert": 4})
    assert grid.get_rank_groups("tensor", "row") == grid.get_rank_groups("tensor")
    for names in (("row", "expert"), ("data", "expert")):
        with pytest.raises(ConfigError, match=f"{', '.join(names)} cannot be combined, because they overlap"):
            grid.get_rank_groups(*names)


def test_group_crosses_hosts() -> None:
    grid = RankGrid.from_sizes({"data": 2, "tensor": 2}, hosts=["a", "a", "b", "b"])
    assert [grid.crosses_hosts(line) for line in (*grid.get_rank_groups("tensor"), *grid.get_rank_groups("data"))] == [
        False
    ] * 2 + [True] * 2
    assert RankGrid.from_sizes({"tensor": 2}).crosses_hosts((0, 1)) is None


@pytest.mark.parametrize(
    ("sizes", "coords", "said"),
    [
        ({"tensor": 0}, {}, r"tensor=0"),
        ({"tensr": 2}, {}, r"no axis 'tensr'"),
        ({"tensor": 2}, {"tensor": 2}, r"The coordinates {'tensor': 2} are outside the mesh"),
        ({"tensor": 2}, {"row": 0}, r"The coordinates {'row': 0} are outside the mesh"),
    ],
    ids=str,
)
def test_invalid_coordinates_are_refused(sizes: dict[str, int], coords: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ParallelContext.from_sizes(sizes, coords)
