"""``shardformer train``: a run that a config file says."""

from __future__ import annotations

import os
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
    from shardformer.train_command.run import DryRunReport

MODULE = "shardformer.train_command"


def train(
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The run, in TOML.")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another value for a key, as parallel.tensor=2; none removes it. Repeatable.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="How many are started here; by default as the axes in [parallel] multiply to."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(min=0, help="How often all start again, from the last checkpoint, when one has died; else never."),
    ] = None,
    shutdown_timeout: Annotated[
        int | None,
        typer.Option(min=0, metavar="SECONDS", help="For the step and the save after Ctrl-C or SIGTERM; else 600."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing: print how the model is cut, and what each rank holds.")
    ] = False,
) -> None:
    """Train a model as a config file says: model, data, layout, optimizer, schedule and hooks.

    Started again with the same file it goes on where it was. Under a launcher (shardformer run, srun) it is one of the
    processes; else it starts them.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # every process would say what one has said
    from shardformer.train_command.config_schema import load_train_config

    asked = list(changes or [])
    found = load_train_config(config, asked)
    where = _where(dry_run)
    if where is None and _count(found.layout, processes) > 1:
        _start(found, _count(found.layout, processes), max_restarts or 0, shutdown_timeout, [str(config), *asked])
    # without a launcher, one process is what --processes 1 asks for
    unused = {"--processes": processes if where else None, "--max-restarts": max_restarts or None}
    _check_unused(where or "with one process", {**unused, "--shutdown-timeout": shutdown_timeout})
    if dry_run:
        from rich.console import Console

        from shardformer.train_command.run import make_dry_run_report

        print_plan(Console(highlight=False), make_dry_run_report(found))
        return
    from shardformer.train_command.run import run_training as train_here

    train_here(found)


def _start(found: TrainConfig, count: int, max_restarts: int, shutdown_timeout: int | None, run: list[str]) -> NoReturn:
    """Starts the processes, waits for their end, and exits with their status."""
    from shardformer.cli.run import launch
    from shardformer.launcher.shutdown import SHUTDOWN_TIMEOUT_VARIABLE
    from shardformer.train_command.build import build_hooks, build_optimizer

    build_hooks(found), build_optimizer(found.optimizer)  # refused here, once and not in every process
    if shutdown_timeout is not None:
        os.environ[SHUTDOWN_TIMEOUT_VARIABLE] = str(shutdown_timeout)
    options = ["--nproc_per_node", str(count), "--max-restarts", str(max_restarts)]
    sys.exit(launch([*options, "-m", MODULE, *run], "train"))


def _where(dry_run: bool) -> str | None:
    """In words, where this command starts no processes; None where it may."""
    from shardformer.training.initialize import LAUNCHER_VARIABLES

    launched = next((name for name in LAUNCHER_VARIABLES if name in os.environ), None)
    return "in a dry run" if dry_run else f"under a launcher ({launched} is set)" if launched else None


def _check_unused(where: str, options: dict[str, int | None]) -> None:
    """Raises ConfigError for options of the processes that this command would start: it starts none."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name} {value} {where}",
                rule=f"{name} is for the processes that this command starts",
                remedy="Leave it out",
            )


def _count(layout: ParallelConfig, processes: int | None) -> int:
    """How many processes are started. Raises ConfigError for a number that the layout does not fit."""
    least = prod(size or 1 for size in layout.sizes.values())
    count = least if processes is None else processes
    if count % least or (layout.data is not None and count != least):
        sizes = ", ".join(f"{name} = {size}" for name, size in layout.sizes.items() if size is not None)
        raise ConfigError(
            f"--processes {count} for {sizes}",
            rule="The sizes of the axes multiply to the number of processes; data takes what is left if it is not said",
            remedy=f"Use --processes {least}" + (" or a multiple of it" if layout.data is None else ""),
        )
    return count


def print_plan(console: Console, plan: DryRunReport) -> None:
    from rich.table import Table

    from shardformer.zero.memory_estimate import format_bytes

    layout = ", ".join(f"{name} {size}" for name, size in plan.layout.items() if size > 1) or "one process"
    console.print(f"[bold]{plan.model}[/], {plan.num_parameters:,} parameters", soft_wrap=True)
    console.print(
        f"{plan.num_samples:,} samples of {plan.data}, {plan.num_steps:,} steps, over {layout}", soft_wrap=True
    )
    console.print()
    console.print(plan.description, soft_wrap=True, markup=False)
    console.print()
    table = Table(title="What each rank holds", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    axes = [name for name in ("pipe", "tensor") if plan.layout[name] > 1]
    for name in (*axes, "parameters", "gradients", "masters", "states", "a step", "in all", "host"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in plan.ranks:
        kept = rank.persistent_bytes
        step = "?" if rank.step is None else format_bytes(rank.step)
        most = kept.total + max((rank.step or 0) - kept.gradients, 0)  # a step's peak has the gradients in it
        cells = (kept.parameters + kept.gathered, kept.gradients, kept.masters, kept.states)
        table.add_row(
            *(str(rank.coords[name]) for name in axes),
            *map(format_bytes, cells), step,
            ("?" if rank.step is None else format_bytes(most)), format_bytes(kept.host),
        )  # fmt: skip
    console.print(table)
    console.print(
        "A step: gradients, activations and scratch at its fullest moment, traced without values.", soft_wrap=True
    )
    if plan.why_untraced:
        console.print(f"?: the step cannot be traced: {plan.why_untraced}", soft_wrap=True, markup=False)
