"""Detects losses that compare the samples of a batch with each other, such as contrastive losses.

Such a loss is not the mean of the losses of its micro-batches, because each micro-batch and data rank compares only its
own samples. ``gather_over_data`` gives every data rank the samples of all ranks. A ``SampleIndependenceTrial`` detects
such a loss in the first step, by running a few samples separately and together, without gradients.
"""

from __future__ import annotations

import math
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.collectives import all_gather, all_gather_ints, all_reduce
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.gradient_accumulation.label_tracing import LabelTracer
from shardformer.gradient_accumulation.micro_batch_loss import (
    ABSOLUTE,
    IN_TRIAL,
    RELATIVE,
    GatherInLossTrialError,
    LossFunctionCall,
    MicroBatchLossScaler,
    is_mean_or_sum,
)
from shardformer.gradient_accumulation.micro_batches import Ids, get_batch_size, merge_micro_batch_outputs, split_batch
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.pipeline.runtime import Batch, LastStageOutputs, LossFn
from shardformer.pipeline.stage_forward import StageForward
from shardformer.random_state import fork_rng
from shardformer.torch_compat import disable_current_modes, is_compiled

# A, B: two groups of samples; AB: both as one batch

DTYPE_ROUNDINGS = 8
"""Tolerance of losses in 16 bits, in units of the dtype's eps."""
REPEAT_TOLERANCE = 1e-2
"""Tolerance of a repeated computation, as a share of the tolerance of different ones."""
SAMPLES_PER_PART = 2
"""Number of samples in each of A and B if the batch has enough. BatchNorm needs more than one."""


def gather_over_data(x: Tensor, context: ParallelContext) -> Tensor:
    """All-gather a tensor along dim 0 over the data-parallel ranks, with support for autograd.

    Use this in a ``loss_fn`` that compares all samples of the batch. Every data rank then computes the loss of the full
    batch, and the mean over data ranks has the same gradients as training on one device. Requires one micro-batch.

    >>> def contrastive(output, batch):                                                           # doctest: +SKIP
    ...     images, texts = (shardformer.pipeline.gather_over_data(x, engine.context) for x in output)
    ...     return torch.nn.functional.cross_entropy(images @ texts.T, torch.arange(len(images)))

    Communicates over data: in the forward pass one all-gather of the numbers of samples and one of the tensor, and in
    the backward pass one all-reduce of the gathered size.

    Args:
        x: a tensor with this rank's samples along dim 0. Ranks may have different numbers of samples.
        context: the parallel context that ``launch_from_torch`` returned, or ``engine.context``.
    """
    if not isinstance(context, ParallelContext):
        raise ConfigError(
            f"gather_over_data requires a ParallelContext, but got context={context!r:.60}.",
            remedy="Pass engine.context or the context that launch_from_torch returned.",
        )
    if IN_TRIAL.get():
        raise GatherInLossTrialError
    if context.data.size == 1:
        return x
    lengths = [row[0] for row in all_gather_ints([len(x)], context.data)]
    gathered: Tensor = _GatherSamples.apply(x, context.data, lengths)
    return gathered


class _GatherSamples(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, lengths: list[int]) -> Tensor:
        ctx.axis, ctx.lengths = axis, lengths
        return all_gather(tensor.detach(), axis, 0, lengths_by_rank=lengths, purpose="samples").clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        summed = all_reduce(grad.contiguous().clone(), ctx.axis, purpose="samples")
        begin = sum(ctx.lengths[: ctx.axis.rank])
        return summed[begin : begin + ctx.lengths[ctx.axis.rank]], None, None


class SampleIndependenceTrialResult(IntEnum):
    """Outcome on one rank of a trial that detects contrastive losses, which compare samples with each other."""

    INDEPENDENT = 0
    INCONCLUSIVE = 1  # the loss cannot be computed in a trial, or the step itself rejects it
    NOT_REPEATABLE = 2  # the same samples have a different loss the second time
    GATHERS = 3  # the loss gathers the samples of other data ranks
    COMPARES = 4  # the loss compares the samples of a batch


