"""1D tensor parallelism compared with tensor grids: a LLaMA, and one product by SUMMA or by all-gathers.

    python benchmarks/tensor_grids.py                      # four processes
    python benchmarks/tensor_grids.py --hidden 512 --batch 4 16 64
    python benchmarks/tensor_grids.py --formula 64 512     # traffic per rank by the formulas, for LLaMA-7B

All variants train alternately in the same processes, from the same weights and with the same batches. The command fails
unless their losses are equal. Bytes are those that the recorder counts on all ranks, without the head and the loss.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
import torch.distributed as dist
from common import MB, Llama, Step, Timing
from summa_linear import Linear2D

import shardformer
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.mesh.parallel_context import ParallelContext, reshape_tensor_axis
from shardformer.mesh.tensor_grid import TensorGrid

GRIDS = {"1D": None, "2D 2x2": (2, 2), "2D 4x1": (4, 1), "2D 1x4": (1, 4)}
HIDDEN_7B, WEIGHTS_7B = 4096, 4 * 4096**2 + 3 * 4096 * 11008


@dataclass(frozen=True)
class Setting:
    """The model and batch that all variants train."""

    size: Llama
    batch: int
    repetitions: int
    seconds: float


def measure_model(setting: Setting) -> tuple[dict[str, Timing], dict[str, float]]:
    """Measure in every process: times, and MB sent by all ranks in a step."""
    plain = ParallelContext.from_default_process_group({"tensor": dist.get_world_size()})
    batches = setting.size.batches(setting.batch)
    steps: dict[str, Step | None] = {}
    sent: dict[str, float] = {}
    for name, sizes in GRIDS.items():
        context = plain if sizes is None else reshape_tensor_axis(plain, sizes)
        mode = "1d" if sizes is None else "2d"
        model = shardformer.shard_model(setting.size.build(), context=context, tensor_parallel_mode=mode)
        steps[name] = common.train_step(model, batches)
        with CollectiveRecorder(context) as recorder:
            model(**batches[0]).loss.backward()
        sent[name] = sum(
            n * plain.tensor.size / context.sizes[axis]
            for (_, axis, why), (_, n) in recorder.summarize_calls().items()
            if why in ("block", "weights") and axis in context.sizes
        )
    return common.take_turns(steps, setting.repetitions, setting.seconds), {n: x / MB for n, x in sent.items()}


def measure_product(setting: Setting) -> dict[str, Timing]:
    """Measure in every process: one linear layer with four times as many output features, forward and backward."""
    context = reshape_tensor_axis(ParallelContext.from_default_process_group({"tensor": dist.get_world_size()}), (2, 2))
    grid, hidden = TensorGrid.from_context(context, "2d"), setting.size.hidden
    torch.manual_seed(0)
    native = torch.nn.Linear(hidden, 4 * hidden)
    x = torch.randn(setting.batch // 2, setting.size.sequence, hidden // 2)
    steps: dict[str, Step | None] = {}
    for name, summa in (("SUMMA", True), ("gathered", False)):
        layer = Linear2D.from_native_module(native, grid, summa=summa)

        def step(index: int, layer: Any = layer) -> float:
            layer.zero_grad()
            loss = layer(x.detach().requires_grad_()).square().mean()
            loss.backward()
            return float(loss.detach())

        steps[name] = step
    return common.take_turns(steps, setting.repetitions, setting.seconds)


def report(setting: Setting, timings: dict[str, Timing], sent: dict[str, float] | None, first: str) -> str:
    rows = []
    for name, timing in timings.items():
        row = [name, common.ms(timing.ms), f"{timing.ms / timings[first].ms:.2f}"]
        rows.append(row + ([f"{sent[name]:.2f}", f"{sent[name] / sent[first]:.2f}"] if sent is not None else []))
    head = [f"{setting.batch * setting.size.sequence} tokens", "ms", f"of {first}"]
    return common.table(head + (["MB sent", f"of {first}"] if sent is not None else []), rows)


def formula(ranks: int, tokens: int) -> list[str]:
    """Return the traffic per rank for a layer of LLaMA-7B in 1D and on the best grid, in millions of numbers."""
    stream = tokens * HIDDEN_7B

    def grid(rows: int) -> float:
        columns = ranks // rows
        return 10 * stream / rows * (columns - 1) / columns + 3 * WEIGHTS_7B / columns * (rows - 1) / rows

    rows = min((n for n in range(1, ranks + 1) if ranks % n == 0), key=grid)
    line = 8 * stream * (ranks - 1) / ranks
    return [f"{ranks} ranks, {tokens} tokens", f"{line / 1e6:,.0f}", f"{rows}x{ranks // rows}",
            f"{grid(rows) / 1e6:,.0f}", f"{grid(rows) / line:.2f}"]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.formula:
        rows = [formula(ranks, tokens) for ranks in args.formula for tokens in (4096, 16384, 65536)]
        print(common.table(["LLaMA-7B, a layer", "1D, millions", "best grid", "millions", "of 1D"], rows))
        return 0
    results: dict[str, Any] = {}
    wrong = 0.0
    with common.processes(4, args.threads) as pool:
        for batch in args.batch:
            size = common.llama(args.hidden, args.sequence, args.layers, args.vocabulary)
            setting = Setting(size, batch, args.repetitions, args.seconds)
            timings, sent = pool.run(measure_model, setting)[0]
            products = pool.run(measure_product, setting)[0]
            wrong = max(wrong, *(common.largest_difference(t, f)[1] for t, f in ((timings, "1D"), (products, "SUMMA"))))
            results[str(batch)] = [common.timings_as_dict(timings), sent, common.timings_as_dict(products)]
            if not args.json:
                print(f"\n{report(setting, timings, sent, '1D')}\n\n{report(setting, products, None, 'SUMMA')}")
    if args.json:
        print(common.as_json("tensor_grids", vars(args), results))
    if wrong > 1e-4:
        print(f"FAIL: the largest difference is {wrong:.1e}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(__doc__, seconds=10.0, hidden=256, layers=4, sequence=64, vocabulary=500)
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 16, 64], help="samples per batch")
    parser.add_argument("--formula", type=int, nargs="+", default=[], metavar="RANKS", help="print the formulas only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
