"""Average the Trainer's losses over data-parallel ranks so that every label of the global batch counts equally.

Ranks can have different numbers of labels, and in the last batch of an evaluation different numbers of samples. A plain
average of their losses would give more weight to the labels of a rank with few labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardformer.comm.collectives import all_gather, all_reduce
from shardformer.comm.sharded_tensor import ShardedTensor, to_full_tensors
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.gradient_accumulation.micro_batch_loss import RECORDED_LOSSES, LossFunctionCall
from shardformer.mesh.parallel_context import Axis


class GlobalBatchLossAverager:
    """Averages the losses of the data-parallel ranks so that the result is the loss of the global batch.

    Args:
        data_axis: axis of the data-parallel ranks.

    Attributes:
        items: mean number of items per rank, by which models divide the sum of their losses.
        batch_size: number of samples of this rank's batch, or None if it is unknown.
    """

    def __init__(self, data_axis: Axis) -> None:
        self._data = data_axis
        self._samples: int | None = None
        self._is_weighted = self._has_warned = self._has_warned_of_samples = False
        self.items: Any = None
        self.batch_size: int | None = None

    @property
    def has_only_padding_samples(self) -> bool:
        """Whether this rank has only padding samples in the last batch."""
        return self._samples == 0

    @contextmanager
    def set_num_local_samples(self, num_samples: int | None) -> Iterator[None]:
        """Temporarily set this rank's number of samples, or None if all ranks have the same number."""
        self._samples, self._is_weighted = num_samples, False
        try:
            yield
        finally:
            self._samples = None

    def detect_num_items_argument(self, call_args: Iterable[Any]) -> None:
        """Mark the loss as weighted if ``call_args`` contains the global number of items (labels)."""
        self._is_weighted |= self.items is not None and any(each is self.items for each in call_args)

    def scale_to_global_mean(self, local_mean: Tensor, local_count: float) -> Tensor:
        """Scale this rank's mean so that the average over the ranks is the mean over the global batch.

        All-reduces one number over the data-parallel ranks.
        """
        if self._data.size == 1:
            return local_mean
        self._is_weighted = True
        local_count = 0.0 if self.has_only_padding_samples else local_count
        total = self._sum_over_ranks(torch.tensor(float(local_count), device=local_mean.device))
        if not total:
            return local_mean  # NaN, as in one process
        return local_mean * (local_count * self._data.size / total) if local_count else local_mean.nan_to_num() * 0.0

    def warn_if_unequal_label_counts(self, labels: Any) -> None:
        """Warn once if an unweighted loss is averaged over ranks that have different numbers of labels.

        All-gathers the numbers of labels if the loss is unweighted.
        """
        if self._is_weighted or self._has_warned or self._data.size == 1 or not isinstance(labels, Tensor):
            return
        counts = all_gather(labels.ne(-100).sum().reshape(1), self._data, 0, purpose="loss").tolist()
        if len(set(counts)) > 1:
            self._has_warned = True
            warnings.warn(
                f"The data-parallel ranks have {counts} labels, so the average of their losses differs from the loss "
                "in one process. Use a mean loss of torch.nn.functional, or divide the sum of the losses by "
                "num_items_in_batch. TrainingArguments(average_tokens_across_devices=False) disables this warning.",
                stacklevel=2,
            )

    def warn_if_contrastive_loss(self, loss_call: LossFunctionCall) -> None:
        """Warn once if a contrastive loss compares only the samples on the same rank."""
        logits, size = next(iter(loss_call.bound_arguments.values())), self.batch_size
        if self._has_warned_of_samples or not loss_call.has_class_index_targets or tuple(logits.shape) != (size, size):
            return
        assert loss_call.labels_or_weights is not None
        if size is not None and size > 1 and loss_call.labels_or_weights.tolist() == list(range(size)):
            self._has_warned_of_samples = True
            warnings.warn(
                f"A contrastive loss compares only the {size} samples on the same data-parallel rank, and not those of "
                "the global batch. In compute_loss, gather the embeddings of all ranks with "
                "shardformer.pipeline.gather_over_data(embeddings, trainer.context).",
                stacklevel=2,
            )

    def average_over_ranks(self, loss: Tensor | None) -> Any:
        """Average the loss over the data-parallel ranks. A loss without weights is weighted by its number of samples.

        Communicates at most two numbers.
        """
        if loss is None or self._data.size == 1:
            return loss
        if self._samples is not None and not self._is_weighted:
            loss = self.scale_to_global_mean(loss, self._samples)
        elif self.has_only_padding_samples:
            loss = loss.nan_to_num() * 0.0
        return all_reduce(loss.clone(), self._data, purpose="loss") / self._data.size

    def _sum_over_ranks(self, local_count: Tensor) -> float:
        return float(all_reduce(local_count, self._data, purpose="loss"))


