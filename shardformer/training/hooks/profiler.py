"""A hook that profiles the time and memory of some training steps with torch's profiler."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shardformer.errors import ConfigError, check_int
from shardformer.filesystem import replace_file_atomically, replace_text_atomically, to_absolute_path
from shardformer.public_names import deprecate_renamed_arguments
from shardformer.training.hook import RENAMED_DIRECTORY, Hook, TrainerProtocol

ROWS = 25


@deprecate_renamed_arguments(RENAMED_DIRECTORY, renamed_attributes=RENAMED_DIRECTORY)
class Profiler(Hook):
    """Profiles some training steps on each rank with torch's profiler, and writes traces and summaries.

    Each rank writes to its own folder, such as ``directory/rank0``. If step 3 is the last profiled step, it writes the
    trace ``step-3.json``, which you can open in chrome://tracing or Perfetto, and ``step-3.txt``, a table of the most
    expensive operators. If matplotlib is installed, it also plots the memory over time in ``step-3-memory.png``.

    Profiled steps are slower than other steps. This hook doesn't communicate.
    """

    def __init__(
        self,
        directory: Annotated[str | Path, "Directory of the traces."],
        wait: Annotated[int, "Steps before the warm-up step of the profiler."] = 1,
        active: Annotated[int, "Number of steps that are profiled."] = 2,
        repeat: Annotated[int, "Number of cycles."] = 1,
        memory: Annotated[bool, "Record allocations."] = True,
    ) -> None:
        for name, value, least in (("wait", wait, 0), ("active", active, 1), ("repeat", repeat, 1)):
            check_int(f"Profiler.{name}", value, least)
        self.directory, self.memory = to_absolute_path(directory), memory
        self._schedule = schedule(wait=wait, warmup=1, active=active, repeat=repeat)
        self._profile: profile | None = None
        self._rank_folder = self.directory
        self._step = self._steps_profiled = 0
        self._active, self._cycle, self._is_ending = active, wait + 1 + active, False
        self.written: list[Path] = []

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._rank_folder = self.directory / f"rank{trainer.engine.world.rank}"
        if self._rank_folder.is_symlink():
            raise ConfigError(
                f"Profiler cannot write to '{self._rank_folder}', which is a symbolic link.",
                remedy="Remove the link, or pass another directory.",
            )
        self._rank_folder.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if trainer.engine.context.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=self._schedule,
            on_trace_ready=self._write_trace,
            profile_memory=self.memory,
            acc_events=True,
        )
        self._steps_profiled, self._is_ending = 0, False
        self._profile.__enter__()

    def after_step(self, trainer: TrainerProtocol) -> None:
        self._step = trainer.step
        if self._profile is not None:
            self._steps_profiled += 1
            self._profile.step()

    def after_train(self, trainer: TrainerProtocol) -> None:
        self.on_exception(trainer)
        if not self.written and trainer.is_first:
            warnings.warn(
                "The run was too short for Profiler to write a trace. Reduce the argument wait.", stacklevel=2
            )

    def on_exception(self, trainer: TrainerProtocol) -> None:
        profiler, self._profile, self._is_ending = self._profile, None, True
        if profiler is not None:
            profiler.__exit__(None, None, None)

    def _write_trace(self, profiler: profile) -> None:
        if self._is_ending and self._steps_profiled % self._cycle <= self._cycle - self._active:
            return  # the run ended before the end of the warm-up
        trace = self._rank_folder / f"step-{self._step}.json"
        with replace_file_atomically(trace) as hidden:
            profiler.export_chrome_trace(str(hidden))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        text = profiler.key_averages().table(sort_by=order, row_limit=ROWS)
        replace_text_atomically(trace.with_suffix(".txt"), text)
        self.written.append(trace)
        if self.memory:
            plot_memory_trace(trace, trace.with_name(f"{trace.stem}-memory.png"))


def plot_memory_trace(trace_path: Path, image_path: Path) -> None:
    """Plot the allocated memory over time from a profiler trace. If matplotlib is not installed, warn and return."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn(
            "Profiler cannot plot the memory without matplotlib. Run pip install 'shardformer[plot]'.", stacklevel=2
        )
        return
    times, megabytes = read_memory_timeline(trace_path)
    if not times:
        return
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.step(times, megabytes, where="post", color="#0072B2", linewidth=1)
    axes.fill_between(times, megabytes, step="post", alpha=0.2, color="#0072B2")
    axes.set_title("Memory allocated since the profiler began", loc="left", fontsize=10)
    axes.set_xlabel("ms")
    axes.set_ylabel("MB")
    axes.spines[["top", "right"]].set_visible(False)
    with replace_file_atomically(image_path) as hidden:
        figure.savefig(hidden, dpi=130)


def read_memory_timeline(trace_path: Path) -> tuple[list[float], list[float]]:
    """Read times in ms, and the memory in MB that was allocated on the device, from a profiler trace."""
    events = json.loads(trace_path.read_text(encoding="utf-8"))["traceEvents"]
    seen = [e for e in events if e.get("name") == "[memory]"]
    kinds = {e["args"].get("Device Type", 0) for e in seen}
    device = max(kinds, default=0)  # 0 is the CPU
    found = sorted((float(e["ts"]), int(e["args"]["Bytes"])) for e in seen if e["args"].get("Device Type", 0) == device)
    times, megabytes, total = [], [], 0
    for at, count in found:
        total += count
        times.append((at - found[0][0]) / 1000)
        megabytes.append(total / 1e6)
    return times, megabytes
