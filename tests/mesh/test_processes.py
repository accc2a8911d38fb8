"""Algorithms depend on the backend of the tensor's device, and gloo stages GPU tensors on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardformer.comm.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
    start_all_gather_into_tensor,
    start_all_to_all,
    start_inplace_all_reduce,
)
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh import parallel_context
from shardformer.mesh import parallel_context as processes
from shardformer.mesh.parallel_context import ParallelContext, ProcessGroupTransport
from shardformer.pipeline.p2p_communication import PointToPointCommunicator


@pytest.mark.parametrize(
    ("configuration", "gloo", "nccl"),
    [
        ("cpu:gloo,cuda:nccl", {"cpu"}, {"cuda"}),
        ("cuda:nccl", {"cpu"}, {"cuda"}),
        ("cpu:gloo,cuda:gloo", {"cpu", "cuda"}, set()),
    ],
)
def test_group_with_one_backend_per_device(
    configuration: str, gloo: set[str], nccl: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = object()
    for name, value in {
        "get_rank": lambda: 1,
        "get_process_group_ranks": lambda _: [0, 1],
        "get_backend": lambda _: configuration,
        "get_backend_config": lambda _: configuration,
    }.items():
        monkeypatch.setattr(dist, name, value)
    monkeypatch.setattr(processes, "get_default_store", lambda: None)
    monkeypatch.setattr(processes, "get_deadlock_monitor", lambda store, rank: SimpleNamespace(carriers=[]))
    transport = ProcessGroupTransport(group)

    class On:
        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    devices = {"cpu", "cuda"}
    assert {d for d in devices if transport.is_direct_exchange_faster(On(d))} == gloo  # type: ignore[arg-type]
    assert {d for d in devices if transport.has_serialized_sends(torch.device(d))} == nccl


class OfAGpu:
    """While entered, tensors count as GPU tensors, except for the host copies of a transport."""

    def __init__(self) -> None:
        self.copies: list[torch.Tensor] = []

    def __enter__(self) -> OfAGpu:
        self.before = (
            parallel_context._copy_to_host,
            parallel_context._allocate_host_buffer,
            ProcessGroupTransport._needs_host_staging,
        )
        copied, on_host, _ = self.before
        parallel_context._copy_to_host = lambda x: self._kept(copied(x))
        parallel_context._allocate_host_buffer = lambda x: self._kept(on_host(x))
        ProcessGroupTransport._needs_host_staging = lambda _, x: not any(x is copy for copy in self.copies)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        (
            parallel_context._copy_to_host,
            parallel_context._allocate_host_buffer,
            ProcessGroupTransport._needs_host_staging,
        ) = self.before  # type: ignore[method-assign]

    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        self.copies.append(x)
        return x


def collectives(*, staged: bool) -> tuple[list[torch.Tensor], int]:
    """Return the results of each kind of collective on this rank, and the number of host copies."""
    context = ParallelContext.from_default_process_group({"pipe": 2})
    axis, mine = context.pipe, 1.0 + context.rank
    if not staged:
        return _collectives(context, axis, mine), 0
    with OfAGpu() as gpu:
        return _collectives(context, axis, mine), len(gpu.copies)


def _collectives(context: ParallelContext, axis: Any, mine: float) -> list[torch.Tensor]:
    other = 1 - axis.rank
    link, arriving = PointToPointCommunicator(context), torch.empty(5)
    received = link.receive(arriving, other, "test")
    sent = link.send(torch.full((5,), mine), other, "test")
    large = torch.arange(300_000.0) * mine
    out = torch.empty(6)
    return [
        all_reduce(torch.arange(6.0) * mine, axis),
        all_reduce(torch.arange(6.0) * mine, axis, op="max"),
        start_inplace_all_reduce(large, axis, "test").wait(),
        all_gather(torch.full((2, 4 - axis.rank), mine), axis, 1, 7),
        reduce_scatter(torch.arange(14.0).view(2, 7) * mine, axis, 1),
        start_all_gather_into_tensor(out, torch.full((3,), mine), axis, "test").wait(),
        start_all_to_all([torch.full((2,), mine), torch.full((2,), -mine)], [2, 2], axis, "test").wait(),
        broadcast(torch.full((4,), mine), axis, 1),
        received.wait(),
        sent.wait(),
    ]


def test_gpu_tensors_over_gloo_are_staged_on_host(pool2: WorkerPool) -> None:
    direct = pool2.run(collectives, staged=False)
    staged = pool2.run(collectives, staged=True)
    for (ours, copies), (theirs, _) in zip(staged, direct, strict=True):
        assert copies >= len(ours)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
