"""Executes the forward and backward passes of a pipeline schedule on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, InputError, LaunchError, PolicyError
from shardformer.gradient_accumulation.micro_batch_loss import MicroBatchLossScaler, does_loss_compare_samples
from shardformer.gradient_accumulation.micro_batches import iter_named_tensors, merge_micro_batch_outputs
from shardformer.mesh.rank_failures import LostPeerError
from shardformer.pipeline.p2p_communication import StageCommunicator
from shardformer.pipeline.schedules import ActionKind, PipelineAction, PipelineSchedule
from shardformer.pipeline.split_backward import WeightBackward, run_input_backward
from shardformer.pipeline.stage_forward import StageActivations, StageForward, StageForwardState, has_nan, is_all_nan
from shardformer.pipeline.stage_manager import PipelineStages
from shardformer.torch_compat import tree_map_only

IGNORED = -100
"""Label of ignored tokens in torch and transformers."""

Batch = Mapping[str, Any]
LossFn = Callable[[Any, Batch], Tensor]


class LastStageOutputs:
    """Collects the outputs of the last pipeline stage, or reduces them to the loss of the batch.

    Args:
        micro_batches, micro_batch_sizes: the micro-batches and their numbers of samples.
        stage_forward: runs the forward pass of the last stage.
        loss_scaler: weights of the micro-batches in the loss of the batch, or None to keep the outputs.
        loss_fn: (output, micro-batch) -> loss, or None for the model's own loss.

    If ``checks_comparison`` is set, ``compares_samples`` is set if ``loss_fn`` compares the samples of a micro-batch.
    """

    def __init__(
        self,
        micro_batches: Sequence[Batch],
        micro_batch_sizes: Sequence[int],
        stage_forward: StageForward,
        loss_scaler: MicroBatchLossScaler | None,
        loss_fn: LossFn | None,
    ) -> None:
        self.checks_comparison, self.compares_samples = False, False
        self._parts, self.sizes, self._stage_forward = micro_batches, micro_batch_sizes, stage_forward
        self._weights, self._loss_fn = loss_scaler, loss_fn
        self._outputs: dict[int, Any] = {}
        self.loss: Tensor | None = None
        self.counted: float | None = None
        self.factors = torch.zeros((), dtype=torch.float64)
        self.output: Any = None

    def start_recording_loss_calls(self, micro_batch_index: int) -> None:
        """Start recording loss function calls for a micro-batch. Called before the model's head runs."""
        if self._weights is not None:
            self._weights.start_recording_loss_calls(micro_batch_index)

    def store_output(self, micro_batch_index: int, output: Any) -> Tensor | None:
        """Store the model's output for a micro-batch, and return its loss for the backward pass, if any."""
        if self._weights is None:
            self._outputs[micro_batch_index] = output
            self._check_first_output_is_not_nan(output)
            return None
        try:
            loss = self._extract_loss(output, self._parts[micro_batch_index])
        finally:
            self._weights.stop_recording_loss_calls()
        self._check_first_loss_is_not_nan(loss, output)
        if self.checks_comparison and self._loss_fn is not None:
            part, size = self._parts[micro_batch_index], self.sizes[micro_batch_index]
            self.compares_samples = does_loss_compare_samples(self._loss_fn, output, part, size, len(self._parts))
            self.checks_comparison = False
        loss = self._weights.scale_loss(micro_batch_index, loss)
        value = loss.detach().double()
        self.loss = value if self.loss is None else self.loss + value
        return loss

    def _extract_loss(self, output: Any, micro_batch: Batch) -> Tensor:
        result = output if self._loss_fn is None else self._loss_fn(output, micro_batch)
        loss = find_loss_in_output(result)
        if loss is not None:
            return loss
        source, returned = "model" if self._loss_fn is None else "loss_fn", _describe_output(result)
        raise ConfigError(
            f"The {source} returned {returned}, which contains no scalar loss.",
            remedy="Add labels to the batch, or pass a loss_fn(output, micro_batch) that returns a scalar tensor.",
        )

    def _check_first_loss_is_not_nan(self, loss: Tensor, output: Any) -> None:
        """Raise an error if the first loss is NaN because all labels are ignored or the model is split into stages."""
        is_valid, self._stage_forward.is_last_layer_valid = self._stage_forward.is_last_layer_valid, None
        outputs = [t for _, t in iter_named_tensors({"output": output})]
        is_misplaced = self._stage_forward.misplaced_module_path is not None
        if not is_valid or not is_all_nan(loss) or not (is_misplaced or any(map(is_all_nan, outputs))):
            return
        tensors = [(str(name[-1]), t) for part in self._parts for name, t in iter_named_tensors(part)]
        labels = [t for name, t in tensors if "label" in name and not t.is_floating_point()]
        if labels and all(bool((t == IGNORED).all()) for t in labels):
            raise InputError(
                f"The loss is NaN because all labels of the batch are {IGNORED} (ignored).",
                remedy="Check the collator that creates the labels, and skip batches without labels.",
            )
        if (path := self._stage_forward.misplaced_module_path) is not None:
            raise _make_misplaced_module_error("loss", path)
        raise ConfigError(
            "The loss is NaN, because it uses a model output that only an earlier pipeline stage computes.",
            remedy="Pass a loss_fn to Pipeline that uses only the last hidden states or the logits, or omit pipe.",
        )

    def _check_first_output_is_not_nan(self, output: Any) -> None:
        """Raise PolicyError if all values of the first output are NaN because of a module on the wrong stage."""
        is_valid, self._stage_forward.is_last_layer_valid = self._stage_forward.is_last_layer_valid, None
        path = self._stage_forward.misplaced_module_path
        if is_valid and path is not None:
            tensors = [t for _, t in iter_named_tensors({"output": output}) if t.is_floating_point() and t.numel()]
            if all(map(has_nan, tensors)):
                raise _make_misplaced_module_error("output", path)

    @property
    def averages_only_over_class_labels(self) -> bool:
        """Whether the loss only averages over class labels, and so cannot compare samples."""
        return self._weights is not None and self._weights.has_only_class_means

    def stop_recording_loss_calls(self) -> None:
        """Stop recording calls of loss functions. Called after the last forward pass or an error."""
        if self._weights is not None:
            self._weights.stop_recording_loss_calls()

    def finalize_outputs(self) -> None:
        if self._weights is None:
            ordered = [self._outputs[i] for i in sorted(self._outputs)]
            self.output = (
                replace_nan_placeholders_with_none(merge_micro_batch_outputs(ordered, self.sizes)) if ordered else None
            )
        elif self.loss is not None:
            self._weights.run_deferred_checks()
            self.counted, self.factors = self._weights.num_counted_labels, self._weights.loss_factors_hash


