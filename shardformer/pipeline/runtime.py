"""Runs the actions of a schedule on one rank, for one batch of micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, InputError, LaunchError
from shardformer.layout.activation_layout import ActivationLayout
from shardformer.mesh.rank_failures import LostPeerError
from shardformer.pipeline.layer_sequence import LayerRange, LayerSequence
from shardformer.pipeline.micro_batch_loss import LossWeights, compares_outputs
from shardformer.pipeline.micro_batches import merge_outputs, named_tensors_in
from shardformer.pipeline.p2p_communication import StageExchange
from shardformer.pipeline.schedules import Action, ActionKind, Schedule
from shardformer.pipeline.split_backward import WeightBackward, backward_of_inputs
from shardformer.pipeline.stage_forward import StageActivations, StageForward, StagePass, is_placeholder
from shardformer.torch_compat import tree_map_only

IGNORED = -100
"""The label of what does not count, in torch and transformers."""

Batch = Mapping[str, Any]
LossFn = Callable[[Any, Batch], Tensor]


class LastStage:
    """What is done with the outputs of the last stage: their losses are weighted, or they are kept.

    Args:
        parts, sizes: the micro-batches, and how many samples each has.
        stage_forward: the forward of the last stage; others' heads see no output.
        weights: of the micro-batches in the loss of the batch; None where the outputs are wanted.
        loss_fn: (output, micro-batch) -> loss; None for the model's own.
        looks: whether ``compares`` is to become whether ``loss_fn`` compares the samples of the first micro-batch.
    """

    def __init__(
        self,
        parts: Sequence[Batch],
        sizes: Sequence[int],
        stage_forward: StageForward,
        weights: LossWeights | None,
        loss_fn: LossFn | None,
        *,
        looks: bool = False,
    ) -> None:
        self._looks, self.compares = looks, False
        self._parts, self.sizes, self._stage_forward = parts, sizes, stage_forward
        self._weights, self._loss_fn = weights, loss_fn
        self._outputs: dict[int, Any] = {}
        self.loss: Tensor | None = None
        self.counted: float | None = None
        self.factors = torch.zeros((), dtype=torch.float64)
        self.output: Any = None

    def before(self, micro_batch: int) -> None:
        """When the last layer has run."""
        if self._weights is not None:
            self._weights.start(micro_batch)

    def after(self, micro_batch: int, output: Any) -> Tensor | None:
        """When the model gave its output: the loss to go back from, or None."""
        if self._weights is None:
            self._outputs[micro_batch] = output
            return None
        try:
            loss = self._loss_of(output, self._parts[micro_batch])
        finally:
            self._weights.stop()
        self._check_first(loss, output)
        if self._looks and self._loss_fn is not None:
            part, size = self._parts[micro_batch], self.sizes[micro_batch]
            self.compares, self._looks = compares_outputs(self._loss_fn, output, part, size, len(self._parts)), False
        loss = self._weights.of(micro_batch, loss)
        value = loss.detach().double()
        self.loss = value if self.loss is None else self.loss + value
        return loss

    def _loss_of(self, output: Any, part: Batch) -> Tensor:
        given = output if self._loss_fn is None else self._loss_fn(output, part)
        loss = loss_in(given)
        if loss is not None:
            return loss
        who = "model" if self._loss_fn is None else "loss function"
        raise ConfigError(
            f"The {who} returned {_describe_output(given)}, in which there is no loss",
            rule="A step goes back from a tensor of one number: what is returned itself, its .loss, its ['loss'], or "
            "the first element of a tuple. A model of transformers returns a loss where the batch has labels",
            remedy="Add labels to the batch, or pass loss_fn=, a function (output, micro-batch) -> loss",
        )

    def _check_first(self, loss: Tensor, output: Any) -> None:
        """The first loss of all is a number, unless the model gives none; not NaN that stands for another stage's."""
        ended_well, self._stage_forward.ended_well = self._stage_forward.ended_well, None
        outputs = [t for _, t in named_tensors_in({"output": output})]
        if not ended_well or not is_placeholder(loss) or not any(map(is_placeholder, outputs)):
            return
        given = [
            (name[-1], t) for part in self._parts for name, t in named_tensors_in(part) if not t.is_floating_point()
        ]
        labels = [t for name, t in given if "label" in str(name)]
        if labels and all(bool((t == IGNORED).all()) for t in labels):
            raise InputError(
                f"All labels of the batch are {IGNORED}: the loss is NaN, as the plain model's",
                rule=f"A mean is over the labels that count, and {IGNORED} marks those that do not",
                remedy="Look at the collator or the mask that writes the labels, and leave such a batch out",
            )
        raise ConfigError(
            "The loss is NaN: it reads something in the model's output that an earlier stage computed",
            rule="The last stage has what its own layers and what stands behind them give",
            remedy="Give Pipeline(..., loss_fn=) that reads the last states or the logits only; where the model's "
            "head reads states between its layers, leave pipe out",
        )

    @property
    def is_explained(self) -> bool:
        """Whether the loss is made of means over classes that the batch holds."""
        return self._weights is not None and self._weights.is_explained

    def close(self) -> None:
        """After the last forward, or an error."""
        if self._weights is not None:
            self._weights.stop()

    def finish(self) -> None:
        if self._weights is None:
            ordered = [self._outputs[i] for i in sorted(self._outputs)]
            self.output = without_placeholders(merge_outputs(ordered, self.sizes)) if ordered else None
        elif self.loss is not None:
            self._weights.finish()
            self.counted, self.factors = self._weights.counted, self._weights.factors


