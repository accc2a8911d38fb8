"""Effect of overlapping communication with computation: each method, with and without.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --shapes 4x512 --hidden 2048

Two methods are measured, forward and backward, on two processes. In a block's backward pass, the collective of the
input's gradient overlaps with the matmuls of the weights' gradients; "waiting" waits for it first. With sequence
parallelism, ``enable_sequence_overlap`` passes shards around a ring during the matmuls at a block's edges.

Overlap needs hardware that sends while a process computes: the copy engines of a GPU, or a free CPU core. If there are
as many cores as processes, it can only save the time for which processes would wait for each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import common
from common import Llama, Setting, Timing

import shardformer
from shardformer.comm.collectives import PendingCollective
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.tensor_parallel import linear_communication as edges

WAITING, PLAIN = "blocks, waiting", "blocks"
SEQUENCE_WAITING, SEQUENCE, RING = "sequence parallel, waiting", "sequence parallel", "sequence parallel, ring"
SEQUENCE_PARALLEL = {"enable_sequence_parallelism": True}
OPTIONS: Mapping[str, dict[str, bool]] = {
    WAITING: {},
    PLAIN: {},
    SEQUENCE_WAITING: SEQUENCE_PARALLEL,
    SEQUENCE: SEQUENCE_PARALLEL,
    RING: {**SEQUENCE_PARALLEL, "enable_sequence_overlap": True},
}
BASE = {PLAIN: WAITING, SEQUENCE: SEQUENCE_WAITING, RING: SEQUENCE_WAITING}
WORST_DIFFERENCE = 1e-4


@contextmanager
def waiting() -> Iterator[None]:
    """Wait for the collectives at a block's edges where they start."""
    starts = {name: getattr(edges, name) for name in ("start_all_reduce", "start_reduce_scatter")}
    for name, start in starts.items():
        setattr(edges, name, _wait_at_once(start))
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(edges, name, start)


def _wait_at_once(start: Callable[..., PendingCollective]) -> Callable[..., PendingCollective]:
    def start_and_wait(*args: Any, **kwargs: Any) -> PendingCollective:
        result = start(*args, **kwargs).wait()
        return PendingCollective((), lambda: result)

    return start_and_wait


def measure(setting: Setting) -> dict[str, Timing]:
    """Measure in every process."""
    context = ParallelContext.from_default_process_group({"tensor": 2})
    batches = setting.model.batches(setting.batch)
    steps: dict[str, common.Step | None] = {}
    for name, options in OPTIONS.items():
        model = shardformer.shard_model(setting.model.build(), context=context, **options)
        around = waiting if name in (WAITING, SEQUENCE_WAITING) else nullcontext
        steps[name] = common.train_step(model, batches, None, around)
    return common.take_turns(steps, setting.repetitions, setting.seconds)


def report(timings: Mapping[str, Timing]) -> str:
    rows = [
        [name, common.ms(timing.ms), f"{timing.ms / timings[BASE[name]].ms:.2f}" if name in BASE else "-"]
        for name, timing in timings.items()
    ]
    return common.table(["variant", "ms", "/ waiting"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    results, alike = {}, True
    with common.two_processes(args.threads) as pool:
        for shape in args.shapes:
            batch, sequence = map(int, shape.split("x"))
            size = Llama(args.hidden, args.intermediate, args.heads, sequence, args.layers, args.vocabulary)
            common.progress(f"measuring hidden {args.hidden}, batch x sequence {shape}")
            timings = pool.run(measure, Setting(size, batch, args.repetitions, args.seconds))[0]
            results[shape] = common.timings_as_dict(timings)
            alike &= common.largest_difference(timings, WAITING)[1] <= WORST_DIFFERENCE
            if not args.json:
                steps = len(timings[PLAIN].seconds)
                title = f"hidden {args.hidden}, {args.layers} layers, batch x sequence {shape}; median of {steps} steps"
                print(f"\n{title}\n\n{report(timings)}", flush=True)
    if args.json:
        print(common.as_json("overlap", vars(args), results))
    return 0 if alike else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(
        __doc__, seconds=60.0, hidden=1024, intermediate=2736, heads=16, layers=4, vocabulary=1000
    )
    shapes = ["1x128", "2x128", "2x512"]
    parser.add_argument("--shapes", nargs="+", default=shapes, metavar="BxS", help="batch x sequence")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
