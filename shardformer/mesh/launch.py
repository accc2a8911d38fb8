"""Joining the processes that a launcher started, and laying the grid over them."""

from __future__ import annotations

import math
import os
import runpy
import warnings
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist

from shardformer.errors import ConfigError, nearest
from shardformer.mesh.context import ParallelContext, local_device, with_sequence, with_tensor
from shardformer.mesh.grid import AXES
from shardformer.mesh.process_group import join_process_group
from shardformer.mesh.sizes import total_of
from shardformer.mesh.tensor_grid import sizes_of_mode

TIMEOUT_S = 600.0
"""Of a collective that not all processes joined."""


def launch_from_torch(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    tensor: int | tuple[int, ...] | None = None,
    pipe: int | None = None,
    data: int | None = None,
    sequence: int | tuple[int, int] | None = None,
    backend: str | None = None,
    seed: int | None = None,
    timeout_s: float | None = None,
) -> ParallelContext:
    """Joins the processes that a launcher started, and lays the grid over them.

    Works under ``shardformer run``, torchrun and SLURM (srun). With no size given all processes form the tensor axis.

    Args:
        config: a dict, or a Python file whose names are its keys, with ``parallel = dict(tensor=2, data=2)`` or
            ``parallel = dict(tensor=dict(size=8, mode="2.5d", depth=2))``; keyword arguments win over it.
        tensor, pipe, data, sequence: sizes of these axes. One of tensor and data that is left open takes what remains
            of the processes; pipe and sequence are 1 unless given. Two numbers for sequence are a ring of groups: keys
            travel in the ring, and heads are exchanged for positions in the groups. Two numbers for tensor are the rows
            and columns of a grid, three have a third axis, for ``tensor_parallel_mode``.
        backend: a torch.distributed backend; by default gloo, and with CUDA nccl beside it.
        seed: seeds torch on every process, the same everywhere.
        timeout_s: after this many seconds a collective that not all processes joined is an error; by default 600.

    Raises LaunchError without a launcher's environment; ConfigError, on all processes, when the sizes do not fit them,
    or when one of them cannot read its config or seed itself.
    """
    _join(backend, timeout_s)
    asked: dict[str, Any] = {"tensor": tensor, "pipe": pipe, "data": data, "sequence": sequence}

    def sizes() -> dict[str, Any]:
        """Of the axes, when all that one process may stumble over is done."""
        settings = _read_config(config)
        for name, size in _parallel_sizes(settings).items():
            if asked.get(name) is None:
                asked[name] = size
        _seed(settings.get("seed") if seed is None else seed)
        return {name: total_of(n, name) if isinstance(n, tuple | list) else n for name, n in asked.items()}

    context = with_tensor(with_sequence(ParallelContext.from_world(sizes), asked["sequence"]), asked["tensor"])
    _warn_of_hosts(context)
    return context


def _warn_of_hosts(context: ParallelContext) -> None:
    """Says on the first rank what it costs where the tensor axis goes from host to host."""
    grid, line = context.grid, context.tensor.ranks
    if context.rank != 0 or not context.tensor.crosses_hosts:
        return
    on_host = Counter(grid.hosts[grid.ranks.index(rank)] for rank in line)
    inside = math.gcd(*on_host.values())
    warnings.warn(
        f"The tensor axis of {len(line)} ranks spans {len(on_host)} hosts: every layer waits for the network several "
        "times in each forward and backward, which is often slower than one host alone. Where a host's share of the "
        f"model fits, keep the axis inside of a host, tensor={inside}, and put data or pipe between the hosts, which "
        f"then have {len(line) // inside} times as many ranks.",
        stacklevel=3,
    )


