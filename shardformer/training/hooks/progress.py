"""``Progress``, a hook that shows the progress of a run in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from shardformer.errors import check_number
from shardformer.training.hook import Hook, TrainerProtocol

if TYPE_CHECKING:
    from rich.console import Console

PLAIN = {"loss": "loss {:.4f}", "learning_rate": "lr {:.3g}"}
SCALED = {"tokens_per_s": "{}{} tokens/s", "flops_per_s": "{} {}FLOP/s", "memory_bytes": "{} {}B"}
UNITS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


class Progress(Hook):
    """Shows a progress bar with loss, speed and memory, or prints lines if the output is not a terminal.

    Only the first rank prints. To show speed and memory, add ``Throughput()`` before this hook. Communicates nothing.
    """

    def __init__(
        self,
        every_s: Annotated[
            float, "Seconds between lines without a terminal. The last step and validation metrics are always printed."
        ] = 10.0,
    ) -> None:
        check_number("Progress.every_s", every_s, least=0, unit="seconds", example=10)
        self.every_s = every_s
        self._bar: Any = None
        self._task: Any = None
        self._printed_at, self._printed_step = 0.0, -1

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._printed_at, self._printed_step = -self.every_s, -1
        if not trainer.is_first:
            return
        console = _create_console()
        if console.is_terminal:
            self._bar = _create_progress_bar(console)
            self._task = self._bar.add_task("", total=trainer.num_steps, completed=trainer.step)
            self._bar.start()
        elif trainer.step:
            console.print(f"resuming from step {trainer.step}", soft_wrap=True)

    def after_step(self, trainer: TrainerProtocol) -> None:
        if not trainer.is_first:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.step, description=format_metrics(trainer.values))
        elif time.perf_counter() - self._printed_at >= self.every_s or trainer.step == trainer.num_steps:
            self._print_line(trainer, format_metrics(trainer.values))

    def after_validation(self, trainer: TrainerProtocol) -> None:
        found = [f"{name} {value:.4g}" for name, value in trainer.values.items() if name.startswith("validation/")]
        if trainer.is_first:
            self._print_line(trainer, "  ".join(found))

    def after_train(self, trainer: TrainerProtocol) -> None:
        if not trainer.is_first:
            return
        if self._bar is None and self._printed_step != trainer.step and trainer.values:
            self._print_line(trainer, format_metrics(trainer.values))
        self.on_exception(trainer)
        if trainer.stopped_by is not None:
            _create_console().print(
                f"stopped at step {trainer.step}: {trainer.stopped_by}", soft_wrap=True, markup=False
            )

    def on_exception(self, trainer: TrainerProtocol) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print_line(self, trainer: TrainerProtocol, text: str) -> None:
        self._printed_at, self._printed_step = time.perf_counter(), trainer.step
        of = f"/{trainer.num_steps}" if trainer.num_steps is not None else ""
        console = self._bar.console if self._bar is not None else _create_console()
        console.print(f"step {trainer.step}{of}  {text}", soft_wrap=True, markup=False)


def format_metrics(values: dict[str, float]) -> str:
    """Format the loss, learning rate, speed and memory as one line. Metrics that are missing are left out."""
    shown = [text.format(values[name]) for name, text in PLAIN.items() if name in values]
    shown += [text.format(*scale_to_unit_prefix(values[name])) for name, text in SCALED.items() if name in values]
    return "  ".join(shown)


def scale_to_unit_prefix(value: float) -> tuple[str, str]:
    """Return a number with three digits and its unit prefix, as in ("51.2", "k") for 51200."""
    unit, scale = next(((unit, scale) for unit, scale in UNITS if abs(value) >= scale), ("", 1.0))
    return f"{value / scale:.3g}", unit


def _create_console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _create_progress_bar(console: Console) -> Any:
    from rich import progress

    return progress.Progress(
        progress.BarColumn(bar_width=20),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.description}"),
        progress.TimeRemainingColumn(),
        console=console,
    )
