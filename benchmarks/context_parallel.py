"""Context parallelism: attention compared with torch's ring, and step time and memory of a LLaMA over 1 to 4 processes.

    python benchmarks/context_parallel.py                      # both
    python benchmarks/context_parallel.py --attention --lengths 4096 8192
    python benchmarks/context_parallel.py --attention --dtype bfloat16
    python benchmarks/context_parallel.py --model --lengths 1024 4096

Attention is causal, forward and backward, on the same tensors in the same processes, alternately. The command fails
unless outputs and gradients equal those of attention on one rank. torch's context parallelism has no CPU kernel, so its
ring is called with the kernel of ShardFormer. Bytes are those of all ranks on the loopback device. The memory of the
model is the size of saved tensors, and the peak size of tensors in a step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from common import MB, Llama, Step, Timing
from torch import Tensor

import shardformer
from shardformer.context_parallel.attention_kernels import AttentionScoreOptions
from shardformer.context_parallel.masks import ChunkedAttentionMask, causal_mask_predicate
from shardformer.context_parallel.ring_attention import RingKVExchange, ring_attention
from shardformer.context_parallel.sequence_layout import SequenceLayout
from shardformer.context_parallel.ulysses import (
    UlyssesHeadExchange,
    assign_key_heads_to_ranks,
    assign_query_heads_to_ranks,
    gather_heads_and_scatter_positions,
    scatter_heads_and_gather_positions,
)
from shardformer.local_ranks.fake_rank import MemoryTracker
from shardformer.mesh.parallel_context import ParallelContext

HEADS, WIDTH = 8, 64
ALLOWED = {"float32": 1e-4, "bfloat16": 4e-2}
"""Tolerance for outputs and gradients, relative to the largest value. In 16 bits torch's ring differs by half of it."""
OURS = ("ring", "ulysses", "gather")
TORCHS = ("torch all-gather", "torch all-to-all")
Attend = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Attention:
    """The attention that all variants compute.

    Args:
        keys: number of key and value heads.
    """

    length: int
    keys: int
    dtype: torch.dtype
    repetitions: int
    seconds: float


def measure_attention(setting: Attention) -> tuple[dict[str, Timing], dict[str, float], dict[str, float]]:
    """Measure in every process: times, MB on the loopback device (0 if unknown), and the largest differences."""
    context = ParallelContext.from_default_process_group({"sequence": dist.get_world_size()})
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, setting.keys, setting.keys, HEADS)
    whole = [torch.randn(1, n, setting.length, WIDTH, generator=generator).to(setting.dtype) for n in heads]
    variants = {name: _ours(name, whole, context) for name in OURS}
    variants |= {name: _torchs(name, whole, context) for name in TORCHS}
    wanted = _in_one_place(whole)
    sent: dict[str, float] = {}
    differences: dict[str, float] = {}
    steps: dict[str, Step | None] = {}
    for name, attend in variants.items():
        attend()
        dist.barrier()
        before = _on_loopback()
        found = attend()
        dist.barrier()
        sent[name] = (_on_loopback() - before) / MB
        index = _indices(name, setting.length, context)
        differences[name] = max(
            float((a - b[:, :, index]).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)
        )
        steps[name] = _as_step(attend)
    return common.take_turns(steps, setting.repetitions, setting.seconds), sent, differences


def _as_step(attend: Attend) -> Step:
    def step(index: int) -> float:
        return float(attend()[0].sum())

    return step


def _indices(name: str, length: int, context: ParallelContext) -> Tensor:
    ranks = context.sequence.size
    positions = SequenceLayout(length, 1, ranks) if name == "ulysses" else SequenceLayout(length, ranks)
    return positions.get_positions_of_rank(context.sequence.rank)


