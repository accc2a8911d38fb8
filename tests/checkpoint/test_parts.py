"""Components of checkpoints: checksums, JSON values, assignment of writes, and chunks of a rank."""

from __future__ import annotations

import doctest
import json
import math
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardformer.checkpoint import chunks, training_state
from shardformer.checkpoint.chunks import (
    CheckpointTensor,
    LocalTensorRegion,
    assign_chunks_to_write,
    intersect_chunks,
    split_flat_range_into_chunks,
    subtract_chunks,
)
from shardformer.checkpoint.file_format import compute_chunk_checksum, decode_json_value, encode_json_value
from shardformer.errors import InputError
from shardformer.layout.shard_spec import ShardSpec, Split
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext

DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64,
    torch.complex128,
]  # fmt: skip


def test_docstring_examples() -> None:
    assert [doctest.testmod(each).failed for each in (chunks, training_state)] == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksums_of_chunks_add_up(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 7, 3) * 3).to(dtype)
    whole = compute_chunk_checksum(x, (0, 0, 0))
    parts = [compute_chunk_checksum(x[a:b, c:d], (a, c, 0)) for a, b in ((0, 2), (2, 5)) for c, d in ((0, 6), (6, 7))]
    assert sum(parts) % 2**64 == whole
    assert 0 <= whole < 2**64


def test_checksum_of_many_or_long_rows() -> None:
    for shape in ((3, 70_001), (70_001, 3), (140_000,)):
        x = torch.randint(0, 255, shape, dtype=torch.uint8)
        half = shape[-1] // 2
        start = (0,) * len(shape)
        parts = compute_chunk_checksum(x[..., :half], start) + compute_chunk_checksum(
            x[..., half:], (*start[:-1], half)
        )
        assert parts % 2**64 == compute_chunk_checksum(x, start)


def test_checksum_detects_transposed_elements() -> None:
    x = torch.arange(16, dtype=torch.int32).view(4, 4)
    assert compute_chunk_checksum(x.t(), (0, 0)) != compute_chunk_checksum(x, (0, 0))


@given(st.integers(0, 34), st.integers(0, 31), st.integers(0, 34))
def test_checksum_detects_flipped_bit_and_swapped_elements(at: int, bit: int, other: int) -> None:
    x = torch.arange(35, dtype=torch.int32).view(5, 7)
    before = compute_chunk_checksum(x, (0, 0))
    y = x.clone().view(-1)
    y[at] ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
    assert compute_chunk_checksum(y.view(5, 7), (0, 0)) != before
    if at != other:
        z = x.clone().view(-1)
        z[[at, other]] = z[[other, at]]
        assert compute_chunk_checksum(z.view(5, 7), (0, 0)) != before
    assert compute_chunk_checksum(x, (1, 0)) != before


def test_checksum_of_empty_and_single_element_tensors() -> None:
    assert compute_chunk_checksum(torch.empty(0, 3), (0, 0)) == 0
    assert compute_chunk_checksum(torch.tensor(1.5), ()) != 0


# -------------------------------------------------------------------------------------------------- plain values


PLAIN: list[Any] = [
    None, True, 3, 0.1, -math.inf, "words", [1, [2.5, "a"]], (1, (2,)), {"a": 1}, {1: "b", (2, 3): None}, {"$": 1},
    {1, 2}, Counter({3: 2}), torch.float32, {"betas": (0.9, 0.999), "lr": torch.tensor(0.1)}, numpy.float32(0.25),
    numpy.arange(4), torch.Size([2, 3]),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: str(value)[:20])
def test_json_round_trip(value: Any) -> None:
    back = decode_json_value(json.loads(json.dumps(encode_json_value(value, "it"))))
    assert repr(back) == repr(tuple(value) if isinstance(value, torch.Size) else value)
    if not isinstance(value, torch.Size):
        assert type(back) is type(value)


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    )
)
def test_json_round_trip_of_random_values(value: Any) -> None:
    assert decode_json_value(json.loads(json.dumps(encode_json_value(value, "it")))) == value


