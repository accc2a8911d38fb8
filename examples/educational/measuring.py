"""Measure the memory of a run from the first weight to the last step, as a trace and as a plot.

Each run with ``--profile`` writes a trace for chrome://tracing or ui.perfetto.dev,
``<example>-<variant>.trace.json.gz``, and the memory curve, ``<example>-<variant>.json``. It also plots the curves of
all variants with the same setting into ``<example>.png``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.mesh.init_distributed import launch_from_torch
from shardformer.mesh.parallel_context import ParallelContext

MB = 1e6
# device types in the memory events of a trace
DEVICE_TYPES = {"cpu": 0, "cuda": 1}
COLOURS = ("#4c5b66", "#1f78b4")
GREY = "#7b868e"


@dataclass(frozen=True)
class Curve:
    """Memory of one process over time, and its phases ("build", "step 1", ...)."""

    variant: str
    setting: str
    time_ms: list[float]
    memory_mb: list[float]
    phases: list[tuple[str, float, float]]

    @property
    def peak(self) -> tuple[float, float]:
        """Time of the peak in ms, and peak memory in MB."""
        memory_mb = max(self.memory_mb)
        return self.time_ms[self.memory_mb.index(memory_mb)], memory_mb

    @property
    def step_ms(self) -> float:
        """Duration of the fastest step in ms, including the overhead of the profiler."""
        return min(end - start for name, start, end in self.phases if name != "build")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of both examples."""
    parser.add_argument("--tensor-parallel", action="store_true", help="shard the model over all processes")
    parser.add_argument("--profile", action="store_true", help="write a trace and a plot of the memory")
    parser.add_argument(
        "--out", type=Path, default=Path("profile"), help="folder for the output of --profile (default: ./profile)"
    )


def start(args: argparse.Namespace) -> ParallelContext:
    """Initialize the processes of a launcher, if there is one, as one tensor axis."""
    context = launch_from_torch() if "RANK" in os.environ else ParallelContext.from_group(None)
    size = context.tensor.size
    if args.tensor_parallel != (size > 1):
        raise ConfigError(
            f"--tensor-parallel is {'on' if args.tensor_parallel else 'off'}, and the number of processes is {size}.",
            rule="Tensor parallelism needs at least two processes, and replicated models would do the same work.",
            remedy="Use torchrun --nproc_per_node 2 with --tensor-parallel, or one process without it.",
        )
    if size > 1:
        dist.barrier()  # exclude the wait for ranks that started later from the first step
    return context


def report(model: nn.Module, recorder: CollectiveRecorder, num_steps: int, context: ParallelContext) -> None:
    """Print the local number of parameters and the communication per step, on rank 0."""
    if context.tensor.rank == 0:
        specs = get_shard_specs(model)
        whole = sum(prod(specs[name].shape) for name, _ in model.named_parameters())
        held = sum(param.numel() for param in model.parameters())
        rows = [("weights", f"{whole:,}"), ("on this rank", f"{held:,} ({held / whole:.0%})")]
        for (op, _, purpose), (count, wire_bytes) in recorder.summarize_calls().items():
            if purpose != "gather":  # only for printing
                what = "all-reduces" if op == "all_reduce" else "all-gathers"
                value = f"{count / num_steps:g}, {wire_bytes / num_steps:,.0f} bytes ({purpose})"
                rows.append((f"{what} a step", value))
        print("\n".join(f"{name:20} {value}" for name, value in rows), flush=True)


def variant_name(args: argparse.Namespace, size: int) -> str:
    where = "one process" if size == 1 else f"rank 0 of {size}"
    return where + ", parallel loss" * getattr(args, "loss_parallel", False)


@contextmanager
def profiled(example: str, setting: str, args: argparse.Namespace, context: ParallelContext) -> Iterator[None]:
    """Profile the block on rank 0 and write the output files, if ``--profile`` is set.

    Build the model inside the block too, so that the profiler records its allocations.
    """
    if not args.profile or context.tensor.rank > 0:
        yield
        return
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (context.device.type == "cuda")
    with profile(activities=activities, profile_memory=True) as profiler:
        yield
    args.out.mkdir(parents=True, exist_ok=True)
    variant = variant_name(args, context.tensor.size)
    stem = args.out / f"{example}-{variant.replace(',', '').replace(' ', '-')}"
    profiler.export_chrome_trace(f"{stem}.trace.json.gz")
    curve = read_curve(Path(f"{stem}.trace.json.gz"), variant, setting, context.device)
    Path(f"{stem}.json").write_text(json.dumps(asdict(curve)), encoding="utf-8")
    print(f"{'peak memory':20} {short(curve.peak[1])} MB; the trace is {stem}.trace.json.gz")
    files = args.out.glob(f"{example}-*.json")
    curves = [Curve(**json.loads(path.read_text(encoding="utf-8"))) for path in files]
    # curves of another hidden size or batch are not comparable
    same = sorted((other for other in curves if other.setting == setting), key=lambda other: other.variant)
    draw(same, f"Memory of {example}.py: {setting}", args.out / f"{example}.png")


