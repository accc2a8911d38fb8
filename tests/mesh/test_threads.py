"""The transport between threads: same collectives as processes, and an error instead of an endless wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardformer.comm.collectives import (
    all_gather,
    all_gather_objects,
    all_reduce,
    broadcast,
    broadcast_object,
    reduce_scatter,
)
from shardformer.local_ranks.threads import ThreadTransport, run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.mesh.transport import CollectiveAnnouncement
from shardformer.pipeline.p2p_communication import PointToPointCommunicator


@pytest.mark.parametrize("direct", [True, False], ids=["exchange", "own"])
@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size: int, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exchanges as over gloo, and with gathers and scatters of equal shards as over NCCL."""
    monkeypatch.setattr(ThreadTransport, "is_direct_exchange_faster", lambda self, x: direct)
    rows = torch.arange(7.0 * size).view(size, 7)

    def collect(context: ParallelContext) -> list[Any]:
        axis = context.tensor
        mine = rows[axis.rank]
        uneven = rows.T[: size + 1].tensor_split(size)[axis.rank]
        return [
            all_reduce(mine.clone(), axis),
            all_reduce(mine.clone(), axis, op="max"),
            all_gather(mine[None], axis, 0),
            all_gather(uneven, axis, 0, size + 1),
            broadcast(mine.clone(), axis, 1),
            all_gather_objects(axis.rank, axis),
            broadcast_object(axis.rank, axis, 1),
            reduce_scatter(rows.T.contiguous(), axis, 0),
        ]

    found = run_as_threads(collect, tensor=size)
    whole = [rows.sum(0), rows.amax(0), rows, rows.T[: size + 1], rows[1], list(range(size)), 1]
    for *alike, _ in found:
        for value, expected in zip(alike, whole, strict=True):
            assert torch.equal(value, expected) if isinstance(expected, Tensor) else value == expected
    assert torch.equal(torch.cat([stretch for *_, stretch in found]), size * rows.T)


def test_messages_arrive_in_order() -> None:
    def talk(context: ParallelContext) -> list[float]:
        wires, rank = PointToPointCommunicator(context), context.pipe.rank
        arriving = [torch.empty(2) for _ in range(3)]
        works = [wires.receive(x, 1 - rank, "activation") for x in arriving]
        x = torch.empty(2)
        for i in range(3):
            wires.send(x.fill_(10 * rank + i), 1 - rank, "activation")  # the tensor may change after the send
        return [float(work.wait()[0]) for work in works]

    assert run_as_threads(talk, pipe=2) == [[10, 11, 12], [0, 1, 2]]


@pytest.mark.parametrize("in_turn", [False, True])
def test_each_direction_has_a_transport_if_sends_run_in_turn(in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadTransport, "has_serialized_sends", lambda self, device: in_turn)

    def talk(context: ParallelContext) -> tuple[float, int]:
        wires, rank = PointToPointCommunicator(context), context.pipe.rank
        work = wires.receive(torch.empty(1), 1 - rank, "activation")
        wires.send(torch.full((1,), float(rank)), 1 - rank, "activation")
        return float(work.wait()), len(set(wires._transports.values()))

    assert run_as_threads(talk, pipe=2) == [(1.0, 1 + in_turn), (0.0, 1 + in_turn)]


def test_missing_ranks_of_a_call_are_reported() -> None:
    def meet(context: ParallelContext) -> list[int]:
        return (
            [*context.data.transport.announce_collective("supper", wait=True).missing] if context.data.rank != 1 else []
        )

    assert run_as_threads(meet, data=3) == [[1], [], [1]]
    calls = run_as_threads(
        lambda c: c.data.transport.announce_collective(f"{c.data.rank % 2}", wait=True).calls, data=3
    )
    assert (
        calls
        == [
            [CollectiveAnnouncement("0", False), CollectiveAnnouncement("1", False), CollectiveAnnouncement("0", False)]
        ]
        * 3
    )


def test_flattened_axis_has_separate_messages() -> None:
    def collect(context: ParallelContext) -> list[list[int]]:
        both = context.flatten("data", "tensor")
        assert context.flatten("data", "tensor") is both
        return [all_gather_objects(context.rank, axis) for axis in (both, context.tensor, both, context.data)]

    assert run_as_threads(collect, data=2, tensor=2)[2] == [[0, 1, 2, 3], [2, 3], [0, 1, 2, 3], [0, 2]]
