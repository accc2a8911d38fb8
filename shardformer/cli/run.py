"""The ``shardformer run`` command, which starts a script like torchrun, and also supports host files."""

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
from typing import Annotated, Any, NoReturn

import typer

from shardformer import launcher
from shardformer.cli._options import ARGUMENTS, OTHER, check_num_processes_within_limit, print_help
from shardformer.errors import ConfigError, LaunchError, get_first_message_line, suggest_similar_names
from shardformer.launcher.failure_report import FEW, format_failure_report
from shardformer.launcher.hostfile import find_local_host_index, read_hostfile, select_hosts_by_name
from shardformer.launcher.shutdown import (
    SHUTDOWN_TIMEOUT_VARIABLE,
    STUCK_PROCESSES,
    format_current_lines_by_rank,
    set_torchrun_shutdown_timeout,
)

MAX_NODES = 2**16
MAX_TIMEOUT_S = 24 * 3600


def check_torchrun_options(args: argparse.Namespace) -> None:
    """Raise LaunchError if the value of a torchrun option, such as ``--nnodes``, is invalid."""
    _check_process_and_node_counts(args)
    _check_timeout_option_values(args)
    _check_signal_names(args.signals_to_handle)
    if args.local_addr is not None:
        try:
            socket.getaddrinfo(args.local_addr, None)
        except (OSError, UnicodeError) as error:
            raise LaunchError(
                f"--local-addr {args.local_addr!r} is not an address of this machine: {error}.",
                remedy="Use --local-addr 127.0.0.1, or remove the option.",
            ) from error


def _check_process_and_node_counts(torchrun_args: argparse.Namespace) -> None:
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        num_processes = determine_local_world_size(torchrun_args.nproc_per_node)
    except ValueError as error:
        raise LaunchError(
            f"--nproc_per_node {torchrun_args.nproc_per_node!r} is not valid: {error}.",
            remedy="Pass a number of processes, or one of auto, cpu and gpu.",
        ) from error
    if num_processes < 1:
        raise LaunchError(
            f"--nproc_per_node must be at least 1, but got {torchrun_args.nproc_per_node}.",
            remedy="Pass the number of processes to start, for example --nproc_per_node 2.",
        )
    check_num_processes_within_limit(f"--nproc_per_node {torchrun_args.nproc_per_node}", num_processes)
    try:
        least, most = parse_min_max_nnodes(torchrun_args.nnodes)
    except (ValueError, RuntimeError):
        least, most = 0, 0
    if not 1 <= least <= most <= MAX_NODES:
        raise LaunchError(
            f"--nnodes {torchrun_args.nnodes!r} is neither a number of machines nor a range such as 1:4.",
            remedy="Use --nnodes 2, or remove --nnodes to run only on this machine.",
        )
    if torchrun_args.standalone and most > 1:
        raise LaunchError(
            f"--standalone runs on one machine and cannot be combined with --nnodes {torchrun_args.nnodes}.",
            remedy="Remove one of the two options.",
        )
    if torchrun_args.rdzv_backend == "static" and not 0 <= torchrun_args.node_rank < most:
        raise LaunchError(
            f"--node_rank {torchrun_args.node_rank} is out of range for --nnodes {torchrun_args.nnodes}.",
            remedy="Use a --node_rank from 0 to --nnodes minus 1, or a larger --nnodes.",
        )


def _check_timeout_option_values(torchrun_args: argparse.Namespace) -> None:
    timeouts = {"--monitor-interval": torchrun_args.monitor_interval}
    for name, value in (
        ("--shutdown-timeout", getattr(torchrun_args, "shutdown_timeout", None)),
        (SHUTDOWN_TIMEOUT_VARIABLE, os.environ.get(SHUTDOWN_TIMEOUT_VARIABLE)),
    ):
        if value is not None:
            timeouts[name] = float(value) if str(value).lstrip("-").isdecimal() else float("nan")
    for name, seconds in timeouts.items():
        if not (seconds > 0 or (seconds == 0 and name != "--monitor-interval")) or not seconds <= MAX_TIMEOUT_S:
            value = os.environ[name] if name == SHUTDOWN_TIMEOUT_VARIABLE else f"{seconds:g}"
            example = 1 if name == "--monitor-interval" else 60
            raise LaunchError(
                f"{name} must be a number of seconds up to {MAX_TIMEOUT_S}, but got {value}.",
                remedy=f"For example, use {name} {example}.",
            )


