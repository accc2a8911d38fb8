"""Initialize torch.distributed in the launched processes and arrange them in a mesh."""

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

from shardformer.errors import (
    ConfigError,
    LaunchError,
    check_choice,
    check_number,
    get_first_message_line,
)
from shardformer.mesh.parallel_context import (
    ParallelContext,
    get_launcher_store,
    get_local_device,
    reshape_sequence_axis,
    reshape_tensor_axis,
)
from shardformer.mesh.rank_failures import SAME_ADDRESS, LostPeerError, Rendezvous
from shardformer.mesh.rank_grid import AXES, count_ranks_on_axis
from shardformer.mesh.tensor_grid import compute_grid_shape
from shardformer.torch_compat import PrefixStore, Store, TCPStore

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
REMOTE_ADDRESS = "192.0.2.1"
"""An address that no machine has (RFC 5737, for documentation)."""
SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface (``man 7 netdevice``)."""
POLL_S = 0.01
STARTED = (
    "The launcher has started all ranks: check whether one of them has exited, or is still importing modules or "
    "loading data before it calls launch_from_torch"
)
SRUN = "Start all processes with one srun command, and check that they are running and can reach this host"
SLURM_STEP = "SLURM_STEP_ID"
"""Variable that srun sets in the tasks that it starts."""
ENDED = "shardformer/ended"
"""Prefix of the keys, followed by the rank, under which a process stores the error that ended it."""
REST_S = 2.0  # threads that still run after this time belong to the user


def init_process_group(device: torch.device, backend: str | None, timeout_s: float) -> None:
    """Initialize torch's default process group from the environment variables set by torchrun or SLURM.

    Raises LaunchError if neither of them has set its variables.
    """
    _set_torchrun_env_from_slurm()
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        srun = "`srun python train.py`, " if "SLURM_JOB_ID" in os.environ else ""
        names = ", ".join(missing)
        raise LaunchError(
            f"The environment variables {names} are not set, because no launcher has started this process.",
            remedy=f"Start the script with {srun}`shardformer run --nproc_per_node 2 train.py` or torchrun, "
            "or call torch.distributed.init_process_group first.",
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _select_gloo_network_interface()
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    timeout, store = timedelta(seconds=timeout_s), _create_store_after_restart(timedelta(seconds=timeout_s))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with nullcontext() if size == 1 else _report_missing_ranks(rank, size, timeout_s):
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    atexit.register(destroy_process_group)


@contextmanager
def _report_missing_ranks(rank: int, world_size: int, timeout_s: float) -> Iterator[None]:
    """Raise LostPeerError with the missing ranks if some processes do not connect in the ``with`` block."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    advice = STARTED if _uses_torchelastic_agent_store() else SRUN if get_num_slurm_tasks() else SAME_ADDRESS
    rendezvous = Rendezvous(host, port, rank, world_size, "rank", _get_torchelastic_restart_count(), advice)
    try:
        with rendezvous.report_missing_processes():
            yield
    except DistError as error:
        missing = rendezvous.describe_missing_processes() or f"all {world_size} ranks"
        reason = get_first_message_line(error)
        raise LostPeerError(
            f"Rank {rank} could not connect to {missing} at {host}:{port} within timeout_s={timeout_s:g} seconds "
            f"({reason:.160}).",
            remedy=f"{advice}. If processes start slowly, increase timeout_s.",
        ) from error


def _uses_torchelastic_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _get_torchelastic_restart_count() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _select_gloo_network_interface() -> None:
    """Select a network interface for gloo that other hosts can reach, if the job runs on several hosts.

    gloo uses the interface that the host's own name resolves to and announces its address to the peers. If /etc/hosts
    maps the name to 127.0.0.1, no peer can connect.
    """
    env = os.environ
    if INTERFACE in env or env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]) == env["WORLD_SIZE"]:
        return
    name = find_network_interface(env["MASTER_ADDR"])
    if name == LOOPBACK:  # this is the first host
        name = find_network_interface(REMOTE_ADDRESS)
    if name not in (None, LOOPBACK):
        env[INTERFACE] = name


def find_network_interface(host: str) -> str | None:
    """Find the name of the network interface that reaches ``host``, or None if it is unknown."""
    try:
        import fcntl  # not on every system

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: the system chooses a route
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with suppress(OSError):
                    # struct ifreq: name, then sockaddr with family, port, address
                    answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    if socket.inet_ntoa(answer[20:24]) == address:
                        return name
    except (OSError, ImportError):
        pass
    return None


