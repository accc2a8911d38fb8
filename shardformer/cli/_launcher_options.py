"""What the options of torch's launcher may be, where it would wait, fail in its depths, or start too much."""

from __future__ import annotations

import argparse
import os
import signal
import socket

from shardformer.cli._ending import VARIABLE
from shardformer.cli._processes import check_count
from shardformer.errors import LaunchError, nearest

MOST_NODES = 2**16
LONGEST_S = 24 * 3600


def check_options(options: argparse.Namespace) -> None:
    """Raises LaunchError for numbers of processes, machines, seconds and names that cannot be."""
    _check_counts(options)
    _check_seconds(options)
    _check_signals(options.signals_to_handle)
    if options.local_addr is not None:
        try:
            socket.getaddrinfo(options.local_addr, None)
        except (OSError, UnicodeError) as error:
            raise LaunchError(
                f"--local-addr is {options.local_addr!r}: {error}",
                rule="It is a name or an address of this machine",
                remedy="Write --local-addr 127.0.0.1, or leave it out",
            ) from error


def _check_counts(options: argparse.Namespace) -> None:
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        num_processes = determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise LaunchError(
            f"--nproc_per_node is {options.nproc_per_node!r}: {error}",
            rule="It is a number of processes, or a kind of device that this machine has: auto, cpu, gpu",
            remedy="Write --nproc_per_node 2",
        ) from error
    if num_processes < 1:
        raise LaunchError(
            f"--nproc_per_node is {options.nproc_per_node} and gives {num_processes} processes",
            rule="A run has one process at the least",
            remedy="Write --nproc_per_node 2",
        )
    check_count(f"--nproc_per_node {options.nproc_per_node}", num_processes)
    try:
        least, most = parse_min_max_nnodes(options.nnodes)
    except (ValueError, RuntimeError):
        least, most = 0, 0
    if not 1 <= least <= most <= MOST_NODES:
        raise LaunchError(
            f"--nnodes is {options.nnodes!r}",
            rule="It is a number of machines from 1, or the least and the most as 1:4",
            remedy="Write --nnodes 2, or leave it out to run on this machine alone",
        )
    if options.standalone and most > 1:
        raise LaunchError(
            f"--standalone stands beside --nnodes {options.nnodes}",
            rule="A standalone run is one of this machine alone",
            remedy="Leave one of the two out",
        )
    if options.rdzv_backend == "static" and not 0 <= options.node_rank < most:
        raise LaunchError(
            f"--node_rank is {options.node_rank} and --nnodes {options.nnodes}",
            rule="The ranks of the machines count from 0 and stay below their number",
            remedy=f"Use a number from 0 to {most - 1}" if most > 1 else "Leave it out, or give --nnodes as well",
        )


def _check_seconds(options: argparse.Namespace) -> None:
    asked = {"--monitor-interval": options.monitor_interval}
    for name, said in (
        ("--shutdown-timeout", getattr(options, "shutdown_timeout", None)),
        (VARIABLE, os.environ.get(VARIABLE)),
    ):
        if said is not None:
            asked[name] = float(said) if str(said).lstrip("-").isdecimal() else float("nan")
    for name, seconds in asked.items():
        if not (seconds > 0 or (seconds == 0 and name != "--monitor-interval")) or not seconds <= LONGEST_S:
            raise LaunchError(
                f"{name} is {os.environ[VARIABLE] if name == VARIABLE else f'{seconds:g}'}",
                rule=f"It is a number of seconds, up to {LONGEST_S}",
                remedy=f"Write {name} {1 if name == '--monitor-interval' else 60}, or leave it out",
            )


def _check_signals(names: str) -> None:
    known = [member.name for member in signal.Signals if member not in (signal.SIGKILL, signal.SIGSTOP)]
    for name in names.split(","):
        if name.strip() not in known:
            raise LaunchError(
                f"--signals-to-handle is {names!r}",
                rule="It lists signals that a process may handle, with commas between them",
                remedy=f"Write --signals-to-handle SIGTERM,SIGINT. {nearest(name.strip(), known)}",
            )
