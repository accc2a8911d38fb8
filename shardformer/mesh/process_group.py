"""Joining the processes that a launcher started, and leaving them so that the interpreter can end."""

from __future__ import annotations

import atexit
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError

from shardformer.errors import LaunchError, first_line
from shardformer.mesh.lost import LostPeerError
from shardformer.mesh.meeting import SAME_ADDRESS, Meeting
from shardformer.mesh.processes import launcher_store

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
ELSEWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737, for documentation)."""
SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface (``man 7 netdevice``)."""
POLL_S = 0.01
STARTED = "The launcher has started all: see what each does before launch_from_torch, and whether one has ended"
ENDED = "shardformer/ended"
"""Where a process writes in the launcher's store why it ended, behind which comes its rank."""
REST_S = 2.0  # threads that run on by then are the user's own


def join_process_group(device: torch.device, backend: str | None, timeout_s: float) -> None:
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
    _choose_interface()
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    timeout, store = timedelta(seconds=timeout_s), _store_of_attempt(timedelta(seconds=timeout_s))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with nullcontext() if size == 1 else _joined_by_all(rank, size, timeout_s):
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    atexit.register(leave_process_group)


@contextmanager
def _joined_by_all(rank: int, size: int, timeout_s: float) -> Iterator[None]:
    """Around what waits for all processes: LostPeerError names those that have not come."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    advice = STARTED if _have_met() else SAME_ADDRESS
    meeting = Meeting(host, port, rank, size, "rank", _attempt(), advice)
    try:
        with meeting.watched():
            yield
    except DistError as error:
        missing = meeting.missing()
        raise LostPeerError(
            f"Rank {rank} has not met {missing or f'all {size} ranks'} at {host}:{port} ({first_line(error):.160})",
            rule=f"All processes of a launch call launch_from_torch, none of them later than timeout_s={timeout_s:g} "
            "seconds after the first, and they reach each other",
            remedy=f"{advice}. Where one needs longer before it, give a larger timeout_s",
        ) from error


def _have_met() -> bool:
    """Whether the launchers met before they started the processes, and have a store for them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _attempt() -> str:
    """How often the launcher has started its processes before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _choose_interface() -> None:
    """Names the interface that reaches the first host, where there are several hosts and the user named none.

    gloo takes the one that this host's name resolves to, and says it to the others: on a host whose name stands for
    127.0.0.1 in /etc/hosts nobody would reach it.
    """
    env = os.environ
    alone = env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]) == env["WORLD_SIZE"]
    if INTERFACE in env or alone:
        return
    name = interface_towards(env["MASTER_ADDR"])
    if name == LOOPBACK:  # the first host's name for itself: the interface that leads out
        name = interface_towards(ELSEWHERE)
    if name not in (None, LOOPBACK):
        env[INTERFACE] = name


def interface_towards(host: str) -> str | None:
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
    attempt = _attempt()
    if attempt == "0" or not _have_met():
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, int(os.environ["WORLD_SIZE"]), is_master=False, timeout=timeout)
    return PrefixStore(f"shardformer/attempt_{attempt}", store)


def leave_process_group() -> None:
    """Destroys all groups, and waits for gloo's threads.

    After a collective they free its tensors, for which they need the interpreter: one that asks for it while it ends is
    unwound out of C++, and the process aborts with "terminate called without an active exception".
    """
    if not dist.is_initialized():
        return
    _say_why_it_ends()
    dist.destroy_process_group()
    deadline = time.monotonic() + REST_S
    time.sleep(POLL_S)  # gives the interpreter to a thread that waits for it
    while _another_thread_runs() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _say_why_it_ends() -> None:
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
