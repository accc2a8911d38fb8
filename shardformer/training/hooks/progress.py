"""``Progress``: how far a run is, on the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shardformer.errors import check_number
from shardformer.training.hook import Hook, TrainerProtocol

if TYPE_CHECKING:
    from rich.console import Console

PLAIN = {"loss": "loss {:.4f}", "learning_rate": "rate {:.3g}"}
SCALED = {"tokens_per_s": "{}{} tokens/s", "flops_per_s": "{} {}FLOP/s", "memory_bytes": "{} {}B"}
UNITS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


class Progress(Hook):
    """A bar with the loss, tokens per second, operations per second and memory; where there is no terminal, lines.

    The first rank shows it. Speed and memory are there with ``Throughput()`` before this hook. Communicates nothing.

    Args:
        every_s: seconds from one line to the next where there is no terminal. The last step, and what a validation
            gave, are always told.

    Raises ConfigError for a time that cannot be.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        check_number("Progress.every_s", every_s, least=0, unit="seconds", example=10)
        self.every_s = every_s
        self._bar: Any = None
        self._task: Any = None
        self._last = self._told = 0.0
        self._told_step = -1

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._told, self._told_step = -self.every_s, -1
        if not trainer.is_first:
            return
        console = _console()
        if console.is_terminal:
            self._bar = _bar_on(console)
            self._task = self._bar.add_task("", total=trainer.num_steps, completed=trainer.step)
            self._bar.start()
        elif trainer.step:
            console.print(f"goes on from step {trainer.step}", soft_wrap=True)

    def after_step(self, trainer: TrainerProtocol) -> None:
        if not trainer.is_first:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.step, description=format_metrics(trainer.values))
        elif time.perf_counter() - self._told >= self.every_s or trainer.step == trainer.num_steps:
            self._tell(trainer, format_metrics(trainer.values))

    def after_validation(self, trainer: TrainerProtocol) -> None:
        found = {name: value for name, value in trainer.values.items() if name.startswith("validation/")}
        if trainer.is_first:
            self._tell(trainer, "  ".join(f"{name} {value:.4g}" for name, value in found.items()))

    def after_train(self, trainer: TrainerProtocol) -> None:
        if not trainer.is_first:
            return
        if self._bar is None and self._told_step != trainer.step and trainer.values:
            self._tell(trainer, format_metrics(trainer.values))
        self._stop()
        if trainer.stopped_by is not None:
            _console().print(f"ended at step {trainer.step}: {trainer.stopped_by}", soft_wrap=True, markup=False)

    def on_exception(self, trainer: TrainerProtocol) -> None:
        self._stop()

    def _tell(self, trainer: TrainerProtocol, what: str) -> None:
        self._told, self._told_step = time.perf_counter(), trainer.step
        of = f"/{trainer.num_steps}" if trainer.num_steps is not None else ""
        console = self._bar.console if self._bar is not None else _console()
        console.print(f"step {trainer.step}{of}  {what}", soft_wrap=True, markup=False)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def format_metrics(values: dict[str, float]) -> str:
    """The loss, the learning rate, speed and memory, as far as they are known, in a line."""
    shown = [text.format(values[name]) for name, text in PLAIN.items() if name in values]
    shown += [text.format(*short(values[name])) for name, text in SCALED.items() if name in values]
    return "  ".join(shown)


def short(value: float) -> tuple[str, str]:
    """51200 as ("51.2", "k")."""
    unit, scale = next(((unit, scale) for unit, scale in UNITS if abs(value) >= scale), ("", 1.0))
    return f"{value / scale:.3g}", unit


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _bar_on(console: Console) -> Any:
    from rich import progress

    return progress.Progress(
        progress.BarColumn(bar_width=20),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.description}"),
        progress.TimeRemainingColumn(),
        console=console,
    )
