"""Scale the losses of micro-batches so that their sum equals the loss of the full batch.

Micro-batches can have different numbers of labels, because of padding or a short last micro-batch. The mean of their
mean losses then differs from the mean over all tokens of the batch. While the model's head runs,
``MicroBatchLossScaler`` intercepts the mean losses of ``torch.nn.functional`` and replaces the i-th one by

    mean_m * n_mi / N_i             n_mi = labels counted in micro-batch m,   N_i = sum of n_mi over all micro-batches

The losses of the micro-batches then sum to the loss of the full batch, if the model's loss is a sum of mean losses with
constant factors. The first backward pass needs N_i before the other forward passes have run (1F1B). The first forward
pass therefore records how the i-th target is computed from the batch (``label_tracing``), and predicts the counts of
other micro-batches.

Every prediction is checked: each micro-batch must have the predicted count, and its loss must be the same linear
combination of recorded losses. Otherwise a ConfigError asks for ``loss_weight``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardformer.comm.collectives import all_reduce
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.gradient_accumulation.label_tracing import (
    LabelTracer,
    LabelTransform,
    SymbolicTensorSize,
    evaluate_expression,
    find_label_transforms_matching_target,
)
from shardformer.gradient_accumulation.micro_batches import Tensors, iter_named_tensors, rebuild_container
from shardformer.mesh.parallel_context import Axis
from shardformer.torch_compat import has_real_data, tolist_or_ones

_CLASS_LOSSES = "cross_entropy nll_loss linear_cross_entropy"
_ELEMENTWISE_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss huber_loss kl_div
    hinge_embedding_loss poisson_nll_loss soft_margin_loss
    """
_OTHER_LOSSES = """
    cosine_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
    triplet_margin_loss triplet_margin_with_distance_loss gaussian_nll_loss ctc_loss
    """

RECORDED_LOSSES: Mapping[Any, str] = {
    getattr(F, name): kind
    for kind, names in (("classes", _CLASS_LOSSES), ("elements", _ELEMENTWISE_LOSSES), ("others", _OTHER_LOSSES))
    for name in names.split()
    if hasattr(F, name)
}
"""What a mean loss divides by: the number of labels that are not ignored, of elements, or of unreduced losses."""

_WEIGHT_NORMALIZED_LOSSES = tuple(getattr(F, name) for name in ("mse_loss", "l1_loss", "huber_loss"))
"""Losses whose weighted mean is divided by the sum of the weights, not by the number of elements."""

LossCount = Tensor | int


