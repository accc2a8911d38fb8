"""Effect of compiled layers (``compile=True``) on the time of a training step of a LLaMA.

    python benchmarks/compile.py
    python benchmarks/compile.py --layouts tensor data --hidden 256
    python benchmarks/compile.py --layouts tensor --whole

A step is a forward pass, a backward pass and torch's fused AdamW on two processes. For each layout the compiled and the
eager model take turns. "first s" is the time of the first step, in which torch.compile builds the graphs. The losses
must agree. ``--whole`` adds ``torch.compile(model)``, which also traces what is outside the layers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import common
import torch
from common import Llama, Timing
from torch import nn

import shardformer
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.sharding.compiled_layers import compiled_stacks

LAYOUTS: Mapping[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tensor": ({"tensor": 2}, {}),
    "sequence parallel": ({"tensor": 2}, {"enable_sequence_parallelism": True}),
    "data": ({"data": 2}, {}),
}
"""Name -> sizes of the axes, options of ``shard_model``."""
EAGER, COMPILED, WHOLE = "eager", "compile=True", "torch.compile(model)"
WORST_DIFFERENCE = 1e-4

Result = tuple[dict[str, Timing], dict[str, float], list[str]]
"""The timings, the time of the first step in seconds, and what was compiled."""


def measure(
    size: Llama, layout: str, batch: int, names: Sequence[str], backend: str, repetitions: int, seconds: float
) -> Result:
    """Measure the variants of one layout in every process."""
    sizes, options = LAYOUTS[layout]
    context = ParallelContext.from_world(sizes)
    batches = [
        {name: x.chunk(context.data.size)[context.data.rank] for name, x in b.items()} for b in size.batches(batch)
    ]
    steps: dict[str, common.Step | None] = {}
    first: dict[str, float] = {}
    lines: list[str] = []
    for name in names:
        compiled = backend if name == COMPILED else False
        model = shardformer.shard_model(size.build(), context=context, compile=compiled, **options)
        called: Any = torch.compile(model, backend=backend) if name == WHOLE else model
        steps[name] = step = _step(called, model, batches)
        start = time.perf_counter()
        step(0)
        first[name] = time.perf_counter() - start
        lines += map(str, compiled_stacks(model))
    return common.take_turns(steps, repetitions, seconds), first, lines


def _step(called: Callable[..., Any], model: nn.Module, batches: Sequence[Mapping[str, torch.Tensor]]) -> common.Step:
    optimizer = common.adamw(model)

    def step(index: int) -> float:
        model.zero_grad()
        loss = called(**batches[index % len(batches)]).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def report(timings: Mapping[str, Timing], first: Mapping[str, float]) -> str:
    eager = timings[EAGER]
    rows = []
    for name, taken in timings.items():
        pairs = zip(taken.losses, eager.losses)
        difference = max(abs(a - b) / abs(b) for a, b in pairs)
        speedups = [f"{eager.ms / taken.ms:.2f}", f"{min(eager.seconds) / min(taken.seconds):.2f}"]
        rows.append([name, common.ms(taken.ms), *speedups, f"{first[name]:.1f}", f"{difference:.1e}"])
    return common.table(["variant", "ms", "speed-up", "of minima", "first s", "loss differs by"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    size = common.llama(args.hidden, args.sequence, args.layers, args.vocabulary)
    names = [EAGER, COMPILED, *([WHOLE] if args.whole else [])]
    results, agrees = {}, True
    with common.two_processes(args.threads) as pool:
        for layout in args.layouts:
            common.progress(f"measuring {layout}")
            timings, first, lines = pool.run(
                measure, size, layout, args.batch, names, args.backend, args.repetitions, args.seconds
            )[0]
            results[layout] = {"timings": common.timings_as_dict(timings), "first": first, "compiled": lines}
            agrees &= common.largest_difference(timings, EAGER)[1] <= WORST_DIFFERENCE
            if not args.json:
                steps = len(timings[EAGER].seconds)
                title = f"{layout}: {size}, batch {args.batch}; median of {steps} steps"
                print(f"\n{title}\n\n{report(timings, first)}\n\n" + "\n".join(lines), flush=True)
    if args.json:
        print(common.as_json("compile", vars(args), results))
    return 0 if agrees else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(__doc__, seconds=40.0, hidden=512, layers=4, vocabulary=1000, batch=2, sequence=256)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--whole", action="store_true", help=f"measure {WHOLE}, too")
    parser.add_argument("--backend", default="inductor", help="the compiler")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
