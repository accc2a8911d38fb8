"""Cost of the consistency checks between ranks: a step with and without them.

    python benchmarks/watch.py --seconds 60

A LLaMA over two tensor ranks, two data ranks and two stages, and a forward pass in evaluation. The checks are on in
every other step, so that both variants use the same memory. A difference of a percent takes hundreds of steps to
measure.
"""

from __future__ import annotations

import sys
from typing import Any

import common
import torch
from common import Llama, Step

import shardformer
from shardformer.layout.sharding_metadata import get_sharding_metadata
from shardformer.mesh.parallel_context import ParallelContext

EVALUATED = ", evaluated"
LAYOUTS: dict[str, dict[str, int]] = {
    "tensor 2": {"tensor": 2},
    "data 2": {"data": 2},
    "pipe 2": {"pipe": 2},
    f"tensor 2{EVALUATED}": {"tensor": 2},
}


def measure(size: Llama, batch: int, name: str, repetitions: int, seconds: float) -> Any:
    """Measure in every process."""
    sizes = LAYOUTS[name]
    context = ParallelContext.from_default_process_group(sizes)
    model, batches = shardformer.shard_model(size.build(), context=context).train(), size.batches(batch)
    optimizer, state = common.adamw(model), get_sharding_metadata(model)
    pipeline = shardformer.Pipeline(model) if context.pipe.size > 1 else None
    watch, last = state.monitor, {id(g.bucket): g.bucket for r in state.reducers for g in _gradients(r)}
    watched = [bucket for bucket in last.values() if bucket.watch is not None]

    def step_with(on: bool) -> Step:
        def step(index: int) -> float:
            state.monitor = watch if on else None
            for bucket in watched:
                bucket.watch = watch if on else None
            batch = batches[index % len(batches)]
            if name.endswith(EVALUATED):
                with torch.no_grad():
                    return float(model.eval()(**batch).loss)
            if pipeline is not None:
                loss = pipeline.step(batch)
            else:
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        return step

    return common.take_turns({"without": step_with(False), "with": step_with(True)}, repetitions, seconds, at_least=20)


def _gradients(reducer: Any) -> list[Any]:
    return [gradient for gradient in reducer.gradients if gradient.bucket is not None]


def main(argv: list[str] | None = None) -> int:
    parser = common.arguments(__doc__, seconds=30.0, hidden=256, sequence=128, layers=4, vocabulary=8000, batch=2)
    args = parser.parse_args(argv)
    size = common.llama(args.hidden, args.sequence, args.layers, args.vocabulary)
    results, rows = {}, []
    with common.two_processes(args.threads) as pool:
        for name in LAYOUTS:
            common.progress(f"measuring {name}")
            timings = pool.run(measure, size, args.batch, name, args.repetitions, args.seconds)[0]
            results[name] = common.timings_as_dict(timings)
            plain, watched = timings["without"], timings["with"]
            pairs = sorted(b / a for a, b in zip(plain.seconds, watched.seconds, strict=True))
            ratios = [f"{watched.ms / plain.ms:.3f}", f"{pairs[len(pairs) // 2]:.3f}"]
            rows.append([name, common.ms(plain.ms), common.ms(watched.ms), *ratios])
    if args.json:
        print(common.as_json("watch", vars(args), results))
    else:
        print(f"\nA step of a LLaMA: hidden {args.hidden}, batch {args.batch} x {args.sequence}, AdamW\n")
        print(common.table(["layout", "without, ms", "with, ms", "of medians", "median of pairs"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