def loss_in(output: Any) -> Tensor | None:
    """The loss in what a model returned, a tensor of one number; None without.

    In each form that the Trainer of transformers takes: ``output.loss``, ``output["loss"]`` or the first element of a
    tuple; or the output itself.
    """
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    elif found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        return None
    return found.reshape(()) if found.dim() else found


def _describe_output(output: Any) -> str:
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else ""
    has_key = isinstance(output, Mapping) and "loss" in output
    if has_key or hasattr(output, "loss"):
        loss = output["loss"] if has_key else output.loss
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.40}"
        shape = f" with loss={what}"
    return f"a {type(output).__name__}{shape}"


class NoOutput:
    """What ``Pipeline.forward`` gives on a stage that has no output."""

    def __init__(self, stage: int, last: int) -> None:
        self._stage, self._last = stage, last

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error(name)

    def __getitem__(self, key: Any) -> Any:
        raise self._error(repr(key))

    def _error(self, name: str) -> ConfigError:
        return ConfigError(
            f"{name} was asked of stage {self._stage}",
            remedy="Call forward(batch, gather=True) on all stages, or look at the output on the last stage only",
        )


def without_placeholders(output: Any) -> Any:
    """The output without what other stages made of it, which is NaN here where the output itself is not."""
    tensors = [t for _, t in named_tensors_in({"output": output}) if t.is_floating_point() and t.numel()]
    placeholders = {id(t) for t in tensors if is_placeholder(t)}
    if len(placeholders) == len(tensors):
        return output
    return tree_map_only(Tensor, lambda t: None if id(t) in placeholders else t, output)


@dataclass
class _InFlightMicroBatch:
    """A micro-batch in a stage between its forward and its backward."""

    received: list[Tensor]
    handed_on: list[Tensor]
    loss: Tensor | None = None


@dataclass
class StepInputs:
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
    head: LastStage
    loss_scale: float = 1.0


@dataclass
class RunTrace:
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
        chain: LayerSequence,
        spans: Sequence[LayerRange],
        exchange: StageExchange,
        stage: int,
        stream: ActivationLayout,
    ) -> None:
        self._model, self._stage_forward, self._chain = model, stage_forward, chain
        self._spans, self._exchange, self._stage = spans, exchange, stage
        self._live: dict[tuple[int, int], _InFlightMicroBatch] = {}
        self._weights: dict[tuple[int, int], WeightBackward] = {}
        self._stream = stream
        self._broken_off = ""
        self.trace: RunTrace | None = None

    def check_goes_on(self) -> None:
        """Raises LaunchError after a step that an error broke off: the other stages are still in it."""
        if not self._broken_off or len(self._job.schedule.actions) == 1:
            return
        raise LaunchError(
            f"An earlier step ended in the middle: stage {self._stage}, {self._broken_off}",
            rule="Stages run a step together, and the others still wait in that one for what it did not send",
            remedy="Let the error end this process, and with it the others, and start again from what was saved",
        )

    def run(self, job: StepInputs) -> None:
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
            self._broken_off = _describe_action(action)
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
        if action.kind is ActionKind.FORWARD:
            return self._forward(action)
        if action.kind is ActionKind.WEIGHT:
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
        names = self._chain.received_states(span.start)
        # no leaves: autocast takes those for weights, keeps their copies in 16 bits and adds up gradients in these
        given = [x.view_as(x) for x in received]
        run = StagePass(span, dict(zip(names, given, strict=True)), job.seeds[index])
        if is_last:
            run.at_end = lambda: job.head.before(index)
        output, payload = self._stage_forward.run(self._model, run, lambda: self._model(**job.batches[index]))
        live = _InFlightMicroBatch(received, [])
        if is_last:
            live.loss = job.head.after(index, output)
        else:
            assert payload is not None
            live.handed_on = list(payload.values())
            self._exchange.send(action, list(payload.values()), self._lies_whole(span.stop, payload))
        if torch.is_grad_enabled():
            self._live[stage, index] = live
        return waited

    def _lies_whole(self, unit: int, payload: StageActivations) -> list[bool]:
        """Which tensors of a payload all tensor ranks hold alike, at a boundary before ``unit``."""
        is_cut = self._chain.stacks[self._chain.stack_of(unit)].layout_in(self._stream).shards_stacks
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
        if action.kind is ActionKind.INPUT:
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
                raise _lost_stage_error(self._exchange.waiting_for, where, error) from error
            error.add_note(f"In {where}.")
            raise


def _describe_action(action: Action) -> str:
    kind = {
        ActionKind.FORWARD: "forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.INPUT: "backward of the input",
        ActionKind.WEIGHT: "backward of the weights",
    }[action.kind]
    return f"action {action} ({kind} of micro-batch {action.micro_batch} in virtual stage {action.stage})"


def _lost_stage_error(stage: int, where: str, error: LostPeerError) -> LostPeerError:
    return LostPeerError(
        f"Stage {stage} is gone, which {where} needs. {error.what}", remedy="See what the stage that ended first says"
    )