def _check_signal_names(signal_names: str) -> None:
    known = [member.name for member in signal.Signals if member not in (signal.SIGKILL, signal.SIGSTOP)]
    for name in map(str.strip, signal_names.split(",")):
        if name not in known:
            hint = suggest_similar_names(name, known)
            raise LaunchError(
                f"--signals-to-handle {signal_names!r} contains {name!r}, which is not a signal that can be handled.",
                remedy=f"{hint} Use signal names, such as --signals-to-handle SIGTERM,SIGINT.",
            )


# Options go to the launcher's own parser. Arguments after the script go to the script.
CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}

USAGE = "shardformer run [OPTIONS] SCRIPT [ARGS]..."
DESCRIPTION = """
Start one process per rank, and set the environment variables of torch.distributed. All options of torchrun are
accepted, with - or _ in their names. On one machine, a free port is used unless you pass a port or a rendezvous.

To use several machines, list them in a file and run the same command with --hostfile on each of them. The first
machine is the master.
"""
HELP_GROUPS = {
    "Processes": ("nproc_per_node", "module", "max_restarts", "shutdown_timeout"),
    "Machines": ("hostfile", "host", "nnodes", "node_rank", "master_addr", "master_port"),
    "Rendezvous": ("standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr"),
    "Output of the processes": ("log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs"),
}
"""Title in the help -> names of options. The other options of torchrun come last."""
HELP_TEXTS = {
    "nproc_per_node": ("N", "Processes on each machine: a number, or auto, cpu or gpu. Default: 1."),
    "nnodes": ("N", "Number of machines, or a range such as 1:4 for an elastic run. Default: 1."),
    "node_rank": ("N", "Rank of this machine, starting from 0."),
    "master_addr": ("NAME", "Name or address of the first machine."),
    "master_port": ("PORT", "Port on the first machine. Default: a free port on one machine, 29500 on several."),
    "module": ("", "Run SCRIPT as a Python module, like python -m."),
    "max_restarts": ("N", "Maximum number of restarts of all processes after one fails. Default: 0."),
    "shutdown_timeout": ("SECONDS", "Time in which the processes must end after a signal. Default: 30."),
    "signals_to_handle": ("NAMES", "Signals to forward. Default: SIGTERM,SIGINT,SIGHUP,SIGQUIT."),
    "help": ("", "Show this message and exit."),
}
"""Name of an option of torchrun -> metavar and help, shorter than those of torchrun."""
EXAMPLE = """
shardformer run --nproc-per-node 2 train.py --my-option 3
shardformer run --hostfile hosts.txt train.py   # on every machine
"""


def run(arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGS]...")] = None) -> None:
    """Start a script in several processes, with the options of torchrun and support for host files."""
    sys.exit(launch_script(arguments or []))


def launch_script(argv: Sequence[str], command_name: str = "run") -> int:
    """Start a script in several processes, wait for them, and return the exit status.

    Args:
        command_name: the name of the command in messages.
    """
    options = parse_run_arguments(argv)
    _check_script_exists(options)
    _set_omp_num_threads(options)
    return _launch_with_torchrun(options, command_name)


