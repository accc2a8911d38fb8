"""``shardformer run``: a thin layer over torchrun that checks its options first."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from shardformer import launcher
from shardformer.cli._options import check_num_processes
from shardformer.errors import LaunchError, did_you_mean, first_line
from shardformer.launcher.failure_report import FEW, describe_failures
from shardformer.launcher.hostfile import find_this_host, read_hostfile, select_hosts
from shardformer.launcher.shutdown import (
    SHUTDOWN_TIMEOUT_VARIABLE,
    STUCK_PROCESSES,
    describe_stack_locations,
    set_shutdown_timeout,
)

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
    check_num_processes(f"--nproc_per_node {options.nproc_per_node}", num_processes)
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
        (SHUTDOWN_TIMEOUT_VARIABLE, os.environ.get(SHUTDOWN_TIMEOUT_VARIABLE)),
    ):
        if said is not None:
            asked[name] = float(said) if str(said).lstrip("-").isdecimal() else float("nan")
    for name, seconds in asked.items():
        if not (seconds > 0 or (seconds == 0 and name != "--monitor-interval")) or not seconds <= LONGEST_S:
            value = os.environ[name] if name == SHUTDOWN_TIMEOUT_VARIABLE else f"{seconds:g}"
            raise LaunchError(
                f"{name} is {value}",
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
                remedy=f"Write --signals-to-handle SIGTERM,SIGINT. {did_you_mean(name.strip(), known)}",
            )


# Everything goes to the launcher's own parser, and everything after the script to the script.
CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}

USAGE = "shardformer run [options] script.py [the script's own arguments]"
DESCRIPTION = """
Start a script once per process, with the environment that torch.distributed expects. Every option of torchrun is
taken. Without a port or a rendezvous, a run on one machine picks a free port. On several machines, give the same
command on each of them (nothing is started over ssh): --hostfile then says how many there are, which comes first and
which of them this one is.
"""


def run(arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGS]...")] = None) -> None:
    """Start a script in many processes: torchrun's options, and host files."""
    sys.exit(launch(arguments or []))


def launch(arguments: Sequence[str], command: str = "run") -> int:
    """Starts the processes and waits for their end. Returns the exit status.

    Args:
        command: that the user gave, for messages.
    """
    options = parse(arguments)
    _check_script(options)
    _set_threads(options)
    return _launch(options, command)


