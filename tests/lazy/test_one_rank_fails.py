"""One rank fails before sharding, for example because its model folder is missing: other ranks do not wait."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TWO = """
    import atexit, os, sys
    import torch.distributed as dist
    from shardformer.config import ShardConfig
    from shardformer.errors import ConfigError, LaunchError
    from shardformer.mesh.init_distributed import launch_from_torch
    from shardformer.mesh.init_distributed import destroy_process_group
    from shardformer.sharding.checks import create_checked_context

    first = os.fork()
    second = os.fork() if first else 0
    if first and second:
        print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in (first, second)))
        sys.exit()
    rank = int(bool(first))
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
    atexit.register(destroy_process_group)
    config = ShardConfig(context=launch_from_torch())
    create_checked_context(config)
    if rank == 1:
        raise ConfigError("'my-model' has no config", remedy="Correct the path")
    try:
        create_checked_context(config)
    except LaunchError as error:
        print(error, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have torch's threads")
def test_ranks_do_not_wait_for_a_failed_process(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = [sys.executable, "-c", textwrap.dedent(TWO), str(tmp_path / "store")]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60)
    text, codes = done.stdout.splitlines()
    assert text.startswith("Process 1 ended before it reached shard_model: ConfigError: 'my-model' has no config.")
    assert codes == "0 1", done.stderr