def relaunch_command_in_processes(context: typer.Context, num_processes: int) -> None:
    """Restart the current command in ``num_processes`` processes, unless this process is already one of them.

    Exits with the status of these processes. Raises ConfigError if a launcher started another number of processes.
    """
    from shardformer.mesh.init_distributed import get_launcher_env_variable_name
    from shardformer.training.initialize import get_launcher_world_size

    if get_launcher_env_variable_name() is not None:
        if get_launcher_world_size() != num_processes:
            raise ConfigError(
                f"The parallel layout needs {num_processes} processes, but the launcher started "
                f"{get_launcher_world_size()}.",
                remedy=f"Start {num_processes} processes, or run the command without a launcher.",
            )
    elif num_processes > 1:
        check_num_processes_within_limit("The layout", num_processes)
        words = ["-m", "shardformer", str(context.info_name), *context.meta[ARGUMENTS]]
        sys.exit(launch_script(["--nproc_per_node", str(num_processes), *words], str(context.info_name)))


class _RunArgumentParser(argparse.ArgumentParser):
    def print_help(self, file: Any = None) -> None:
        rows = {action.dest: _format_help_row(action) for action in vars(self)["_actions"] if action.option_strings}
        groups = {title: [rows.pop(name) for name in names if name in rows] for title, names in HELP_GROUPS.items()}
        print_help(USAGE, DESCRIPTION, [*groups.items(), (OTHER, list(rows.values()))], EXAMPLE)

    def error(self, message: str) -> NoReturn:
        if "training_script" in message:
            raise LaunchError("No script was passed.", remedy=f"Pass a script, or a module with -m: {USAGE}.")
        short, could, names = message.removeprefix("ambiguous option: ").partition(" could match ")
        if could:
            # torch defines each option twice, with - and with _
            wanted = " or ".join(sorted({name.replace("_", "-") for name in names.split(", ")}))
            option = short.partition("=")[0]
            raise LaunchError(f"The option {option!r} is ambiguous.", remedy=f"Did you mean {wanted}?")
        raise LaunchError(message[:1].upper() + message[1:], rule=f"Usage: {USAGE}.", remedy=f"See {self.prog} --help.")


def _format_help_row(action: argparse.Action) -> tuple[str, str]:
    """Format an option as a row of the help screen: its names, a placeholder for its value, and its description."""
    names = sorted({name.replace("_", "-") for name in action.option_strings}, key=lambda name: name.startswith("--"))
    usual = (action.metavar or action.dest.rpartition("_")[2].upper(), action.help or "")
    metavar, text = HELP_TEXTS.get(action.dest, usual)
    return f"{', '.join(names)}{'' if action.nargs == 0 else f' {metavar}'}", text


def parse_run_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of torchrun, and the additional options ``--hostfile`` and ``--host``."""
    parser = _RunArgumentParser(
        prog="shardformer run",
        usage=USAGE,
        parents=[_make_torchrun_parser()],
        conflict_handler="resolve",
    )
    ours = parser.add_argument_group("hosts")
    ours.add_argument("--hostfile", metavar="FILE", help="File with one machine per line: NAME, or NAME slots=4.")
    ours.add_argument(
        "--host", metavar="A,B", help="Names of machines, with commas. With --hostfile: a subset of its machines."
    )

    # torch's defaults are applied last, to detect options that were passed or set in torch's PET_ variables
    defaults = {name: parser.get_default(name) for name in ("nnodes", "nproc_per_node", "node_rank", "master_addr")}
    parser.set_defaults(**{name: None for name in defaults if f"PET_{name.upper()}" not in os.environ})
    options = parser.parse_args(list(argv))
    _check_no_ignored_rendezvous_options(options)
    if options.hostfile is not None or options.host is not None:
        _set_torchrun_options_from_hosts(options)
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    check_torchrun_options(options)
    if _is_single_node(options) and options.local_addr is None:
        options.local_addr = "127.0.0.1"  # by default torch resolves the host name, which fails on some machines
    return options


def _check_no_ignored_rendezvous_options(torchrun_args: argparse.Namespace) -> None:
    """Raise LaunchError for options such as ``--master-addr`` if torch's launcher would ignore them."""
    rendezvous = "--standalone" if torchrun_args.standalone else f"--rdzv-backend {torchrun_args.rdzv_backend}"
    if not torchrun_args.standalone and torchrun_args.rdzv_backend == "static":
        return
    for name in ("master_addr", "master_port", *(("rdzv_endpoint", "rdzv_id") if torchrun_args.standalone else ())):
        value = getattr(torchrun_args, name)
        if value not in (None, "", "none") and f"PET_{name.upper()}" not in os.environ:  # a cluster may set these
            option = f"--{name.replace('_', '-')}"
            raise LaunchError(
                f"{option} {value} has no effect with {rendezvous}.",
                remedy=f"Remove {option} or {rendezvous}.",
            )


