"""Trace how a model computes the target of its loss, to predict the targets of other micro-batches.

A model head may shift, clamp, flatten or copy its labels. ``LabelTracer`` records the torch functions of the head, and
expresses the target as a function of the micro-batch's tensors, which can then be evaluated for other micro-batches. If
an operation cannot be recorded, ``find_label_transforms_matching_target`` searches the micro-batch for a tensor with
the values of the target, after the transformations that heads commonly use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardformer.comm.sharded_tensor import is_inplace_call
from shardformer.gradient_accumulation.micro_batches import TensorPath, Tensors
from shardformer.torch_compat import tolist_or_ones


@dataclass(frozen=True)
class SymbolicTensorSize:
    """Symbolic size of a tensor dimension in a micro-batch, multiplied by ``sign``."""

    name: TensorPath
    dim: int
    sign: int = 1

    def compute_size(self, micro_batch_tensors: Tensors) -> int:
        return self.sign * micro_batch_tensors[self.name].shape[self.dim]

    @staticmethod
    def from_int(size: int, micro_batch_tensors: Tensors) -> SymbolicTensorSize | int:
        """Replace an int by the symbolic size of an equal tensor dimension, or return the int if there is none.

        Ignores the first dimension of each tensor, and the numbers -1, 0 and 1.
        """
        if abs(size) > 1:
            for name, tensor in micro_batch_tensors.items():
                if abs(size) in tensor.shape[1:]:
                    return SymbolicTensorSize(name, 1 + tensor.shape[1:].index(abs(size)), 1 if size > 0 else -1)
        return size


@dataclass(frozen=True, eq=False)
class MicroBatchTensorExpression:
    """Symbolic expression for a tensor of a micro-batch."""

    name: TensorPath


@dataclass(frozen=True, eq=False)
class TorchFunctionResultExpression:
    """Symbolic expression for the result of a torch function that was called on micro-batch tensors.

    Args:
        output_index: index of the result, if the function returns several.
        writes_first_argument: whether the function writes its result into its first argument.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output_index: int | None = None
    writes_first_argument: bool = False


Expression = MicroBatchTensorExpression | TorchFunctionResultExpression


@torch.no_grad()
def evaluate_expression(
    expression: Expression, micro_batch_tensors: Tensors, cached_values: dict[int, Tensor] | None = None
) -> Tensor:
    """Evaluate a symbolic expression on the tensors of a micro-batch."""
    cached_values = {} if cached_values is None else cached_values
    if id(expression) in cached_values:
        return cached_values[id(expression)]
    if isinstance(expression, MicroBatchTensorExpression):
        return micro_batch_tensors[expression.name]

    def evaluate_argument(arg: Any) -> Any:
        if isinstance(arg, MicroBatchTensorExpression | TorchFunctionResultExpression):
            return evaluate_expression(arg, micro_batch_tensors, cached_values)
        return arg.compute_size(micro_batch_tensors) if isinstance(arg, SymbolicTensorSize) else arg

    args, kwargs = (
        _map_nested(expression.args, evaluate_argument),
        _map_nested(dict(expression.kwargs), evaluate_argument),
    )
    if expression.writes_first_argument:
        args = (args[0].clone(), *args[1:])
    result = expression.fn(*args, **kwargs)
    if expression.output_index is not None:
        result = result[expression.output_index]
    out: Tensor = args[0] if expression.writes_first_argument else result
    cached_values[id(expression)] = out
    return out


def _map_nested(nested: Any, fn: Callable[[Any], Any]) -> Any:
    if type(nested) in (tuple, list):
        return type(nested)(_map_nested(x, fn) for x in nested)
    if type(nested) is dict:
        return {key: _map_nested(x, fn) for key, x in nested.items()}
    if type(nested) is slice:
        return slice(_map_nested(nested.start, fn), _map_nested(nested.stop, fn), _map_nested(nested.step, fn))
    return fn(nested)


class _ArgumentNotFromMicroBatchError(Exception):
    """Raised if a recorded function has an argument that was not computed from the micro-batch."""