@dataclass(frozen=True, eq=False)
class LossFunctionCall:
    """A recorded call of a loss function of ``torch.nn.functional``.

    Args:
        bound_arguments: arguments by name.
        labels_or_weights: the labels or weights, which determine the number of labels.
        ignore_index: class index of ignored labels.
    """

    loss_fn: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    bound_arguments: Mapping[str, Any]
    reduction: str
    labels_or_weights: Tensor | None
    ignore_index: int | None

    @classmethod
    def from_call_arguments(
        cls, loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LossFunctionCall:
        bound = _signature(loss_fn).bind(*args, **kwargs)
        bound.apply_defaults()
        named = bound.arguments
        reduction: str = named["reduction"]
        size_average, reduce = named.get("size_average"), named.get("reduce")  # deprecated arguments of torch
        if size_average is not None or reduce is not None:
            reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
        basis = named.get("target", named.get("targets"))
        if loss_fn in _WEIGHT_NORMALIZED_LOSSES and named.get("weight") is not None:
            basis = named["weight"]
        return cls(loss_fn, args, kwargs, named, reduction, basis, named.get("ignore_index"))

    @property
    def name(self) -> str:
        return str(getattr(self.loss_fn, "__name__", self.loss_fn))

    @property
    def is_mean(self) -> bool:
        return self.reduction in ("mean", "batchmean")

    @property
    def has_class_index_targets(self) -> bool:
        """Whether the target of the loss contains class indices."""
        return (
            RECORDED_LOSSES[self.loss_fn] == "classes"
            and self.labels_or_weights is not None
            and not self.labels_or_weights.is_floating_point()
        )

    @property
    def has_label_weights(self) -> bool:
        return self.bound_arguments.get("weight") is not None and (
            self.has_class_index_targets or self.loss_fn in _WEIGHT_NORMALIZED_LOSSES
        )

    def compute_loss(self) -> Tensor:
        return self.loss_fn(*self.args, **self.kwargs)

    def compute_mean_denominator(self) -> LossCount:
        """Compute the denominator of a mean loss, such as the number of labels that are not ignored."""
        if self.has_class_index_targets or self.has_label_weights:
            assert self.labels_or_weights is not None
            return self.count_labels_or_sum_weights(self.labels_or_weights, self.ignore_index)
        first: Tensor = next(iter(self.bound_arguments.values()))
        if self.reduction == "batchmean":
            return first.shape[0] if first.dim() else 1
        if RECORDED_LOSSES[self.loss_fn] == "others":
            with torch.no_grad():
                return self.compute_loss_with_reduction("none").numel()
        assert self.labels_or_weights is not None
        if RECORDED_LOSSES[self.loss_fn] == "elements":
            return int(torch.broadcast_shapes(first.shape, self.labels_or_weights.shape).numel())
        return self.labels_or_weights.numel() // self._get_num_classes()  # class probabilities

    def count_labels_or_sum_weights(self, target_or_weights: Tensor, ignore_index: int | None) -> LossCount:
        """Compute the denominator of the mean loss for the labels or weights of another micro-batch.

        For a tensor without data, this is the number of its elements.
        """
        if not has_real_data(target_or_weights):
            return target_or_weights.numel()
        weight: Tensor | None = self.bound_arguments.get("weight")
        if not self.has_class_index_targets:
            return target_or_weights.detach().sum(dtype=torch.float64)
        counted = (
            torch.ones_like(target_or_weights, dtype=torch.bool)
            if ignore_index is None
            else target_or_weights != ignore_index
        )
        if weight is None:
            return counted.sum()
        of_target = weight.detach().double()[torch.where(counted, target_or_weights, 0).to(weight.device)]
        return torch.where(counted.to(weight.device), of_target, 0.0).sum()

    @property
    def has_ignore_index_as_extra_class(self) -> bool:
        """Whether ``ignore_index`` equals the number of classes, as in question answering models."""
        return self.has_class_index_targets and self.ignore_index == self._get_num_classes()

    def find_ignore_index(self, micro_batch_tensors: Tensors, other_micro_batch_tensors: Tensors) -> int | None:
        """Compute the ``ignore_index`` for another micro-batch, which may depend on the sequence length."""
        if self.ignore_index is None or not self.has_ignore_index_as_extra_class:
            return self.ignore_index
        size = SymbolicTensorSize.from_int(self.ignore_index, micro_batch_tensors)
        return size.compute_size(other_micro_batch_tensors) if isinstance(size, SymbolicTensorSize) else size

    def _get_num_classes(self) -> int:
        if "linear_weight" in self.bound_arguments:
            return int(self.bound_arguments["linear_weight"].shape[0])
        logits: Tensor = self.bound_arguments["input"]
        return logits.shape[1] if logits.dim() > 1 else logits.shape[0]

    def compute_loss_with_reduction(self, reduction: str) -> Tensor:
        """Call the loss function with the recorded arguments but a different ``reduction``."""
        arguments = {
            n: value for n, value in self.bound_arguments.items() if n not in ("size_average", "reduce", "reduction")
        }
        first = [arguments.pop(name) for name in list(arguments)[:2]]  # vocabulary-parallel logits need them positional
        return self.loss_fn(*first, **arguments, reduction=reduction)


_signature = cache(inspect.signature)


# m: micro-batch, i: call of a loss, n: counts, N: their sum

LossWeight = Callable[[Mapping[str, Any]], float]
Problem = Callable[[], str]


@dataclass
class _LabelCountsPerMicroBatch:
    """Number of labels in each micro-batch for one loss of the model.

    For a mean loss, the numbers are predicted. For a summed loss, they are counted in each call.
    """

    name: str
    is_mean: bool
    n_m: list[float] = field(default_factory=list)
    total: float = 0.0  # over all micro-batches, and over data ranks if the loss is averaged over them
    seen: dict[int, LossCount] = field(default_factory=dict)


@dataclass
class _RecordedLosses:
    """The losses that were recorded in the forward pass of one micro-batch, until ``scale_loss`` frees them."""

    parts: list[Tensor] = field(default_factory=list)  # the model receives clones, which it may modify
    reductions: list[str] = field(default_factory=list)


class MicroBatchLossScaler:
    """Scales the losses of micro-batches so that they sum to the loss of the full batch.

    Call ``start_recording_loss_calls(m)`` and ``stop_recording_loss_calls()`` before and after the head in each
    micro-batch's forward pass. Run the backward pass on the result of ``scale_loss(m, loss)``, and call
    ``run_deferred_checks()`` before the optimizer step. The loss of a single micro-batch is not scaled.

    The host synchronizes with the GPU only in the first forward pass and in ``run_deferred_checks``. On a CPU, all
    checks run at once.

    Args:
        micro_batches: all micro-batches, whose shapes may differ.
        micro_batch_sizes: number of samples of each micro-batch.
        loss_weight: micro-batch -> number of counted labels, which then weights its loss. No losses are recorded.
        label_transforms: label forms that earlier steps found, by index of the loss. New ones are added.
        data_axis: (data axis, device for communication) if the full batch spans all data ranks. Losses are then
            multiplied by the number of ranks, because gradients are averaged. Communicates two numbers per loss, and
            two after the last loss, before the first backward pass.
        count_labels: whether to compute ``counted`` even for a single micro-batch.
    """

    def __init__(
        self,
        micro_batches: Sequence[Mapping[str, Any]],
        micro_batch_sizes: Sequence[int],
        loss_weight: LossWeight | None = None,
        label_transforms: dict[int, LabelTransform] | None = None,
        data_axis: tuple[Axis, torch.device] | None = None,
        *,
        count_labels: bool = False,
    ) -> None:
        assert len(micro_batches) == len(micro_batch_sizes), (len(micro_batches), len(micro_batch_sizes))
        self._micro_batches, self._sizes = micro_batches, micro_batch_sizes
        self._label_transforms = {} if label_transforms is None else label_transforms
        self._data_axis = data_axis if data_axis is not None and data_axis[0].size > 1 else None
        self._num_ranks = 1 if self._data_axis is None else self._data_axis[0].size
        self._is_full_batch = len(micro_batches) == 1 and self._data_axis is None
        self._counts, self._weight = count_labels, 0.0
        self._weight_shares = None if loss_weight is None else self._compute_micro_batch_weights(loss_weight)
        self._losses: list[_LabelCountsPerMicroBatch] = []
        self._first: int | None = None
        self._forwards: dict[int, _RecordedLosses] = {}
        self._factors: dict[int, Tensor] = {}  # per micro-batch: factor of each recorded loss in the micro-batch's loss
        self._deferred_checks: list[tuple[Tensor, Problem]] = []
        self._recorder: _LossFunctionRecorder | None = None
        self._is_evaluation = not torch.is_grad_enabled()
        self.has_only_class_means = self._weight_shares is None
        """Whether all recorded losses are means over labels of the batch, so that samples are independent."""

    def start_recording_loss_calls(self, micro_batch_index: int) -> None:
        """Record calls of loss functions in a micro-batch, until ``stop_recording_loss_calls`` is called."""
        self.stop_recording_loss_calls()
        if self._weight_shares is not None or (self._is_full_batch and not self._counts):
            return
        if self._first is None:
            self._first = micro_batch_index
        if micro_batch_index == self._first:
            self._losses = []
        self._forwards[micro_batch_index] = _RecordedLosses()
        needs_labels = micro_batch_index == self._first and not self._is_full_batch
        trace = LabelTracer(dict(iter_named_tensors(self._micro_batches[micro_batch_index]))) if needs_labels else None
        self._recorder = _LossFunctionRecorder(self, micro_batch_index, trace)
        self._recorder.__enter__()

    def stop_recording_loss_calls(self) -> None:
        watch, self._recorder = self._recorder, None
        if watch is not None:
            watch.__exit__(None, None, None)

    def scale_loss(self, micro_batch_index: int, loss: Tensor) -> Tensor:
        """Scale the loss of a micro-batch to its contribution to the loss of the full batch.

        Raises ConfigError if the loss is not a linear combination of the recorded losses.
        """
        if self._weight_shares is not None:
            share = self._weight_shares[micro_batch_index]
            return loss * share if share else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        if self._is_full_batch:
            return loss
        failed = True
        try:
            self._check_loss_matches_recorded(micro_batch_index, loss)
            failed = False
        finally:
            if micro_batch_index == self._first:  # a rank that fails, or calls fewer losses, informs the others
                self._sum_over_data_ranks(math.nan if failed else 0.0, has_ended=True)
        return loss.detach() if self._is_evaluation else loss

    def _check_loss_matches_recorded(self, micro_batch_index: int, loss: Tensor) -> None:
        forward = self._forwards.pop(micro_batch_index, _RecordedLosses())
        if not forward.parts:
            unreduced = " except with reduction='none'" if "none" in forward.reductions else ""
            raise make_unsupported_loss_error(
                f"The model computed its loss without calling a loss function of torch.nn.functional{unreduced}.",
                "Call a loss function with reduction='mean', such as cross_entropy, or pass loss_weight.",
            )
        if loss.numel() != 1:
            raise make_unsupported_loss_error(
                f"The loss of micro-batch {micro_batch_index} must be a scalar, but has the shape {tuple(loss.shape)}."
            )
        if (count := len(forward.parts)) != (expected := len(self._losses)):
            raise make_unsupported_loss_error(
                f"The model called {count} loss functions for micro-batch {micro_batch_index}, but {expected} for "
                f"micro-batch {self._first}.",
                "Call the same loss functions for all samples, or pass loss_weight.",
            )
        self._check_loss_is_linear_combination(micro_batch_index, loss, forward)

    def run_deferred_checks(self) -> None:
        """Run the checks that were deferred to avoid synchronizing with the GPU. Raises ConfigError if one fails."""
        checks, self._deferred_checks = self._deferred_checks, []
        results = tolist_or_ones(torch.stack([ok for ok, _ in checks])) if checks else []
        for (_, problem), ok in zip(checks, results, strict=True):
            if not ok:
                raise make_unsupported_loss_error(problem())
        self._check_summed_loss_not_divided()

    @property
    def num_counted_labels(self) -> float | None:
        """Number of labels in the full batch's mean loss, or None if its terms average over different numbers."""
        if self._weight_shares is not None:
            return self._weight
        return totals.pop() if len(totals := {x.total if x.is_mean else None for x in self._losses}) == 1 else None

    @property
    def loss_factors_hash(self) -> Tensor:
        """Hash of the factors by which the model weights its losses. It must be equal on all data ranks."""
        values = next(iter(self._factors.values()), torch.zeros(0, dtype=torch.float64))
        return (values * torch.arange(1, len(values) + 1, device=values.device)).sum()

    def record_and_scale_loss(
        self, micro_batch_index: int, label_tracer: LabelTracer | None, loss_call: LossFunctionCall
    ) -> Tensor:
        """Record a call of a loss function, and return the loss scaled to its share of the full batch's loss."""
        forward = self._forwards[micro_batch_index]
        forward.reductions.append(loss_call.reduction)
        if self._is_full_batch:
            total = float(loss_call.compute_mean_denominator()) if loss_call.is_mean else 0.0
            self._losses.append(_LabelCountsPerMicroBatch(loss_call.name, loss_call.is_mean, total=total))
        if self._is_full_batch or loss_call.reduction == "none":
            return loss_call.compute_loss()
        loss_index = len(forward.parts)
        if micro_batch_index == self._first:
            self._losses.append(_LabelCountsPerMicroBatch(loss_call.name, loss_call.is_mean))
            if loss_call.is_mean:
                self._predict_and_store_label_counts(
                    self._losses[-1], micro_batch_index, label_tracer, loss_call, loss_index
                )
            else:
                self.has_only_class_means = False
        elif [(x.name, x.is_mean) for x in self._losses[loss_index : loss_index + 1]] != [
            (loss_call.name, loss_call.is_mean)
        ]:
            raise make_unsupported_loss_error(
                f"The model called {loss_call.name} for micro-batch {micro_batch_index}, but a different function or "
                f"reduction for micro-batch {self._first}.",
                "Call the same loss functions for all samples, or pass loss_weight.",
            )
        elif loss_call.is_mean:
            self._check_predicted_label_count(micro_batch_index, loss_index, loss_call)
        part = self._compute_loss_share(self._losses[loss_index], micro_batch_index, loss_call)
        if self._is_evaluation:
            part = part.detach().requires_grad_()
        forward.parts.append(part)
        with self.enable_grad_in_evaluation(micro_batch_index):
            return part.clone()

    def enable_grad_in_evaluation(self, micro_batch_index: int) -> AbstractContextManager[Any]:
        """Enable gradients during evaluation, to measure how much each recorded loss contributes to the total loss."""
        return torch.enable_grad() if self._is_evaluation and self._forwards[micro_batch_index].parts else nullcontext()

    def _compute_loss_share(
        self, label_counts: _LabelCountsPerMicroBatch, micro_batch_index: int, loss_call: LossFunctionCall
    ) -> Tensor:
        if not loss_call.is_mean:
            label_counts.seen[micro_batch_index] = loss_call.compute_mean_denominator()
            loss = loss_call.compute_loss()
            return loss * self._num_ranks if self._data_axis is not None else loss
        n, total = label_counts.n_m[micro_batch_index], label_counts.total
        if not total:  # the full batch's loss is NaN, too
            return loss_call.compute_loss()
        if not n:
            return loss_call.compute_loss_with_reduction("sum") * 0.0
        return loss_call.compute_loss() * (n * self._num_ranks / total)

    def _predict_and_store_label_counts(
        self,
        label_counts: _LabelCountsPerMicroBatch,
        micro_batch_index: int,
        label_tracer: LabelTracer | None,
        loss_call: LossFunctionCall,
        loss_index: int,
    ) -> None:
        """Predict and store the number of labels that a mean loss counts in each micro-batch.

        If the prediction fails, this rank sends NaN to the other data ranks, which would otherwise wait for it.
        """
        try:
            label_counts.n_m = self._predict_label_counts(micro_batch_index, label_tracer, loss_call, loss_index)
        except ShardFormerError:
            self._sum_over_data_ranks(math.nan)
            raise
        label_counts.total = self._sum_over_data_ranks(sum(label_counts.n_m))

    def _sum_over_data_ranks(self, local_value: float, has_ended: bool = False) -> float:
        """Sum a number of labels over the data ranks. ``has_ended`` means that this rank calls no further loss."""
        if self._data_axis is None:
            return local_value
        axis, device = self._data_axis
        summed = all_reduce(
            torch.tensor([local_value, has_ended], dtype=torch.float64, device=device), axis, purpose="loss"
        )
        total, num_ended = (
            summed.tolist() if has_real_data(summed) else (local_value * axis.size, has_ended * axis.size)
        )
        if math.isnan(total) and not math.isnan(local_value):
            raise InputError(
                "Another data-parallel rank failed to count the labels of its loss.",
                remedy="See the error in the log of that rank.",
            )
        if num_ended not in (0, axis.size) and not math.isnan(local_value):
            raise make_unsupported_loss_error(
                "The data-parallel ranks computed different numbers of mean losses. For example, the model may skip "
                "a loss if its batch has no labels for a task.",
                "Call the same loss functions on all data-parallel ranks, or pass loss_weight.",
            )
        return float(total)

    def _compute_micro_batch_weights(self, loss_weight_fn: LossWeight) -> list[float]:
        weights = [float(loss_weight_fn(m)) for m in self._micro_batches]
        total = self._weight = self._sum_over_data_ranks(sum(weights))
        if not total > 0 or min(weights) < 0:
            raise ConfigError(
                f"loss_weight must return non-negative numbers with a positive sum, but returned {weights}.",
                remedy="Return the number of labels that are not ignored: int((micro_batch['labels'] != -100).sum()).",
            )
        return [weight * self._num_ranks / total for weight in weights]

    def _predict_label_counts(
        self,
        first_micro_batch_index: int,
        label_tracer: LabelTracer | None,
        loss_call: LossFunctionCall,
        loss_index: int,
    ) -> list[float]:
        here = loss_call.compute_mean_denominator()
        tensors = [dict(iter_named_tensors(m)) for m in self._micro_batches]
        n_m = self._predict_label_counts_from_labels(
            first_micro_batch_index, label_tracer, loss_call, loss_index, tensors
        )
        self.has_only_class_means = self.has_only_class_means and n_m is not None and loss_call.has_class_index_targets
        if n_m is None:
            n_m = self._predict_label_counts_from_num_samples(first_micro_batch_index, loss_call, here)
        n_m[first_micro_batch_index] = here
        if any(isinstance(n, Tensor) for n in n_m):
            device = next(n.device for n in n_m if isinstance(n, Tensor))
            n_m = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=device) for n in n_m]).tolist()
        return [float(n) for n in n_m]

    def _predict_label_counts_from_labels(
        self,
        first_micro_batch_index: int,
        label_tracer: LabelTracer | None,
        loss_call: LossFunctionCall,
        loss_index: int,
        micro_batch_tensors: list[dict[Any, Tensor]],
    ) -> list[Any] | None:
        """Predict the number of labels of each micro-batch from its label tensor, or return None if it is unknown."""
        basis, here = loss_call.labels_or_weights, micro_batch_tensors[first_micro_batch_index]
        if basis is None:
            return None
        n, counts = (
            loss_call.compute_mean_denominator(),
            loss_call.has_class_index_targets or loss_call.has_label_weights,
        )

        def count_micro_batch_labels(micro_batch_index: int, label_tensor: Tensor) -> LossCount:
            if counts:
                return loss_call.count_labels_or_sum_weights(
                    label_tensor.to(basis.device),
                    loss_call.find_ignore_index(here, micro_batch_tensors[micro_batch_index]),
                )
            assert isinstance(n, int)
            return n * label_tensor.numel() // max(basis.numel(), 1)

        expression = None if label_tracer is None else label_tracer.get_expression(basis)
        if expression is not None:
            try:
                bases = [evaluate_expression(expression, of_m) for of_m in micro_batch_tensors]
            except (RuntimeError, IndexError, TypeError, ValueError, KeyError):
                bases = []  # an expression with a fixed length, in a micro-batch of another length
            if bases and _are_tensors_equal(bases[first_micro_batch_index], basis):
                return [count_micro_batch_labels(m, there) for m, there in enumerate(bases)]
        if not loss_call.has_class_index_targets:
            return None
        ignore_index = -100 if loss_call.ignore_index is None else loss_call.ignore_index
        used = [form for i, form in self._label_transforms.items() if i < loss_index]
        forms = find_label_transforms_matching_target(
            basis, here, ignore_index, loss_call.has_ignore_index_as_extra_class, used
        )
        if not forms:
            return None
        form = self._label_transforms[loss_index] if self._label_transforms.get(loss_index) in forms else forms[0]
        self._label_transforms[loss_index] = form
        there_m = [loss_call.find_ignore_index(here, of_m) for of_m in micro_batch_tensors]
        return [
            count_micro_batch_labels(m, form(micro_batch_tensors[m], ignore_index if i is None else i))
            for m, i in enumerate(there_m)
        ]

    def _predict_label_counts_from_num_samples(
        self, first_micro_batch_index: int, loss_call: LossFunctionCall, first_label_count: LossCount
    ) -> list[Any]:
        """Predict the number of labels of each micro-batch from its number of samples, if no label is ignored."""
        size = self._sizes[first_micro_batch_index]
        full = (
            loss_call.labels_or_weights.numel()
            if loss_call.has_class_index_targets and loss_call.labels_or_weights is not None
            else None
        )
        if (
            loss_call.has_label_weights
            or (full is not None and int(first_label_count) != full)
            or int(first_label_count) % size
        ):
            shape = None if loss_call.labels_or_weights is None else tuple(loss_call.labels_or_weights.shape)
            raise make_unsupported_loss_error(
                f"{loss_call.name} counts {float(first_label_count):g} labels in micro-batch "
                f"{first_micro_batch_index}, but the micro-batch "
                f"contains no tensor of shape {shape} with these labels.",
                "Add the labels to the batch, or pass loss_weight.",
            )
        return [int(first_label_count) // size * other for other in self._sizes]

    def _check_predicted_label_count(
        self, micro_batch_index: int, loss_index: int, loss_call: LossFunctionCall
    ) -> None:
        expected, seen = (
            self._losses[loss_index].n_m[micro_batch_index],
            torch.as_tensor(loss_call.compute_mean_denominator()),
        )
        name = loss_call.name  # the deferred check must not keep the logits alive
        self._check_or_defer_on_gpu(
            (seen - expected).abs() <= 1e-6 * abs(expected),
            lambda: (
                f"{name} (loss {loss_index} of the model) averages over {float(seen):g} labels in micro-batch "
                f"{micro_batch_index}, but {expected:g} labels were predicted from the batch."
            ),
        )

    def _check_loss_is_linear_combination(
        self, micro_batch_index: int, loss: Tensor, recorded_losses: _RecordedLosses
    ) -> None:
        """Check that the loss is a sum of recorded losses with the same factors in every micro-batch."""
        if loss.requires_grad:
            factors = self._compute_loss_factors(loss, recorded_losses)
        elif self._is_evaluation:  # detached, or not computed from the recorded losses
            factors = loss.new_ones(len(recorded_losses.parts), dtype=torch.float64)
        else:  # no trainable parameters
            return
        values = torch.stack([part.detach().double() for part in recorded_losses.parts]) * factors
        dtypes = [loss.dtype, *(part.dtype for part in recorded_losses.parts)]
        bound = 8 * max(torch.finfo(dtype).eps for dtype in dtypes)
        value, expected = loss.detach().double(), values.sum()
        scale = value.abs() + values.abs().sum()
        self._check_or_defer_on_gpu(  # NaN passes
            ~((value - expected).abs() > bound * scale),
            lambda: (
                f"The loss of micro-batch {micro_batch_index} is {float(value):.6g}, but its mean losses sum to "
                f"{float(expected):.6g}. The loss contains another term, such as a router's balancing loss, or is not "
                "a sum."
            ),
        )
        self._factors[micro_batch_index] = factors
        before = self._factors[next(iter(self._factors))]
        self._check_or_defer_on_gpu(
            ~((factors - before).abs() > bound * before.abs()).any(),
            lambda: (
                f"The model multiplies its mean losses by {factors.tolist()} in micro-batch {micro_batch_index}, but "
                f"by {before.tolist()} in another micro-batch."
            ),
        )

    @staticmethod
    def _compute_loss_factors(loss: Tensor, recorded_losses: _RecordedLosses) -> Tensor:
        trained = [part for part in recorded_losses.parts if part.requires_grad]
        grads = iter(torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True))
        of_parts = [next(grads) if part.requires_grad else None for part in recorded_losses.parts]
        zero = loss.new_zeros((), dtype=torch.float64)
        return torch.stack([zero if grad is None else grad.double() for grad in of_parts])

    def _check_summed_loss_not_divided(self) -> None:
        """Raise ConfigError if the model divides a summed loss by the number of labels in a micro-batch."""
        for loss_index, loss in enumerate(self._losses):
            n_m = {m: float(n) for m, n in loss.seen.items()}
            total = self._sum_over_data_ranks(sum(n_m.values())) if n_m else 0.0
            for m, n in n_m.items():
                factor = float(self._factors[m][loss_index]) if m in self._factors else 0.0
                if n < total and abs(factor * n - 1) < 1e-6:
                    raise make_unsupported_loss_error(
                        f"The model divides the summed {loss.name} by the {n:g} labels of micro-batch {m} instead "
                        "of by all labels of the batch.",
                        "Use reduction='mean', add num_items_in_batch to the batch, or pass loss_weight.",
                    )

    def _check_or_defer_on_gpu(self, is_valid: Tensor, describe_problem_fn: Problem) -> None:
        """Raise ConfigError if ``is_valid`` is False. On a GPU, this check is deferred to ``run_deferred_checks``."""
        if is_valid.device.type != "cpu":
            self._deferred_checks.append((is_valid, describe_problem_fn))
        elif not tolist_or_ones(is_valid):
            raise make_unsupported_loss_error(describe_problem_fn())