class WeightedLossMode(TorchFunctionMode):
    """A torch function mode that weights each mean loss by the number of labels that this rank has."""

    def __init__(self, loss_averager: GlobalBatchLossAverager) -> None:
        super().__init__()
        self._mean = loss_averager

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._mean.detect_num_items_argument((*args, *kwargs.values()))
        if (
            func not in RECORDED_LOSSES
            or not (call := LossFunctionCall.from_call_arguments(func, args, kwargs)).is_mean
        ):
            return func(*args, **kwargs)
        self._mean.warn_if_contrastive_loss(call)
        return self._mean.scale_to_global_mean(call.compute_loss(), float(call.compute_mean_denominator()))


class WeightedMeanMode(TorchFunctionMode):
    """A torch function mode that weights each mean that a trainer computes from outputs of its models.

    The weight is the number of averaged elements on this rank, such as samples or tokens. Means that do not require
    gradients and means in the forward pass of a model stay unchanged. In an evaluation, only the computation of the
    loss requires gradients, and not the forward pass.

    Communicates what ``GlobalBatchLossAverager.scale_to_global_mean`` communicates, for each mean.

    Args:
        models: models whose outputs the loss is computed from.
        output_factors: factors by which the outputs are multiplied, in the order of the forward passes. In a trial,
            they make the outputs of two models differ.
    """

    def __init__(
        self,
        loss_averager: GlobalBatchLossAverager,
        models: Sequence[nn.Module],
        output_factors: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self._mean, self._models, self._factors = loss_averager, models, output_factors
        self._outer_grad_modes: list[bool] = []
        self._marked: list[Tensor] = []
        self._num_calls = 0

    def __enter__(self) -> Self:
        self._is_evaluation = not torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        self._undo = [
            register_forward_hooks(model, HookOrder.RECORDER, self._start_forward, self._end_forward, always_call=True)
            for model in self._models
        ]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]  # torch does not annotate it
        torch.set_grad_enabled(not self._is_evaluation)
        for undo in self._undo:
            undo()
        for tensor in self._marked:
            tensor.requires_grad_(False)
        self._marked.clear()

    def _start_forward(self, model: nn.Module, args: Any) -> None:
        self._outer_grad_modes.append(torch.is_grad_enabled())
        if self._is_evaluation:
            torch.set_grad_enabled(False)

    def _end_forward(self, model: nn.Module, args: Any, output: Any) -> Any:
        torch.set_grad_enabled(before := self._outer_grad_modes.pop())
        if self._outer_grad_modes or not isinstance(output, Mapping):
            return output
        factor = self._factors[self._num_calls % len(self._factors)] if self._factors else None
        self._num_calls += 1
        for name, value in output.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if factor is not None:
                value = value * factor
            if self._is_evaluation and before:
                value = self._require_grad(value)
            output[name] = value  # type: ignore[index]  # a ModelOutput or a dict
        return output

    def _require_grad(self, output: Tensor) -> Tensor:
        local = output.local if isinstance(output, ShardedTensor) else output
        if not local.requires_grad:
            self._marked.append(local.requires_grad_())
        return output.with_local_shard(local) if isinstance(output, ShardedTensor) else output

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_mean = func in (torch.mean, Tensor.mean) and len(args) == 1 and not kwargs.keys() & {"dim", "axis"}
        if self._outer_grad_modes or not is_mean or not result.requires_grad:
            return result
        return self._mean.scale_to_global_mean(result, args[0].numel())


class DataParallelLabelSmoother:
    """A wrapper around Trainer's label smoother that weights the loss by the number of labels on this rank."""

    def __init__(self, label_smoother: Any, loss_averager: GlobalBatchLossAverager) -> None:
        self._smoother, self._mean = label_smoother, loss_averager

    def __call__(self, outputs: Any, labels: Tensor, shift_labels: bool = False, **kwargs: Any) -> Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        full = {"logits": to_full_tensors(logits)}  # the smoother writes into results of sharded logits
        loss: Tensor = self._smoother(full, labels, shift_labels=shift_labels, **kwargs)
        if kwargs.get("num_items_in_batch") is not None:
            return loss
        counted = labels[..., 1:] if shift_labels else labels
        return self._mean.scale_to_global_mean(loss, float(counted.ne(self._smoother.ignore_index).sum()))
