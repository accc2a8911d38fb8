"""Offload: step time compared with the minimum of the link, overlap, and the largest model for a given memory.

    python benchmarks/offload.py                              # times, over a link of 0.5 GB/s in each direction
    python benchmarks/offload.py --bandwidth 0                # at the speed of the memory
    python benchmarks/offload.py --timeline timeline.png      # computation, copies and updates of one step
    python benchmarks/offload.py --largest 80                 # parameters that fit into 80 GB of device memory
    python benchmarks/offload.py --memory memory.png          # the example of the ZeRO paper, by kind, as bars

A LLaMA in bf16 with ZeRO stage 2 over two data ranks. On a CPU, device and host are two pools of the same memory, and
threads copy between them at no more than ``--bandwidth``. All variants run in the same processes and alternate step by
step. Their losses must be bitwise identical. The minimum is the time of a rank's gradients and parameters on the link.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from common import Llama, Timing
from torch import nn

import shardformer
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.host import DEVICE_TO_HOST, HOST_TO_DEVICE
from shardformer.zero.shard_optimizer import shard_optimizer
from shardformer.zero.zero_optimizer import ZeroOptimizer

ON_DEVICE = "on the device"
GB = 1e9
PAPER = (7.5e9, 64)
"""Parameters and ranks of the example."""


@dataclass(frozen=True)
class Setting:
    """The model, and the bandwidth of the link in bytes per second (None: unlimited)."""

    size: Llama
    batch: int
    bandwidth: float | None
    folder: str
    repetitions: int
    seconds: float

    def made(self, name: str, context: ParallelContext) -> tuple[nn.Module, ZeroOptimizer]:
        how = dict(VARIANTS[name])
        if (to := how.pop("to", None)) is not None:
            to = f"nvme:{self.folder}" if to == "nvme" else to
            how["offload"] = shardformer.OffloadConfig(to, how.pop("share", 0.0), bandwidth=self.bandwidth)
        model = shardformer.shard_model(self.size.build(), context=context)
        made = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return model, shard_optimizer(model, made, stage=2, precision="bf16", bucket_bytes=4 * 2**20, **how)


VARIANTS: dict[str, dict[str, Any]] = {
    ON_DEVICE: {},
    "half of it on the host": {"to": "cpu", "share": 0.5},
    "on the host": {"to": "cpu"},
    "on the host, without overlap": {"to": "cpu", "overlap": False},
    "in files": {"to": "nvme"},
}


def measure(setting: Setting) -> tuple[dict[str, Timing], dict[str, str], float]:
    """Measure in every process: the times, statistics of each optimizer, and the minimum time in seconds."""
    context = ParallelContext.from_default_process_group({"data": dist.get_world_size()})
    steps: dict[str, common.Step] = {}
    made = {name: setting.made(name, context) for name in VARIANTS}
    for name, (model, optimizer) in made.items():
        steps[name] = step_of(setting, context, model, optimizer)
    timings = common.take_turns(steps, setting.repetitions, setting.seconds)
    link: Any = made["on the host"][1]._host
    count = len(timings[ON_DEVICE].seconds) + 2
    floor = 0.0
    for way in (DEVICE_TO_HOST, HOST_TO_DEVICE):
        floor = max(floor, sum(copied.end - copied.begin for copied in link.link.log if copied.way == way) / count)
    return timings, {name: optimizer.describe() for name, (_, optimizer) in made.items()}, floor


def step_of(
    setting: Setting, context: ParallelContext, model: nn.Module, optimizer: ZeroOptimizer
) -> Callable[[int], float]:
    rank, each = context.data.rank, setting.batch
    batches = [
        {key: value[rank * each : (rank + 1) * each] for key, value in batch.items()}
        for batch in setting.size.batches(each * context.data.size)
    ]

    def step(index: int) -> float:
        optimizer.zero_grad()
        loss = model(**batches[index % len(batches)]).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


Spans = dict[str, list[tuple[float, float]]]


def timeline(setting: Setting) -> Spans:
    """Record in every process: the operations of one step, with start and end in seconds."""
    context = ParallelContext.from_default_process_group({"data": dist.get_world_size()})
    model, optimizer = setting.made("on the host", context)
    step = step_of(setting, context, model, optimizer)
    for index in range(3):
        step(index)
    spans: Spans = {"forward": [], "backward": [], "update on the host": []}
    host: Any = optimizer._host
    inner: Any = optimizer.inner[0]
    update = inner.step

    def updating() -> None:
        begin = time.perf_counter()
        update()
        spans["update on the host"].append((begin, time.perf_counter()))

    inner.step = updating
    host.link.log.clear()
    batch = setting.size.batches(setting.batch)[0]
    start = time.perf_counter()
    loss = model(**batch).loss
    middle = time.perf_counter()
    loss.backward()
    spans["forward"], spans["backward"] = [(start, middle)], [(middle, time.perf_counter())]
    optimizer.step()
    optimizer.zero_grad()
    for way, name in ((DEVICE_TO_HOST, "gradients to the host"), (HOST_TO_DEVICE, "parameters to the device")):
        spans[name] = [(copied.begin, copied.end) for copied in host.link.log if copied.way == way]
    return {name: [(a - start, b - start) for a, b in found] for name, found in spans.items()}


def draw_timeline(spans: Spans, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    order = ["forward", "backward", "gradients to the host", "update on the host", "parameters to the device"]
    for row, name in enumerate(order):
        axes.broken_barh([(a * 1e3, (b - a) * 1e3) for a, b in spans[name]], (row - 0.35, 0.7), color=f"C{row}")
    axes.set_yticks(range(len(order)), order)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title("One step of one rank, masters and state on the host", loc="left", fontsize=10)
    figure.savefig(path, dpi=110)


PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, offload": {"stage": 2, "offload": "cpu"},
    "stage 3, offload": {"stage": 3, "offload": "cpu"},
    "stage 3, parameters too": {"stage": 3, "offload": shardformer.OffloadConfig("cpu", parameters=True)},
    "stage 2, no masters (Kahan)": {
        "stage": 2,
        "precision": shardformer.MixedPrecision("bf16", master_weights="kahan"),
    },
}


def model_of(numel: float, layers: int = 100) -> nn.Module:
    """Build a model with this many parameters, in layers, on the meta device."""
    width = round(numel / layers / 1000)
    return nn.ModuleList([nn.Linear(width, 1000, bias=False, device="meta") for _ in range(layers)])


def kept(numel: float, ranks: int, how: Mapping[str, Any]) -> shardformer.zero.memory_estimate.MemoryEstimate:
    model = model_of(numel)
    return shardformer.estimate_memory(
        model, torch.optim.Adam(model.parameters()), data=ranks, **{"precision": "bf16", **how}
    )


def largest(gigabytes: float) -> str:
    """Return the number of parameters that fit, in billions. A rank's memory grows in proportion to it."""
    rows = []
    for name, how in PLACES.items():
        cells = []
        for ranks in (1, 8, 64):
            found = kept(1e9, ranks, how)
            cells += [f"{gigabytes * GB / found.total:.1f}", f"{found.host / 1e9 * gigabytes * GB / found.total:.0f}"]
        rows.append([name, *cells])
    head = [f"{gigabytes:g} GB a rank", *(x for n in (1, 8, 64) for x in (f"{n} ranks: 1e9", "GB of the host"))]
    return common.table(head, rows)