class _LossFunctionRecorder(TorchFunctionMode):
    def __init__(
        self, loss_scaler: MicroBatchLossScaler, micro_batch_index: int, label_tracer: LabelTracer | None
    ) -> None:
        super().__init__()
        self._weights, self._index, self._trace = loss_scaler, micro_batch_index, label_tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RECORDED_LOSSES:
            return self._weights.record_and_scale_loss(
                self._index, self._trace, LossFunctionCall.from_call_arguments(func, args, kwargs)
            )
        with self._weights.enable_grad_in_evaluation(self._index):
            out = func(*args, **kwargs)
        if self._trace is not None:
            self._trace.record_function_call(func, args, kwargs, out)
        return out


def _are_tensors_equal(tensor: Tensor, other_tensor: Tensor) -> bool:
    return tensor.shape == other_tensor.shape and bool(
        tolist_or_ones((tensor.detach().to(other_tensor) == other_tensor.detach()).all())
    )


def make_unsupported_loss_error(
    problem: str, remedy: str = "Pass loss_weight, use reduction='sum', or add num_items_in_batch to the batch."
) -> ConfigError:
    return ConfigError(
        problem,
        rule="With several micro-batches, the loss must be a sum of mean losses of torch.nn.functional with "
        "constant factors. For other losses, pass a function loss_weight that counts the labels of a micro-batch.",
        remedy=f"{remedy} If you use only one micro-batch, you can also set average_loss_over='ranks'.",
    )


