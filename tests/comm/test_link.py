"""Copies between device and host are correct, ordered and asynchronous."""

from __future__ import annotations

import time
import weakref

import pytest
import torch

from shardformer.offload.host import DEVICE_TO_HOST, HOST_TO_DEVICE, HostDeviceCopier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_tensors_are_restored(device: str) -> None:
    link = HostDeviceCopier(torch.device(device))
    x = torch.randn(1000, device=device)
    host, back = link.allocate_on_host(1000, torch.float32), torch.empty(1000, device=device)
    assert torch.equal(link.start_copy_to_host(host, x).synchronize(), x.cpu())
    assert torch.equal(link.start_copy_to_device(back, host).wait(), x)
    torch.accelerator.synchronize() if device == "cuda" else None
    assert all((link.get_measured_bandwidth(way) or 0) > 0 for way in (DEVICE_TO_HOST, HOST_TO_DEVICE))


def test_copies_in_one_direction_run_in_order() -> None:
    link, host = HostDeviceCopier(torch.device("cpu"), bandwidth=1e6), torch.empty(1000)
    copies = [link.start_copy_to_host(host, torch.full((1000,), float(n))) for n in range(5)]
    assert float(copies[-1].synchronize()[0]) == 4
    assert [copied.num_bytes for copied in link.log] == [4000] * 5


def test_source_is_kept_until_copied() -> None:
    link, x = HostDeviceCopier(torch.device("cpu"), bandwidth=40_000.0), torch.ones(1000)
    copy, held = link.start_copy_to_host(torch.empty(1000), x), weakref.ref(x.untyped_storage())
    storage = held()
    assert storage is not None and torch._C._storage_Use_Count(storage._cdata) > 2
    copy.synchronize()
    assert torch._C._storage_Use_Count(storage._cdata) == 2


def test_copy_does_not_block() -> None:
    link = HostDeviceCopier(torch.device("cpu"), bandwidth=40_000.0)
    begin = time.perf_counter()
    copy = link.start_copy_to_host(torch.empty(1000), torch.ones(1000))
    begun = time.perf_counter() - begin
    copy.synchronize()
    assert begun < 0.05 <= time.perf_counter() - begin