def draw_memory(path: Path) -> None:
    from matplotlib.figure import Figure

    numel, ranks = PAPER
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    names = list(PLACES)
    found = [kept(numel, ranks, PLACES[name]) for name in names]
    left = [0.0] * len(names)
    for number, kind in enumerate(("parameters", "gathered", "gradients", "masters", "states")):
        sizes = [getattr(each, kind) / GB for each in found]
        axes.barh(names, sizes, left=left, label=kind, color=f"C{number}")
        left = [a + b for a, b in zip(left, sizes)]
    for row, total in enumerate(left):
        axes.text(total + 1, row, f"{total:.1f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("GB of the device, on each rank")
    axes.set_title(f"{numel / 1e9:g} billion parameters in bf16, Adam, {ranks} data ranks", loc="left", fontsize=10)
    axes.legend(loc="lower right", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def report(timings: Mapping[str, Timing], floor: float) -> str:
    base = timings[ON_DEVICE].ms
    rows = [
        [name, common.ms(timing.ms), f"{timing.ms / base:.2f}", common.ms(timing.ms - base)]
        for name, timing in timings.items()
    ]
    head = ["masters and state", "ms a step", f"over {ON_DEVICE}", "ms more"]
    return f"{common.table(head, rows)}\n\nthe link alone takes {floor * 1e3:.0f} ms of a step, each way"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.largest or args.memory:
        print(largest(args.largest) if args.largest else "")
        draw_memory(args.memory) if args.memory else None
        return 0
    size = common.llama(args.hidden, args.sequence, args.layers, args.vocabulary)
    bandwidth = args.bandwidth * GB or None
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, common.two_processes(args.threads) as workers:
        setting = Setting(size, args.batch, bandwidth, folder, args.repetitions, args.seconds)
        if args.timeline:
            draw_timeline(workers.run(timeline, setting)[0], args.timeline)
            return 0
        timings, described, floor = workers.run(measure, setting)[0]
    if args.json:
        print(common.as_json("offload", {**vars(args)}, {"floor": floor, "times": common.timings_as_dict(timings)}))
    else:
        numel = sum(p.numel() for p in replace(size).build().parameters())
        print(f"\n{numel / 1e6:.1f}M parameters in bf16, stage 2, data 2, link of {args.bandwidth:g} GB/s\n")
        print(report(timings, floor))
        print(f"\n{described['in files']}")
    worst, difference = common.largest_difference(timings, ON_DEVICE)
    if difference:
        print(f"FAIL: the losses of {worst} differ by {difference:.1e}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(__doc__, seconds=40.0, hidden=512, layers=6, vocabulary=8000, sequence=128)
    parser.add_argument("--bandwidth", type=float, default=0.5, help="GB per second in each direction (0: unlimited)")
    parser.add_argument("--batch", type=int, default=2, help="samples per rank")
    parser.add_argument("--folder", default=None, help="folder for offloaded files (default: the temporary folder)")
    parser.add_argument("--timeline", type=Path, default=None, metavar="PNG")
    parser.add_argument("--memory", type=Path, default=None, metavar="PNG")
    parser.add_argument("--largest", type=float, default=0.0, metavar="GB", help="memory of each rank")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
