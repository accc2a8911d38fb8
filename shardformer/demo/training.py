"""What each process of the demo runs: a loop of plain PyTorch in one process, the trainer in several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from shardformer.comm.recorder import Recorder
from shardformer.demo.journal import Note, write_note
from shardformer.demo.memory import Peak, measure_peak
from shardformer.demo.settings import Settings
from shardformer.engine.build import initialize
from shardformer.engine.parallel import Parallel
from shardformer.mesh.context import ParallelContext
from shardformer.optim.grad_norm import clip_grad_norm_
from shardformer.trainer.hook import Hook, Run
from shardformer.trainer.trainer import Trainer

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


@dataclass
class Probes:
    """What is measured around each step."""

    settings: Settings
    context: ParallelContext
    journal: str
    peak: Peak = field(default_factory=Peak)
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorder, self._around = Recorder(self.context), ExitStack()
        self._began = 0.0

    def before(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """``step`` is counted from 0."""
        self._began = time.perf_counter()
        if step == min(PROBED_STEP, self.settings.steps - 1):
            self.peak = self._around.enter_context(measure_peak(model, optimizer))
            self._around.enter_context(self.recorder)

    def updated(self) -> None:
        """The step is made, and its gradients are gone."""
        self._around.close()

    def after(self, step: int, loss: Tensor) -> None:
        self.losses.append(float(loss.detach()))
        self.times_s.append(time.perf_counter() - self._began)
        if self.context.tensor.rank == self.context.pipe.rank == 0:
            rate = self.settings.batch * self.settings.sequence / _typical(self.times_s)
            write_note(self.journal, Note(step + 1, self.losses[-1], rate))

    def result(self, model: nn.Module) -> DemoRun:
        calls = self.recorder.calls
        sent = round(sum(call.wire_bytes / (1 if call.op == "send" else call.ranks) for call in calls))
        num_parameters = sum(p.numel() for p in model.parameters())
        return DemoRun(
            self.losses, num_parameters, self.peak.num_bytes, sent, self.recorder.count(), _typical(self.times_s)
        )


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = LambdaLR(optimizer, lambda step: warm_up_and_fall(step, settings.steps))
    probes = Probes(settings, context, journal)
    if context.tensor.size * context.pipe.size == 1:
        return _plainly(settings, model, optimizer, schedule, batch_fn, probes)
    engine = initialize(
        model,
        optimizer,
        train_data=Steps(batch_fn, settings.steps),
        scheduler=schedule,
        parallel=Parallel(
            tensor=context.tensor.size,
            pipe=pipe,
            micro_batches=settings.num_parts,
            sequence_parallel=settings.sequence_parallel,
            max_grad_norm=MAX_NORM,
        ),
        context=context,
        batch_size=settings.batch,
        data_options={"shuffle": False},
    )
    Trainer(engine, [Measures(probes)]).fit(steps=settings.steps)
    return probes.result(engine.model)


def _plainly(
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    batch_fn: Callable[[int], Mapping[str, Tensor]],
    probes: Probes,
) -> DemoRun:
    """A loop as anybody would write it."""
    for step in range(settings.steps):
        probes.before(step, model, optimizer)
        loss = model(**batch_fn(step)).loss
        loss.backward()
        clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        probes.updated()
        schedule.step()
        probes.after(step, loss)
    return probes.result(model)


class Steps:
    """The samples of so many batches, one after the other."""

    def __init__(self, batch_fn: Callable[[int], Mapping[str, Tensor]], num_steps: int) -> None:
        self._batch_fn, self._step, self._batch = batch_fn, 0, batch_fn(0)
        self._size = len(next(iter(self._batch.values())))
        self._count = num_steps * self._size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, row = divmod(index, self._size)
        if step != self._step:
            self._step, self._batch = step, self._batch_fn(step)
        return {name: value[row] for name, value in self._batch.items()}


class Measures(Hook):
    """Measures the steps of a trainer as those of the plain loop."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes

    def before_forward(self, trainer: Run) -> None:
        self._probes.before(trainer.step, trainer.engine.model, trainer.engine.optimizer)

    def after_optimizer_step(self, trainer: Run) -> None:
        self._probes.updated()

    def after_step(self, trainer: Run) -> None:
        loss: Any = trainer.loss
        self._probes.after(trainer.step - 1, loss)


def warm_up_and_fall(step: int, num_steps: int) -> float:
    """The learning rate of a step as a share of the highest: it rises over some steps, then falls to a tenth."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - 0.9 * step / num_steps)


def _typical(times_s: list[float]) -> float:
    """The median time of a step; neither the first counts, which warms up, nor the one that is profiled."""
    return median(times_s[PROBED_STEP + 1 :] or times_s[-1:])