class LabelTracer:
    """Records how a model computes its labels from a micro-batch, to predict those of other micro-batches.

    Call ``record_function_call`` after each torch function.
    """

    def __init__(self, micro_batch_tensors: Tensors) -> None:
        self._tensors = micro_batch_tensors
        self._expressions: Any = WeakIdKeyDictionary()  # does not keep tensors alive
        for name, tensor in micro_batch_tensors.items():
            self._expressions[tensor] = MicroBatchTensorExpression(name)

    def get_expression(self, tensor: Tensor) -> Expression | None:
        expression: Expression | None = self._expressions.get(tensor)
        return expression

    def record_function_call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        is_write = is_inplace_call(fn, kwargs)
        written = args[0] if is_write and args and isinstance(args[0], Tensor) else None
        if written is None and not isinstance(output, Tensor | tuple | list):
            return
        derived = self._build_result_expression(fn, args, kwargs, is_write)
        if written is not None:
            self._store_or_delete_expression(written, derived)
        elif isinstance(output, Tensor):
            self._store_or_delete_expression(output, derived)
        elif derived is not None:
            for i, part in enumerate(output):
                if isinstance(part, Tensor):
                    self._store_or_delete_expression(
                        part, TorchFunctionResultExpression(derived.fn, derived.args, derived.kwargs, output_index=i)
                    )

    def _store_or_delete_expression(
        self, tensor: Tensor, result_expression: TorchFunctionResultExpression | None
    ) -> None:
        if result_expression is not None:
            self._expressions[tensor] = result_expression
        elif tensor in self._expressions:
            del self._expressions[tensor]  # overwritten with an unknown value

    def _build_result_expression(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], writes_first_argument: bool
    ) -> TorchFunctionResultExpression | None:
        name = getattr(fn, "__name__", "")
        if any(word in name for word in _RANDOM_OPS):
            return None
        num_known, has_sizes = 0, name in _OPS_WITH_SIZES

        def to_expression(arg: Any) -> Any:
            nonlocal num_known
            if not isinstance(arg, Tensor):
                return SymbolicTensorSize.from_int(arg, self._tensors) if has_sizes and type(arg) is int else arg
            expression = self.get_expression(arg)
            if expression is not None:
                num_known += 1
                return expression
            if arg.numel() > 1 or arg.requires_grad:
                raise _ArgumentNotFromMicroBatchError
            return arg  # a scalar constant

        try:
            args, kwargs = _map_nested((tuple(args), dict(kwargs)), to_expression)
        except _ArgumentNotFromMicroBatchError:
            return None
        return (
            TorchFunctionResultExpression(fn, args, kwargs, writes_first_argument=writes_first_argument)
            if num_known
            else None
        )


_RANDOM_OPS = ("rand", "bernoulli", "multinomial", "normal", "dropout", "uniform")
"""Random operations are not repeated, because repeating them would change later random numbers."""

_OPS_WITH_SIZES = ("__getitem__", "__setitem__", "clamp", "clip", "narrow")
"""Operations in which an int argument that equals a size of the micro-batch is treated as that size."""


@dataclass(frozen=True)
class LabelTransform:
    """Common transformation of the labels in a micro-batch into the target of a loss: shift, slice or clamp.

    Args:
        offset: number of leading entries of the last dimension to drop.
        is_shifted: whether an ignored label is appended first, as in causal language models.
        is_clamped: whether the labels are clamped to [0, ignored class], as in question answering.
    """

    name: TensorPath
    offset: int = 0
    is_shifted: bool = False
    is_clamped: bool = False

    def __call__(self, micro_batch_tensors: Tensors, ignore_index: int) -> Tensor:
        labels = micro_batch_tensors[self.name]
        if self.is_shifted:
            labels = F.pad(labels, (0, 1), value=ignore_index)
        if self.offset:
            labels = labels[..., self.offset :]
        return (labels.clamp(0, ignore_index) if self.is_clamped else labels).reshape(-1)


def find_label_transforms_matching_target(
    target: Tensor,
    micro_batch_tensors: Tensors,
    ignore_index: int,
    are_labels_clamped: bool,
    used_transforms: Collection[LabelTransform],
) -> list[LabelTransform]:
    """Find the transformations of micro-batch tensors that result in ``target``, most likely first.

    Several forms match if tensors are equal by chance or all labels are ignored. Tensors with a typical name for labels
    come first, then those that no other loss of the model has used.
    """
    flat = target.reshape(-1)
    used_names = {form.name for form in used_transforms}
    forms = _iter_candidate_transforms(flat.numel(), micro_batch_tensors, are_labels_clamped)
    matches = [form for form in forms if _are_labels_equal(form(micro_batch_tensors, ignore_index), flat)]
    return sorted(matches, key=lambda form: (not _has_label_name(form.name), form.name in used_names))


def _iter_candidate_transforms(
    num_labels: int, micro_batch_tensors: Tensors, are_labels_clamped: bool
) -> Iterator[LabelTransform]:
    for name, tensor in micro_batch_tensors.items():
        if tensor.is_floating_point() or tensor.dtype == torch.bool or not tensor.dim() or not tensor.numel():
            continue
        length = tensor.shape[-1]
        rows = tensor.numel() // length
        if tensor.numel() == num_labels:
            yield LabelTransform(name, is_clamped=are_labels_clamped)
            yield LabelTransform(name, offset=1, is_shifted=True, is_clamped=are_labels_clamped)
        elif 0 < num_labels < tensor.numel() and num_labels % rows == 0:
            yield LabelTransform(name, offset=length - num_labels // rows, is_clamped=are_labels_clamped)


def _are_labels_equal(labels: Tensor, target: Tensor) -> bool:
    return labels.shape == target.shape and bool(tolist_or_ones((labels.to(target.device) == target).all()))


def _has_label_name(tensor_path: TensorPath) -> bool:
    return any(word in str(tensor_path) for word in ("label", "target", "position"))