def _make_torchrun_parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    try:
        return get_args_parser()
    except ValueError as error:
        reason = get_first_message_line(error)
        raise LaunchError(
            f"An environment variable PET_... of torchrun has an invalid value: {reason}.",
            remedy="Unset the variable, or set it to a valid value, for example PET_NNODES=2 or PET_STANDALONE=1.",
        ) from error


def _set_torchrun_options_from_hosts(torchrun_args: argparse.Namespace) -> None:
    if torchrun_args.standalone or torchrun_args.rdzv_endpoint or torchrun_args.rdzv_backend != "static":
        raise LaunchError(
            "--hostfile and --host cannot be combined with --standalone or rendezvous options like --rdzv-endpoint.",
            remedy="Remove --hostfile and --host, or remove the other options.",
        )
    hosts = read_hostfile(torchrun_args.hostfile) if torchrun_args.hostfile is not None else None
    chosen = select_hosts_by_name(torchrun_args.host, hosts) if torchrun_args.host is not None else hosts or []
    if torchrun_args.nnodes is not None and torchrun_args.nnodes != str(len(chosen)):
        raise LaunchError(
            f"--nnodes {torchrun_args.nnodes} does not match the number of selected hosts, {len(chosen)}.",
            remedy="Remove --nnodes, or select hosts with --host.",
        )
    if torchrun_args.nproc_per_node is None:
        slots = {host.slots for host in chosen}
        if len(slots) > 1:
            listing = ", ".join(f"{host.name} {host.slots if host.slots else 'without slots'}" for host in chosen)
            raise LaunchError(
                f"The hosts have different numbers of slots: {listing}.",
                remedy="Give all hosts the same number of slots, or set the number of processes with --nproc_per_node.",
            )
        (count,) = slots
        torchrun_args.nproc_per_node = None if count is None else str(count)
    torchrun_args.nnodes = str(len(chosen))
    torchrun_args.master_addr = torchrun_args.master_addr or chosen[0].name
    if torchrun_args.node_rank is None:
        torchrun_args.node_rank = find_local_host_index(chosen)


def _is_single_node(torchrun_args: argparse.Namespace) -> bool:
    on_free_port = (
        torchrun_args.rdzv_backend == "static" and not torchrun_args.rdzv_endpoint and torchrun_args.master_port is None
    )
    return bool(torchrun_args.standalone or (on_free_port and torchrun_args.nnodes in ("1", "1:1")))


def _check_script_exists(torchrun_args: argparse.Namespace) -> None:
    script: str = torchrun_args.training_script
    if torchrun_args.module:
        name = script.partition(".")[0]  # editable installs are found by their own finders
        found = bool(PathFinder.find_spec(name, [os.getcwd(), *sys.path]) or find_spec(name))
    elif torchrun_args.no_python:
        found = shutil.which(script) is not None
    else:
        found = os.path.exists(script)
        if Path(script).is_fifo():
            raise LaunchError(
                f"The script {script!r} is a pipe, which only one process can read.",
                remedy="Write the script to a file.",
            )
        if os.path.isdir(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
            raise LaunchError(
                f"Cannot run the folder {script!r}, because it has no __main__.py.",
                remedy="Pass the path of a script in the folder.",
            )
    if not found:
        kind = "module" if torchrun_args.module else "script"
        folder = Path(script).parent
        hint = suggest_similar_names(script, [] if torchrun_args.module else map(str, folder.glob("*.py")))
        hint, directory = f" {hint}" if hint.startswith("Did") else "", os.getcwd()
        raise LaunchError(
            f"There is no {kind} {script!r} in {directory!r}.",
            remedy=f"Check the name, or change to another directory.{hint}",
        )


def _set_omp_num_threads(torchrun_args: argparse.Namespace) -> None:
    """Set OMP_NUM_THREADS to the number of CPU cores per process, unless the variable is already set."""
    from torch.distributed.run import determine_local_world_size

    num_processes = determine_local_world_size(torchrun_args.nproc_per_node)
    if num_processes > 1:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_processes)))


