"""Initialises torch.distributed for the processes that a launcher started, builds the mesh, and shuts down."""

from __future__ import annotations

import atexit
import math
import os
import runpy
import socket
import struct
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError

from shardformer.errors import ConfigError, LaunchError, check_choice, check_number, did_you_mean, first_line
from shardformer.mesh.parallel_context import (
    ParallelContext,
    launcher_store,
    local_device,
    with_grid_axes,
    with_ring_axes,
)
from shardformer.mesh.rank_failures import SAME_ADDRESS, LostPeerError, Rendezvous
from shardformer.mesh.rank_grid import AXES, num_ranks
from shardformer.mesh.tensor_grid import sizes_of_mode
from shardformer.torch_compat import PrefixStore, TCPStore

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
REMOTE_ADDRESS = "192.0.2.1"
"""An address that nobody has (RFC 5737, for documentation)."""
SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface (``man 7 netdevice``)."""
POLL_S = 0.01
STARTED = "The launcher has started all: see what each does before launch_from_torch, and whether one has ended"
ENDED = "shardformer/ended"
"""Where a process writes in the launcher's store why it ended, behind which comes its rank."""
REST_S = 2.0  # threads that run on by then are the user's own


def init_process_group(device: torch.device, backend: str | None, timeout_s: float) -> None:
    """Initialises torch's default group from the environment that torchrun sets, or else from SLURM's.

    Raises LaunchError when neither is there.
    """
    _environment_from_slurm()
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LaunchError(
            f"The environment of a launcher is missing: {', '.join(missing)}",
            rule="Each process learns its rank and its peers from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            remedy="Start the script with `shardformer run --nproc_per_node 2 train.py` or torchrun, "
            "or call torch.distributed.init_process_group before",
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _select_network_interface()
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    timeout, store = timedelta(seconds=timeout_s), _store_of_attempt(timedelta(seconds=timeout_s))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with nullcontext() if size == 1 else _report_missing_ranks(rank, size, timeout_s):
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    atexit.register(destroy_process_group)


@contextmanager
def _report_missing_ranks(rank: int, size: int, timeout_s: float) -> Iterator[None]:
    """Around what waits for all processes: LostPeerError names those that have not come."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    advice = STARTED if _launchers_share_store() else SAME_ADDRESS
    meeting = Rendezvous(host, port, rank, size, "rank", _restart_count(), advice)
    try:
        with meeting.report_missing():
            yield
    except DistError as error:
        missing = meeting.missing()
        raise LostPeerError(
            f"Rank {rank} has not met {missing or f'all {size} ranks'} at {host}:{port} ({first_line(error):.160})",
            rule=f"All processes of a launch call launch_from_torch, none of them later than timeout_s={timeout_s:g} "
            "seconds after the first, and they reach each other",
            remedy=f"{advice}. Where one needs longer before it, give a larger timeout_s",
        ) from error


def _launchers_share_store() -> bool:
    """Whether the launchers met before they started the processes, and have a store for them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _restart_count() -> str:
    """How often the launcher has started its processes before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _select_network_interface() -> None:
    """Names the interface that reaches the first host, where there are several hosts and the user named none.

    gloo takes the one that this host's name resolves to, and says it to the others: on a host whose name stands for
    127.0.0.1 in /etc/hosts nobody would reach it.
    """
    env = os.environ
    alone = env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]) == env["WORLD_SIZE"]
    if INTERFACE in env or alone:
        return
    name = interface_for_host(env["MASTER_ADDR"])
    if name == LOOPBACK:  # the first host's name for itself: the interface that leads out
        name = interface_for_host(REMOTE_ADDRESS)
    if name not in (None, LOOPBACK):
        env[INTERFACE] = name


def interface_for_host(host: str) -> str | None:
    """The network interface of this machine by which ``host`` is reached; None where the system does not tell."""
    try:
        import fcntl  # not on every system

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: the system chooses a route
            mine = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with suppress(OSError):
                    # struct ifreq: the name, then a sockaddr, whose address follows its family and port
                    answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    if socket.inet_ntoa(answer[20:24]) == mine:
                        return name
    except (OSError, ImportError):
        pass
    return None


def _store_of_attempt(timeout: timedelta) -> Any:
    """Where processes that were started once more by a launcher meet, apart from those before them.

    torch's static rendezvous keeps its store from one attempt to the next, with the addresses of processes that are
    gone, which gloo would try to reach. None where this is the first attempt, or the launcher brings no store.
    """
    attempt = _restart_count()
    if attempt == "0" or not _launchers_share_store():
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, int(os.environ["WORLD_SIZE"]), is_master=False, timeout=timeout)
    return PrefixStore(f"shardformer/attempt_{attempt}", store)


def destroy_process_group() -> None:
    """Destroys all groups, and waits for gloo's threads.

    After a collective they free its tensors, for which they need the interpreter: one that asks for it while it ends is
    unwound out of C++, and the process aborts with "terminate called without an active exception".
    """
    if not dist.is_initialized():
        return
    _record_exit_error()
    dist.destroy_process_group()
    deadline = time.monotonic() + REST_S
    time.sleep(POLL_S)  # gives the interpreter to a thread that waits for it
    while _another_thread_runs() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _record_exit_error() -> None:
    """Writes down the error that ends this process, if one does, for those that wait for it to come to a call.

    Not an error that another process is gone: it may be the one that has the store.
    """
    error, store = getattr(sys, "last_value", None), launcher_store()
    if error is not None and store is not None and not isinstance(error, LaunchError):
        with suppress(RuntimeError):  # where the process that has the store is gone, there is nobody to tell
            store.set(f"{ENDED}/{dist.get_rank()}", f"{type(error).__name__}: {first_line(error)}")


def _another_thread_runs() -> bool:
    """Whether the system has given a thread beside the main one work to do; False where it does not tell."""
    for status in Path("/proc/self/task").glob("*/stat"):
        try:
            state = status.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if state == "R" and status.parent.name != str(os.getpid()):
            return True
    return False


def _environment_from_slurm() -> None:
    """Fills torch's variables from srun's where a launcher has not set them."""
    env = os.environ
    if "RANK" in env or "SLURM_PROCID" not in env:
        return
    first_host = env.get("SLURM_LAUNCH_NODE_IPADDR") or first_slurm_host(env.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    env.setdefault("RANK", env["SLURM_PROCID"])
    env.setdefault("WORLD_SIZE", env.get("SLURM_NTASKS", "1"))
    env.setdefault("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))
    env.setdefault("MASTER_ADDR", first_host)
    # every task of a job computes the same port, and two jobs on a node seldom the same one
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))


def first_slurm_host(nodelist: str) -> str:
    """``node[03-05,9],gpu1`` -> ``node03``."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return nodelist.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


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
    """Joins the processes that a launcher started; without sizes, all of them are tensor parallel ranks.

    Works under ``shardformer run``, torchrun and SLURM (srun).

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
    _init_default_group(backend, timeout_s)
    asked: dict[str, Any] = {"tensor": tensor, "pipe": pipe, "data": data, "sequence": sequence}

    def sizes() -> dict[str, Any]:
        """Of the axes, when all that one process may stumble over is done."""
        settings = _read_config(config)
        for name, size in _parallel_sizes(settings).items():
            if asked.get(name) is None:
                asked[name] = size
        _seed(settings.get("seed") if seed is None else seed)
        return {name: num_ranks(n, name) if isinstance(n, tuple | list) else n for name, n in asked.items()}

    context = with_grid_axes(with_ring_axes(ParallelContext.from_world(sizes), asked["sequence"]), asked["tensor"])
    _warn_cross_host_tensor_axis(context)
    return context


def _warn_cross_host_tensor_axis(context: ParallelContext) -> None:
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


def _init_default_group(backend: str | None, timeout_s: float | None) -> None:
    if timeout_s is not None:
        check_number("timeout_s", timeout_s, below=math.inf, unit="seconds", example=600)
    if not dist.is_initialized():
        init_process_group(local_device(), backend, TIMEOUT_S if timeout_s is None else float(timeout_s))
        return
    named = {"backend": backend, "timeout_s": timeout_s}
    for name, value in named.items():
        if value is not None:
            raise ConfigError(
                f"launch_from_torch({name}={value!r}) where torch.distributed is initialized already",
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
        raise ConfigError(f"The config says {misplaced}", remedy="Write parallel = dict(tensor=2)")
    asked = settings.get("parallel") or {}
    if not isinstance(asked, Mapping):
        raise ConfigError(f"The config says parallel = {asked!r:.80}", remedy="Write parallel = dict(tensor=2)")
    if "pipe" in asked and "pipeline" in asked:
        raise ConfigError(
            f"The config says both pipe={asked['pipe']!r} and pipeline={asked['pipeline']!r}", remedy="Write pipe alone"
        )
    for name, value in asked.items():
        axis = "pipe" if name == "pipeline" else str(name)
        check_choice("parallel axis", axis, AXES)
        size = value.get("size", 1) if isinstance(value, Mapping) else value
        if isinstance(value, Mapping) and (unknown := set(value) - {"size", "mode", "depth"}):
            raise ConfigError(
                f"The config says {sorted(map(str, unknown))[0]!r} of the parallel axis {name!r}",
                rule="Of an axis it says the size, and of the tensor axis the mode, and the depth of one of 2.5D",
                remedy=did_you_mean(sorted(map(str, unknown))[0], ("size", "mode", "depth")),
            )
        mode = value.get("mode") if isinstance(value, Mapping) else None
        if axis == "tensor" and mode not in (None, "1d"):
            size = sizes_of_mode(mode, size, value.get("depth"))
        sizes[axis] = size
    return sizes