@pytest.mark.parametrize(
    "value",
    [object(), print, {"fn": lambda: None}, torch.zeros(2**13), InputError],
    ids=lambda value: type(value).__name__,
)
def test_json_refuses_code_and_large_tensors(value: Any) -> None:
    with pytest.raises(InputError, match=r"extra.* cannot be saved in a checkpoint"):
        encode_json_value(value, "extra")


# ---------------------------------------------------------------------------------------------------- boxes


@given(st.lists(st.integers(1, 5), min_size=0, max_size=3), st.data())
def test_flat_range_is_covered_by_few_boxes(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    x = torch.arange(numel).view(shape)
    region = LocalTensorRegion(tuple(shape), None, {}, slice(begin, end))
    flat = x.reshape(-1)[begin:end]
    held = region.split_into_chunks(flat)
    assert [int(v) for h in held for v in h.values.reshape(-1)] == flat.tolist()
    for h in held:
        assert torch.equal(x[tuple(slice(a, a + n) for a, n in zip(h.start, h.values.shape, strict=True))], h.values)
    assert len(list(split_flat_range_into_chunks(tuple(shape), begin, end))) <= max(2 * len(shape) - 1, 1)


Piece = tuple[tuple[int, int], tuple[int, int]]
PIECES = st.tuples(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.tuples(st.integers(1, 4), st.integers(1, 4)))


@given(PIECES, st.lists(PIECES, max_size=4))
def test_subtract_chunks_leaves_uncovered_elements(piece: Piece, others: list[Piece]) -> None:
    def numbers(one: Any) -> set[tuple[int, int]]:
        (a, b), (n, m) = one
        return {(i, j) for i in range(a, a + n) for j in range(b, b + m)}

    left = list(subtract_chunks(piece, others))
    assert set().union(*map(numbers, left)) == numbers(piece).difference(*map(numbers, others))
    assert sum(len(numbers(each)) for each in left) == len(set().union(*map(numbers, left)))
    for other in others:
        common = intersect_chunks(piece, other)
        assert (numbers(common) if common else set()) == numbers(piece) & numbers(other)


@pytest.mark.parametrize("overlaps", [False, True])
def test_replicated_elements_are_written_once(overlaps: bool) -> None:
    """Pairs of ranks replicate KV heads, or flat ranges overlap."""
    full = torch.arange(60.0).view(6, 10)

    def do(context: ParallelContext) -> torch.Tensor:
        rank = context.tensor.rank
        if overlaps:
            region = LocalTensorRegion((6, 10), None, {}, slice(0, 60 - 7 * rank))
            x = full.reshape(-1)[: 60 - 7 * rank]
        else:
            split = Split((((0, 3),), ((0, 3),), ((3, 6),), ((2, 6),)))
            spec = ShardSpec((6, 10), {0: split})
            region, x = LocalTensorRegion((6, 10), spec, context.coords), spec.slice_full_tensor(full, context.coords)
        x = full.reshape(-1)[region.flat_range] if overlaps else region.spec.slice_full_tensor(full, context.coords)  # type: ignore[union-attr]
        item = region.make_tensor_item("x", x)
        count = torch.zeros(6, 10)
        for (_, start, size), pieces in assign_chunks_to_write([item], context.tensor).items():
            for piece in pieces:
                assert intersect_chunks(piece, (start, size)) == piece
                count[tuple(slice(a, a + n) for a, n in zip(*piece, strict=True))] += 1
        return count

    found = run_as_threads(do, tensor=4)
    assert bool((torch.stack(found).sum(0) == 1).all())


def test_writes_of_replicated_tensors_are_balanced() -> None:
    def do(context: ParallelContext) -> int:
        items = [
            LocalTensorRegion((n, 3), None, {}).make_tensor_item(f"x{n}", torch.zeros(n, 3)) for n in (8, 5, 4, 3, 2)
        ]
        mine = assign_chunks_to_write([*items, CheckpointTensor("none", (0, 3), torch.float32, [])], context.data)
        return sum(math.prod(size) for pieces in mine.values() for _, size in pieces)

    assert run_as_threads(do, data=3) == [24, 21, 21]
