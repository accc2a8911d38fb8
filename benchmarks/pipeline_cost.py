"""Memory of a pipeline stage, and traffic between stages. Part of ``pipeline.py``."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import common
from common import MB, Llama
from peak_memory import measure_peak
from torch import Tensor

import shardformer
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.pipeline import Pipeline
from shardformer.pipeline.stage_manager import PipelineStageManager


@dataclass(frozen=True)
class Held:
    """Bytes on one stage. ``activations`` is the peak of a step minus the other fields."""

    params: int
    grads: int
    states: int
    activations: int
    layers: int


def measure_held(size: Llama, batch: int, micro_batches: int, schedule: str) -> Held:
    """Measure in every process."""
    import torch.distributed as dist

    context = ParallelContext.from_default_process_group({"pipe": dist.get_world_size()})
    manager = PipelineStageManager(context, schedule)
    model = shardformer.shard_model(size.build(), context=context, pipeline_stage_manager=manager)
    optimizer = common.adamw(model)
    step = common.pipeline_step(model, Pipeline(model, micro_batches), size.batches(batch))
    step(0)
    grads = bytes_of([p.grad for p in model.parameters()])
    optimizer.step()
    model.zero_grad()
    step(1)  # warm-up, for persistent allocations
    model.zero_grad()
    params = bytes_of(list(model.parameters()))
    states = bytes_of([x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)])
    with measure_peak(model, optimizer) as peak:
        step(2)
    layers = len({name.split(".")[2] for name, _ in model.named_parameters() if ".layers." in name})
    return Held(params, grads, states, peak.num_bytes - params - grads - states, layers)


def bytes_of(tensors: list[Tensor | None] | list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def memory(args: argparse.Namespace) -> list[Any]:
    size = common.llama(args.hidden[0], args.sequence[0], args.layers, args.vocabulary)
    micro_batches = max(args.micro_batches)
    results, rows = [], []
    for stages in args.stages:
        parts = {"1f1b": micro_batches, "gpipe": micro_batches} if stages > 1 else {"1f1b": micro_batches, "at once": 1}
        with common.processes(stages, args.threads) as pool:
            for name, count in parts.items():
                common.progress(f"measuring the memory of {stages} stages, {name}")
                schedule = "1f1b" if name == "at once" else name
                ranks = pool.run(measure_held, size, args.batch, count, schedule)
                results.append({"stages": stages, "schedule": name, "ranks": [asdict(held) for held in ranks]})
                label = name if name == "at once" else f"{name}, {count} micro-batches"
                for rank, held in enumerate(ranks):
                    numbers = [held.params, held.grads + held.states, held.activations]
                    total = sum(numbers)
                    shown = [f"{n / MB:.1f}" for n in (*numbers, total)]
                    rows.append([f"{stages}: {rank}", label, str(held.layers), *shown])
    if not args.json:
        head = ["stages: stage", "schedule", "layers", "parameters", "gradients, AdamW", "activations", "together"]
        print(
            f"\nMemory, MB: hidden {size.hidden}, {size.layers} layers, vocabulary {size.vocabulary}, batch "
            f"{args.batch} x {size.sequence}, fp32\n\n{common.table(head, rows)}",
            flush=True,
        )
    return results


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sent in a step, and that it gathered over its tensor axis on arrival."""

    activations: int
    gradients: int
    arrival: int
    messages: int


def measure_sent(size: Llama, batch: int, micro_batches: int, is_sequence_parallel: bool) -> Sent:
    """Measure in every process. The first step, which also sends headers, is not counted."""
    context = ParallelContext.from_default_process_group({"tensor": 2, "pipe": 2})
    options = {"enable_sequence_parallelism": True} if is_sequence_parallel else {}
    model = shardformer.shard_model(size.build(), context=context, **options)
    step = common.pipeline_step(model, Pipeline(model, micro_batches), size.batches(batch))
    step(0)
    with CollectiveRecorder(context) as recorder:
        step(1)
    forward, backward = (recorder.payload_bytes("send", purpose=p) for p in ("activation", "gradient"))
    arrival = recorder.wire_bytes("all_gather", axis="tensor", purpose="arrival") // 2  # sent by this rank
    return Sent(forward, backward, arrival, recorder.count("send"))


def communicated(args: argparse.Namespace) -> tuple[list[Any], bool]:
    """Print the traffic per micro-batch and boundary of all ranks, compared with B*S*H."""
    size = common.llama(args.hidden[0], args.sequence[0], args.layers, args.vocabulary)
    micro_batches = min(args.micro_batches)
    formula = args.batch // micro_batches * size.sequence * size.hidden * 4
    results, rows, good = [], [], True
    with common.processes(4, args.threads) as pool:
        for is_sequence_parallel in (False, True):
            common.progress(f"counting bytes, sequence parallel: {is_sequence_parallel}")
            ranks = pool.run(measure_sent, size, args.batch, micro_batches, is_sequence_parallel)
            each = [
                sum(getattr(sent, name) for sent in ranks) // micro_batches
                for name in ("activations", "gradients", "arrival")
            ]
            gathered = 0 if is_sequence_parallel else 2 * formula
            good &= each == [formula, formula, gathered]
            results.append({"sequence parallel": is_sequence_parallel, "ranks": [asdict(sent) for sent in ranks]})
            name = "tensor 2 x pipe 2" + (", sequence parallel" if is_sequence_parallel else "")
            messages = sum(sent.messages for sent in ranks) / micro_batches
            rows.append([name, *(f"{n:,}" for n in each), f"{messages:g}"])
    rows.append(["B*S*H*4 of a micro-batch", *(f"{n:,}" for n in (formula, formula)), f"2 x {formula:,}", "4"])
    if not args.json:
        head = ["bytes for a micro-batch", "activations", "gradients", "gathered on arrival", "messages"]
        print(
            f"\nBytes of all ranks: hidden {size.hidden}, batch {args.batch} x {size.sequence}, {micro_batches} "
            f"micro-batches, one boundary\n\n{common.table(head, rows)}"
        )
        print(f"equal to the formula: {'yes' if good else 'NO'}", flush=True)
    return results, good