# -------------------------------------------------------------------------------------------------------------- options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if "training_script" in message:
            raise LaunchError(
                "The command names no script",
                rule=f"The form is: {USAGE}",
                remedy="Add the script, or -m and a module, after the options",
            )
        short, could, names = message.removeprefix("ambiguous option: ").partition(" could match ")
        if could:
            # torch spells each option twice, with - and with _
            wanted = sorted({name.replace("_", "-") for name in names.split(", ")})
            raise LaunchError(
                f"There is no option {short.partition('=')[0]!r}",
                rule="An option may be shortened as long as only one begins so",
                remedy=f"Did you mean {' or '.join(wanted)}?",
            )
        raise LaunchError(
            message[:1].upper() + message[1:], rule=f"The form is: {USAGE}", remedy=f"See {self.prog} --help"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """torch's own options, with what ``--hostfile`` and ``--host`` say filled in where the options do not say it."""
    parser = _Parser(
        prog="shardformer run",
        usage=USAGE,
        description=DESCRIPTION,
        parents=[_torch_options()],
        conflict_handler="resolve",
    )
    ours = parser.add_argument_group("hosts")
    ours.add_argument("--hostfile", metavar="FILE", help="A line for each machine: its name, or name slots=4.")
    ours.add_argument("--host", metavar="A,B", help="Machines by name; beside --hostfile, a choice among its machines.")

    # torch's defaults are held back until we know what the user said, here or in torch's PET_ variables.
    held_back = {name: parser.get_default(name) for name in ("nnodes", "nproc_per_node", "node_rank", "master_addr")}
    parser.set_defaults(**{name: None for name in held_back if f"PET_{name.upper()}" not in os.environ})
    options = parser.parse_args(list(arguments))
    _check_used(options)
    if options.hostfile is not None or options.host is not None:
        _apply_hosts(options)
    for name, value in held_back.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    check_options(options)
    if _is_alone(options) and options.local_addr is None:
        options.local_addr = "127.0.0.1"  # Else the machine's own name is looked up, which not every machine can.
    return options


def _check_used(options: argparse.Namespace) -> None:
    """Raises LaunchError for options that torch's launcher would take and not read."""
    meeting = "--standalone" if options.standalone else f"--rdzv-backend {options.rdzv_backend}"
    if not options.standalone and options.rdzv_backend == "static":
        return
    for name in ("master_addr", "master_port", *(("rdzv_endpoint", "rdzv_id") if options.standalone else ())):
        value = getattr(options, name)
        if value not in (None, "", "none") and f"PET_{name.upper()}" not in os.environ:  # that a cluster sets for all
            option = f"--{name.replace('_', '-')}"
            raise LaunchError(
                f"{option} {value} with {meeting}",
                rule="A standalone run finds a free port of this machine; a rendezvous has its own endpoint",
                remedy=f"Leave {option} out, or {meeting}",
            )


def _torch_options() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    try:
        return get_args_parser()
    except ValueError as error:
        raise LaunchError(
            f"A variable of the environment that begins with PET_ is no number: {first_line(error)}",
            rule="PET_ and the name of an option of torchrun is its default; that of a switch is 0 or 1",
            remedy="Correct it, or unset it",
        ) from error


def _apply_hosts(options: argparse.Namespace) -> None:
    if options.standalone or options.rdzv_endpoint or options.rdzv_backend != "static":
        raise LaunchError(
            "A list of hosts stands beside --standalone or a rendezvous",
            rule="Both say where the machines meet, and only one can",
            remedy="Use --hostfile or --host, or torch's rendezvous options, not both",
        )
    hosts = read_hostfile(options.hostfile) if options.hostfile is not None else None
    chosen = select_hosts(options.host, hosts) if options.host is not None else hosts or []
    if options.nnodes is not None and options.nnodes != str(len(chosen)):
        raise LaunchError(
            f"--nnodes is {options.nnodes}, and the list of hosts has {len(chosen)}",
            rule="The number of machines is the number of hosts",
            remedy="Leave --nnodes out, or choose the machines with --host",
        )
    if options.nproc_per_node is None:
        slots = {host.slots for host in chosen}
        if len(slots) > 1:
            listing = ", ".join(f"{host.name} {host.slots if host.slots else 'without slots'}" for host in chosen)
            raise LaunchError(
                f"The hosts differ in their slots: {listing}",
                rule="Every machine runs the same number of processes",
                remedy="Say how many with --nproc_per_node, or write the same slots= for each host",
            )
        (count,) = slots
        options.nproc_per_node = None if count is None else str(count)
    options.nnodes = str(len(chosen))
    options.master_addr = options.master_addr or chosen[0].name
    if options.node_rank is None:
        options.node_rank = find_this_host(chosen)


def _is_alone(options: argparse.Namespace) -> bool:
    on_free_port = options.rdzv_backend == "static" and not options.rdzv_endpoint and options.master_port is None
    return bool(options.standalone or (on_free_port and options.nnodes in ("1", "1:1")))


def _check_script(options: argparse.Namespace) -> None:
    script: str = options.training_script
    if options.module:
        name = script.partition(".")[0]  # which an editable install finds in its own way
        found = bool(PathFinder.find_spec(name, [os.getcwd(), *sys.path]) or find_spec(name))
    elif options.no_python:
        found = shutil.which(script) is not None
    else:
        found = os.path.exists(script)
        if Path(script).is_fifo():
            raise LaunchError(
                f"{script!r} is a pipe",
                rule="Every process reads the script, and what one has read is gone for the others",
                remedy="Write it to a file",
            )
        if os.path.isdir(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
            raise LaunchError(
                f"{script!r} is a folder without a __main__.py",
                rule=f"The form is: {USAGE}",
                remedy="Name the script in it",
            )
    if not found:
        kind = "module" if options.module else "script"
        folder = Path(script).parent
        hint = did_you_mean(script, [] if options.module else map(str, folder.glob("*.py")))
        raise LaunchError(
            f"There is no {kind} {script!r} in {os.getcwd()!r}",
            rule=f"The form is: {USAGE}",
            remedy=f"Correct the name. {hint}" if hint.startswith("Did") else "Correct the name or change the folder",
        )


def _set_threads(options: argparse.Namespace) -> None:
    """Share the machine's cores out among its processes, where the user did not."""
    from torch.distributed.run import determine_local_world_size

    num_processes = determine_local_world_size(options.nproc_per_node)
    if num_processes > 1:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_processes)))


