"""Effect of compiled layers (``compile=True``) on the time of a training step of a LLaMA and a GPT-2.

    python benchmarks/compile.py
    python benchmarks/compile.py --models gpt2 --layouts tensor data --hidden 256
    python benchmarks/compile.py --layouts tensor --whole

A step is a forward pass, a backward pass and the fused AdamW. For each layout, the compiled and the eager model take
turns, so that other jobs on the machine affect both. A round runs one step of each, and gives a ratio of their times.
The speed-up is the median of these ratios. "of CPU time" is the same for the CPU time of the slower rank, without
waiting. "first s" is the time of the first step, which compiles the graphs. The losses must agree. ``--whole`` adds
``torch.compile(model)``, which also traces what is outside the layers.

For one process, the last line divides the time of an eager step: inductor fuses only the other operations.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

import common
import torch
import torch.distributed as dist
from common import Timing
from torch import Tensor, nn
from torch.profiler import profile

import shardformer
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.sharding.compiled_layers import get_layer_stack_compilers

LAYOUTS: Mapping[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one process": ({"data": 1}, {}),
    "tensor": ({"tensor": 2}, {}),
    "sequence parallel": ({"tensor": 2}, {"enable_sequence_parallelism": True}),
    "data": ({"data": 2}, {}),
}
"""Name -> sizes of the axes, options of ``shard_model``."""
EAGER, COMPILED, WHOLE = "eager", "compile=True", "torch.compile(model)"
KINDS = {
    "matrix products": r"aten::(add|b|badd)?mm$",
    "attention": "aten::_scaled_dot_product",
    "optimizer": "_fused_adam",
}
"""Kind -> pattern of the operators that inductor does not fuse."""
PROFILED_STEPS = 3
WORST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Setting:
    model: str
    hidden: int
    layers: int
    vocabulary: int
    batch: int
    sequence: int

    def build(self) -> nn.Module:
        """Build the model in fp32, with the same random weights in every process. It has no dropout."""
        if self.model == "llama":
            return common.llama(self.hidden, self.sequence, self.layers, self.vocabulary).build()
        import transformers

        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=self.vocabulary,
            n_positions=self.sequence,
            n_embd=self.hidden,
            n_layer=self.layers,
            n_head=max(2, self.hidden // 64),
            bos_token_id=0,
            eos_token_id=0,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model

    def batches(self) -> list[dict[str, Tensor]]:
        return common.llama(self.hidden, self.sequence, self.layers, self.vocabulary).batches(self.batch)

    def __str__(self) -> str:
        return (
            f"{self.model}: hidden {self.hidden}, {self.layers} layers, vocabulary {self.vocabulary}, "
            f"batch {self.batch} x {self.sequence}"
        )


@dataclass
class Variant:
    """A model and its optimizer. ``cpu_s`` are the seconds of CPU time of each step on this rank."""

    called: Callable[..., Any]
    model: nn.Module
    batches: Sequence[Mapping[str, Tensor]]
    cpu_s: list[float]

    def __post_init__(self) -> None:
        self._optimizer = common.adamw(self.model)

    def step(self, index: int) -> float:
        start = time.process_time()
        self.model.zero_grad()
        loss = self.called(**self.batches[index % len(self.batches)]).loss
        loss.backward()
        self._optimizer.step()
        self.cpu_s.append(time.process_time() - start)
        return float(loss.detach())


@dataclass
class Result:
    timings: dict[str, Timing]
    cpu_s: dict[str, list[float]]
    first_s: dict[str, float]
    compiled: list[str]
    shares: dict[str, float]

    def differs_by(self, name: str) -> float:
        pairs = zip(self.timings[name].losses, self.timings[EAGER].losses)
        return max(abs(a - b) / abs(b) for a, b in pairs)


def measure(
    setting: Setting, layout: str, names: Sequence[str], backend: str, repetitions: int, seconds: float
) -> Result:
    """Measure the variants of one layout in every process."""
    sizes, options = LAYOUTS[layout]
    context = ParallelContext.from_default_process_group(sizes)
    batches = [
        {name: x.chunk(context.data.size)[context.data.rank] for name, x in b.items()} for b in setting.batches()
    ]
    variants: dict[str, Variant] = {}
    first: dict[str, float] = {}
    lines: list[str] = []
    for name in names:
        compiled = backend if name == COMPILED else False
        model = shardformer.shard_model(setting.build(), context=context, compile=compiled, **options)
        called: Any = torch.compile(model, backend=backend) if name == WHOLE else model
        variants[name] = Variant(called, model, batches, [])
        start = time.perf_counter()
        variants[name].step(0)
        first[name] = time.perf_counter() - start
        lines += map(str, get_layer_stack_compilers(model))
    timings = common.take_turns({name: each.step for name, each in variants.items()}, repetitions, seconds)
    cpu_s = {name: each.cpu_s[-len(timings[name].seconds) :] for name, each in variants.items()}
    return Result(timings, cpu_s, first, lines, _shares(variants[EAGER]))


def _shares(eager: Variant) -> dict[str, float]:
    """Return the share of each kind of operation in the time of an eager step; empty if it includes waiting."""
    if dist.get_world_size() > 1:
        return {}
    with profile() as profiled:
        for index in range(PROFILED_STEPS):
            eager.step(index)
    events = profiled.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    shares = dict.fromkeys([*KINDS, "other"], 0.0)
    for event in events:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, event.key)), "other")
        shares[kind] += event.self_cpu_time_total / total
    return shares


def report(result: Result) -> str:
    rows = []
    for name, taken in result.timings.items():
        speedups = [
            [a / b for a, b in zip(eager, own)]
            for eager, own in (
                (result.timings[EAGER].seconds, taken.seconds),
                (result.cpu_s[EAGER], result.cpu_s[name]),
            )
        ]
        quartiles = quantiles(speedups[0], n=4) if len(speedups[0]) > 1 else speedups[0] * 3
        cells = [f"{median(speedups[0]):.2f}", f"{quartiles[0]:.2f}-{quartiles[2]:.2f}", f"{median(speedups[1]):.2f}"]
        rows.append(
            [name, common.ms(taken.ms), *cells, f"{result.first_s[name]:.1f}", f"{result.differs_by(name):.1e}"]
        )
    head = ["variant", "ms", "speed-up", "quartiles", "of CPU time", "first s", "loss differs by"]
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in result.shares.items())
    lines = [*result.compiled, f"An eager step: {shares}."] if shares else result.compiled
    return "\n".join([common.table(head, rows), "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    names = [EAGER, COMPILED, *([WHOLE] if args.whole else [])]
    results, agrees = {}, True
    for model in args.models:
        setting = Setting(model, args.hidden, args.layers, args.vocabulary, args.batch, args.sequence)
        for layout in args.layouts:
            common.progress(f"measuring {layout} of {model}")
            single = layout == "one process"
            with common.processes(1, args.threads) if single else common.two_processes(args.threads) as pool:
                ranks = pool.run(measure, setting, layout, names, args.backend, args.repetitions, args.seconds)
            result = ranks[0]
            result.cpu_s = {
                name: [max(times) for times in zip(*(rank.cpu_s[name] for rank in ranks))] for name in names
            }
            results[f"{model}, {layout}"] = asdict(result)
            agrees &= all(result.differs_by(name) <= WORST_DIFFERENCE for name in names)
            if not args.json:
                steps = len(result.timings[EAGER].seconds)
                print(f"\n{layout}, {setting}; medians of {steps} steps\n\n{report(result)}", flush=True)
    if args.json:
        print(common.as_json("compile", vars(args), results))
    return 0 if agrees else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(__doc__, seconds=40.0, hidden=512, layers=4, vocabulary=1000, batch=2, sequence=256)
    parser.add_argument("--models", nargs="+", choices=["llama", "gpt2"], default=["llama", "gpt2"])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=["one process", "tensor"])
    parser.add_argument("--whole", action="store_true", help=f"measure {WHOLE}, too")
    parser.add_argument("--backend", default="inductor", help="the compiler")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
