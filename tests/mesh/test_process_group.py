"""Exit of a process that used gloo, and its network interface. For its initialization see test_context.py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shardformer.mesh import init_distributed
from shardformer.mesh import init_distributed as process_group
from shardformer.mesh.init_distributed import INTERFACE, find_network_interface

ENDINGS = """
    import atexit, os, sys
    import torch, torch.distributed as dist
    from shardformer.mesh.init_distributed import destroy_process_group

    for store in sys.argv[1:]:
        first = os.fork()
        second = os.fork() if first else 0
        if not first or not second:
            sys.setswitchinterval(5)  # a thread that asks for the interpreter gets it when it is let go of, not before
            dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(bool(first)), world_size=2)
            held = dist.group.WORLD  # as by a model whose layers use it
            atexit.register(destroy_process_group)
            for _ in range(30):
                dist.all_reduce(torch.ones(4), async_op=True).wait()
            sys.exit()
        print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in (first, second)), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have torch's threads")
@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.full)])
def test_process_exits_without_gloo_abort(tmp_path: Path, rounds: int) -> None:
    stores = [str(tmp_path / str(i)) for i in range(rounds)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = [sys.executable, "-c", textwrap.dedent(ENDINGS), *stores]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0"] * 2 * rounds, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the addresses of interfaces")
def test_interface_for_host() -> None:
    assert find_network_interface("127.0.0.1") == "lo"
    assert find_network_interface("no.such.host.invalid") is None


@pytest.mark.parametrize(
    ("env", "routes", "chosen"),
    [
        ({"LOCAL_WORLD_SIZE": "1"}, {"first": "eth3"}, "eth3"),
        ({"LOCAL_WORLD_SIZE": "1"}, {"first": "lo", init_distributed.REMOTE_ADDRESS: "eth0"}, "eth0"),
        ({"LOCAL_WORLD_SIZE": "1"}, {"first": "lo", init_distributed.REMOTE_ADDRESS: None}, None),
        ({"LOCAL_WORLD_SIZE": "1", INTERFACE: "ib0"}, {"first": "eth3"}, "ib0"),
        ({"LOCAL_WORLD_SIZE": "2"}, {"first": "eth3"}, None),
    ],
)
def test_interface_reaches_first_host(
    env: dict[str, str], routes: dict[str, str | None], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a host may resolve to 127.0.0.1, which other hosts cannot reach."""
    monkeypatch.setattr(init_distributed.os, "environ", {"WORLD_SIZE": "2", "MASTER_ADDR": "first", **env})
    monkeypatch.setattr(process_group, "find_network_interface", routes.get)
    init_distributed._select_gloo_network_interface()
    assert init_distributed.os.environ.get(INTERFACE) == chosen
