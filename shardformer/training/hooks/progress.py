"""A hook that shows the progress of a run in a terminal, a notebook or a log file."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from shardformer.errors import check_number
from shardformer.training.hook import Hook, TrainerProtocol

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

PLAIN = {"loss": "loss {:.4f}", "learning_rate": "lr {:.3g}"}
SCALED = {"tokens_per_s": "{}{} tokens/s", "memory_bytes": "{} {}B", "flops_per_s": "{} {}FLOP/s"}
UNITS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
VALIDATION = "validation/"
GAP = "  "
MIN_BAR, BAR, WIDE = 10, 20, 100
"""Columns of the bar on a narrow and on a wide terminal, and the columns of a wide terminal."""
RECENT_STEPS = 50
"""Number of steps whose mean duration, with validation and saving, gives the remaining time."""
REFRESHES_PER_S = 4


class Progress(Hook):
    """Shows the loss, remaining time, speed and memory of a run in a progress bar, or in log lines without a terminal.

    The bar always shows the step, the loss and the remaining time, and as many other values as fit into the terminal.
    If there is no terminal, the hook prints lines instead. To show speed and memory, add ``Throughput()`` before this
    hook. Only the first rank prints. This hook doesn't communicate.
    """

    def __init__(
        self,
        every_s: Annotated[
            float, "Seconds between lines if there is no terminal. The last step and validations are always printed."
        ] = 10.0,
    ) -> None:
        check_number("Progress.every_s", every_s, minimum=0, unit="seconds", example=10)
        self.every_s = every_s
        self._bar: _TerminalProgressBar | _NotebookProgressBar | None = None
        self._console: Any = None
        self._printed_at, self._printed_step = 0.0, -1
        self._step_ends: deque[float] = deque(maxlen=RECENT_STEPS + 1)

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._printed_at, self._printed_step = -math.inf, -1
        self._step_ends.clear()
        if not trainer.is_first:
            return
        self._console = create_rich_console()
        if trainer.num_steps is not None and trainer.step >= trainer.num_steps:
            self._print_line(f"Nothing to train: {trainer.step} of {trainer.num_steps} steps are complete.")
            self._printed_step = trainer.step
            return
        if trainer.step:
            self._print_line(f"Resuming from step {trainer.step}.")
        if self._console.is_jupyter:
            self._bar = _NotebookProgressBar()
        elif self._console.is_terminal:
            self._bar = _TerminalProgressBar(self._console)

    def after_step(self, trainer: TrainerProtocol) -> None:
        if not trainer.is_first:
            return
        self._step_ends.append(time.perf_counter())
        if self._bar is not None:
            self._bar.show(StatusLine.from_trainer(trainer, self._estimate_remaining_seconds(trainer)))
        elif time.perf_counter() - self._printed_at >= self.every_s or trainer.step == trainer.num_steps:
            self._print_status_line(trainer)

    def after_validation(self, trainer: TrainerProtocol) -> None:
        if trainer.is_first:
            found = {n.removeprefix(VALIDATION): v for n, v in trainer.values.items() if n.startswith(VALIDATION)}
            metrics = GAP.join(f"{name} {value:.4g}" for name, value in found.items())
            self._print_line(f"step {format_step_progress(trainer)}{GAP}validation{GAP}{metrics}")

    def after_train(self, trainer: TrainerProtocol) -> None:
        if not trainer.is_first:
            return
        if self._bar is None and self._printed_step != trainer.step and trainer.values:
            self._print_status_line(trainer)
        self.on_exception(trainer)
        if trainer.stopped_by is not None:
            self._print_line(f"Stopped after step {trainer.step}: {trainer.stopped_by}.")

    def on_exception(self, trainer: TrainerProtocol) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _estimate_remaining_seconds(self, trainer: TrainerProtocol) -> float | None:
        ends = self._step_ends
        if len(ends) < 2 or trainer.num_steps is None:  # the first step is slower than all others
            return None
        return (trainer.num_steps - trainer.step) * (ends[-1] - ends[0]) / (len(ends) - 1)

    def _print_status_line(self, trainer: TrainerProtocol) -> None:
        self._printed_at, self._printed_step = time.perf_counter(), trainer.step
        line = StatusLine.from_trainer(trainer, self._estimate_remaining_seconds(trainer))
        self._print_line(GAP.join([f"step {line.step_progress_text}", *line.required[1:], *line.optional]))

    def _print_line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)


class StatusLine:
    """Status line of a run, shortened to fit the width of the terminal.

    Args:
        done_fraction: Completed fraction of the run from 0 to 1, or None if the number of steps is unknown.
        required_texts: Texts that are always shown, of which the first is the step.
        optional_texts: Texts that are shown if there is enough space, in the order of their importance.
    """

    def __init__(
        self, done_fraction: float | None, required_texts: Sequence[str], optional_texts: Sequence[str]
    ) -> None:
        self.done, self.required, self.optional = done_fraction, required_texts, optional_texts

    @classmethod
    def from_trainer(cls, trainer: TrainerProtocol, remaining_seconds: float | None) -> StatusLine:
        values, total = trainer.values, trainer.num_steps
        texts = {name: text.format(values[name]) for name, text in PLAIN.items() if name in values}
        for name, text in SCALED.items():
            if name in values:
                texts[name] = text.format(*scale_to_si_prefix(values[name]))
        required = [format_step_progress(trainer), *filter(None, [texts.pop("loss", "")])]
        elapsed = f"{format_duration(trainer.seconds)} elapsed"
        if total is not None:
            required.append(
                "-:--:-- left" if remaining_seconds is None else f"{format_duration(remaining_seconds)} left"
            )
        epochs = f"/{trainer.last_epoch}" if trainer.last_epoch is not None else ""
        texts["epoch"] = f"epoch {min(trainer.epoch + 1, trainer.last_epoch or trainer.epoch + 1)}{epochs}"
        order = ("tokens_per_s", "learning_rate", "memory_bytes", "elapsed", "epoch", "flops_per_s")
        texts["elapsed"] = elapsed
        return cls(trainer.step / total if total else None, required, [texts[name] for name in order if name in texts])

    @property
    def step_progress_text(self) -> str:
        return self.required[0]

    def get_texts_that_fit(self, max_width: int) -> list[str]:
        """Select the texts to show next to the progress bar, and drop optional texts that exceed ``max_width``."""
        shown = list(self.required)
        for text in self.optional:
            if len(GAP.join([*shown, text])) + self.compute_progress_bar_width(max_width) + 1 > max_width:
                break
            shown.append(text)
        return shown

    def compute_progress_bar_width(self, max_width: int) -> int:
        """Return the width of the progress bar in columns, or 0 if the required texts do not leave enough space."""
        if self.done is None or len(GAP.join(self.required)) + MIN_BAR + 1 > max_width:
            return 0
        return BAR if max_width >= WIDE else MIN_BAR

    def to_rich_text(self, max_width: int, ascii_only: bool = False) -> Text:
        """Render the progress bar and the texts as one line of at most ``max_width`` columns."""
        from rich.text import Text

        columns = self.compute_progress_bar_width(max_width)
        full = round(columns * (self.done or 0.0))
        done, left = ("#", "-") if ascii_only else ("━", "─")
        bar = (done * full, "bar.complete" if full < columns else "bar.finished"), (left * (columns - full), "bar.back")
        return Text.assemble(
            *bar, " " * bool(columns), GAP.join(self.get_texts_that_fit(max_width)), no_wrap=True, overflow="crop"
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.to_rich_text(options.max_width, options.ascii_only)


class _TerminalProgressBar:
    """Progress bar on the last line of the terminal, which is redrawn several times per second."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._live = Live(console=console, refresh_per_second=REFRESHES_PER_S)
        self._live.start()

    def show(self, status_line: StatusLine) -> None:
        self._live.update(status_line)

    def stop(self) -> None:
        self._live.stop()


