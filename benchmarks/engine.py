"""Overhead of the engine: ``engine.train_step`` compared with a plain loop over the same parts.

The loop calls the pipeline, clips, steps the optimizer and clears the gradients. Measured on two processes in three
layouts, and in one process against a plain PyTorch loop. Each variant is built twice, first and last, because the
memory that a model gets changes the step time by some percent.
"""

from __future__ import annotations

import sys
from typing import Any

import common
import torch
from common import Llama, Step

import shardformer
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.pipeline.pipeline import Pipeline

LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {},
    "data 2": {"data": 2},
    "tensor 2": {"tensor": 2},
    "pipe 2": {"pipe": 2},
}


def measure(size: Llama, batch: int, sizes: dict[str, int], repetitions: int, seconds: float) -> Any:
    """Measure in every process."""
    rank = torch.distributed.get_rank()
    steps: dict[str, Step] = {}
    if not sizes:
        steps["plain PyTorch"] = plain(size, batch)
    for name, make in (("bare loop", bare), ("engine", engine), ("engine again", engine), ("bare loop again", bare)):
        alone = ParallelContext.from_group(Axis("tensor", ranks=(rank,)))
        steps[name] = make(size, batch, ParallelContext.from_default_process_group(sizes) if sizes else alone)
    return common.take_turns(steps, repetitions, seconds, at_least=9)


def joined(timings: Any) -> dict[str, float]:
    """Return kind -> ms per step, the mean of its two variants."""
    own = {name: [t.ms for n, t in timings.items() if n.removesuffix(" again") == name] for name in timings}
    return {name: sum(ms) / len(ms) for name, ms in own.items() if ms}


def plain(size: Llama, batch: int) -> Step:
    model, batches = size.build().train(), size.batches(batch)
    optimizer = common.adamw(model)

    def step(index: int) -> float:
        loss = model(**batches[index % len(batches)], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def bare(size: Llama, batch: int, context: ParallelContext) -> Step:
    model, batches = shardformer.shard_model(size.build(), context=context).train(), size.batches(batch)
    pipeline, optimizer = Pipeline(model, average_loss_over="tokens"), common.adamw(model)

    def step(index: int) -> float:
        loss = pipeline.step(batches[index % len(batches)])
        shardformer.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def engine(size: Llama, batch: int, context: ParallelContext) -> Step:
    model, batches = size.build(), size.batches(batch)
    asked = {"max_grad_norm": 1.0, "on_nonfinite": "ignore"}
    made = shardformer.initialize(model, common.adamw(model), context=context, parallel=asked)
    return lambda index: float(made.train_step(batches[index % len(batches)]))


def main(argv: list[str] | None = None) -> int:
    parser = common.arguments(__doc__, seconds=20.0, hidden=256, sequence=128, layers=4, vocabulary=8000, batch=2)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    args = parser.parse_args(argv)
    size = common.llama(args.hidden, args.sequence, args.layers, args.vocabulary)
    results, rows = {}, []
    with common.two_processes(args.threads) as pool:
        for name in args.layouts:
            common.progress(f"measuring {name}")
            timings = pool.run(measure, size, args.batch, LAYOUTS[name], args.repetitions, args.seconds)[0]
            results[name] = common.timings_as_dict(timings)
            means = joined(timings)
            base = means["bare loop"]
            rows += [[f"{name}, {kind}", common.ms(ms), f"{ms / base:.3f}"] for kind, ms in means.items()]
    if args.json:
        print(common.as_json("engine", vars(args), results))
    else:
        print(f"\nA step of a LLaMA: hidden {args.hidden}, batch {args.batch} x {args.sequence}, AdamW, clipped\n")
        print(common.table(["layout", "ms", "of the bare loop"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
