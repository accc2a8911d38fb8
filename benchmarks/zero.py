"""ZeRO compared with torch: step time and loopback traffic of an unmodified LLaMA over data ranks.

    python benchmarks/zero.py                                                     # 31M parameters, two data ranks
    python benchmarks/zero.py --hidden 256 --layers 4 --vocabulary 8000 --batch 4 # 7.26M, as in wire_bytes.py
    python benchmarks/zero.py --model bert
    python benchmarks/zero.py --tensor 2                                         # data 2 x tensor 2

A step is a forward pass, a backward pass and torch's fused AdamW, in fp32. All variants run in the same processes and
alternate step by step. The command fails unless their losses agree in every step. With ``--tensor``, torch's variants
train over as many data ranks as there are processes, on the same samples.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
import torch.distributed as dist
from common import MB, Llama, Timing
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from wire_bytes import counted

import shardformer
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.zero.shard_optimizer import shard_optimizer

PEER, SHARDED = "DDP + ZeroRedundancyOptimizer", "fully_shard"
WORST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Setting:
    """The model, the batch and the number of ranks."""

    size: Llama
    model: str
    batch: int
    tensor: int
    variants: tuple[str, ...]
    repetitions: int
    seconds: float

    def build(self) -> nn.Module:
        if self.model == "llama":
            return self.size.build()
        import transformers

        torch.manual_seed(0)
        size = self.size
        config = transformers.BertConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.hidden,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=size.sequence,
        )
        model: nn.Module = transformers.BertForMaskedLM(config)
        return model


Made = tuple[nn.Module, torch.optim.Optimizer]


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def ddp(setting: Setting, context: ParallelContext) -> Made:
    model = DistributedDataParallel(setting.build(), gradient_as_bucket_view=True)
    return model, fused(model)


def ddp_zero(setting: Setting, context: ParallelContext) -> Made:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import emits a warning

    model = DistributedDataParallel(setting.build(), gradient_as_bucket_view=True)
    how: dict[str, Any] = {"lr": 1e-4, "fused": True, "parameters_as_bucket_view": True}
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **how)


def fsdp(setting: Setting, context: ParallelContext, reshard: bool = True) -> Made:
    model = setting.build()
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return model, fused(model)


def ours(setting: Setting, context: ParallelContext, stage: int, **how: Any) -> Made:
    model = shardformer.shard_model(setting.build(), context=context)
    optimizer = fused(model)
    return model, optimizer if stage == 0 else shard_optimizer(model, optimizer, stage=stage, **how)


VARIANTS: dict[str, Callable[[Setting, ParallelContext], Made]] = {
    "DDP": ddp,
    PEER: ddp_zero,
    SHARDED: fsdp,
    "fully_shard, kept for the backward pass": lambda s, c: fsdp(s, c, reshard=False),
    "ShardFormer without": lambda s, c: ours(s, c, 0),
    "ShardFormer stage 1": lambda s, c: ours(s, c, 1),
    "ShardFormer stage 2": lambda s, c: ours(s, c, 2),
    "ShardFormer stage 3": lambda s, c: ours(s, c, 3),
    "ShardFormer stage 3, kept for the backward pass": lambda s, c: ours(s, c, 3, reshard_after_forward=False),
}


def measure(setting: Setting) -> tuple[dict[str, float | None], dict[str, Timing]]:
    """Measure in every process: MB over loopback per step, and the times."""
    world = dist.get_world_size()
    context = ParallelContext.from_default_process_group({"data": world // setting.tensor, "tensor": setting.tensor})
    steps = {name: step_of(name, setting, context) for name in setting.variants}
    sent: dict[str, float | None] = {}
    for name, step in steps.items():
        for index in range(2):  # allocations and recordings of the first step are not counted
            step(index)
        before, nothing = counted(), counted()
        for index in range(2, 4):
            step(index)
        after = counted()
        sent[name] = None
        if before and nothing and after:
            sent[name] = (after[0] - nothing[0] - (nothing[0] - before[0])) / 2 / MB
    return sent, common.take_turns(steps, setting.repetitions, setting.seconds)


def step_of(name: str, setting: Setting, context: ParallelContext) -> Callable[[int], float]:
    """Return a step on this rank's samples, whose loss is that of all ranks."""
    model, optimizer = VARIANTS[name](setting, context)
    is_ours = name.startswith("ShardFormer")
    ranks = context.data.size if is_ours else dist.get_world_size()
    rank = context.data.rank if is_ours else dist.get_rank()
    each = setting.batch * dist.get_world_size() // ranks
    batches: list[Mapping[str, Tensor]] = [
        {key: value[rank * each : (rank + 1) * each] for key, value in batch.items()}
        for batch in setting.size.batches(setting.batch * dist.get_world_size())
    ]

    def step(index: int) -> float:
        optimizer.zero_grad()
        loss = model(**batches[index % len(batches)]).loss
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step


def report(sent: Mapping[str, float | None], timings: Mapping[str, Timing]) -> str:
    rows = []
    for name, timing in timings.items():
        against = [f"{timing.ms / timings[peer].ms:.2f}" if peer in timings else "-" for peer in (PEER, SHARDED)]
        crossed = sent[name]
        rows.append([name, common.ms(timing.ms), *against, "-" if crossed is None else f"{crossed:.1f}"])
    return common.table(["", "ms a step", f"over {PEER}", f"over {SHARDED}", "MB a step"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    size = common.llama(args.hidden, args.sequence, args.layers, args.vocabulary)
    chosen = tuple(name for name in VARIANTS if not args.variants or any(word in name for word in args.variants))
    setting = Setting(size, args.model, args.batch, args.tensor, chosen, args.repetitions, args.seconds)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    pool = common.two_processes(args.threads) if args.tensor == 1 else common.processes(2 * args.tensor, args.threads)
    with pool as workers:
        sent, timings = workers.run(measure, setting)[0]
    worst, difference = common.largest_difference(timings, next(iter(timings)))
    if args.json:
        print(common.as_json("zero", vars(args), {"MB": sent, "times": common.timings_as_dict(timings)}))
    else:
        numel = sum(p.numel() for p in setting.build().parameters())
        print(
            f"\n{args.model}, {numel / 1e6:.2f}M parameters, {args.layers} layers, hidden {args.hidden}, vocabulary "
            f"{args.vocabulary}, {args.batch} x {args.sequence} per rank, data 2, tensor {args.tensor}\n\n"
            f"{report(sent, timings)}"
        )
    if difference > WORST_DIFFERENCE:
        print(f"FAIL: the losses of {worst} differ by {difference:.1e}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(__doc__, seconds=60.0, hidden=512, layers=6, sequence=128, vocabulary=12000)
    parser.add_argument("--model", choices=("llama", "bert"), default="llama")
    parser.add_argument("--batch", type=int, default=2, help="samples per process")
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks of ShardFormer")
    parser.add_argument("--variants", nargs="*", default=(), help="variants whose names contain one of these words")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