def _create_store_after_restart(timeout: timedelta) -> Store | None:
    """Create a new key-value store if the launcher has restarted the processes.

    torch's static rendezvous reuses its store across attempts, with the addresses of exited processes that gloo would
    try to reach. None at the first attempt, or if the launcher provides no store.
    """
    attempt = _get_torchelastic_restart_count()
    if attempt == "0" or not _uses_torchelastic_agent_store():
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, int(os.environ["WORLD_SIZE"]), is_master=False, timeout=timeout)
    return PrefixStore(f"shardformer/attempt_{attempt}", store)


def destroy_process_group() -> None:
    """Destroy all process groups, and wait for gloo's threads, which could otherwise abort the process.

    After a collective, these threads free its tensors and need the interpreter lock. A thread that requests the lock
    while the interpreter ends is unwound out of C++, and the process aborts with "terminate called without an active
    exception".
    """
    if not dist.is_initialized():
        return
    _publish_exception_to_store()
    dist.destroy_process_group()
    deadline = time.monotonic() + REST_S
    time.sleep(POLL_S)  # releases the interpreter lock to a waiting thread
    while _is_other_thread_running() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _publish_exception_to_store() -> None:
    """Write the exception that ended this process to the store, where waiting ranks can read it.

    An error about a lost peer is skipped, because that peer may be the one with the store.
    """
    error, store = getattr(sys, "last_value", None), get_launcher_store()
    if error is not None and store is not None and not isinstance(error, LaunchError):
        with suppress(RuntimeError):  # the process with the store has exited
            store.set(f"{ENDED}/{dist.get_rank()}", f"{type(error).__name__}: {get_first_message_line(error)}")


def _is_other_thread_running() -> bool:
    for status in Path("/proc/self/task").glob("*/stat"):
        try:
            state = status.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
        if state == "R" and status.parent.name != str(os.getpid()):
            return True
    return False


def get_launcher_env_variable_name() -> str | None:
    """Return the name of an environment variable set by the launcher, or None if there is no launcher.

    SLURM also sets ``SLURM_PROCID`` in the script of sbatch and in the shell of salloc, which are not tasks of srun.
    """
    if "RANK" in os.environ:
        return "RANK"
    return SLURM_STEP if get_num_slurm_tasks() > 1 else None


def get_num_slurm_tasks() -> int:
    """Return the number of tasks in this job step of srun, or 0 if srun did not start this process."""
    env = os.environ
    if SLURM_STEP not in env or "SLURM_PROCID" not in env:
        return 0
    return int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)


def _set_torchrun_env_from_slurm() -> None:
    env = os.environ
    if "RANK" in env or not get_num_slurm_tasks():
        return
    first_host = env.get("SLURM_LAUNCH_NODE_IPADDR") or get_first_slurm_host(env.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    env.setdefault("RANK", env["SLURM_PROCID"])
    env.setdefault("WORLD_SIZE", str(get_num_slurm_tasks()))
    env.setdefault("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))
    env.setdefault("MASTER_ADDR", first_host)
    # every task of a job computes the same port, and two jobs on a node rarely collide
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))


def get_first_slurm_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list, such as ``node03`` for ``node[03-05,9],gpu1``."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return nodelist.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


TIMEOUT_S = 600.0
"""Default timeout of collectives."""


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
    """Initialize torch.distributed and arrange the processes in a mesh, by default all on the tensor axis.

    By default, all processes are on the tensor axis. Works under ``shardformer run``, torchrun and SLURM (srun).

    Args:
        config: a dict, or a Python file whose names are its keys, with ``parallel = dict(tensor=2, data=2)`` or
            ``parallel = dict(tensor=dict(size=8, mode="2.5d", depth=2))``. Keyword arguments take precedence.
        tensor: size of the tensor axis. If it or ``data`` is missing, it is inferred from the number of processes; if
            both are, ``data`` is inferred. Two or three numbers are (rows, columns) or (rows, columns, depth) of a grid
            for ``tensor_parallel_mode``.
        pipe: number of pipeline ranks; default: 1.
        data: number of data parallel ranks.
        sequence: number of context parallel ranks; default: 1. Two numbers are (ring, Ulysses group): the ring
            exchanges keys and values, the groups exchange heads for positions.
        backend: a torch.distributed backend; default: gloo, with CUDA also nccl.
        seed: seed of torch, the same on every process.
        timeout_s: timeout of collectives in seconds; default: 600.

    Raises:
        LaunchError: the environment of a launcher is missing.
        ConfigError: on all processes, if the sizes do not fit, or if one process cannot read its config or seed.
    """
    _init_default_process_group(backend, timeout_s)
    sizes: dict[str, Any] = {"tensor": tensor, "pipe": pipe, "data": data, "sequence": sequence}

    def resolve_axis_sizes() -> dict[str, Any]:
        settings = _read_config(config)
        for name, size in _parse_axis_sizes(settings).items():
            if sizes.get(name) is None:
                sizes[name] = size
        _set_torch_seed(settings.get("seed") if seed is None else seed)
        return {name: count_ranks_on_axis(n, name) if isinstance(n, tuple | list) else n for name, n in sizes.items()}

    context = ParallelContext.from_default_process_group(resolve_axis_sizes)
    context = reshape_tensor_axis(reshape_sequence_axis(context, sizes["sequence"]), sizes["tensor"])
    _warn_if_tensor_axis_crosses_hosts(context)
    return context