def read_curve(trace: Path, variant: str, setting: str, device: torch.device) -> Curve:
    """Read the memory events of a trace, and the phases marked by ``record_function``."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    kind = DEVICE_TYPES[device.type]
    events.sort(key=lambda e: e.get("ts", 0))
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(("build", "step "))]
    start, end = marks[0]["ts"], marks[-1]["ts"] + marks[-1]["dur"]
    memory = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == kind and e["ts"] < end]
    return Curve(
        variant,
        setting,
        [0.0] + [round((e["ts"] - start) / 1e3, 4) for e in memory],
        [0.0] + [round(e["args"]["Total Allocated"] / MB, 4) for e in memory],
        [(e["name"], (e["ts"] - start) / 1e3, (e["ts"] + e["dur"] - start) / 1e3) for e in marks],
    )


def draw(curves: list[Curve], title: str, path: Path) -> None:
    """Plot each curve in its own panel, with the outline of the first curve for comparison.

    Every phase has the same width, so that steps of different duration are aligned.
    """
    try:
        import matplotlib
    except ImportError:
        print('No plot was written, because matplotlib is not installed. Run pip install -e ".[plot]" in the checkout')
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name, _, _ in curves[0].phases]
    num_columns, num_rows = min(len(curves), 2), (len(curves) + 1) // 2
    size = (1.5 + 5 * num_columns, 0.9 + 2.9 * num_rows)
    figure, grid = plt.subplots(num_rows, num_columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.supxlabel("time; each phase is drawn with the same width", fontsize=9, color=GREY)
    for axes in grid.flat[len(curves) :]:
        axes.set_visible(False)
    for axes, curve in zip(grid.flat, curves, strict=False):
        colour = COLOURS[0] if curve is curves[0] else COLOURS[1]
        for other in (curves[0], curve):
            at = [in_phases(t, other.phases) for t in other.time_ms]
            axes.step(at, other.memory_mb, where="post", color=GREY if other is curves[0] else colour, linewidth=0.9)
        axes.fill_between(at, curve.memory_mb, step="post", color=colour, alpha=0.3, linewidth=0)
        x, y = in_phases(curve.peak[0], curve.phases), curve.peak[1]
        axes.plot([0, len(names)], [y, y], color=colour, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.plot([x], [y], "o", color=colour, markersize=5)
        share = "" if curve is curves[0] else f", {y / curves[0].peak[1]:.0%} of {curves[0].variant}"
        axes.annotate(
            f"peak {short(y)} MB{share}", (0.06, y), (0, 5), textcoords="offset points", color=colour,
            bbox=dict(facecolor="white", edgecolor="none", alpha=0.85, pad=1),
        )  # fmt: skip
        axes.set_title(curve.variant, loc="left", fontsize=11, color=colour, fontweight="bold")
        axes.set_title(f"fastest step {short(curve.step_ms)} ms, profiled", loc="right", fontsize=9, color=GREY)
        for boundary in range(1, len(names)):
            axes.axvline(boundary, color="#d5dade", linewidth=0.8, zorder=0)
        axes.set_xticks([i + 0.5 for i in range(len(names))], names)
        axes.tick_params(length=0)
        axes.set(xlim=(0, len(names)), ylim=(0, max(curve.peak[1] for curve in curves) * 1.15))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e9eb", linewidth=0.8)
        axes.set_axisbelow(True)
    for axes in grid[:, 0]:
        axes.set_ylabel("memory held (MB)")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"{'picture':20} {path}, of {len(curves)} run{'s' * (len(curves) > 1)}")


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def in_phases(time_ms: float, phases: list[tuple[str, float, float]]) -> float:
    """2.25 for a time a quarter into the third phase; what lies between two phases belongs to the end of the first."""
    index = max((i for i, (_, start, _) in enumerate(phases) if start <= time_ms), default=0)
    _, start, end = phases[index]
    return index + min(max((time_ms - start) / (end - start), 0.0), 1.0)
