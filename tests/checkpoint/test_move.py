"""Tensors that move between ranks: all elements arrive, and only missing elements are sent."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardformer.checkpoint import reshard_in_memory as move
from shardformer.checkpoint.chunks import (
    CheckpointTensor,
    ChunkBounds,
    LocalTensorChunk,
    LocalTensorRegion,
    intersect_chunks,
    subtract_chunks,
)
from shardformer.checkpoint.reshard_in_memory import (
    CheckpointTensorMetadata,
    ChunkTransfer,
    ReshardStats,
    StoredAndRequestedTensors,
    batch_transfers,
    order_sends_and_receives,
    plan_chunk_transfers,
    redistribute_tensors_across_ranks,
)
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError
from shardformer.layout.shard_spec import EvenSplit, ShardSpec, Split, get_even_split_bounds
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext

MANY = settings(deadline=None, max_examples=50)
CHUNKS = st.sampled_from([1, 7, 32, move.TRANSFER_BYTES])

Pieces = list[ChunkBounds]


def part_of(full: Tensor, piece: ChunkBounds) -> Tensor:
    return full[tuple(slice(a, a + n) for a, n in zip(*piece, strict=True))]


def numbered(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1, prod(shape) + 1).reshape(tuple(shape)).to(dtype)


def item_of(name: str, full: Tensor, pieces: Pieces) -> CheckpointTensor:
    """Return an item with chunks in separate memory, noncontiguous if they have several dimensions."""
    held = []
    for start, size in pieces:
        memory = torch.empty(size[::-1], dtype=full.dtype).permute(tuple(reversed(range(len(size)))))
        held.append(LocalTensorChunk(start, memory.copy_(part_of(full, (start, size)))))
    return CheckpointTensor(name, tuple(full.shape), full.dtype, held)


def moved(
    have: Sequence[Sequence[CheckpointTensor]],
    want: Sequence[Sequence[CheckpointTensor]],
    chunk_bytes: int = move.TRANSFER_BYTES,
) -> list[ReshardStats]:
    """Exchange items between as many threads as ranks, and record the transfers."""

    def do(context: ParallelContext) -> ReshardStats:
        rank = context.data.rank
        with CollectiveRecorder(context) as recorder:
            found = redistribute_tensors_across_ranks(
                have[rank], want[rank], context.data, max_message_bytes=chunk_bytes
            )
        assert recorder.wire_bytes("send", purpose="move") == recorder.wire_bytes() == found.sent
        return found

    return run_as_threads(do, data=len(have))


def mask_of(shape: Sequence[int], pieces: Pieces) -> Tensor:
    mask = torch.zeros(tuple(shape), dtype=torch.bool)
    for piece in pieces:
        part_of(mask, piece).fill_(True)
    return mask


def test_docstring_examples() -> None:
    assert doctest.testmod(move).failed == 0


# ------------------------------------------------------------------------------------------- any pieces, any ranks


@st.composite
def pieces_of(draw: Any, shape: tuple[int, ...]) -> Pieces:
    """Draw disjoint chunks of a grid, some of them empty."""
    grid = []
    for n in shape:
        cuts = sorted([0, n, *draw(st.lists(st.integers(0, n), max_size=2))])
        grid.append([(a, b - a) for a, b in pairwise(cuts)])
    cells = [(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in product(*grid)]
    return [cell for cell in cells if draw(st.booleans())]


@st.composite
def cases(draw: Any) -> tuple[list[tuple[int, ...]], list[list[Pieces]], list[list[Pieces]]]:
    """Draw tensor shapes, and source and target chunks of each rank, such that each element has an owner."""
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=3))
    ranks = range(draw(st.integers(1, 4)))
    have = [[draw(pieces_of(shape)) for shape in shapes] for _ in ranks]
    want = [[draw(pieces_of(shape)) for shape in shapes] for _ in ranks]
    for i, shape in enumerate(shapes):
        held = [piece for each in have for piece in each[i] if prod(piece[1])]
        if prod(shape):
            have[draw(st.sampled_from(ranks))][i] += subtract_chunks(((0,) * len(shape), shape), held)
    return shapes, have, want


@MANY
@given(cases(), CHUNKS)
def test_all_elements_arrive_and_only_missing_ones_are_sent(case: Any, chunk_bytes: int) -> None:
    shapes, have, want = case
    full = [numbered(shape) for shape in shapes]

    def items(of: list[list[Pieces]], values: list[Tensor]) -> list[list[CheckpointTensor]]:
        return [[item_of(f"x{i}", x, each[i]) for i, x in enumerate(values)] for each in of]

    wanted = items(want, [torch.zeros_like(x) for x in full])
    found = moved(items(have, full), wanted, chunk_bytes)
    for rank, each in enumerate(wanted):
        for x, item in zip(full, each, strict=True):
            for chunk in item.chunks:
                assert torch.equal(chunk.values, part_of(x, (chunk.start, tuple(chunk.values.shape))))
        masks = [(mask_of(s, h), mask_of(s, w)) for s, h, w in zip(shapes, have[rank], want[rank], strict=True)]
        assert found[rank].received == 4 * sum(int((w & ~h).sum()) for h, w in masks)
        assert found[rank].copied == 4 * sum(int((w & h).sum()) for h, w in masks)
    assert sum(each.sent for each in found) == sum(each.received for each in found)


# ----------------------------------------------------------------------------------------------- layouts of a grid


@st.composite
def layouts(draw: Any, shape: tuple[int, ...], axes: dict[str, int]) -> ShardSpec:
    """Draw specs whose axes shard a dimension or none: evenly, nested, fused or with shared shards."""
    cut: dict[int, list[Any]] = {}
    for axis, ranks in axes.items():
        dim = draw(st.sampled_from([None, *range(len(shape))]))
        if dim is None:
            continue
        if dim in cut:
            cut[dim].append(EvenSplit(axis, ranks))
            continue
        kind, n = draw(st.sampled_from(["even", "fused", "shared"])), shape[dim]
        at = draw(st.integers(0, n))
        if kind == "shared" and ranks > 1:
            split = Split((((0, n),), *(((0, at),) if r % 2 else ((at, n),) for r in range(1, ranks))), (axis,))
        else:
            split = (Split.even(n, ranks) if kind == "even" else Split.fused([at, n - at], ranks)).with_axis(axis)
        cut[dim] = [split]
    return ShardSpec(shape, cut)


@st.composite
def changes(draw: Any) -> tuple[dict[str, int], ShardSpec, ShardSpec]:
    sizes = draw(st.sampled_from([{"tensor": 2}, {"tensor": 4}, {"tensor": 2, "data": 2}, {"tensor": 3}]))
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    return sizes, draw(layouts(shape, sizes)), draw(layouts(shape, sizes))


@MANY
@given(changes(), CHUNKS)
def test_rank_receives_only_elements_it_does_not_store(change: Any, chunk_bytes: int) -> None:
    sizes, old, new = change
    full = numbered(old.shape, torch.int64)

    def do(context: ParallelContext) -> tuple[ReshardStats, dict[str, int]]:
        x = torch.zeros(new.get_local_shape(context.coords), dtype=torch.int64)
        have = LocalTensorRegion(old.shape, old, context.coords).make_tensor_item(
            "x", old.slice_full_tensor(full, context.coords)
        )
        want = LocalTensorRegion(new.shape, new, context.coords).make_tensor_item("x", x)
        found = redistribute_tensors_across_ranks(
            [have], [want], context.flatten("data", "tensor"), max_message_bytes=chunk_bytes
        )
        assert torch.equal(x, new.slice_full_tensor(full, context.coords))
        return found, context.coords

    for found, coords in run_as_threads(do, **sizes):
        mine, before = (set(spec.slice_full_tensor(full, coords).flatten().tolist()) for spec in (new, old))
        assert found.received + found.copied == 8 * len(mine)
        if old.stores_each_element_once or set(old.axes) <= set(new.axes):
            assert found.copied == 8 * len(mine & before)


def stretches(shape: tuple[int, ...], ranks: int, rank: int) -> LocalTensorRegion:
    bounds = get_even_split_bounds(prod(shape), ranks)
    return LocalTensorRegion(shape, None, {}, slice(bounds[rank], bounds[rank + 1]))


@pytest.mark.parametrize("chunk_bytes", [1, 5, 100])
def test_flat_ranges_move_from_four_to_three_ranks(chunk_bytes: int) -> None:
    full = {
        "a": numbered((7, 5)),
        "b": numbered((3, 1, 11), torch.bfloat16),
        "c": numbered((13,), torch.complex128),
        "d": torch.arange(9) % 2 == 0,
        "e": torch.tensor(3.5, dtype=torch.float64),
        "f": torch.empty(0, 3),
    }

    def items(ranks: int, rank: int, values: dict[str, Tensor]) -> list[CheckpointTensor]:
        found = []
        for name, x in values.items():
            region = stretches(tuple(x.shape), ranks, rank)
            found.append(region.make_tensor_item(name, x.reshape(-1)[region.flat_range]))
        return found

    new = [{name: torch.zeros_like(x) for name, x in full.items()} for _ in range(4)]
    have = [items(4, rank, full) for rank in range(4)]
    want = [items(3, rank, new[rank]) if rank < 3 else [] for rank in range(4)]
    found = moved(have, want, chunk_bytes)
    for name, x in full.items():
        joined = torch.stack([each[name] for each in new])
        assert torch.equal(joined.any(0) if x.dtype == torch.bool else joined.sum(0), x)
    assert found[3].received == found[3].copied == 0 < found[3].sent


# -------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("held", "wanted", "width"),
    [
        (torch.float32, torch.bfloat16, 2),
        (torch.bfloat16, torch.float32, 2),
        (torch.float16, torch.bfloat16, 2),
        (torch.float64, torch.float32, 4),
        (torch.bool, torch.float32, 1),
        (torch.int64, torch.float32, 4),
    ],
    ids=str,
)
def test_transfer_uses_narrower_dtype(held: torch.dtype, wanted: torch.dtype, width: int) -> None:
    full = (torch.randn(5, 3, generator=torch.Generator().manual_seed(0)) * 9).to(held)
    new = torch.zeros(5, 3, dtype=wanted)
    (sender, receiver) = moved(
        [[item_of("x", full, [((0, 0), (5, 3))])], [item_of("x", full, [((0, 0), (1, 3))])]],
        [[], [CheckpointTensor("x", (5, 3), wanted, [LocalTensorChunk((0, 0), new)])]],
        chunk_bytes=10,
    )
    assert torch.equal(new, full.to(wanted))
    assert (sender.sent, receiver.received, receiver.copied) == (12 * width, 12 * width, 3 * width)


def test_element_wanted_twice_is_sent_once_in_wider_dtype() -> None:
    """A parameter in bf16 and part of its fp32 master weights."""
    full = torch.randn(10, generator=torch.Generator().manual_seed(0))
    weight, master = torch.zeros(10, dtype=torch.bfloat16), torch.zeros(4)
    want = [CheckpointTensor("x", (10,), x.dtype, [LocalTensorChunk((at,), x)]) for at, x in ((0, weight), (3, master))]
    _, found = moved([[item_of("x", full, [((0,), (10,))])], []], [[], want])
    assert torch.equal(weight, full.bfloat16()) and torch.equal(master, full[3:7])
    assert found == ReshardStats(0, 4 * 4 + 6 * 2, 0)


def test_wider_of_two_copies_is_sent() -> None:
    full = torch.randn(10, generator=torch.Generator().manual_seed(0))
    have = [item_of("x", full.bfloat16(), [((0,), (10,))]), item_of("x", full, [((3,), (4,))])]
    new = torch.zeros(10)
    _, found = moved([have, []], [[], [CheckpointTensor("x", (10,), torch.float32, [LocalTensorChunk((0,), new)])]])
    assert torch.equal(new, torch.cat([full[:3].bfloat16().float(), full[3:7], full[7:].bfloat16().float()]))
    assert found.received == 4 * 4 + 6 * 2


def test_single_rank_copies_into_training_parameters() -> None:
    full, param = numbered((4, 6)), nn.Parameter(torch.zeros(4, 3))
    found = moved(
        [[item_of("x", full, [((0, 0), (4, 6))])]],
        [[CheckpointTensor("x", (4, 6), torch.float32, [LocalTensorChunk((0, 2), param)])]],
    )
    assert found == [ReshardStats(0, 0, 48)]
    assert torch.equal(param, full[:, 2:5]) and param.is_leaf


# ------------------------------------------------------------------------------------------- who sends, and in what


def whole(name: str, shape: tuple[int, ...]) -> CheckpointTensorMetadata:
    return CheckpointTensorMetadata(name, shape, torch.float32, [((0,) * len(shape), shape)])


def sent_by(said: Sequence[StoredAndRequestedTensors]) -> list[int]:
    sent = [0] * len(said)
    for send in plan_chunk_transfers(said):
        if send.source_rank != send.target_rank:
            sent[send.source_rank] += send.num_bytes
    return sent


def test_owners_balance_bytes_sent() -> None:
    names = {f"x{i}": (n, 5) for i, n in enumerate((9, 5, 4, 3, 3))}
    owner = StoredAndRequestedTensors([whole(name, shape) for name, shape in names.items()], [])
    taker = StoredAndRequestedTensors([], owner.stored)
    assert sorted(sent_by([owner, taker, owner, owner])) == [0, 7 * 20, 8 * 20, 9 * 20]
    assert sent_by([taker, owner, taker]) == [0, 2 * 24 * 20, 0]


def test_sole_owner_sends_less_of_shared_chunks() -> None:
    alone, both = whole("a", (10, 1)), [whole(f"b{n}", (5, 1)) for n in range(2)]
    assert sent_by(
        [
            StoredAndRequestedTensors([alone, *both], []),
            StoredAndRequestedTensors(both, []),
            StoredAndRequestedTensors([], [alone, *both]),
        ]
    ) == [
        40,
        40,
        0,
    ]


def test_plan_is_independent_of_name_order() -> None:
    names = [whole(f"x{n}", (n % 3 + 1, 4)) for n in range(12)]
    there = [
        StoredAndRequestedTensors(names, []),
        StoredAndRequestedTensors(names[::-1], []),
        StoredAndRequestedTensors([], names[::-1]),
    ]
    again = [
        StoredAndRequestedTensors(names[::-1], []),
        StoredAndRequestedTensors(names, []),
        StoredAndRequestedTensors([], names),
    ]
    assert set(plan_chunk_transfers(there)) == set(plan_chunk_transfers(again))


def test_small_transfers_share_one_message() -> None:
    full = [numbered((8, 3)), numbered((8, 2), torch.bfloat16)]
    rows = [[((4 * r, 0), (4, x.shape[1])) for r in range(2)] for x in full]
    have = [[item_of(f"x{i}", x, [rows[i][r]]) for i, x in enumerate(full)] for r in range(2)]
    want = [[item_of(f"x{i}", torch.zeros_like(x), [rows[i][1 - r]]) for i, x in enumerate(full)] for r in range(2)]

    def do(context: ParallelContext) -> tuple[int, int]:
        with CollectiveRecorder(context) as recorder:
            redistribute_tensors_across_ranks(have[context.data.rank], want[context.data.rank], context.data)
        return recorder.count("send", purpose="move"), recorder.wire_bytes()

    assert run_as_threads(do, data=2) == [(1, 12 * 4 + 8 * 2)] * 2


@given(
    st.lists(st.tuples(st.sampled_from([torch.float32, torch.bool, torch.complex128]), st.integers(1, 30)), max_size=4),
    st.integers(1, 100),
)
def test_messages_contain_each_element_once_and_are_full(
    sends: list[tuple[torch.dtype, int]], chunk_bytes: int
) -> None:
    given = [ChunkTransfer(f"x{i}", (2, 1), (n, 3), dtype, 0, 1) for i, (dtype, n) in enumerate(sends)]
    found = list(batch_transfers(given, chunk_bytes))
    count = {send.name: torch.zeros(40, 5) for send in given}
    for chunk in found:
        at = 0
        for send in chunk:
            part_of(count[send.name], (send.start, send.size)).add_(1)
            assert at % send.dtype.itemsize == 0
            at += send.num_bytes
        assert at <= chunk_bytes or sum(prod(send.size) for send in chunk) == 1
    for send in given:
        assert torch.equal(count.pop(send.name), mask_of((40, 5), [(send.start, send.size)]).float())
    total = sum(send.num_bytes for send in given)
    assert len(found) <= 2 * -(-total // chunk_bytes)


@pytest.mark.parametrize("size", range(1, 10))
def test_message_order_cannot_deadlock(size: int) -> None:
    """Simulate NCCL: each rank runs its messages in order, and a message needs both ends."""
    waiting = [list(order_sends_and_receives(rank, size)) for rank in range(size)]
    assert all(len(each) == 2 * (size - 1) == len(set(each)) for each in waiting)
    while any(waiting):
        ready = [
            (rank, peer)
            for rank, each in enumerate(waiting)
            for peer, sends in each[:1]
            if sends and waiting[peer][0] == (rank, False)
        ]
        assert ready, waiting
        for rank, peer in ready:
            del waiting[rank][0], waiting[peer][0]


def test_planning_time_grows_with_number_of_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing all pairs of chunks individually would take 16 times as long for 64 ranks as for 16."""
    calls = 0

    def counted(one: ChunkBounds, other: ChunkBounds) -> ChunkBounds | None:
        nonlocal calls
        calls += 1
        return intersect_chunks(one, other)

    def cost(ranks: int, tensors: int) -> int:
        nonlocal calls
        calls, pieces = 0, [((a,), (b - a,)) for a, b in pairwise(get_even_split_bounds(1000, ranks))]
        names = [f"x{i}" for i in range(tensors)]
        have, want = (
            [[CheckpointTensorMetadata(name, (1000,), torch.float32, [piece]) for name in names] for piece in each]
            for each in (pieces, [*pieces[1:], pieces[0]])
        )
        assert len(list(plan_chunk_transfers(list(map(StoredAndRequestedTensors, have, want))))) == ranks * tensors
        return calls

    monkeypatch.setattr(move, "intersect_chunks", counted)
    assert cost(64, 3) <= 5 * cost(16, 3) + 64
    assert cost(16, 12) == 4 * cost(16, 3)