def merge_independence_trial_results(rank_results: Sequence[Sequence[int]]) -> list[int] | None:
    """Merge the outcomes of the contrastive-loss trial on all ranks. Returns None if random numbers affect them.

    A loss that is not repeatable and draws no random numbers reads samples of other data ranks, which differ between
    repetitions.

    Args:
        rank_results: the outcome of each rank, and whether it drew random numbers.
    """
    found = [finding for finding, _ in rank_results]
    if SampleIndependenceTrialResult.NOT_REPEATABLE not in found:
        return found
    return None if any(drew for _, drew in rank_results) else [*found, SampleIndependenceTrialResult.GATHERS]


@dataclass(frozen=True)
class SampleIndependenceTrial:
    """Inputs of a trial that detects a contrastive loss by running two groups of samples separately and together.

    Args:
        parts: the two groups of samples, A and B.
        joint_batch: AB, the two groups as one batch.
        sizes: numbers of samples in A and B.
        weight_by_label_counts: whether micro-batches are weighted by label counts instead of ``loss_weight``.
        reject_unknown_counts: whether the step rejects losses whose label counts are unknown.
    """

    parts: Sequence[Batch]
    joint_batch: Batch
    sizes: Sequence[int]
    weight_by_label_counts: bool
    reject_unknown_counts: bool

    def get_trial_micro_batches(self, data_rank: int) -> list[Batch]:
        """Return the six micro-batches to run in the trial, from which ``classify_losses`` detects a contrastive loss.

        They are A, B, A, B, AB, and again A on the first data rank or B on others. The first two have weighted losses.
        """
        return [*self.parts, *self.parts, self.joint_batch, self.parts[min(data_rank, 1)]]

    def classify_losses(
        self, trial_losses: Sequence[float], *, data_rank: int, eps: float
    ) -> SampleIndependenceTrialResult:
        """Detect a contrastive loss by comparing the losses of the micro-batches in the trial.

        Args:
            trial_losses: weighted A plus weighted B, A, B, AB, and the repetition.
            eps: machine epsilon of the model's dtype.
        """
        weighted, first, second, both, repeated = trial_losses
        if not all(map(math.isfinite, (first, second, both, repeated))):
            return SampleIndependenceTrialResult.INCONCLUSIVE
        tolerance = ABSOLUTE + max(RELATIVE, DTYPE_ROUNDINGS * eps) * max(map(abs, (first, second, both)))
        if abs(repeated - (second if data_rank else first)) > REPEAT_TOLERANCE * tolerance:
            return SampleIndependenceTrialResult.NOT_REPEATABLE
        if math.isfinite(weighted):
            return (
                SampleIndependenceTrialResult.INDEPENDENT
                if abs(weighted - both) <= tolerance
                else SampleIndependenceTrialResult.COMPARES
            )
        if self.reject_unknown_counts:
            return SampleIndependenceTrialResult.INCONCLUSIVE
        return (
            SampleIndependenceTrialResult.INDEPENDENT
            if is_mean_or_sum((first, second), both, tolerance)
            else SampleIndependenceTrialResult.COMPARES
        )


