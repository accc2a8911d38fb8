"""The runtime: does what a schedule says, on one rank, for one batch that was cut into micro-batches."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import LaunchError
from shardformer.layout.stream import StreamLayout
from shardformer.mesh.lost import LostPeerError
from shardformer.pipeline.actions import Action, Kind
from shardformer.pipeline.backward import WeightBackward, backward_of_inputs
from shardformer.pipeline.chain import Chain, UnitRange
from shardformer.pipeline.exchange import StageExchange
from shardformer.pipeline.head import Head
from shardformer.pipeline.schedule import Schedule
from shardformer.pipeline.stage_forward import Payload, StageForward, StagePass


@dataclass
class _Live:
    """A micro-batch in a stage between its forward and its backward."""

    received: list[Tensor]
    handed_on: list[Tensor]
    loss: Tensor | None = None


@dataclass
class StepJob:
    """One batch.

    Args:
        batches: the micro-batches, on every rank.
        keys: what is equal for micro-batches that make activations of the same shapes.
        seeds: of each micro-batch's random numbers, or None.
        head: for the last stage.
        loss_scale: what the loss is multiplied by for the backward.
    """

    schedule: Schedule
    batches: Sequence[Mapping[str, Any]]
    keys: Sequence[Hashable]
    seeds: Sequence[int | None]
    head: Head
    loss_scale: float = 1.0


@dataclass
class Trace:
    """When each action of this rank ran, in seconds from the start, and how many micro-batches were live at most.

    Args:
        start: of the last step, by ``time.perf_counter``, which the processes of one machine have in common.
    """

    spans: list[tuple[Action, float, float]] = field(default_factory=list)
    in_flight: int = 0
    start: float = 0.0


class Runtime:
    """Runs schedules on one rank.

    Args:
        model: this rank's part.
        stage_forward: that runs spans of it.
        spans: the units of each virtual stage.
        exchange: to the other ranks.
        stream: how the activations between the layers lie: what all tensor ranks hold alike is sent once.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_forward: StageForward,
        chain: Chain,
        spans: Sequence[UnitRange],
        exchange: StageExchange,
        stage: int,
        stream: StreamLayout,
    ) -> None:
        self._model, self._stage_forward, self._chain = model, stage_forward, chain
        self._spans, self._exchange, self._stage = spans, exchange, stage
        self._live: dict[tuple[int, int], _Live] = {}
        self._weights: dict[tuple[int, int], WeightBackward] = {}
        self._stream = stream
        self._broken_off = ""
        self.trace: Trace | None = None

    def check_goes_on(self) -> None:
        """Raises LaunchError after a step that an error broke off: the other stages are still in it."""
        if not self._broken_off or len(self._job.schedule.actions) == 1:
            return
        raise LaunchError(
            f"An earlier step ended in the middle: stage {self._stage}, {self._broken_off}",
            rule="Stages run a step together, and the others still wait in that one for what it did not send",
            remedy="Let the error end this process, and with it the others, and start again from what was saved",
        )

    def run(self, job: StepJob) -> None:
        """Does what the schedule says for this rank. Raises LaunchError when another stage is gone."""
        self._job = job
        self._live.clear()
        self._weights.clear()
        self._exchange.begin(job.schedule, job.keys)
        self._exchange.prefetch()
        start = time.perf_counter()
        if self.trace is not None:
            self.trace.start = start
        for action in job.schedule.actions[self._stage]:
            began = time.perf_counter()
            self._broken_off = _in_words(action)
            with self.named(self._broken_off), self._exchange.traffic.within(action=str(action)):
                waited = self._do(action)
            if self.trace is not None:
                self.trace.spans.append((action, began + waited - start, time.perf_counter() - start))
                self.trace.in_flight = max(self.trace.in_flight, len({*self._live, *self._weights}))
        self._broken_off = "at the end of a step"
        with self.named(self._broken_off):
            self._exchange.finish()
        self._broken_off = ""

    def _do(self, action: Action) -> float:
        """Carries out one action. Returns the seconds that it waited for others."""
        if action.kind is Kind.FORWARD:
            return self._forward(action)
        if action.kind is Kind.WEIGHT:
            with self._outside_of_autocast():
                self._weights.pop((action.stage, action.micro_batch)).run()
            return 0.0
        return self._backward(action)

    def _forward(self, action: Action) -> float:
        stage, index = action.stage, action.micro_batch
        job, span = self._job, self._spans[stage]
        began = time.perf_counter()
        received: list[Tensor] = []
        if stage > 0:
            parts, shapes = self._exchange.activations(stage, index)
            trained = [s.trains and torch.is_grad_enabled() for s in shapes]
            received = [p.requires_grad_() if trains else p for p, trains in zip(parts, trained, strict=True)]
        waited = time.perf_counter() - began
        is_last = stage == job.schedule.last
        names = self._chain.carried(span.start)
        # no leaves: autocast takes those for weights, keeps their copies in 16 bits and adds up gradients in these
        given = [x.view_as(x) for x in received]
        run = StagePass(span, dict(zip(names, given, strict=True)), job.seeds[index])
        if is_last:
            run.at_end = lambda: job.head.before(index)
        output, payload = self._stage_forward.run(self._model, run, lambda: self._model(**job.batches[index]))
        live = _Live(received, [])
        if is_last:
            live.loss = job.head.after(index, output)
        else:
            assert payload is not None
            live.handed_on = list(payload.values())
            self._exchange.send(action, list(payload.values()), self._lies_whole(span.stop, payload))
        if torch.is_grad_enabled():
            self._live[stage, index] = live
        return waited

    def _lies_whole(self, unit: int, payload: Payload) -> list[bool]:
        """Which tensors of a payload all tensor ranks hold alike, at a boundary before ``unit``."""
        is_cut = self._chain.stacks[self._chain.stack_of(unit)].layout_in(self._stream).cuts_stacks
        return [name != "hidden" or not is_cut for name in payload]

    def _backward(self, action: Action) -> float:
        stage, index = action.stage, action.micro_batch
        live = self._live.pop((stage, index))
        waited = 0.0
        outputs = [live.loss] if live.loss is not None else []
        grads: Sequence[Tensor | None] = [torch.full_like(loss, self._job.loss_scale) for loss in outputs] or [None]
        if stage != self._job.schedule.last:
            began = time.perf_counter()
            outputs = [t for t in live.handed_on if t.requires_grad]
            grads = self._exchange.gradients(stage, index, action.kind)
            waited = time.perf_counter() - began
        trains = [x for x in live.received if x.requires_grad]
        with self._outside_of_autocast():
            arrived = self._go_back(action, outputs, grads, trains)
        if stage > 0:
            self._exchange.send(action, arrived, [])
        return waited

    def _go_back(
        self, action: Action, outputs: list[Tensor], grads: Sequence[Tensor | None], inputs: list[Tensor]
    ) -> list[Tensor | None]:
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=False) if y.requires_grad]
        if action.kind is Kind.INPUT:
            arrived, rest = backward_of_inputs([y for y, _ in pairs], [g for _, g in pairs], inputs)
            self._weights[action.stage, action.micro_batch] = rest
            return arrived
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        return [x.grad for x in inputs]

    def _outside_of_autocast(self) -> torch.autocast:
        """A backward is outside of the autocast that its forward was in, as in a loop of your own: each operation goes
        back in the dtype that it came in."""
        return torch.autocast(self._exchange.device.type, enabled=False)

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Says in which action of which stage an error came up."""
        where = f"stage {self._stage}, {what}"
        try:
            yield
        except Exception as error:
            if isinstance(error, LostPeerError) and self._exchange.waiting_for is not None:
                raise _gone(self._exchange.waiting_for, where, error) from error
            error.add_note(f"In {where}.")
            raise


def _in_words(action: Action) -> str:
    kind = {
        Kind.FORWARD: "forward",
        Kind.BACKWARD: "backward",
        Kind.INPUT: "backward of the input",
        Kind.WEIGHT: "backward of the weights",
    }[action.kind]
    return f"action {action} ({kind} of micro-batch {action.micro_batch} in virtual stage {action.stage})"


def _gone(stage: int, where: str, error: LostPeerError) -> LostPeerError:
    return LostPeerError(
        f"Stage {stage} is gone, which {where} needs. {error.what}",
        rule="All stages of a pipeline run a step together, and end together",
        remedy="See what the stage that ended first says",
    )
