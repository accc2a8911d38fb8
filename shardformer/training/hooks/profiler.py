"""``Profiler``: where the time and the memory of some steps go."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shardformer.errors import ConfigError, check_int
from shardformer.filesystem.atomic_write import path_of, replace_text, replacing
from shardformer.training.hook import Hook, TrainerProtocol

ROWS = 25


class Profiler(Hook):
    """Runs torch's profiler over some steps, on each rank.

    Into ``folder/rank0``, ``rank1``, ... it writes ``step-3.json``, a trace for chrome://tracing or Perfetto;
    ``step-3.txt``, the operators that took most time; and ``step-3-memory.png``, the memory over time, where matplotlib
    is installed. The number is that of the last step that was profiled. Steps that are profiled are slower.

    Communicates nothing.

    Args:
        wait: steps before the first one that is profiled, beside the one that warms the profiler up.
        active: steps that are profiled.
        repeat: how often.
        memory: whether allocations are recorded.

    Raises ConfigError for numbers that cannot be, and for a link in the place of a rank's folder.
    """

    def __init__(
        self, folder: str | Path, wait: int = 1, active: int = 2, repeat: int = 1, memory: bool = True
    ) -> None:
        for name, value, least in (("wait", wait, 0), ("active", active, 1), ("repeat", repeat, 1)):
            check_int(f"Profiler.{name}", value, least)
        self.folder, self.memory = path_of(folder), memory
        self._schedule = schedule(wait=wait, warmup=1, active=active, repeat=repeat)
        self._profile: Any = None
        self._place = self.folder
        self._step = self._made = 0
        self._active, self._cycle, self._is_ending = active, wait + 1 + active, False
        self.written: list[Path] = []

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._place = self.folder / f"rank{trainer.engine.world.rank}"
        if self._place.is_symlink():
            raise ConfigError(
                f"Profiler({str(self.folder)!r}): {self._place.name} in it is a symbolic link",
                remedy="Remove the link, or give another folder",
            )
        self._place.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if trainer.engine.context.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=self._schedule,
            on_trace_ready=self._write,
            profile_memory=self.memory,
            acc_events=True,
        )
        self._made, self._is_ending = 0, False
        self._profile.__enter__()

    def after_step(self, trainer: TrainerProtocol) -> None:
        self._step = trainer.step
        if self._profile is not None:
            self._made += 1
            self._profile.step()

    def after_train(self, trainer: TrainerProtocol) -> None:
        self._stop()
        if not self.written and trainer.is_first:
            warnings.warn("Profiler: the run was too short for a trace; use fewer steps in wait", stacklevel=2)

    def on_exception(self, trainer: TrainerProtocol) -> None:
        self._stop()

    def _stop(self) -> None:
        running, self._profile, self._is_ending = self._profile, None, True
        if running is not None:
            running.__exit__(None, None, None)

    def _write(self, running: Any) -> None:
        if self._is_ending and self._made % self._cycle <= self._cycle - self._active:
            return  # the run ended before, or in, what warms the profiler up
        trace = self._place / f"step-{self._step}.json"
        with replacing(trace) as hidden:
            running.export_chrome_trace(str(hidden))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        text = running.key_averages().table(sort_by=order, row_limit=ROWS)
        replace_text(trace.with_suffix(".txt"), text)
        self.written.append(trace)
        if self.memory:
            draw_memory(trace, trace.with_name(f"{trace.stem}-memory.png"))


def draw_memory(trace: Path, picture: Path) -> None:
    """Draws the memory that was allocated since the profiler began, over time; nothing without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn(
            "Profiler: no picture of the memory without matplotlib: pip install 'shardformer[plot]'", stacklevel=2
        )
        return
    times, held = memory_over_time(trace)
    if not times:
        return
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.step(times, held, where="post", color="#0072B2", linewidth=1)
    axes.fill_between(times, held, step="post", alpha=0.2, color="#0072B2")
    axes.set_title("Memory allocated since the profiler began", loc="left", fontsize=10)
    axes.set_xlabel("ms")
    axes.set_ylabel("MB")
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(picture) as hidden:
        figure.savefig(hidden, dpi=130)


def memory_over_time(trace: Path) -> tuple[list[float], list[float]]:
    """(milliseconds, megabytes) of each allocation in a trace: on the GPU where there is one, else on the host."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    seen = [e for e in events if e.get("name") == "[memory]"]
    kinds = {e["args"].get("Device Type", 0) for e in seen}
    device = max(kinds, default=0)  # the GPU's where there is one: 0 is the host
    found = sorted((float(e["ts"]), int(e["args"]["Bytes"])) for e in seen if e["args"].get("Device Type", 0) == device)
    times, held, now = [], [], 0
    for at, count in found:
        now += count
        times.append((at - found[0][0]) / 1000)
        held.append(now / 1e6)
    return times, held
