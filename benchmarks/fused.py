"""Effect of fused norms, fused attention and fused activations, for a model of each family.

    python benchmarks/fused.py
    python benchmarks/fused.py --families llama --sequence 2048

A step is a forward pass, a backward pass and torch's fused AdamW on two processes. Each option, and all three together,
are compared with the default model (in which transformers selects torch's scaled_dot_product_attention if available)
and with eager attention. The losses must agree. If a model does not support an option, the table has the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
from common import Timing

import shardformer
from shardformer.errors import ConfigError
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import LANGUAGE_MODEL, RandomBatchFactory, SmallModelFactory

PLAIN, EAGER = "as it comes", "eager attention"
OPTIONS: Mapping[str, tuple[str, ...]] = {
    EAGER: (),
    PLAIN: (),
    "fused norms": ("enable_fused_normalization",),
    "flash attention": ("enable_flash_attention",),
    "jit fused": ("enable_jit_fused",),
    "all three": ("enable_fused_normalization", "enable_flash_attention", "enable_jit_fused"),
}
WORST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Setting:
    family: str
    hidden: int
    heads: int
    layers: int
    vocabulary: int
    batch: int
    sequence: int
    repetitions: int
    seconds: float

    def sample(self) -> SmallModelFactory:
        h, n, depth, length = self.hidden, self.heads, self.layers, self.sequence
        sizes: Mapping[str, dict[str, Any]] = {
            "bert": dict(
                hidden_size=h, num_attention_heads=n, num_hidden_layers=depth, intermediate_size=4 * h,
                max_position_embeddings=length,
            ),
            "gpt2": dict(n_embd=h, n_head=n, n_layer=depth, n_inner=4 * h, n_positions=length),
            "llama": dict(
                hidden_size=h, num_attention_heads=n, num_key_value_heads=n, num_hidden_layers=depth,
                intermediate_size=8 * h // 3 // 16 * 16, max_position_embeddings=length,
            ),
            "t5": dict(d_model=h, num_heads=n, d_kv=h // n, num_layers=depth, d_ff=4 * h),
        }  # fmt: skip
        return SmallModelFactory(self.family, changes={**sizes[self.family], "vocab_size": self.vocabulary})

    def __str__(self) -> str:
        return (
            f"{self.sample().head_class}: hidden {self.hidden}, {self.heads} heads, {self.layers} layers, vocabulary "
            f"{self.vocabulary}, batch {self.batch} x {self.sequence}"
        )


def measure(setting: Setting) -> tuple[dict[str, Timing], dict[str, str]]:
    """Measure in every process: the timings, and the reason for each unsupported option."""
    context = ParallelContext.from_default_process_group({"tensor": 2})
    sample = setting.sample()
    make = RandomBatchFactory(sample.head_class, setting.vocabulary, setting.batch, setting.sequence)
    batches = [make(index) for index in range(common.NUM_BATCHES)]
    steps: dict[str, common.Step | None] = {}
    refused: dict[str, str] = {}
    for name, options in OPTIONS.items():
        torch.manual_seed(0)
        model: Any = sample()
        if name == EAGER:
            model.set_attn_implementation("eager")
        try:
            model = shardformer.shard_model(model, context=context, **dict.fromkeys(options, True))
        except ConfigError as error:
            refused[name] = str(error)
        else:
            steps[name] = common.train_step(model, batches, common.adamw(model))
    return common.take_turns(steps, setting.repetitions, setting.seconds), refused


def report(timings: Mapping[str, Timing], refused: Mapping[str, str]) -> str:
    rows = []
    for name in OPTIONS:
        if name in refused:
            rows.append([name, "refused", "-", "-"])
            continue
        taken = timings[name]
        pairs = zip(taken.losses, timings[PLAIN].losses)
        difference = max(abs(a - b) / abs(b) for a, b in pairs)
        rows.append([name, common.ms(taken.ms), f"{taken.ms / timings[PLAIN].ms:.2f}", f"{difference:.1e}"])
    notes = "".join(f"\n{name}: {why}" for name, why in refused.items())
    return common.table(["option", "ms", f"/ {PLAIN}", "loss differs by"], rows) + notes


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    results, alike = {}, True
    with common.two_processes(args.threads) as pool:
        for family in args.families:
            setting = Setting(
                family, args.hidden, args.heads, args.layers, args.vocabulary, args.batch, args.sequence,
                args.repetitions, args.seconds,
            )  # fmt: skip
            common.progress(f"measuring {setting}")
            timings, refused = pool.run(measure, setting)[0]
            results[family] = {"timings": common.timings_as_dict(timings), "refused": refused}
            alike &= common.largest_difference(timings, PLAIN)[1] <= WORST_DIFFERENCE
            if not args.json:
                steps = len(timings[PLAIN].seconds)
                print(f"\n{setting}; median of {steps} steps\n\n{report(timings, refused)}", flush=True)
    if args.json:
        print(common.as_json("fused", vars(args), results))
    return 0 if alike else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(
        __doc__, seconds=45.0, hidden=512, heads=8, layers=4, vocabulary=1000, batch=2, sequence=512
    )
    parser.add_argument("--families", nargs="+", choices=list(LANGUAGE_MODEL), default=list(LANGUAGE_MODEL))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