IN_TRIAL: ContextVar[bool] = ContextVar("shardformer_is_trying_a_loss", default=False)
RELATIVE, ABSOLUTE = 1e-3, 1e-6
"""Tolerances of losses in fp32."""


class GatherInLossTrialError(Exception):
    """Raised if a loss function calls ``gather_over_data`` while ``does_loss_compare_samples`` tests it."""


@torch.no_grad()
def does_loss_compare_samples(
    loss_fn: Callable[..., Any], output: Any, batch: Any, batch_size: int, num_micro_batches: int
) -> bool:
    """Test whether ``loss_fn`` compares samples with each other, as a contrastive loss does.

    The loss of two samples is then neither the mean nor the sum of their losses.

    Args:
        output, batch: the output and batch of ``batch_size`` samples.
        num_micro_batches: number of micro-batches. If there is only one, a loss may call ``gather_over_data``.
    """
    if batch_size < 2:
        return False
    token = IN_TRIAL.set(True)
    try:
        alone = [
            float(loss_fn(_select_samples(output, batch_size, i, i + 1), _select_samples(batch, batch_size, i, i + 1)))
            for i in (0, 1)
        ]
        both = float(loss_fn(_select_samples(output, batch_size, 0, 2), _select_samples(batch, batch_size, 0, 2)))
    except GatherInLossTrialError:
        return num_micro_batches > 1
    except Exception:  # the test is inconclusive
        return False
    finally:
        IN_TRIAL.reset(token)
    if not all(map(math.isfinite, (*alone, both))):
        return False
    return not is_mean_or_sum(alone, both, ABSOLUTE + RELATIVE * max(abs(x) for x in (*alone, both)))


def is_mean_or_sum(part_losses: Sequence[float], joint_loss: float, tolerance: float) -> bool:
    """Return whether ``joint_loss`` can be a weighted mean or the sum of ``part_losses``."""
    is_mean = min(part_losses) - tolerance <= joint_loss <= max(part_losses) + tolerance
    return is_mean or abs(joint_loss - sum(part_losses)) <= tolerance


def _select_samples(nested: Any, batch_size: int, start: int, end: int) -> Any:
    if isinstance(nested, Tensor):
        return nested[start:end].clone() if nested.dim() and nested.shape[0] == batch_size else nested
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        fields = {
            f.name: _select_samples(getattr(nested, f.name), batch_size, start, end)
            for f in dataclasses.fields(nested)
            if f.init
        }
        kind: Any = type(nested)
        return kind(**fields)
    if isinstance(nested, Mapping):
        return rebuild_container(
            nested, {name: _select_samples(each, batch_size, start, end) for name, each in nested.items()}
        )
    if isinstance(nested, (list, tuple)):
        return rebuild_container(nested, [_select_samples(each, batch_size, start, end) for each in nested])
    return nested
