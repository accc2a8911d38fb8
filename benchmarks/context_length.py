"""Training time of a LLaMA by sequence length, in one process and sharded over two.

    python benchmarks/context_length.py
    python benchmarks/context_length.py --n-ctx 256 1024 --png context_length.png

Forward and backward, batch 4, 8 heads of 64, in fp32. Settings that the published benchmark does not specify are chosen
here: 4 layers, an MLP of 1,376, a vocabulary of 1,000, and a sequence classification head (``--head LlamaForCausalLM``
for the language model). Both models run in the same two processes and alternate step by step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from common import Llama, Timing

import shardformer
from shardformer.mesh.parallel_context import ParallelContext

SINGLE, OURS = "one process", "two processes"
WORST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Setting(common.Setting):
    head: str
    options: tuple[str, ...]


def measure(setting: Setting) -> dict[str, Timing]:
    """Measure in every process."""
    context = ParallelContext.from_default_process_group({"tensor": 2})
    batches = setting.model.batches(setting.batch, setting.head)
    options: dict[str, Any] = {f"enable_{name}": True for name in setting.options}
    sharded = shardformer.shard_model(setting.model.build(setting.head), context=context, **options)
    steps: dict[str, common.Step | None] = {SINGLE: None, OURS: common.train_step(sharded, batches)}
    if context.tensor.rank == 0:
        steps[SINGLE] = common.train_step(setting.model.build(setting.head), batches)
    return common.take_turns(steps, setting.repetitions, setting.seconds, at_least=3, warm_up=1)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    results: dict[int, dict[str, Timing]] = {}
    with common.two_processes(args.threads) as pool:
        for sequence in args.n_ctx:
            common.progress(f"measuring N_CTX {sequence}")
            size = Llama(64 * args.heads, args.intermediate, args.heads, sequence, args.layers, args.vocabulary)
            options = tuple(name.replace("-", "_") for name in args.options)
            setting = Setting(size, args.batch, args.repetitions, args.seconds, args.head, options)
            results[sequence] = pool.run(measure, setting)[0]
    differences = [common.largest_difference(timings, SINGLE)[1] for timings in results.values()]
    if args.json:
        found = {sequence: common.timings_as_dict(timings) for sequence, timings in results.items()}
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        print(common.as_json("context_length", settings, found))
    else:
        print(report(results, args))
        print(f"\nlargest difference of a loss: {max(differences):.1e}")
    if args.png:
        draw(results, args.png)
    return 0 if max(differences) <= WORST_DIFFERENCE else 1


def report(results: Mapping[int, Mapping[str, Timing]], args: argparse.Namespace) -> str:
    head = ["N_CTX", f"{SINGLE}, ms", f"{OURS}, ms", "times as fast", "steps"]
    rows = [
        [
            str(sequence),
            common.ms(timings[SINGLE].ms),
            common.ms(timings[OURS].ms),
            f"{timings[SINGLE].ms / timings[OURS].ms:.2f}",
            str(len(timings[OURS].seconds)),
        ]
        for sequence, timings in results.items()
    ]
    options = ", ".join(args.options) or "no options"
    title = (
        f"{args.head}, batch {args.batch}, {args.heads} heads of 64, {args.layers} layers, intermediate "
        f"{args.intermediate}, vocabulary {args.vocabulary}, fp32, {args.threads} thread a process, {options}; "
        "forward and backward, medians"
    )
    return f"\n{title}\n\n{common.table(head, rows)}"


def draw(results: Mapping[int, Mapping[str, Timing]], path: Path) -> None:
    """Plot the times by length on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    lengths = list(results)
    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for name, colour in ((SINGLE, "#4c5b66"), (OURS, "#1f78b4")):
        times = [results[n][name].ms for n in lengths]
        axes.plot(lengths, times, "o-", color=colour, label=name)
    faster = [results[n][SINGLE].ms / results[n][OURS].ms for n in lengths]
    axes.set(
        xscale="log", yscale="log", xlabel="sequence length, and times as fast", ylabel="forward and backward (ms)"
    )
    axes.set_xticks(lengths, [f"{n:,}\n{ratio:.2f}x" for n, ratio in zip(lengths, faster)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.margins(0.08, 0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e9eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    common.progress(f"drew {path}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(__doc__, seconds=40.0, batch=4, layers=4, intermediate=1376, vocabulary=1000)
    parser.add_argument("--n-ctx", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096], help="sequence lengths")
    parser.add_argument("--heads", type=int, default=8, help="number of heads of size 64")
    parser.add_argument("--head", default="LlamaForSequenceClassification", help="class of transformers")
    parser.add_argument("--options", nargs="*", default=[], help="options of ShardConfig, such as sequence-parallelism")
    parser.add_argument("--png", type=Path, help="plot the times into this file (needs matplotlib)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
