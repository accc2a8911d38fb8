"""``shardformer demo``: a small language model, trained whole in one process and split over two, side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from shardformer.cli._fields import takes
from shardformer.cli._folder import check_folder
from shardformer.cli._processes import check_count
from shardformer.demo.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shardformer.demo.comparison import Outcome, Tell
    from shardformer.demo.journal import Note
    from shardformer.demo.models import Chosen

SHOWN_STEPS = 10
"""A line of the table, or of what is printed where there is no terminal, for each of so many steps."""
WIDEST = 100
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}
"""Read by libraries when a worker starts. Each would say what it says in every process, in the middle of a bar."""


@takes(Settings)
def demo(settings: Settings) -> None:
    """Train a small language model in one process and split over several, and compare everything side by side.

    Split are its layers over two processes, or with --pipe 2 the stack of them into two stages.

    Takes a minute or two on two cores. Ends with status 1 when somebody could tell the two runs apart.
    """
    from rich.console import Console

    from shardformer.demo.comparison import compare
    from shardformer.demo.models import choose
    from shardformer.verify.ahead import AskedStages, check_split

    for name, level in QUIET.items():
        os.environ.setdefault(name, level)
    start = time.perf_counter()
    console = Console(highlight=False)
    check_count("The product of the axes", settings.num_processes)
    if settings.model is not None:
        check_folder(settings.model)
    chosen = choose(settings)
    # before a minute of the plain run, not behind it
    options = {"enable_sequence_parallelism": settings.sequence_parallel}
    stages = None if settings.pipe is None else AskedStages(settings.pipe, settings.num_parts)
    check_split(chosen.model_fn, settings.tensor_size, options=options, stages=stages)
    _print_plan(console, settings, chosen)
    with _watch(console, settings.steps) as watch:
        outcome = compare(settings, chosen, watch)
    console.print(_table(settings, outcome))
    _print_notes(console, settings, time.perf_counter() - start)
    console.print(_verdict(settings, outcome))
    if not outcome.passed:
        raise typer.Exit(1)


def _print_plan(console: Console, settings: Settings, chosen: Chosen) -> None:
    from rich.markup import escape
    from rich.table import Table

    from shardformer.demo.models import TASK, TASK_IN_WORDS

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    tokens = f"{settings.batch} x {settings.sequence} tokens; a token is {chosen.token}"
    rows = [
        ("model", f"{chosen.title} (HuggingFace transformers, unmodified)"),
        ("text", f"{chosen.text.num_bytes:,} bytes, {chosen.text.title}"),
        ("task", f"{TASK_IN_WORDS[TASK[chosen.family]]}: {_count(settings.steps, 'step')} of {tokens}"),
        ("runs", f"one process, then {settings.num_processes} {_who_hold(settings)}; one core a process"),
        ("same", "the first weights, the batches, AdamW; no dropout"),
    ]
    if num_cores < settings.num_processes:
        crowd = f"{settings.num_processes} processes share {_count(num_cores, 'core')}"
        rows.append(("note", f"{crowd} here, so they cannot be faster"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, escape(value))
    console.print(grid)
    console.print()


def _who_hold(settings: Settings) -> str:
    if settings.pipe is None:
        return "that hold a part of every layer each"
    parts = f"each batch passes them in {_count(settings.num_parts, 'micro-batch')}"
    if settings.tensor_size == 1:
        return f"that hold some of the layers each: {parts}"
    return f"in {settings.pipe} stages of {settings.tensor_size}, which hold a part of each of their layers: {parts}"


# -------------------------------------------------------------------------------------------------------- while it runs


@contextmanager
def _watch(console: Console, num_steps: int) -> Iterator[Callable[[str], Tell]]:
    """Shows each run as it goes: a bar that moves on a terminal, a line now and then elsewhere."""
    if not console.is_interactive:
        yield lambda name: _tell_in_lines(console, name, num_steps)
        console.print()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description:13}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]:>30}"),
    )
    with Progress(*columns, console=console, expand=console.width <= WIDEST) as progress:

        def start(name: str) -> Tell:
            task = progress.add_task(name, total=num_steps, news="starting ...")
            return lambda note: progress.update(
                task, completed=note.step, news=f"loss {note.loss:.4f}  {note.tokens_per_s:7,.0f} tokens/s"
            )

        yield start
    console.print()


def _tell_in_lines(console: Console, name: str, num_steps: int) -> Tell:
    console.print(f"{name}: starting ...")
    width = len(str(num_steps))

    def tell(note: Note) -> None:
        if note.step in (1, num_steps) or note.step % SHOWN_STEPS == 0:
            rate = f"{note.tokens_per_s:,.0f} tokens/s"
            console.print(f"{name}: step {note.step:{width}}/{num_steps}  loss {note.loss:.4f}  {rate}", soft_wrap=True)

    return tell


# ------------------------------------------------------------------------------------------------------------- its end


def _table(settings: Settings, outcome: Outcome) -> Table:
    from rich import box
    from rich.table import Table

    plain, split = outcome.plain, outcome.split
    table = Table(box=box.ROUNDED, title="side by side")
    table.add_column("")
    for name in ("one process", f"split over {settings.num_processes}", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = {1, settings.steps, *range(SHOWN_STEPS, settings.steps + 1, SHOWN_STEPS)}
    for step in sorted(shown):
        ours, theirs = split[0].losses[step - 1], plain.losses[step - 1]
        table.add_row(f"loss, step {step}", f"{theirs:.6f}", f"{ours:.6f}", f"{outcome.differences[step - 1]:.1e}")
    table.add_section()
    largest = max(outcome.differences)
    at = outcome.differences.index(largest) + 1
    of_all = "largest" if settings.steps == 1 else f"largest of all {settings.steps} steps"
    table.add_row(of_all, "", f"at step {at}", f"{largest:.1e}", style="bold")
    table.add_section()
    rows = [
        ("parameters per process", plain.num_parameters, max(run.num_parameters for run in split), "{:,}"),
        ("peak memory per process", plain.peak_bytes / 1e6, max(run.peak_bytes for run in split) / 1e6, "{:.1f} MB"),
    ]
    for name, whole, part, form in rows:
        table.add_row(name, form.format(whole), form.format(part), f"x {part / whole:.2f}")
    table.add_row("sent per step", "nothing", f"{sum(run.wire_bytes for run in split) / 1e6:.1f} MB", "")
    table.add_row("exchanges per step", "none", str(split[0].num_collectives), "")
    rates = [settings.batch * settings.sequence / run.step_s for run in (plain, split[0])]
    table.add_row("tokens per second", f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"x {rates[1] / rates[0]:.2f}")
    return table


def _print_notes(console: Console, settings: Settings, seconds: float) -> None:
    notes = (
        "Differences of losses are relative. Memory is what all tensors of a process take at the fullest moment of a "
        "step (weights, gradients, AdamW's averages, activations), without Python and its libraries. Sent is what the "
        "processes send each other, added up. Tokens per second are those of the median step; whatever else the "
        "machine does changes them.",
        "To split a model of your own:  model = shardformer.shard_model(model)"
        if settings.pipe is None
        else "To split a model of your own:  shardformer.Pipeline(shardformer.shard_model(model, context=context)), "
        "with context = shardformer.launch_from_torch(pipe=2)",
        f"Took {seconds:.0f} s.",
    )
    for note in notes:
        console.print(note, style="dim", markup=False)
    console.print()


def _verdict(settings: Settings, outcome: Outcome) -> str:
    differences = f"losses differ by {max(outcome.differences):.1e} at most in {_count(settings.steps, 'step')}"
    bound = f"(bound {outcome.allowed:.0e})"
    if outcome.drift is not None:
        by_itself = f"one process differs from itself by {outcome.drift:.0e} when the samples of a batch change places"
        bound = f"(bound {outcome.allowed:.0e}: {by_itself})"
    if outcome.passed:
        return f"[bold green]Nobody can tell:[/] {differences} {bound}."
    return f"[bold red]SOMEBODY CAN TELL:[/] {differences} {bound}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
