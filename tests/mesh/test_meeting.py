"""Missing processes are reported while the others wait for them."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from shardformer.mesh import init_distributed, parallel_context
from shardformer.mesh import rank_failures as meeting
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.mesh.rank_failures import LostPeerError, Rendezvous
from shardformer.mesh.rank_grid import RankGrid


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SAY_AFTER_S", 1.0)
    monkeypatch.setattr(meeting, "MARK_AFTER_S", 0.1)
    monkeypatch.setattr(meeting, "AGAIN_S", 0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_first_rank_prints_missing_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=5), wait_for_workers=False)

    def come(place: int) -> None:
        with Rendezvous("127.0.0.1", port, place, 4, "rank").report_missing_processes():
            time.sleep(1.8)

    threads = [threading.Thread(target=come, args=[place]) for place in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = capfd.readouterr().err
    assert said.count(f"has waited for 1 s at 127.0.0.1:{port} for ranks 1, 3 of 4. ") == 1
    del store


def test_connection_error_names_missing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=5), wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with (
        pytest.raises(
            LostPeerError, match=r"(?s)Rank 0 could not connect to rank 1 of 2 .*timeout_s=0\.5.*keys: /?nobody"
        ),
        init_distributed._report_missing_ranks(0, 2, 0.5),
    ):
        store.wait(["nobody"], timedelta(seconds=0.5))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "host"), [(1, "127.0.0.1"), (0, "127.0.0.1"), (1, "no.such.host.invalid")])
def test_unreachable_address_is_printed_with_reason(place: int, host: str, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with Rendezvous(host, port, place, 2, "node").report_missing_processes():
        time.sleep(2.5)
    said = capfd.readouterr().err
    assert f"node {place} (" in said and f"could not connect to node 0 at {host}:{port}" in said
    assert (
        "Connection refused" if host == "127.0.0.1" else "not known" if "not known" in said else "resolution"
    ) in said


def test_nothing_is_printed_when_all_ranks_connect(capfd: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    with Rendezvous("127.0.0.1", free_port(), 1, 2, "rank").report_missing_processes():
        pass
    assert time.monotonic() - begin < 0.5 and not capfd.readouterr().err


def test_tensor_axis_across_hosts_warns() -> None:
    grid = RankGrid({"data": 1, "pipe": 1, "sequence": 1, "tensor": 4}, (0, 1, 2, 3), hosts=("a", "a", "b", "b"))
    context = ParallelContext(grid, 0, {}, parallel_context.get_local_device(), None)._add_axes(tuple(grid.sizes))
    with pytest.warns(UserWarning, match=r"spans 2 hosts.*tensor=2.*2 times as many"):
        init_distributed._warn_if_tensor_axis_crosses_hosts(context)
