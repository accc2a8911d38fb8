"""A rank that fails alone before it comes to shard, as where it has no folder to load: the others do not wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TWO = """
    import atexit, os, sys
    import torch.distributed as dist
    from shardformer.config import ShardConfig
    from shardformer.errors import ConfigError, LaunchError
    from shardformer.mesh.launch import launch_from_torch
    from shardformer.mesh.process_group import leave_process_group
    from shardformer.sharding.agree import agree_on_group

    store, failing = sys.argv[1], int(sys.argv[2])
    first = os.fork()
    second = os.fork() if first else 0
    if first and second:
        sys.exit(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in (first, second)))
    rank = int(bool(first))
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    atexit.register(leave_process_group)
    config = ShardConfig(context=launch_from_torch())
    agree_on_group(config)
    if rank == failing:
        raise ConfigError("'my-model' holds no config", rule="It does", remedy="Correct the path")
    try:
        agree_on_group(config)
    except LaunchError as error:
        print(rank, error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have torch's threads")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_an_error_ended_is_not_waited_for(failing: int, tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = [sys.executable, "-c", textwrap.dedent(TWO), str(tmp_path / "store"), str(failing)]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60)
    ended = f"{1 - failing} Process {failing} ended before it came to shard, by ConfigError: 'my-model' holds no config"
    assert done.stdout.startswith(ended), done.stderr
    assert done.returncode == 1
