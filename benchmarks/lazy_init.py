"""Peak memory of building and sharding a LLaMA: with an eager build, with lazy initialization, and from saved weights.

    python benchmarks/lazy_init.py
    python benchmarks/lazy_init.py --hidden 512 --layers 2 --tensor 2

Every variant runs in separate processes. Printed is the highest peak of a rank (VmHWM of Linux) above its memory at the
start, compared with the minimum: its shard of the model and one full tensor.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import torch
from common import MB, Llama
from torch import nn

import shardformer
from shardformer.comm.collectives import compute_numel_and_hash
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext

EAGER, LAZY = "built, then sharded", "LazyInit"
LOADED, LAZY_LOADED = "transformers' from_pretrained, then sharded", "shardformer.from_pretrained"
VARIANTS = (EAGER, LAZY, LOADED, LAZY_LOADED)
LAZY_ONES = (LAZY, LAZY_LOADED)
SMALL = Llama(64, 128, 8, 8, layers=1, vocabulary=64)
ALLOWANCE = 1.1
"""Maximum ratio of the peak of a lazy variant to shard + one full tensor, unless --allow is set."""


@dataclass(frozen=True)
class Setting:
    model: Llama
    tensor: int
    variant: str
    folder: str
    small_folder: str


@dataclass(frozen=True)
class Memory:
    """Memory of one rank, in bytes: parameters and buffers, the largest full tensor, and the peak above the start."""

    share: int
    largest: int
    peak: int
    seconds: float
    checksums: list[Any]

    @property
    def ratio(self) -> float:
        return self.peak / (self.share + self.largest)


def measure(setting: Setting) -> Memory:
    """Measure in every process."""
    context = ParallelContext.from_default_process_group({"tensor": setting.tensor})
    for variant in VARIANTS:  # warm-up, so that code and persistent allocations are in memory
        _sharded(Setting(SMALL, setting.tensor, variant, setting.small_folder, ""), context)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status("VmHWM")
    start = time.perf_counter()
    model = _sharded(setting, context)
    seconds = time.perf_counter() - start
    peak = _status("VmHWM") - before
    share = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    specs = get_shard_specs(model)
    largest = max(torch.Size(specs[n].shape).numel() * p.element_size() for n, p in model.named_parameters())
    return Memory(share, largest, peak, seconds, [compute_numel_and_hash(p) for p in model.parameters()])


def _sharded(setting: Setting, context: ParallelContext) -> nn.Module:
    from transformers import LlamaForCausalLM

    if setting.variant == LAZY:
        with shardformer.meta_init.LazyInit():
            model = setting.model.build()
    elif setting.variant == LAZY_LOADED:
        model = shardformer.from_pretrained(LlamaForCausalLM, setting.folder)
    elif setting.variant == LOADED:
        model = LlamaForCausalLM.from_pretrained(setting.folder)
    else:
        model = setting.model.build()
    return shardformer.shard_model(model, context=context)


def _status(field: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def save(model: Llama, folder: str) -> None:
    built: Any = model.build()
    built.save_pretrained(folder, max_shard_size="100MB")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    size = Llama(args.hidden, args.intermediate, args.heads, 128, args.layers, args.vocabulary)
    results: dict[int, dict[str, list[Memory]]] = {}
    with TemporaryDirectory() as folder:
        small = str(Path(folder) / "small")
        run_apart(1, args.threads, save, size, folder)
        run_apart(1, args.threads, save, SMALL, small)
        for tensor in args.tensor:
            results[tensor] = {}
            for variant in VARIANTS:
                common.progress(f"measuring tensor={tensor}: {variant}")
                setting = Setting(size, tensor, variant, folder, small)
                results[tensor][variant] = run_apart(tensor, args.threads, measure, setting)
    if args.json:
        found = {t: {v: [asdict(m) for m in ranks] for v, ranks in row.items()} for t, row in results.items()}
        print(common.as_json("lazy_init", vars(args), found))
    else:
        print(report(results, args))
    same = all(
        [m.checksums for m in ranks] == [m.checksums for m in row[EAGER]]
        for row in results.values()
        for ranks in row.values()
    )
    worst = max(m.ratio for row in results.values() for v in LAZY_ONES for m in row[v])
    print(f"\nsame weights in all variants: {'yes' if same else 'NO'}; worst ratio of the lazy variants: {worst:.2f}")
    return 0 if same and worst <= args.allow else 1


def run_apart(num: int, threads: int, fn: Any, *args: Any) -> Any:
    """Run ``fn`` in new processes."""
    with WorkerPool(
        num, timeout_s=common.TIMEOUT_S, num_threads=threads, module_names=("torch", "transformers")
    ) as pool:
        return pool.run(fn, *args)


def report(results: dict[int, dict[str, list[Memory]]], args: argparse.Namespace) -> str:
    rows = []
    for tensor, row in results.items():
        for variant, ranks in row.items():
            m = max(ranks, key=lambda memory: memory.ratio)
            numbers = [f"{x / MB:,.0f}" for x in (m.share, m.largest, m.peak)]
            rows.append([f"{tensor}  {variant}", *numbers, f"{m.ratio:.2f}", f"{max(r.seconds for r in ranks):.1f}"])
    head = ["tensor", "share, MB", "largest full, MB", "peak, MB", "peak / (share + largest)", "seconds"]
    title = (
        f"LLaMA: hidden {args.hidden}, intermediate {args.intermediate}, {args.layers} layers, vocabulary "
        f"{args.vocabulary}, fp32; of the rank with the highest peak"
    )
    return f"\n{title}\n\n{common.table(head, rows)}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(
        __doc__, seconds=0.0, hidden=1024, intermediate=2752, heads=16, layers=6, vocabulary=16000
    )
    parser.add_argument("--tensor", type=int, nargs="+", default=[1, 2, 4], help="tensor parallel sizes")
    parser.add_argument("--allow", type=float, default=ALLOWANCE, help="maximum ratio of the lazy variants")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