def make_loss_trial(
    batch: Batch,
    main_input_name: str | None,
    special_token_ids: Ids,
    *,
    require_full_samples: bool,
    weight_by_label_counts: bool,
    reject_unknown_counts: bool,
) -> SampleIndependenceTrial | None:
    """Create a contrastive-loss trial from the first samples of a batch, or return None if it cannot be split.

    Args:
        main_input_name, special_token_ids: as in ``split_batch``.
        require_full_samples: whether other ranks wait for a rank whose forward pass fails, so that only valid batches
            may run.
        weight_by_label_counts, reject_unknown_counts: as in ``SampleIndependenceTrial``.
    """
    try:
        size = get_batch_size(batch, main_input_name)
        each = min(SAMPLES_PER_PART, size // 2)
        if each == SAMPLES_PER_PART or (each and not require_full_samples):
            cuts = [each, each, size - 2 * each]
            first, second = split_batch(batch, [n for n in cuts if n], main_input_name, special_token_ids)[:2]
            both = split_batch(batch, [n for n in (2 * each, cuts[2]) if n], main_input_name, special_token_ids)[0]
            return SampleIndependenceTrial(
                [first, second], both, [each, each], weight_by_label_counts, reject_unknown_counts
            )
        if size and not require_full_samples:
            both = merge_micro_batch_outputs([batch, batch], [size, size])
            return SampleIndependenceTrial(
                [batch, batch], both, [size, size], weight_by_label_counts, reject_unknown_counts
            )
    except ShardFormerError:
        pass
    return None


class SampleIndependenceTrialOutputs(LastStageOutputs):
    """Collects the micro-batch losses of a contrastive-loss trial, and ignores errors of the loss function."""

    def __init__(
        self,
        trial: SampleIndependenceTrial,
        micro_batches: Sequence[Batch],
        stage_forward: StageForward,
        loss_fn: LossFn | None,
    ) -> None:
        self._trial_weights = (
            _DeferredErrorLossScaler(trial.parts, trial.sizes) if trial.weight_by_label_counts else None
        )
        super().__init__(micro_batches, [1] * len(micro_batches), stage_forward, self._trial_weights, loss_fn)
        self._losses_seen = [math.nan] * len(micro_batches)
        self.has_gathered = False

    def start_recording_loss_calls(self, micro_batch_index: int) -> None:
        if micro_batch_index < 2:
            super().start_recording_loss_calls(micro_batch_index)

    def store_output(self, micro_batch_index: int, output: Any) -> None:
        token = IN_TRIAL.set(True)
        try:
            loss = self._extract_loss(output, self._parts[micro_batch_index])
            self.stop_recording_loss_calls()
            if micro_batch_index < 2:
                loss = (
                    loss * math.nan
                    if self._trial_weights is None
                    else self._trial_weights.scale_loss(micro_batch_index, loss)
                )
            self._losses_seen[micro_batch_index] = float(loss)
        except GatherInLossTrialError:
            self.has_gathered = True
        except Exception:  # no error, no finding
            return
        finally:
            IN_TRIAL.reset(token)
            self.stop_recording_loss_calls()

    def get_trial_losses(self) -> list[float]:
        """Return the losses of the trial in the order that ``SampleIndependenceTrial.classify_losses`` expects."""
        try:
            if self._trial_weights is not None:
                self._trial_weights.run_deferred_checks()
        except ConfigError:
            self._losses_seen[0] = math.nan
        return [self._losses_seen[0] + self._losses_seen[1], *self._losses_seen[2:]]


class _DeferredErrorLossScaler(MicroBatchLossScaler):
    """Scales micro-batch losses, and raises errors only after the model's forward pass has finished."""

    _first_error: Exception | None = None

    def record_and_scale_loss(
        self, micro_batch_index: int, label_tracer: LabelTracer | None, loss_call: LossFunctionCall
    ) -> Tensor:
        if self._first_error is None:
            try:
                return super().record_and_scale_loss(micro_batch_index, label_tracer, loss_call)
            except Exception as problem:
                self._first_error = problem
        return loss_call.compute_loss()

    def scale_loss(self, micro_batch_index: int, loss: Tensor) -> Tensor:
        if self._first_error is not None:
            raise self._first_error
        return super().scale_loss(micro_batch_index, loss)


@contextmanager
def restore_model_after_trial(model: nn.Module, device: torch.device) -> Iterator[list[nn.Module]]:
    """Save a model's buffers, attributes and random state, and restore them after the ``with`` block.

    Disables the forward hooks that the user registered. Yields a list, which on exit contains the modules that wrote to
    their buffers.
    """
    buffer_writers: list[nn.Module] = []
    package = __name__.partition(".")[0]
    modules = [module for module in model.modules() if type(module).__module__.partition(".")[0] != package]
    plain = [({n: v for n, v in vars(m).items() if isinstance(v, (int, float, str, type(None)))}, m) for m in modules]
    buffers = [(m, {n: (b, None if b is None else b.clone()) for n, b in m._buffers.items()}) for m in modules]
    hooks = [(each, dict(each)) for m in model.modules() for each in (m._forward_pre_hooks, m._forward_hooks) if each]
    eager = torch.compiler.set_stance("force_eager") if any(map(is_compiled, model.modules())) else nullcontext()
    try:
        for each, registered in hooks:
            for number in [number for number, hook in registered.items() if _is_user_hook(hook)]:
                del each[number]
        # recorders must not record the trial
        with torch.no_grad(), fork_rng(device), eager, disable_current_modes():
            yield buffer_writers
    finally:
        for each, registered in hooks:
            each.clear()
            each.update(registered)
        for values, module in plain:
            vars(module).update(values)
        with torch.no_grad():
            for module, saved in buffers:
                for name, (buffer, before) in saved.items():
                    is_same, module._buffers[name] = module._buffers.get(name) is buffer, buffer
                    if buffer is not None and before is not None and not (is_same and torch.equal(buffer, before)):
                        buffer.copy_(before)
                        buffer_writers.append(module)


def _is_user_hook(hook: Any) -> bool:
    """Return whether a hook is defined in the user's code, not in a library."""
    while isinstance(hook, partial):
        hook = hook.func
    package, root = (str(name).partition(".")[0] for name in (__name__, getattr(hook, "__module__", "")))
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root != package and not any(file.startswith(sysconfig.get_path(name)) for name in ("purelib", "platlib"))


def warn_about_batch_norm_statistics(batch_division: str) -> None:
    """Warn that BatchNorm computes separate statistics for each micro-batch and data-parallel rank."""
    warnings.warn(
        f"The batch is split {batch_division}, and BatchNorm computes separate statistics for each part. To get the "
        "same results as on one device, use GroupNorm, or torch.nn.SyncBatchNorm with one micro-batch. See "
        "docs/engine.md",
        stacklevel=3,
    )


def check_loss_trial_results(
    trial_results: Sequence[int],
    batch_division: str,
    require_exact_loss: bool,
    allow_gather: bool,
    is_only_batch_norm: bool,
) -> None:
    """Raise ConfigError or warn if the loss is contrastive, but the batch is split over micro-batches or ranks.

    Args:
        trial_results: outcomes of the trial on all ranks.
        batch_division: how the batch is split, as part of a sentence.
        require_exact_loss: whether the loss must equal that of the full batch: the user did not choose a mean of the
            parts.
        allow_gather: whether a loss may gather the samples of all data ranks, which needs one micro-batch.
        is_only_batch_norm: whether samples interact only in training mode, by batch statistics.
    """
    is_gathered = SampleIndependenceTrialResult.GATHERS in trial_results
    if (is_gathered and allow_gather) or not (is_gathered or SampleIndependenceTrialResult.COMPARES in trial_results):
        return
    if is_only_batch_norm and require_exact_loss:
        warn_about_batch_norm_statistics(batch_division)
    if is_only_batch_norm:
        return
    how = "computing the samples in one batch or in two gives different losses"
    if is_gathered:
        how = "it gathers samples from other data-parallel ranks"
    if require_exact_loss:
        raise ConfigError(
            f"The loss compares the samples of a batch with each other ({how}), as a contrastive loss does. The batch "
            f"is split {batch_division}, so samples in different parts would not be compared.",
            remedy="Use one micro-batch, and call gather_over_data in loss_fn. To average the losses of the parts "
            "instead, pass loss_weight or, for data-parallel ranks, ParallelConfig(average_loss_over='ranks').",
        )
    warnings.warn(
        f"The loss compares the samples of a batch with each other ({how}), as a contrastive loss does. The batch is "
        f"split {batch_division}, so the results differ from training on one device. Use one micro-batch, and call "
        "shardformer.pipeline.gather_over_data in loss_fn. See docs/engine.md",
        stacklevel=2,
    )
