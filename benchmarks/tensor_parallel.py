"""Train an unmodified LLaMA in one process, and with tensor parallelism of ShardFormer, torch and transformers.

    python benchmarks/tensor_parallel.py
    python benchmarks/tensor_parallel.py --hidden 256 --sequence 128 --batch 8

A step is a forward pass, a backward pass and torch's fused AdamW, in fp32. All variants run in the same two processes
and alternate step by step. The second process sleeps during a step of the single process. The command fails unless the
losses of all variants agree in every step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import common
import torch.distributed as dist
from common import MB, Llama, Timing
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import shardformer
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.mesh.transport import WIRE_FACTOR

SINGLE, OURS = "one process", "ShardFormer"
WORST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Setting(common.Setting):
    variants: tuple[str, ...]

    def __str__(self) -> str:
        m = self.model
        return (
            f"hidden {m.hidden}, sequence {m.sequence}, batch {self.batch}, {m.layers} layers, {m.heads} heads, "
            f"intermediate {m.intermediate}, vocabulary {m.vocabulary}"
        )


@dataclass(frozen=True)
class Traffic:
    """Collectives of one rank in a step, those of the loss among them, and the minimum bytes sent by both ranks."""

    collectives: int
    of_loss: int
    wire_bytes: int


@dataclass(frozen=True)
class Contender:
    """A model that is ready to train, and the context manager for its steps."""

    model: nn.Module
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class Counter(TorchDispatchMode):
    """Counts functional collectives and their bytes, including those of DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives, self.wire_bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor then calls the operation with regular tensors, which are counted
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if func.namespace.startswith("_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            kind = next(kind for kind in WIRE_FACTOR if name.startswith(kind))
            full = out if kind == "all_gather" else args[0]
            self.collectives += 1
            self.wire_bytes += WIRE_FACTOR[kind] * full.numel() * full.element_size() * (dist.get_world_size() - 1)
        return out


def ours(size: Llama, context: ParallelContext, **options: bool) -> Contender:
    return Contender(shardformer.shard_model(size.build(), context=context, **options))


def torch_plan(size: Llama, context: ParallelContext, *, blocks: bool = False) -> Contender:
    """Apply torch's parallelize_module with the plan of its tutorial, or with ``blocks`` the best plan it can express.

    The latter converts the input of each block to a DTensor, so that the gradients of q, k and v are summed before they
    are reduced, and computes the loss on sharded logits.
    """
    model = size.build()
    assert context.mesh is not None
    mesh = context.mesh["tensor"]
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(size.layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{i}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{i}.{name}"] = RowwiseParallel()
        if blocks:
            plan[f"model.layers.{i}.self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Replicate()},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            plan[f"model.layers.{i}.mlp"] = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
            )
    if blocks:
        plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return Contender(parallelize_module(model, mesh, plan), loss_parallel if blocks else nullcontext)


def transformers_plan(size: Llama) -> Contender:
    """Apply transformers' own plan, like from_pretrained(..., distributed_config=DistributedConfig(tp_size=2)).

    Its two steps are called separately, because the combined function requires accelerate.
    """
    from transformers.distributed import DistributedConfig

    model: Any = size.build()
    config, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=dist.get_world_size()))
    return Contender(type(model).maybe_distribute_model(model, config, mesh))


Build = Callable[[Llama, ParallelContext], Contender]
VARIANTS: Mapping[str, Build] = {
    SINGLE: lambda size, _: Contender(size.build()),
    OURS: lambda size, context: ours(size, context),
    f"{OURS}, sequence parallel": lambda size, context: ours(size, context, enable_sequence_parallelism=True),
    f"{OURS}, sequence parallel, overlap": lambda size, context: ours(
        size, context, enable_sequence_parallelism=True, enable_sequence_overlap=True
    ),
    "torch parallelize_module": lambda size, context: torch_plan(size, context),
    "torch, best plan": lambda size, context: torch_plan(size, context, blocks=True),
    "transformers' plan": lambda size, _: transformers_plan(size),
}


