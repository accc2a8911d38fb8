"""What each process of the demo runs: a training loop as anybody would write it, and one line more to split it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from shardformer.comm.recorder import Recorder
from shardformer.demo.journal import Note, write_note
from shardformer.demo.memory import Peak, measure_peak
from shardformer.demo.settings import Settings
from shardformer.engine.pipeline import Pipeline
from shardformer.mesh.context import ParallelContext
from shardformer.optim.grad_norm import clip_grad_norm_
from shardformer.sharder import shard_model

MAX_NORM = 1.0
WARMUP_STEPS = 10
PROBED_STEP = 2
"""Counted from 0. It is profiled, so it is slow, and its time does not count; AdamW's states are there by then."""
SEED = 0


@dataclass(frozen=True)
class DemoRun:
    """What one process has to tell at the end; ``wire_bytes`` is what it sent itself in one step."""

    losses: list[float]
    num_parameters: int
    peak_bytes: int
    wire_bytes: int
    num_collectives: int
    step_s: float


def train(
    settings: Settings,
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int], Mapping[str, Tensor]],
    learning_rate: float,
    journal: str,
    pipe: int,
) -> DemoRun:
    """Trains in this process, or in all of them together, on the CPU in fp32."""
    context = ParallelContext.from_world({"tensor": None, "pipe": pipe, "data": 1}, device=torch.device("cpu"))
    torch.manual_seed(SEED)
    model = model_fn().float().train()
    if context.tensor.size * context.pipe.size > 1:
        model = shard_model(model, context=context, enable_sequence_parallelism=settings.sequence_parallel)
    pipeline = Pipeline(model, settings.num_parts) if context.pipe.size > 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_fall(step, settings.steps))
    losses: list[float] = []
    times_s: list[float] = []
    peak, recorder = Peak(), Recorder(context)
    for step in range(settings.steps):
        start = time.perf_counter()
        with ExitStack() as probes:
            if step == min(PROBED_STEP, settings.steps - 1):
                peak = probes.enter_context(measure_peak(model, optimizer))
                probes.enter_context(recorder)
            if pipeline is not None:
                loss = pipeline.step(batch_fn(step))
            else:
                loss = model(**batch_fn(step)).loss
                loss.backward()
            clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
        times_s.append(time.perf_counter() - start)
        if context.tensor.rank == context.pipe.rank == 0:
            rate = settings.batch * settings.sequence / _typical(times_s)
            write_note(journal, Note(step + 1, losses[-1], rate))
    num_parameters = sum(p.numel() for p in model.parameters())
    sent = round(sum(call.wire_bytes / (1 if call.op == "send" else call.ranks) for call in recorder.calls))
    return DemoRun(losses, num_parameters, peak.num_bytes, sent, recorder.count(), _typical(times_s))


def warm_up_and_fall(step: int, num_steps: int) -> float:
    """The learning rate of a step as a share of the highest: it rises over some steps, then falls to a tenth."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - 0.9 * step / num_steps)


def _typical(times_s: list[float]) -> float:
    """The median time of a step; neither the first counts, which warms up, nor the one that is profiled."""
    return median(times_s[PROBED_STEP + 1 :] or times_s[-1:])
