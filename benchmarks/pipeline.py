"""Pipeline parallelism: compared with torch.distributed.pipelining; bubble, stored micro-batches, memory and traffic.

    python benchmarks/pipeline.py                     # all parts
    python benchmarks/pipeline.py --against-torch --hidden 512 --sequence 256
    python benchmarks/pipeline.py --bubble --png timeline.png
    python benchmarks/pipeline.py --memory
    python benchmarks/pipeline.py --bytes

Against torch: an unmodified LLaMA of transformers, split by ShardFormer, and the same layers split by hand at the same
positions (``hand_cut.py``) with torch's schedule of the same name. Forward and backward, in the same two processes and
over the same group, alternating step by step. The command fails unless their losses agree in every step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

import common
import pipeline_cost
import pipeline_timeline
from common import Timing
from hand_cut import HandCut

import shardformer
from shardformer.layout.sharding_metadata import get_sharding_metadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.pipeline import Pipeline
from shardformer.pipeline.schedules import SCHEDULES
from shardformer.pipeline.stage_manager import PipelineStageManager

SINGLE, OURS, TORCH = "one process", "ShardFormer", "torch"
WORST_DIFFERENCE = 1e-5
WARM_UP = 2
PARTS = ("against_torch", "bubble", "memory", "bytes")


@dataclass(frozen=True)
class Setting(common.Setting):
    micro_batches: int
    schedules: tuple[str, ...]

    def __str__(self) -> str:
        m = self.model
        return (
            f"hidden {m.hidden}, {m.layers} layers, vocabulary {m.vocabulary}, batch {self.batch} x {m.sequence}, "
            f"{self.micro_batches} micro-batches"
        )


@dataclass(frozen=True)
class Measured:
    """Measurements of one process: times, CPU seconds of its own steps, and the number of layers per virtual stage."""

    timings: dict[str, Timing]
    cpu: dict[str, list[float]]
    layers: dict[str, list[int]]


def measure(setting: Setting) -> Measured:
    """Measure in both processes."""
    context = ParallelContext.from_default_process_group({"pipe": 2})
    batches = setting.model.batches(setting.batch)
    steps: dict[str, common.Step | None] = {SINGLE: None}
    if context.pipe.rank == 0:
        steps[SINGLE] = common.train_step(setting.model.build(), batches)
    layers: dict[str, list[int]] = {}
    for name in setting.schedules:
        manager = PipelineStageManager(context, name)
        model = shardformer.shard_model(setting.model.build(), context=context, pipeline_stage_manager=manager)
        steps[f"{OURS} {name}"] = common.pipeline_step(model, Pipeline(model, setting.micro_batches), batches)
        stages = get_sharding_metadata(model).stages
        assert stages is not None
        bounds = [(span.start, span.stop) for span in stages.spans]
        layers[name] = [end - start for start, end in bounds]
        rival = HandCut(
            setting.model.build(), name, setting.micro_batches, bounds, manager.placement, context.pipe.group
        )
        steps[f"{TORCH} {name}"] = lambda index, rival=rival: rival.step(batches[index % len(batches)])
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    steps = {name: step and timed(step, cpu[name]) for name, step in steps.items()}
    timings = common.take_turns(steps, setting.repetitions, setting.seconds, warm_up=WARM_UP)
    return Measured(timings, {name: times[WARM_UP:] for name, times in cpu.items()}, layers)


def timed(step: common.Step, times: list[float]) -> common.Step:
    """Wrap a step to add its CPU seconds to ``times``."""

    def run(index: int) -> float:
        before = time.process_time()
        loss = step(index)
        times.append(time.process_time() - before)
        return loss

    return run


def joined(ranks: Sequence[dict[str, Timing]]) -> dict[str, Timing]:
    """Combine the times with the losses of the rank that has them."""
    return {
        name: Timing(
            timing.seconds, [next(x for x in xs if not isnan(x)) for xs in zip(*(r[name].losses for r in ranks))]
        )
        for name, timing in ranks[0].items()
    }


def report(timings: Mapping[str, Timing], cpu: Mapping[str, float], layers: Mapping[str, list[int]]) -> str:
    head = [
        "schedule (layers)",
        OURS,
        "least",
        TORCH,
        "least",
        "/ torch",
        "least / least",
        "CPU / torch",
        "/ one process",
    ]
    single = timings[SINGLE]
    rows = []
    for name, cut in layers.items():
        ours, theirs = timings[f"{OURS} {name}"], timings[f"{TORCH} {name}"]
        least = [min(t.seconds) * 1e3 for t in (ours, theirs)]
        rows.append(
            [
                f"{name} ({', '.join(map(str, cut))})",
                *(common.ms(x) for x in (ours.ms, least[0], theirs.ms, least[1])),
                f"{median(a / b for a, b in zip(ours.seconds, theirs.seconds)):.2f}",
                f"{least[0] / least[1]:.2f}",
                f"{cpu[f'{OURS} {name}'] / cpu[f'{TORCH} {name}']:.2f}",
                f"{median(a / b for a, b in zip(ours.seconds, single.seconds)):.2f}",
            ]
        )
    return common.table(head, rows)


def against_torch(args: argparse.Namespace) -> tuple[list[Any], bool]:
    results, alike = [], True
    with common.two_processes(args.threads) as pool:
        for setting in settings(args):
            common.progress(f"measuring {setting}")
            ranks = pool.run(measure, setting)
            timings = joined([rank.timings for rank in ranks])
            cpu = {name: sum(median(rank.cpu[name] or [0.0]) for rank in ranks) for name in timings}
            name, difference = common.largest_difference(timings, SINGLE)
            alike &= difference <= WORST_DIFFERENCE
            results.append({**asdict(setting), "timings": common.timings_as_dict(timings), "cpu": cpu})
            if not args.json:
                single = timings[SINGLE]
                print(
                    f"\n{setting}; milliseconds per step, median and minimum of {len(single.seconds)} rounds. Ratios "
                    f"are medians of rounds. One process, full batch: {common.ms(single.ms)} (minimum "
                    f"{common.ms(min(single.seconds) * 1e3)})\n\n{report(timings, cpu, ranks[0].layers)}\n"
                )
                print(f"largest relative difference of a loss: {difference:.1e}, from {SINGLE} to {name}", flush=True)
    return results, alike


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    wanted = [part for part in PARTS if getattr(args, part)] or PARTS
    results: dict[str, Any] = {}
    good = True
    if "against_torch" in wanted:
        results["against_torch"], good = against_torch(args)
        if not good:
            print(f"A loss differs by more than {WORST_DIFFERENCE:g}: the variants are not equivalent", file=sys.stderr)
    if "bubble" in wanted:
        results["bubble"], is_held = pipeline_timeline.run(args)
        good &= is_held
    if "memory" in wanted:
        results["memory"] = pipeline_cost.memory(args)
    if "bytes" in wanted:
        results["bytes"], is_formula = pipeline_cost.communicated(args)
        good &= is_formula
    if args.json:
        print(common.as_json("pipeline", {k: str(v) for k, v in vars(args).items()}, results))
    return 0 if good else 1


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    for hidden in args.hidden:
        for sequence in args.sequence:
            for micro_batches in args.micro_batches:
                size = common.llama(hidden, sequence, args.layers, args.vocabulary)
                names = tuple(args.schedules)
                yield Setting(size, args.batch, args.repetitions, args.seconds, micro_batches, names)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(__doc__, seconds=60.0, batch=8, layers=8, vocabulary=8000)
    for part in PARTS:
        parser.add_argument(
            f"--{part.replace('_', '-')}", action="store_true", help="run this part, and other specified parts"
        )
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--sequence", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), metavar="NAME")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4], help="numbers of stages in --memory")
    parser.add_argument("--png", type=Path, help="plot a timeline of --bubble into this file (needs matplotlib)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
