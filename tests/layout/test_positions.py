"""Assignment of sequence positions to context parallel ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardformer.context_parallel.sequence_layout import SequenceLayout, get_chunk_positions
from shardformer.errors import InputError

SIZES = st.integers(1, 5)


@given(length=st.integers(1, 70), ring=SIZES, group=SIZES)
def test_each_position_is_on_one_rank(length: int, ring: int, group: int) -> None:
    if length < SequenceLayout.get_min_length(ring, group):
        with pytest.raises(InputError, match=f"A sequence of {length} positions"):
            SequenceLayout(length, ring, group)
        return
    positions = SequenceLayout(length, ring, group)
    assert positions.split.stores_each_index_once
    assert positions.split.full == length
    lengths = positions.split.get_local_lengths()
    assert min(lengths) > 0
    assert max(lengths) - min(lengths) <= 2
    for rank in range(ring):
        mine = get_chunk_positions(positions, positions.get_chunk_indices_of_rank(rank)).tolist()
        parts = [positions.get_positions_of_rank(rank * group + i).tolist() for i in range(group)]
        assert [at for part in parts for at in part] == mine == sorted(mine)
        assert [len(part) for part in parts] == positions.get_lengths_in_ulysses_group(rank)
        assert {positions.get_ring_rank_of_chunk(chunk) for chunk in positions.get_chunk_indices_of_rank(rank)} == {
            rank
        }


@given(length=st.integers(8, 90), ring=st.integers(1, 4))
def test_causal_attention_is_balanced_over_ranks(length: int, ring: int) -> None:
    positions = SequenceLayout(length, ring)
    pairs = [sum(int(i) + 1 for i in positions.get_positions_of_rank(rank)) for rank in range(ring)]
    assert max(pairs) - min(pairs) <= 3 * length  # of length ** 2 / (2 * ring) each