def measure(setting: Setting) -> tuple[dict[str, Timing], dict[str, Traffic]]:
    """Measure in every process."""
    context = ParallelContext.from_default_process_group({"tensor": dist.get_world_size()})
    batches = setting.model.batches(setting.batch)
    steps: dict[str, common.Step | None] = {}
    traffic: dict[str, Traffic] = {}
    for name in setting.variants:
        if name == SINGLE and context.tensor.rank > 0:
            steps[name] = None
            continue
        contender = VARIANTS[name](setting.model, context)
        optimizer = common.adamw(contender.model)
        steps[name] = common.train_step(contender.model, batches, optimizer, contender.around)
        if name != SINGLE:
            forward_backward = common.train_step(contender.model, batches, None, contender.around)
            traffic[name] = count(forward_backward, context)
    return common.take_turns(steps, setting.repetitions, setting.seconds), traffic


def count(step: common.Step, context: ParallelContext) -> Traffic:
    """Count the collectives of the second step. In the first one the ranks also compare their inputs."""
    step(0)
    with ExitStack() as stack:
        recorder, counter = stack.enter_context(CollectiveRecorder(context)), stack.enter_context(Counter())
        step(0)
    if recorder.calls:
        return Traffic(recorder.count(), recorder.count(purpose="loss"), recorder.wire_bytes())
    return Traffic(counter.collectives, 0, counter.wire_bytes)


def report(timings: Mapping[str, Timing], traffic: Mapping[str, Traffic]) -> str:
    head = ["variant", "ms a step", "/ one process", "/ ShardFormer", "collectives", "MB a step"]
    rows = []
    for name, timing in timings.items():
        ratios = [f"{timing.ms / timings[base].ms:.2f}" if base in timings else "-" for base in (SINGLE, OURS)]
        seen = traffic.get(name)
        own = f" ({seen.of_loss} the loss's)" if seen and seen.of_loss else ""
        said = [f"{seen.collectives}{own}", f"{seen.wire_bytes / MB:.2f}"] if seen else ["-", "-"]
        rows.append([name, common.ms(timing.ms), *ratios, *said])
    return common.table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    results, alike = [], True
    with common.two_processes(args.threads) as pool:
        for setting in settings(args):
            common.progress(f"measuring {setting}")
            timings, traffic = pool.run(measure, setting)[0]
            seen = {name: asdict(value) for name, value in traffic.items()}
            results.append({**asdict(setting), "timings": common.timings_as_dict(timings), "traffic": seen})
            name, difference = common.largest_difference(timings, setting.variants[0])
            alike &= difference <= WORST_DIFFERENCE
            if not args.json:
                steps = len(timings[name].seconds)
                print(f"\n{setting}; median of {steps} steps\n\n{report(timings, traffic)}\n")
                print(
                    f"largest relative difference of a loss: {difference:.1e}, from {setting.variants[0]} to {name}",
                    flush=True,
                )
    if args.json:
        print(common.as_json("tensor_parallel", vars(args), results))
    if not alike:
        print(f"A loss differs by more than {WORST_DIFFERENCE:g}: the variants are not equivalent", file=sys.stderr)
    return 0 if alike else 1


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    for hidden in args.hidden:
        for sequence in args.sequence:
            num_heads = args.heads or heads(hidden)
            size = Llama(hidden, intermediate(hidden), num_heads, sequence, args.layers, args.vocabulary)
            yield Setting(size, args.batch, args.repetitions, args.seconds, tuple(args.variants))


def intermediate(hidden: int) -> int:
    """Return 8/3 of the hidden size, rounded to 16: 688 for 256, 2736 for 1024."""
    return (hidden * 8 // 3 + 15) // 16 * 16


def heads(hidden: int) -> int:
    """Return the number of heads: 8, or from hidden 512 on heads of size 64."""
    return 8 if hidden < 512 else hidden // 64


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(__doc__, seconds=60.0, batch=2, layers=4, vocabulary=8000)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--sequence", type=int, nargs="+", default=[128, 512])
    parser.add_argument(
        "--heads", type=int, default=0, help="number of heads (0: 8, or from hidden 512 on heads of size 64)"
    )
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