def _warn_if_tensor_axis_crosses_hosts(context: ParallelContext) -> None:
    grid, line = context.grid, context.tensor.ranks
    if context.rank != 0 or not context.tensor.crosses_hosts:
        return
    on_host = Counter(grid.hosts[grid.ranks.index(rank)] for rank in line)
    inside = math.gcd(*on_host.values())
    warnings.warn(
        f"The tensor axis of {len(line)} ranks spans {len(on_host)} hosts, so every layer communicates over the "
        f"network, which is slow. If the model fits, use tensor={inside} within each host, and "
        f"{len(line) // inside} times as many data or pipe ranks.",
        stacklevel=3,
    )


def _init_default_process_group(backend: str | None, timeout_s: float | None) -> None:
    if timeout_s is not None:
        check_number("timeout_s", timeout_s, upper_bound=math.inf, unit="seconds", example=600)
    if not dist.is_initialized():
        init_process_group(get_local_device(), backend, TIMEOUT_S if timeout_s is None else float(timeout_s))
        return
    for name, value in {"backend": backend, "timeout_s": timeout_s}.items():
        if value is not None:
            raise ConfigError(
                f"launch_from_torch cannot set {name}={value!r}, because torch.distributed is already initialized.",
                remedy=f"Omit {name}, or pass it to torch.distributed.init_process_group.",
            )


def _set_torch_seed(seed: int | None) -> None:
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(
            f"seed={seed!r} is not an integer.", remedy="Pass an integer, for example seed=42, or omit it."
        )
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
    """Initialize torch.distributed without a launcher, from the rank and the address of rank 0."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=str(port))
    os.environ["LOCAL_RANK"] = str(rank if local_rank is None else local_rank)
    return launch_from_torch(config, **kwargs)


def launch_from_slurm(config: Mapping[str, Any] | str | None = None, **kwargs: Any) -> ParallelContext:
    """Initialize torch.distributed in processes started by srun, like ``launch_from_torch``."""
    return launch_from_torch(config, **kwargs)


def _read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config={config!r:.80} is neither a dict nor the path of a Python file.",
            remedy="Pass a dict, for example config=dict(parallel=dict(tensor=2)).",
        )
    if not os.path.isfile(config):
        raise ConfigError(
            f"The config file {os.fspath(config)!r} does not exist.",
            remedy="Pass the path of an existing file, for example --config config.py.",
        )
    return {k: v for k, v in runpy.run_path(os.fspath(config)).items() if not k.startswith("_")}


def _parse_axis_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for name, value in config.items():  # a config file may have names of the user, but not misspelled ones
        is_misspelled = name != "parallel" and get_close_matches(name.lower(), ["parallel"], cutoff=0.85)
        if is_misspelled or (name in (*AXES, "pipeline") and isinstance(value, int)):
            raise ConfigError(
                f"The config sets {name} = {value!r:.60}, which is not a valid option.",
                remedy="Put the axis sizes into a dict named parallel, such as parallel = dict(tensor=2).",
            )
    parallel = config.get("parallel") or {}
    if not isinstance(parallel, Mapping):
        raise ConfigError(
            f"The config sets parallel = {parallel!r:.80}, but parallel must be a dict.",
            remedy="Use a dict of axis sizes, such as parallel = dict(tensor=2).",
        )
    if "pipe" in parallel and "pipeline" in parallel:
        raise ConfigError(
            f"The config sets both pipe={parallel['pipe']!r} and pipeline={parallel['pipeline']!r}, which are names of "
            "the same axis.",
            remedy="Remove pipeline, and set pipe to the number of pipeline stages.",
        )
    for name, value in parallel.items():
        axis = "pipe" if name == "pipeline" else str(name)
        check_choice("parallel axis", axis, AXES)
        options = value if isinstance(value, Mapping) else {"size": value}
        if unknown := sorted(map(str, set(options) - {"size", "mode", "depth"})):
            raise ConfigError(
                f"The parallel axis {name!r} in the config has the unknown key {unknown[0]!r}.",
                remedy="Use the key 'size'. The tensor axis also has the keys 'mode' and, for mode='2.5d', 'depth'.",
            )
        sizes[axis] = options.get("size", 1)
        if axis == "tensor" and options.get("mode") not in (None, "1d"):
            sizes[axis] = compute_grid_shape(options["mode"], sizes[axis], options.get("depth"))
    return sizes