# ----------------------------------------------------------------------------------------------------- refusals


Asked = Callable[[int, Tensor], tuple[list[CheckpointTensor], list[CheckpointTensor]]]


def no_such_name(rank: int, x: Tensor) -> tuple[list[CheckpointTensor], list[CheckpointTensor]]:
    return [item_of("layer.weight", x, [((0, 0), (4, 6))])], [
        CheckpointTensor("layer.weihgt", (4, 6), x.dtype, [])
    ] if rank else []


def a_missing_part(rank: int, x: Tensor) -> tuple[list[CheckpointTensor], list[CheckpointTensor]]:
    have = [item_of("x", x, [((2 * min(rank, 1), 0), (2, 5 if rank else 6))])]
    return have, [item_of("x", torch.zeros_like(x), [((0, 2), (4, 4))])] if rank else []


def another_shape(rank: int, x: Tensor) -> tuple[list[CheckpointTensor], list[CheckpointTensor]]:
    new = torch.zeros(6, 4) if rank else torch.zeros(4, 6)
    return [item_of("x", x, [((0, 0), (4, 6))])], [item_of("x", new, [((0, 0), tuple(new.shape))])]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (no_such_name, r"Rank 1 requests layer.weihgt, but no rank stores it\. Did you mean 'layer.weight'\?"),
        (a_missing_part, r"Rank 1 requests the chunk of shape \[2, 1\] at \[2, 5\] of x, but no rank stores it"),
        (another_shape, r"x has the shape \(4, 6\) on rank 0, but the shape \(6, 4\) on rank 1\. "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_invalid_request_raises_on_all_ranks_before_transfer(asked: Asked, message: str) -> None:
    def do(context: ParallelContext) -> str:
        have, want = asked(context.data.rank, numbered((4, 6)))
        with CollectiveRecorder(context) as recorder, pytest.raises(ConfigError, match=message) as raised:
            redistribute_tensors_across_ranks(have, want, context.data)
        assert recorder.calls == []
        assert all(not chunk.values.any() for item in want for chunk in item.chunks)
        return str(raised.value)

    assert len(set(run_as_threads(do, data=3))) == 1


# ---------------------------------------------------------------------------------------------------- processes


def rows_become_columns(chunk_bytes: int) -> ReshardStats:
    context = ParallelContext.from_default_process_group({"tensor": 2, "data": None})
    world = context.flatten("data", "tensor")
    full = {f"x{i}": torch.randn(7, 9 + i, generator=torch.Generator().manual_seed(i)) for i in range(3)}
    have, want, new = [], [], {}
    for name, x in full.items():
        old = ShardSpec(x.shape, {0: [Split.even(7, 2), EvenSplit("data", context.data.size)]})
        spec = ShardSpec(x.shape, {1: Split.even(x.shape[1], 2)})
        new[name] = spec, torch.zeros(spec.get_local_shape(context.coords), dtype=torch.bfloat16)
        have.append(
            LocalTensorRegion(old.shape, old, context.coords).make_tensor_item(
                name, old.slice_full_tensor(x, context.coords)
            )
        )
        want.append(LocalTensorRegion(spec.shape, spec, context.coords).make_tensor_item(name, new[name][1]))
    with CollectiveRecorder(context) as recorder:
        found = redistribute_tensors_across_ranks(have, want, world, max_message_bytes=chunk_bytes)
    assert recorder.wire_bytes("send", purpose="move") == found.sent
    for name, (spec, values) in new.items():
        assert torch.equal(values, spec.slice_full_tensor(full[name].bfloat16(), context.coords))
    with pytest.raises(ConfigError, match="Rank 1 requests y, but no rank stores it"):
        redistribute_tensors_across_ranks(
            have, [LocalTensorRegion((1,), None, {}).make_tensor_item("y", torch.zeros(1))] if world.rank else [], world
        )
    return found


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("chunk_bytes", [20, move.TRANSFER_BYTES])
def test_processes_and_threads_transfer_the_same(pool4: WorkerPool, chunk_bytes: int) -> None:
    found = pool4.run(rows_become_columns, chunk_bytes)
    held = [(2, 0), (2, 1), (2, 0), (1, 1)]  # (rows, half of the columns)
    widths = [(5, 4), (5, 5), (6, 5)]
    assert [each.copied for each in found] == [sum(2 * rows * pair[half] for pair in widths) for rows, half in held]
    assert [each.received for each in found] == [
        sum(2 * (7 - rows) * pair[half] for pair in widths) for rows, half in held
    ]
    assert sum(each.sent for each in found) == sum(each.received for each in found)


def test_two_processes_exchange_in_both_directions(pool2: WorkerPool) -> None:
    assert [each.sent for each in pool2.run(rows_become_columns, 64)] == [2 * 4 * 14, 2 * 3 * 16]
