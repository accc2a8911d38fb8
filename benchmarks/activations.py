"""Activation offload to the host, or sharded over tensor ranks: bytes on the device, and the time of a step.

    python benchmarks/activations.py                                  # a LLaMA over two tensor ranks
    python benchmarks/activations.py --hidden 512 --layers 4

A step is a forward and a backward pass in fp32. All variants run in the same processes and alternate step by step. The
command fails unless their losses are bitwise identical. Bytes are the peak of saved tensors on one rank. With
activation checkpointing, they include the inputs of layers, but not recomputed tensors. On the CPU, device and host are
two pools of the same memory, and copies use the same cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import common
from common import MB, Llama, Step, Timing

import shardformer
from shardformer.mesh.parallel_context import ParallelContext

VARIANTS: dict[str, tuple[bool, str | None]] = {
    "all kept": (False, None),
    "all, on the host": (False, "host"),
    "checkpoints": (True, None),
    "checkpoints, on the host": (True, "host"),
    "checkpoints, in parts": (True, "tensor"),
    "checkpoints, in parts on the host": (True, "tensor+host"),
}
"""Name -> whether layers are recomputed, and where saved tensors are stored."""


@dataclass(frozen=True)
class Setting:
    """The model and batch of the benchmark."""

    size: Llama
    batch: int
    repetitions: int
    seconds: float


def measure(setting: Setting) -> tuple[dict[str, tuple[int, int]], dict[str, Timing]]:
    """Measure in every process: peak bytes on the device and on the host, and times."""
    context = ParallelContext.from_default_process_group({})
    batches, steps, held = setting.size.batches(setting.batch), dict[str, Step | None](), dict[str, tuple[int, int]]()
    for name, (checkpointed, on) in VARIANTS.items():
        model: Any = shardformer.shard_model(setting.size.build(), context=context)
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        store = shardformer.offload.offload_activations(model, on or "device")
        step = steps[name] = common.train_step(model, batches)
        step(0)
        figures = store.stats()
        held[name] = figures.most, figures.most_host
        if on is None:
            store.remove()
    return held, common.take_turns(steps, setting.repetitions, setting.seconds)


def report(held: dict[str, tuple[int, int]], timings: dict[str, Timing]) -> str:
    rows = []
    for name, (device, host) in held.items():
        against = next(other for other in VARIANTS if VARIANTS[other] == (VARIANTS[name][0], None))
        sizes = [f"{device / MB:.2f}", f"{device / held[against][0]:.2f}", f"{host / MB:.2f}"]
        rows.append([name, *sizes, common.ms(timings[name].ms), f"{timings[name].ms / timings[against].ms:.2f}"])
    return common.table(["", "MB on the device", "ratio", "MB on the host", "ms a step", "ratio"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    size = common.llama(args.hidden, args.sequence, args.layers, args.vocabulary)
    setting = Setting(size, args.batch, args.repetitions, args.seconds)
    with common.two_processes(args.threads) as pool:
        held, timings = pool.run(measure, setting)[0]
    worst, difference = common.largest_difference(timings, "all kept")
    if args.json:
        results = {"bytes": held, "times": common.timings_as_dict(timings)}
        print(common.as_json("activations", vars(args), results))
    else:
        print(
            f"\nLLaMA, {args.layers} layers, hidden {args.hidden}, vocabulary {args.vocabulary}, {args.batch} x "
            f"{args.sequence}, tensor 2\n\n{report(held, timings)}"
        )
    if difference > 0:
        print(f"FAIL: the losses of {worst} differ by {difference:.1e}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    return common.arguments(
        __doc__, seconds=60.0, hidden=512, layers=8, sequence=256, vocabulary=2000, batch=4
    ).parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