# --------------------------------------------------------------------------------------------------------------- launch


def _rendezvous(options: argparse.Namespace, endpoint: str) -> AbstractContextManager[None]:
    """Says who has not come, where launchers of several machines meet at the first one's address."""
    from shardformer.mesh.rank_failures import Rendezvous

    host, _, port = endpoint.rpartition(":")
    if options.rdzv_backend != "static" or _is_alone(options) or options.nnodes == "1" or not port.isdigit():
        return nullcontext()
    return Rendezvous(
        host, int(port), options.node_rank, int(options.nnodes.rpartition(":")[2]), "node"
    ).report_missing()


def _launch(options: argparse.Namespace, command: str = "run") -> int:
    """Run the processes to their end; 0 when all ended well, else 1 after a last line that names the cause."""
    from torch.distributed import DistNetworkError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.elastic.rendezvous import RendezvousError

    if not options.no_python and not options.run_path:
        # The script runs inside a small file of ours that leaves a note of its first error.
        as_module = ["-m"] if options.module else []
        options.training_script_args = [*as_module, options.training_script, *options.training_script_args]
        options.training_script = str(Path(launcher.__file__).with_name("worker.py"))
        options.module = False
    try:
        # `record` hands the error on where a launcher has started us; without one it would log that there is none.
        start = record(torchrun.run) if "TORCHELASTIC_ERROR_FILE" in os.environ else torchrun.run
        with set_shutdown_timeout(options), _rendezvous(options, torchrun.get_rdzv_endpoint(options)):
            start(options)
    except ChildFailedError as error:
        sys.stdout.flush()
        # where this is not the only launcher, others know how the rest of the ranks ended
        alone = options.nnodes in ("1", "1:1")
        ranks = range(torchrun.determine_local_world_size(options.nproc_per_node) if alone else 0)
        print(describe_failures(error.failures, ranks, command), file=sys.stderr, flush=True)
        return 1
    except SignalException as error:
        left = "".join(f"\nshardformer {command}: of process {pid}: {what}" for pid, what in STUCK_PROCESSES.items())
        left += "".join(f"\nshardformer {command}: {place}" for place in describe_stack_locations()[:FEW])
        print(f"shardformer {command}: ended by {error.sigval.name}{left}", file=sys.stderr, flush=True)
        return 128 + error.sigval
    except (RendezvousError, DistNetworkError) as error:
        raise LaunchError(
            f"The machines did not meet at {torchrun.get_rdzv_endpoint(options)}: {first_line(error)}",
            rule="Every machine runs the same command, and all reach the first one at one free port",
            remedy="Check --master_addr, the firewall of the first machine and --master_port (another if it is taken)",
        ) from error
    except Exception as error:  # what options are out of torch's range end in; those of the script are ChildFailedError
        raise LaunchError(
            f"torch's launcher cannot start this: {type(error).__name__}: {first_line(error)}",
            rule="All options of torchrun are taken, and mean what they mean there",
            remedy="See shardformer run --help",
        ) from error
    return 0
