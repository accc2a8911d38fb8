"""Measured timeline of a pipeline: its bubble, its stored micro-batches, and a plot. Part of ``pipeline.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import common
import torch.distributed as dist
from common import Llama

import shardformer
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.pipeline import Pipeline
from shardformer.pipeline.schedule_chart import format_action, get_action_colors
from shardformer.pipeline.schedules import (
    ActionKind,
    PipelineAction,
    PipelineActionSpan,
    PipelineSchedule,
    compute_bubble_fraction,
    make_schedule,
    simulate_schedule,
)
from shardformer.pipeline.stage_manager import PipelineStageManager

MICRO_BATCHES = (2, 4, 8, 16)
WARM_UP, AT_LEAST = 2, 5

Row = list[tuple[PipelineAction, float, float]]


@dataclass(frozen=True)
class Played:
    """One step: actions of each rank with start and end in seconds, and the maximum of stored micro-batches."""

    rows: list[Row]
    in_flight: list[int]

    @property
    def makespan(self) -> float:
        return max(end for row in self.rows for _, _, end in row)

    @property
    def bubble(self) -> float:
        busy = sum(end - start for row in self.rows for _, start, end in row)
        return 1 - busy / (len(self.rows) * self.makespan)

    def durations(self) -> dict[ActionKind, float]:
        """Return the mean time of each kind of action."""
        taken: dict[ActionKind, list[float]] = {}
        for row in self.rows:
            for action, start, end in row:
                taken.setdefault(action.kind, []).append(end - start)
        return {kind: mean(times) for kind, times in taken.items()}


def measure(size: Llama, batch: int, schedule: str, micro_batches: int, rounds: int) -> list[Played]:
    """Measure in both processes: a few steps with the actions of all ranks."""
    context = ParallelContext.from_default_process_group({"pipe": 2})
    manager = PipelineStageManager(context, schedule)
    model = shardformer.shard_model(size.build(), context=context, pipeline_stage_manager=manager)
    pipeline = Pipeline(model, micro_batches)
    step = common.pipeline_step(model, pipeline, size.batches(batch))
    played = []
    for index in range(WARM_UP + rounds):
        dist.barrier()
        with pipeline.trace() as trace:
            step(index)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (trace.start, trace.spans, trace.in_flight))
        if index >= WARM_UP:
            zero = min(start + spans[0][1] for start, spans, _ in ranks)
            rows = [[(a, start + b - zero, start + e - zero) for a, b, e in spans] for start, spans, _ in ranks]
            played.append(Played(rows, [held for _, _, held in ranks]))
    return played


def run(args: argparse.Namespace) -> tuple[list[Any], bool]:
    """Print the table of bubbles and stored micro-batches. Return the numbers, and whether they match the schedule."""
    hidden, sequence = args.hidden[0], args.sequence[0]
    layers = max(4, args.layers - 1)  # with a head that costs as much as a layer, all stages cost the same
    size = common.llama(hidden, sequence, layers, common.head_like_a_layer(hidden))
    results, rows, is_held = [], [], True
    drawn: tuple[PipelineSchedule, Played] | None = None
    with common.two_processes(args.threads) as pool:
        for name in args.schedules:
            for micro_batches in [m for m in MICRO_BATCHES if m <= 2 * max(args.micro_batches)]:
                common.progress(f"tracing {name}, {micro_batches} micro-batches")
                per_round = args.repetitions or AT_LEAST
                # the same number of samples per micro-batch in each row, so that actions take the same time
                played = pool.run(measure, size, 2 * micro_batches, name, micro_batches, per_round)[0]
                schedule = make_schedule(name, 2, micro_batches)
                best = min(played, key=lambda p: p.makespan)
                row = as_row(schedule, best, played)
                results.append(row)
                rows.append(list(row.values()))
                is_held &= row["held"] == row["held by the schedule"]
                if drawn is None or micro_batches == 8:
                    drawn = schedule, best
    if not args.json:
        print(
            f"\nBubble: hidden {hidden}, {layers} layers and a head that costs one, 2 stages, micro-batches of "
            f"2 x {sequence}; of the fastest of {per_round} steps\n\n{common.table(list(results[0]), rows)}"
        )
        print(f"stored micro-batches equal to the schedule: {'yes' if is_held else 'NO'}", flush=True)
    if args.png is not None and drawn is not None:
        draw(*drawn, args.png)
    return results, is_held


def as_row(schedule: PipelineSchedule, best: Played, played: Sequence[Played]) -> dict[str, str]:
    form = compute_bubble_fraction(schedule.name, schedule.stages, schedule.micro_batches, schedule.num_model_chunks)
    durations = best.durations()
    ideal, timed = simulate_schedule(schedule), simulate_schedule(schedule, durations)
    return {
        "schedule": schedule.name,
        "micro-batches": str(schedule.micro_batches),
        "formula": f"{form:.1%}" if form is not None else f"({ideal.bubble:.1%})",
        "played with these times": f"{timed.bubble:.1%}",
        "measured": f"{best.bubble:.1%}",
        "median": f"{median(p.bubble for p in played):.1%}",
        "ms": common.ms(best.makespan * 1e3),
        "ms of " + " ".join("FBIW"): " ".join(
            f"{durations[k] * 1e3:.1f}" if k in durations else "-" for k in ActionKind
        ),
        "held": ", ".join(map(str, best.in_flight)),
        "held by the schedule": ", ".join(map(str, ideal.in_flight)),
    }


def draw(schedule: PipelineSchedule, played: Played, path: Path) -> None:
    """Plot the measured timeline above that of the schedule with the same mean times, on one scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timeline = simulate_schedule(schedule, played.durations())
    figure, axes = plt.subplots(2, 1, figsize=(12, 4.2), layout="constrained", sharex=True)
    measured = [[PipelineActionSpan(*span) for span in row] for row in played.rows]
    drawn: Sequence[tuple[str, Sequence[Sequence[PipelineActionSpan]], float]] = (
        ("measured", measured, played.bubble),
        ("the schedule, with the mean times of the actions", timeline.spans, timeline.bubble),
    )
    for axis, (title, rows, bubble) in zip(axes, drawn):
        _draw_rows(axis, schedule, rows)
        axis.set_title(f"{title}: bubble {bubble:.1%}", loc="left", fontsize=10)
    axes[0].set_xlim(0, max(played.makespan, timeline.makespan) * 1e3)
    axes[1].set_xlabel("milliseconds")
    figure.suptitle(f"{schedule.name}, {schedule.stages} stages, {schedule.micro_batches} micro-batches", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    common.progress(f"drew {path}")


def _draw_rows(axis: Any, schedule: PipelineSchedule, rows: Sequence[Sequence[PipelineActionSpan]]) -> None:
    narrowest = 1.5 * max(end for row in rows for *_, end in row) / 100
    for rank, row in enumerate(rows):
        for action, start, end in row:
            face, ink = get_action_colors(schedule, action)
            axis.barh(rank, (end - start) * 1e3, 0.8, start * 1e3, color=face, edgecolor="white", linewidth=0.4)
            if end - start > narrowest:  # wide enough for its name
                middle, name = (start + end) / 2 * 1e3, format_action(schedule, action)
                axis.text(middle, rank, name, color=ink, fontsize=6, ha="center", va="center")
    axis.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axis.invert_yaxis()
    axis.set_facecolor("#EDEDED")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