def _ours(name: str, whole: Sequence[Tensor], context: ParallelContext) -> Attend:
    axis, length = context.sequence, whole[0].shape[2]
    ranks = axis.size
    positions = SequenceLayout(length, 1, ranks) if name == "ulysses" else SequenceLayout(length, ranks)
    at = positions.get_positions_of_rank(axis.rank)
    q, k, v, grad = (x[:, :, at].contiguous() for x in whole)
    alone = ParallelContext.from_sizes({}).sequence
    ring = alone if name == "ulysses" else axis
    travel = RingKVExchange(
        ring,
        ChunkedAttentionMask(causal_mask_predicate, None, positions, positions, 1),
        AttentionScoreOptions(WIDTH**-0.5),
        name == "gather",
    )
    stretches = tuple(positions.get_lengths_in_ulysses_group(0))
    mine = assign_query_heads_to_ranks(HEADS, ranks)
    queries = UlyssesHeadExchange(axis, mine, stretches, HEADS)
    keys = UlyssesHeadExchange(axis, assign_key_heads_to_ranks(mine, HEADS, k.shape[1]), stretches, k.shape[1])

    def attend() -> list[Tensor]:
        parts = [x.detach().requires_grad_() for x in (q, k, v)]
        if name == "ulysses":
            entered = [
                scatter_heads_and_gather_positions(x, how) for x, how in zip(parts, (queries, keys, keys), strict=True)
            ]
            out = gather_heads_and_scatter_positions(
                ring_attention(entered[0], entered[1], entered[2], travel), queries
            )
        else:
            out = ring_attention(parts[0], parts[1], parts[2], travel)
        return [out.detach(), *torch.autograd.grad(out, parts, grad)]

    return attend


def _torchs(name: str, whole: Sequence[Tensor], context: ParallelContext) -> Attend:
    """Return torch's ring templates, which take the kernel as an argument."""
    import torch.distributed.tensor.experimental._context_parallel._attention as rings

    at = SequenceLayout(whole[0].shape[2], context.sequence.size).get_positions_of_rank(context.sequence.rank)
    q, k, v, grad = (x[:, :, at].contiguous() for x in whole)
    aten = torch.ops.aten

    def forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **_: Any) -> Any:
        made = (x.contiguous() for x in (query, key, value))
        return aten._scaled_dot_product_flash_attention_for_cpu(*made, 0.0, is_causal)

    def backward(
        query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, grad_out: Tensor,
        **_: Any,
    ) -> Any:  # fmt: skip
        made = (x.contiguous() for x in (grad_out, query, key, value, out, logsumexp))
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*made, 0.0, is_causal)

    method = rings._RotateMethod.ALL_GATHER if name == "torch all-gather" else rings._RotateMethod.ALL_TO_ALL

    def attend() -> list[Tensor]:
        rings._cp_options.enable_load_balance, rings._cp_options.rotate_method = True, method
        group: Any = dist.group.WORLD
        out, lse, *_ = rings._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
        grads = rings._templated_ring_attention_backward(
            group, 2, backward, grad, "grad_out", q, k, v, out, lse, is_causal=True
        )
        return [out, *grads[:3]]

    return attend


def _in_one_place(whole: Sequence[Tensor]) -> list[Tensor]:
    parts = [x.detach().requires_grad_() for x in whole[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, parts, whole[3])]


def _on_loopback() -> int:
    """Return the bytes sent on the loopback device, or 0 if the system does not count them."""
    table = Path("/proc/net/dev")
    lines = table.read_text().splitlines() if table.is_file() else []
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0)


@dataclass(frozen=True)
class Model:
    """The model, trained over all processes."""

    size: Llama
    repetitions: int
    seconds: float


def measure_model(setting: Model) -> tuple[Timing, float, float]:
    """Measure in every process: times, and this rank's bytes of saved tensors and of all tensors in a step."""
    context = ParallelContext.from_default_process_group({"sequence": dist.get_world_size()})
    batches = setting.size.batches(1)
    model = shardformer.shard_model(setting.size.build(), context=context, context_parallel="ring").train()
    saved = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal saved
        saved += x.nbytes if not isinstance(x, torch.nn.Parameter) else 0
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(**batches[0]).loss
    loss.backward()
    model.zero_grad()
    with MemoryTracker([*model.parameters()]) as live:
        model(**batches[0]).loss.backward()
    timing = common.take_turns({"step": common.train_step(model, batches)}, setting.repetitions, setting.seconds)
    return timing["step"], saved, live.peak