class _NotebookProgressBar:
    """Progress bar in the output of a notebook cell, which is updated several times per second."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._line: StatusLine | None = None
        self._shown_at = -math.inf

    def show(self, status_line: StatusLine) -> None:
        self._line = status_line
        if time.perf_counter() - self._shown_at >= 1 / REFRESHES_PER_S:
            self._draw(status_line)

    def stop(self) -> None:
        if self._line is not None:
            self._draw(self._line)

    def _draw(self, status_line: StatusLine) -> None:
        from IPython.display import display  # type: ignore[import-not-found]

        self._shown_at = time.perf_counter()
        output = {"text/plain": status_line.to_rich_text(WIDE).plain}
        if self._handle is None:
            self._handle = display(output, raw=True, display_id=True)
        else:
            self._handle.update(output, raw=True)


def format_step_progress(trainer: TrainerProtocol) -> str:
    """Format the completed and the total number of steps, as in "48/60"."""
    return f"{trainer.step}/{trainer.num_steps}" if trainer.num_steps is not None else f"{trainer.step}"


def format_duration(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds, as in "0:01:30"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def scale_to_si_prefix(number: float) -> tuple[str, str]:
    """Scale a number to an SI prefix and round it to three digits, as in ("51.2", "k") for 51200."""
    # 999.6 is 1 k, not 1e+03
    unit, scale = next(((unit, scale) for unit, scale in UNITS if abs(number) >= 0.9995 * scale), ("", 1.0))
    return f"{number / scale:.3g}", unit


def create_rich_console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