def _make_misplaced_module_error(result: str, module_path: str) -> PolicyError:
    return PolicyError(
        f"The {result} is NaN, because {module_path} runs after the last layer, but the policy places it on an earlier "
        "pipeline stage.",
        remedy=f'Add "{module_path}" to with_last_layer in the PipelineHints of the last layer stack.',
    )


def find_loss_in_output(output: Any) -> Tensor | None:
    """Extract the scalar loss from a model's output, or return None if the output contains no loss.

    The output may be the loss itself or have one of the forms that the transformers Trainer accepts: ``output.loss``,
    ``output["loss"]``, or a tuple whose first element is the loss.
    """
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    elif loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return loss.reshape(()) if loss.dim() else loss


def _describe_output(output: Any) -> str:
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else ""
    has_key = isinstance(output, Mapping) and "loss" in output
    if has_key or hasattr(output, "loss"):
        loss = output["loss"] if has_key else output.loss
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.40}"
        shape = f" with loss={what}"
    return f"a {type(output).__name__}{shape}"


class MissingStageOutput:
    """Placeholder that ``Pipeline.forward`` returns on all stages except the last. Raises ConfigError on access."""

    def __init__(self, stage: int) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._make_missing_output_error(name)

    def __getitem__(self, key: Any) -> Any:
        raise self._make_missing_output_error(repr(key))

    def _make_missing_output_error(self, attribute_name: str) -> ConfigError:
        return ConfigError(
            f"{attribute_name} is not available on pipeline stage {self._stage}, because forward returns the model "
            "output only on the last stage.",
            remedy="Call forward(batch, gather=True) on all stages, or use the output on the last stage only.",
        )


def replace_nan_placeholders_with_none(output: Any) -> Any:
    """Set outputs that only other pipeline stages compute to None."""
    tensors = [t for _, t in iter_named_tensors({"output": output}) if t.is_floating_point() and t.numel()]
    placeholders = {id(t) for t in tensors if is_all_nan(t)}
    if len(placeholders) == len(tensors):
        return output
    return tree_map_only(Tensor, lambda t: None if id(t) in placeholders else t, output)