def _report_nodes_that_have_not_connected(
    torchrun_args: argparse.Namespace, rendezvous_endpoint: str
) -> AbstractContextManager[None]:
    """Create a context manager that reports the machines that have not connected to the rendezvous yet."""
    from shardformer.mesh.rank_failures import Rendezvous

    host, _, port = rendezvous_endpoint.rpartition(":")
    if (
        torchrun_args.rdzv_backend != "static"
        or _is_single_node(torchrun_args)
        or torchrun_args.nnodes == "1"
        or not port.isdigit()
    ):
        return nullcontext()
    return Rendezvous(
        host, int(port), torchrun_args.node_rank, int(torchrun_args.nnodes.rpartition(":")[2]), "node"
    ).report_missing_processes()


def _launch_with_torchrun(torchrun_args: argparse.Namespace, command_name: str = "run") -> int:
    """Run the script with torch's launcher and return the exit status. After a failure, print its cause."""
    from torch.distributed import DistNetworkError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.elastic.rendezvous import RendezvousError

    if not torchrun_args.no_python and not torchrun_args.run_path:
        # the worker runs the script and records its first error
        as_module = ["-m"] if torchrun_args.module else []
        torchrun_args.training_script_args = [
            *as_module,
            torchrun_args.training_script,
            *torchrun_args.training_script_args,
        ]
        torchrun_args.training_script = str(Path(launcher.__file__).with_name("worker.py"))
        torchrun_args.module = False
    try:
        # `record` writes the error for an outer launcher, and logs a warning without one
        start = record(torchrun.run) if "TORCHELASTIC_ERROR_FILE" in os.environ else torchrun.run
        with (
            set_torchrun_shutdown_timeout(torchrun_args),
            _report_nodes_that_have_not_connected(torchrun_args, torchrun.get_rdzv_endpoint(torchrun_args)),
        ):
            start(torchrun_args)
    except ChildFailedError as error:
        sys.stdout.flush()
        # with several launchers, the other ones know how their ranks ended
        alone = torchrun_args.nnodes in ("1", "1:1")
        ranks = range(torchrun.determine_local_world_size(torchrun_args.nproc_per_node) if alone else 0)
        print(format_failure_report(error.failures, ranks, command_name), file=sys.stderr, flush=True)
        return 1
    except SignalException as error:
        left = "".join(f"\nshardformer {command_name}: process {pid}: {what}" for pid, what in STUCK_PROCESSES.items())
        left += "".join(f"\nshardformer {command_name}: {place}" for place in format_current_lines_by_rank()[:FEW])
        if sys.stdout.isatty():
            print("\x1b[?25h", flush=True)  # the progress bar of a killed rank leaves the cursor hidden
        print(f"shardformer {command_name}: ended by {error.sigval.name}{left}", file=sys.stderr, flush=True)
        return 128 + error.sigval
    except (RendezvousError, DistNetworkError) as error:
        endpoint, reason = torchrun.get_rdzv_endpoint(torchrun_args), get_first_message_line(error)
        raise LaunchError(
            f"The machines could not connect to each other at {endpoint}: {reason}.",
            remedy="Run the same command on all machines, and check --master_addr, --master_port and the firewall of "
            "the first machine.",
        ) from error
    except Exception as error:  # invalid values of torch's options. Errors of the script are ChildFailedError
        reason = get_first_message_line(error)
        raise LaunchError(
            f"torchrun could not start the processes: {type(error).__name__}: {reason}.",
            remedy="Check the options with shardformer run --help.",
        ) from error
    return 0