def report_attention(length: int, ranks: int, found: Any) -> str:
    timings, sent, differences = found
    rows = []
    for name, timing in timings.items():
        ratio = timing.ms / timings["torch all-to-all"].ms
        bytes_ratio = sent[name] / sent["torch all-to-all"] if sent["torch all-to-all"] else float("nan")
        rows.append([name, common.ms(timing.ms), f"{ratio:.2f}", f"{sent[name]:.2f}", f"{bytes_ratio:.2f}",
                     f"{differences[name]:.0e}"])  # fmt: skip
    head = [f"{length} tokens, {ranks} processes", "ms", "of torch's", "MB sent", "of torch's", "differs"]
    return common.table(head, rows)


def report_models(found: dict[tuple[int, int], tuple[Timing, float, float]]) -> str:
    rows = []
    for (length, ranks), (timing, saved, peak) in found.items():
        alone = found[length, 1]
        rows.append([f"{length} tokens, {ranks} process{'es' if ranks > 1 else ''}", common.ms(timing.ms),
                     f"{timing.ms / alone[0].ms:.2f}", f"{saved / MB:.1f}", f"{saved / alone[1]:.2f}",
                     f"{peak / MB:.1f}", f"{peak / alone[2]:.2f}"])  # fmt: skip
    return common.table(["", "ms a step", "of one", "MB saved", "of one", "MB at most", "of one"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    both = args.attention == args.model
    results: dict[str, Any] = {}
    wrong = 0.0
    if args.attention or both:
        for ranks in args.ranks[1:]:
            with common.processes(ranks, args.threads) as pool:
                for length in args.lengths:
                    dtype = getattr(torch, args.dtype)
                    setting = Attention(length, args.keys, dtype, args.repetitions, args.seconds)
                    found = pool.run(measure_attention, setting)[0]
                    wrong = max(wrong, *(found[2][name] / ALLOWED[args.dtype] for name in OURS))
                    results[f"attention {length} x {ranks}"] = [common.timings_as_dict(found[0]), *found[1:]]
                    if not args.json:
                        print(f"\n{report_attention(length, ranks, found)}", flush=True)
    if args.model or both:
        models: dict[tuple[int, int], tuple[Timing, float, float]] = {}
        for length in args.lengths:
            size = common.llama(args.hidden, length, args.layers, args.vocabulary)
            for ranks in args.ranks:
                with common.processes(ranks, args.threads) as pool:
                    models[length, ranks] = pool.run(measure_model, Model(size, args.repetitions, args.seconds))[0]
        losses = {key: found[0].losses[0] for key, found in models.items()}
        apart = max(abs(loss / losses[length, 1] - 1) for (length, _), loss in losses.items())
        wrong = max(wrong, apart / ALLOWED["float32"])
        results["models"] = {f"{length} x {ranks}": found[1:] for (length, ranks), found in models.items()}
        if not args.json:
            print(f"\nLLaMA, {args.layers} layers, hidden {args.hidden}, one sequence\n\n{report_models(models)}")
    if args.json:
        print(common.as_json("context_parallel", vars(args), results))
    if wrong > 1:
        print(f"FAIL: the largest difference is {wrong:.1f} times the rounding error", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(__doc__, seconds=20.0, hidden=256, layers=4, vocabulary=2000)
    parser.add_argument("--attention", action="store_true", help="attention only, compared with torch's ring")
    parser.add_argument("--model", action="store_true", help="a LLaMA only")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks, the first one as the reference"
    )
    parser.add_argument("--keys", type=int, default=4, help=f"key heads in --attention, of {HEADS} query heads")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype in --attention")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