@dataclass
class _InFlightMicroBatch:
    received: list[Tensor]
    sent: list[Tensor]
    loss: Tensor | None = None


@dataclass
class PipelineStepInputs:
    """The schedule, micro-batches and random seeds of one training or evaluation step.

    Args:
        batches: the micro-batches, on every rank.
        shape_keys: one key per micro-batch, which is equal for micro-batches whose activations have equal shapes.
        seeds: random seed of each micro-batch, or None.
        last_stage_outputs: collects the outputs of the last stage.
        loss_scale: factor of the loss in the backward pass.
    """

    schedule: PipelineSchedule
    batches: Sequence[Mapping[str, Any]]
    shape_keys: Sequence[Hashable]
    seeds: Sequence[int | None]
    last_stage_outputs: LastStageOutputs
    loss_scale: float = 1.0


@dataclass
class PipelineTimingTrace:
    """The measured start and end of this rank's forward and backward passes, in seconds since ``start``.

    Args:
        in_flight: peak number of micro-batches in flight.
        start: start of the last step according to ``time.perf_counter``, which the processes of a machine share.
    """

    spans: list[tuple[PipelineAction, float, float]] = field(default_factory=list)
    in_flight: int = 0
    start: float = 0.0


class PipelineRuntime:
    """Executes this rank's part of a pipeline schedule, and exchanges activations and gradients with other stages.

    Args:
        model: the model with this rank's parameters.
        pipeline_stages: the installed stages of the model.
        communicator: communication with the other stages.
    """

    def __init__(self, model: nn.Module, pipeline_stages: PipelineStages, communicator: StageCommunicator) -> None:
        assert pipeline_stages.stage_forward is not None
        self._model, self._stage_forward, self._exchange = model, pipeline_stages.stage_forward, communicator
        self._chain, self._spans, self._stage = (
            pipeline_stages.chain,
            pipeline_stages.spans,
            pipeline_stages.manager.stage,
        )
        self._stream = pipeline_stages.stream
        self._in_flight: dict[tuple[int, int], _InFlightMicroBatch] = {}
        self._weights: dict[tuple[int, int], WeightBackward] = {}
        self._interrupted_at = ""
        self.trace: PipelineTimingTrace | None = None

    def check_no_earlier_step_failed(self) -> None:
        """Raise LaunchError if an earlier training step failed on this rank."""
        if not self._interrupted_at or len(self._step.schedule.actions) == 1:
            return
        raise LaunchError(
            f"The pipeline cannot run another step, because an earlier step failed in stage {self._stage}, "
            f"{self._interrupted_at}.",
            remedy="Do not catch the error of a step. Let it end the run, and resume from the last checkpoint.",
        )

    def run_step(self, step_inputs: PipelineStepInputs) -> None:
        """Run this rank's forward and backward passes of one step. Raises LostPeerError if another stage has exited."""
        self._step = step_inputs
        self._in_flight.clear()
        self._weights.clear()
        self._exchange.begin_step(step_inputs.schedule, step_inputs.shape_keys)
        self._exchange.start_next_receives()
        start = time.perf_counter()
        if self.trace is not None:
            self.trace.start = start
        for action in step_inputs.schedule.actions[self._stage]:
            began, waited = time.perf_counter(), self._exchange.seconds_waited
            self._interrupted_at = _describe_action(action)
            with (
                self.add_stage_note_to_errors(self._interrupted_at),
                self._exchange.collective_log.temporarily_set_call_site(pipeline_action=str(action)),
            ):
                self._run_action(action)
            if self.trace is not None:
                began += self._exchange.seconds_waited - waited
                self.trace.spans.append((action, began - start, time.perf_counter() - start))
                self.trace.in_flight = max(self.trace.in_flight, len({*self._in_flight, *self._weights}))
        self._interrupted_at = "at the end of a step"
        with self.add_stage_note_to_errors(self._interrupted_at):
            self._exchange.wait_for_sends()
        self._interrupted_at = ""

    def _run_action(self, action: PipelineAction) -> None:
        if action.kind is ActionKind.FORWARD:
            self._run_forward(action)
        elif action.kind is ActionKind.WEIGHT:
            with self._disable_autocast():
                self._weights.pop((action.stage, action.micro_batch)).run()
        else:
            self._run_backward(action)

    def _run_forward(self, action: PipelineAction) -> None:
        stage, index = action.stage, action.micro_batch
        step, span = self._step, self._spans[stage]
        received: list[Tensor] = []
        if stage > 0:
            parts, shapes = self._exchange.receive_activations(stage, index)
            trained = [s.requires_grad and torch.is_grad_enabled() for s in shapes]
            received = [p.requires_grad_() if trains else p for p, trains in zip(parts, trained, strict=True)]
        is_last = stage == step.schedule.last_stage
        names = self._chain.get_received_activation_names(span.start)
        # non-leaf views: autocast would cache 16-bit copies of leaves, as of weights, and accumulate gradients in them
        states = [x.view_as(x) for x in received]
        run = StageForwardState(span, dict(zip(names, states, strict=True)), step.seeds[index])
        if is_last:
            run.on_last_layer_end = lambda: step.last_stage_outputs.start_recording_loss_calls(index)
        output, payload = self._stage_forward.run_stage_forward(
            self._model, run, lambda: self._model(**step.batches[index])
        )
        live = _InFlightMicroBatch(received, [])
        if is_last:
            live.loss = step.last_stage_outputs.store_output(index, output)
        else:
            assert payload is not None
            live.sent = list(payload.values())
            self._exchange.send_tensors(action, [*live.sent], self._get_replicated_flags(span.stop, payload))
        if torch.is_grad_enabled():
            self._in_flight[stage, index] = live

    def _get_replicated_flags(self, layer_index: int, activations: StageActivations) -> list[bool]:
        is_sharded = (
            self._chain.stacks[self._chain.find_stack_index(layer_index)]
            .get_activation_layout(self._stream)
            .is_stack_sharded
        )
        return [name != "hidden" or not is_sharded for name in activations]

    def _run_backward(self, action: PipelineAction) -> None:
        stage, index = action.stage, action.micro_batch
        live = self._in_flight.pop((stage, index))
        outputs = [live.loss] if live.loss is not None else []
        grads: Sequence[Tensor | None] = [torch.full_like(loss, self._step.loss_scale) for loss in outputs] or [None]
        if stage != self._step.schedule.last_stage:
            outputs = [t for t in live.sent if t.requires_grad]
            grads = self._exchange.receive_gradients(stage, index, action.kind)
        trained = [x for x in live.received if x.requires_grad]
        with self._disable_autocast():
            input_grads = self._compute_input_grads(action, outputs, grads, trained)
        if stage > 0:
            self._exchange.send_tensors(action, input_grads, [])

    def _compute_input_grads(
        self, action: PipelineAction, outputs: list[Tensor], grad_outputs: Sequence[Tensor | None], inputs: list[Tensor]
    ) -> list[Tensor | None]:
        pairs = [(y, g) for y, g in zip(outputs, grad_outputs, strict=False) if y.requires_grad]
        if action.kind is ActionKind.INPUT:
            input_grads, weight_backward = run_input_backward([y for y, _ in pairs], [g for _, g in pairs], inputs)
            self._weights[action.stage, action.micro_batch] = weight_backward
            return input_grads
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        return [x.grad for x in inputs]

    def _disable_autocast(self) -> torch.autocast:
        """Disable autocast in the ``with`` block, because backward passes must run without it."""
        return torch.autocast(self._exchange.device.type, enabled=False)

    @contextmanager
    def add_stage_note_to_errors(self, location: str) -> Iterator[None]:
        """Add a note with the pipeline stage and the current action to errors in the ``with`` block."""
        location = f"stage {self._stage}, {location}"
        try:
            yield
        except Exception as error:
            if isinstance(error, LostPeerError) and self._exchange.waiting_for is not None:
                raise _make_lost_stage_error(self._exchange.waiting_for, location, error) from error
            error.add_note(f"In {location}.")
            raise


def _describe_action(action: PipelineAction) -> str:
    kind = {
        ActionKind.FORWARD: "forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.INPUT: "backward of the input",
        ActionKind.WEIGHT: "backward of the weights",
    }[action.kind]
    return f"action {action} ({kind} of micro-batch {action.micro_batch} in virtual stage {action.stage})"


def _make_lost_stage_error(stage: int, location: str, error: LostPeerError) -> LostPeerError:
    return LostPeerError(
        f"Pipeline stage {stage} ended while {location} was waiting for a message from it. {error.what}.",
        remedy="Find the original error in the log of the process that ended first.",
    )