def _join(backend: str | None, timeout_s: float | None) -> None:
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and 0 < timeout_s < math.inf):
        raise ConfigError(
            f"timeout_s={timeout_s!r}",
            rule="It is a number of seconds above 0, after which a collective that not all joined is an error",
            remedy="Write timeout_s=600, or leave it out",
        )
    if not dist.is_initialized():
        join_process_group(local_device(), backend, TIMEOUT_S if timeout_s is None else float(timeout_s))
        return
    named = {"backend": backend, "timeout_s": timeout_s}
    for name, value in named.items():
        if value is not None:
            raise ConfigError(
                f"launch_from_torch({name}={value!r}) where torch.distributed is initialized already",
                rule="The processes have joined, with a backend and a timeout",
                remedy=f"Leave {name} out, or give it to torch.distributed.init_process_group",
            )


def _seed(seed: Any) -> None:
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed={seed!r}", rule="A seed is a whole number", remedy="Write seed=42, or leave it out")
    torch.manual_seed(seed)


def launch(
    config: Mapping[str, Any] | str | None = None,
    *,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    local_rank: int | None = None,
    **kwargs: Any,
) -> ParallelContext:
    """``launch_from_torch`` for a program that knows its rank, the number of processes and rank 0's address itself."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=str(port))
    os.environ["LOCAL_RANK"] = str(rank if local_rank is None else local_rank)
    return launch_from_torch(config, **kwargs)


def launch_from_slurm(config: Mapping[str, Any] | str | None = None, **kwargs: Any) -> ParallelContext:
    """The same as ``launch_from_torch``, which reads SLURM's environment too."""
    return launch_from_torch(config, **kwargs)


def _read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config={config!r:.80}",
            rule="config is a dict or the path of a Python file whose names are the settings",
            remedy="Write config=dict(parallel=dict(tensor=2))",
        )
    if not os.path.isfile(config):
        raise ConfigError(
            f"The config file {os.fspath(config)!r} does not exist",
            rule="config is a dict or the path of a Python file whose names are the settings",
            remedy="Give the path relative to where the command runs, for example --config config.py",
        )
    return {k: v for k, v in runpy.run_path(os.fspath(config)).items() if not k.startswith("_")}


def _parallel_sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for name, value in settings.items():  # most names are the user's own, but these were meant for us
        if get_close_matches(name.lower(), ["parallel"], cutoff=0.85) and name != "parallel":
            misplaced = f"{name} = {value!r:.60}"
        elif name in (*AXES, "pipeline") and isinstance(value, int):
            misplaced = f"{name} = {value} outside of parallel"
        else:
            continue
        raise ConfigError(
            f"The config says {misplaced}",
            rule="The sizes of the axes stand in a dict called parallel",
            remedy="Write parallel = dict(tensor=2)",
        )
    asked = settings.get("parallel") or {}
    if not isinstance(asked, Mapping):
        raise ConfigError(
            f"The config says parallel = {asked!r:.80}",
            rule="It is a dict: the name of an axis -> its size",
            remedy="Write parallel = dict(tensor=2)",
        )
    if "pipe" in asked and "pipeline" in asked:
        raise ConfigError(
            f"The config says both pipe={asked['pipe']!r} and pipeline={asked['pipeline']!r}",
            rule="They are two names of one axis",
            remedy="Write pipe alone",
        )
    for name, value in asked.items():
        axis = {"pipeline": "pipe"}.get(str(name), name)
        if axis not in AXES:
            raise ConfigError(
                f"The config asks for parallel axis {name!r}",
                rule=f"The axes are {', '.join(AXES)}",
                remedy=nearest(name, AXES),
            )
        size = value.get("size", 1) if isinstance(value, Mapping) else value
        if isinstance(value, Mapping) and (unknown := set(value) - {"size", "mode", "depth"}):
            raise ConfigError(
                f"The config says {sorted(map(str, unknown))[0]!r} of the parallel axis {name!r}",
                rule="Of an axis it says the size, and of the tensor axis the mode, and the depth of one of 2.5D",
                remedy=nearest(sorted(map(str, unknown))[0], ("size", "mode", "depth")),
            )
        mode = value.get("mode") if isinstance(value, Mapping) else None
        if axis == "tensor" and mode not in (None, "1d"):
            size = sizes_of_mode(mode, size, value.get("depth"))
        sizes[axis] = size
    return sizes
