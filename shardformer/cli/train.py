"""The ``shardformer train`` command, which trains a model from a configuration file."""

from __future__ import annotations

import json
import os
import signal
import sys
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from shardformer.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from shardformer.config import ParallelConfig
    from shardformer.train_command.config_schema import TrainConfig
    from shardformer.train_command.dry_run import DryRunReport, RankMemoryEstimate

MODULE = "shardformer.train_command"
OPTION_GROUPS = {
    "Run": ("config", "changes", "dry_run", "as_json"),
    "Processes": ("processes", "max_restarts", "shutdown_timeout"),
}


def train(
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="Run configuration, in TOML format.")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a configuration key, such as parallel.tensor=2. KEY= removes the key. Can be repeated.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of processes to start. Default: the product of the axis sizes."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Maximum number of restarts from the last checkpoint after a process fails. Default: 0.",
        ),
    ] = None,
    shutdown_timeout: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Maximum time to finish the step and save a checkpoint after SIGINT or SIGTERM. Default: no limit.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the layout and the memory per rank, without training."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report of --dry-run as JSON.")] = False,
) -> None:
    """Train a model from a configuration file.

    The file specifies the model, data, layout, optimizer, schedule and hooks. To stop, press Ctrl-C: the command
    finishes the current step and saves a checkpoint. To resume from it, run the command again. The command starts all
    processes of the layout itself, unless you run it under a launcher (shardformer run, srun).
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # every process would print the same warnings
    from shardformer.train_command.config_schema import load_train_config

    overrides = list(changes or [])
    found = load_train_config(config, overrides)
    if as_json and not dry_run:
        raise ConfigError("--json has no effect without --dry-run.", remedy="Add --dry-run, or remove --json.")
    where = _get_reason_not_to_launch(dry_run)
    if where is None and (count := _get_num_processes_for_layout(found.layout, processes)) > 1:
        _launch_training_and_exit(found, count, max_restarts or 0, shutdown_timeout, [str(config), *overrides])
    # without a launcher, --processes 1 is valid: this process trains
    unused = {"--processes": processes if where else None, "--max-restarts": max_restarts or None}
    _check_process_options_unused(where or "if one is enough", {**unused, "--shutdown-timeout": shutdown_timeout})
    if dry_run:
        _print_dry_run(found, as_json)
    else:
        _train_in_current_process(found)


def _print_dry_run(config: TrainConfig, as_json: bool) -> None:
    from rich.console import Console

    from shardformer.train_command.dry_run import make_dry_run_report

    report = make_dry_run_report(config)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_dry_run_report(Console(highlight=False), report)


def _train_in_current_process(config: TrainConfig) -> None:
    """Train without starting processes. After a signal, print where the checkpoint is, and exit."""
    try:
        from shardformer.train_command.run import run_training

        run_training(config)
    except (KeyboardInterrupt, SystemExit) as ended:
        code = ended.code if isinstance(ended, SystemExit) else 128 + signal.SIGINT
        if os.environ.get("RANK", "0") == "0":
            _print_resume_hint(config, code)
        sys.exit(code)


def _print_resume_hint(config: TrainConfig, exit_code: str | int | None) -> None:
    """If a signal ended the run, print the path of its checkpoint and how to resume."""
    from shardformer.train_command.run import get_resume_hint

    if exit_code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        sys.stdout.flush()
        print(get_resume_hint(config), file=sys.stderr, flush=True)


def _launch_training_and_exit(
    config: TrainConfig,
    num_processes: int,
    max_restarts: int,
    shutdown_timeout_s: int | None,
    train_command_args: list[str],
) -> NoReturn:
    from shardformer.cli.run import launch_script
    from shardformer.launcher.shutdown import SHUTDOWN_TIMEOUT_VARIABLE
    from shardformer.train_command.build import build_hooks, build_optimizer_factory

    build_hooks(config), build_optimizer_factory(config.optimizer)  # raises errors once, before any process starts
    if shutdown_timeout_s is not None:
        os.environ[SHUTDOWN_TIMEOUT_VARIABLE] = str(shutdown_timeout_s)
    options = ["--nproc_per_node", str(num_processes), "--max-restarts", str(max_restarts)]
    try:
        status = launch_script([*options, "-m", MODULE, *train_command_args], "train")
    except KeyboardInterrupt:  # before torch's launcher handles signals
        status = 128 + signal.SIGINT
    _print_resume_hint(config, status)
    sys.exit(status)


def _get_reason_not_to_launch(dry_run: bool) -> str | None:
    """Return the reason why this command must not start processes, or None if it may start them."""
    from shardformer.mesh.init_distributed import get_launcher_env_variable_name

    launched = get_launcher_env_variable_name()
    return "in a dry run" if dry_run else f"under a launcher ({launched} is set)" if launched else None


def _check_process_options_unused(no_launch_reason: str, process_options: dict[str, int | None]) -> None:
    """Raise ConfigError if options such as ``--max-restarts`` were passed but the command starts no processes."""
    for name, value in process_options.items():
        if value is not None:
            raise ConfigError(
                f"{name} {value} has no effect, because no processes are started {no_launch_reason}.",
                remedy=f"Remove {name}.",
            )


def _get_num_processes_for_layout(layout: ParallelConfig, requested_num_processes: int | None) -> int:
    """Return the number of training processes to start. Raises ConfigError if the layout needs another number."""
    least = prod(size or 1 for size in layout.sizes.values())
    count = least if requested_num_processes is None else requested_num_processes
    if count % least or (layout.data is not None and count != least):
        sizes = ", ".join(f"{name} = {size}" for name, size in layout.sizes.items() if size is not None)
        alternative = " or a multiple of it" if layout.data is None else ""
        raise ConfigError(
            f"--processes {count} does not match the layout {sizes}.",
            remedy=f"Use --processes {least}{alternative}.",
        )
    return count


def print_dry_run_report(console: Console, report: DryRunReport) -> None:
    from rich.table import Table

    from shardformer.errors import format_bytes
    from shardformer.train_command.run import describe_layout, print_labeled_rows

    count = prod(report.axis_sizes.values())
    processes = f"{count} process{'es' * (count > 1)}"
    print_labeled_rows(
        console, report.summary.format_rows(describe_layout(report.layout, report.axis_sizes, processes))
    )
    console.print()
    console.print(report.description, soft_wrap=True, markup=False)
    console.print()
    table = Table(title="Memory per rank", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    axes = [name for name in ("pipe", "tensor") if report.axis_sizes[name] > 1]
    for name in (*axes, "parameters", "gradients", "masters", "states", "a step", "in all", "host"):
        table.add_column(name, justify="right", no_wrap=True)

    def add_rank_row(estimate: RankMemoryEstimate, *position_cells: str) -> None:
        kept = estimate.persistent_bytes
        cells = (
            kept.parameters + kept.gathered,
            kept.gradients,
            kept.masters,
            kept.states,
            estimate.step_peak_bytes,
            estimate.peak_bytes,
        )
        table.add_row(*position_cells, *("?" if c is None else format_bytes(c) for c in cells), format_bytes(kept.host))

    for rank in report.rank_estimates:
        add_rank_row(rank, *(str(rank.coords[name]) for name in axes))
    console.print(table)
    console.print(
        "A step: peak of gradients, activations and temporary tensors, traced on fake tensors.", soft_wrap=True
    )
    if report.single_process_estimate is not None and report.single_process_estimate.peak_bytes is not None:
        console.print(
            f"One process without parallelism: {format_bytes(report.single_process_estimate.peak_bytes)} in all.",
            soft_wrap=True,
        )
    if report.free_bytes is not None:
        console.print(
            f"Free memory of this machine ({report.device}): {format_bytes(report.free_bytes)}.", soft_wrap=True
        )
    if report.untraced_reason:
        console.print(f"?: the step cannot be traced: {report.untraced_reason}", soft_wrap=True, markup=False)
