"""Which algorithm fits is asked of the backend of the device in use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardformer.mesh.processes import ProcessGroupTransport


@pytest.mark.parametrize(
    ("configuration", "gloo", "nccl"),
    [
        ("cpu:gloo,cuda:nccl", {"cpu"}, {"cuda"}),
        ("cuda:nccl", {"cpu"}, {"cuda"}),
        ("cpu:gloo,cuda:gloo", {"cpu", "cuda"}, set()),
    ],
)
def test_a_group_of_two_backends_has_one_for_each_device(
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
    transport = ProcessGroupTransport(group)

    class On:
        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    devices = {"cpu", "cuda"}
    assert {d for d in devices if transport.exchanges_directly(On(d))} == gloo  # type: ignore[arg-type]
    assert {d for d in devices if transport.sends_in_turn(torch.device(d))} == nccl
