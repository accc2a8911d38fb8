"""Trace how a model computes the target of its loss, to predict the targets of other micro-batches.

A model head may shift, clamp, flatten or copy its labels. ``LabelTracer`` records the torch functions of the head, and
expresses the target as a function of the micro-batch's tensors, which can then be evaluated for other micro-batches. If
an operation cannot be recorded, ``find_label_transforms`` searches the micro-batch for a tensor with the values of the
target, after the transformations that heads commonly use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardformer.comm.sharded_tensor import is_inplace
from shardformer.gradient_accumulation.micro_batches import TensorPath, Tensors
from shardformer.torch_compat import tolist_or_ones


@dataclass(frozen=True)
class TensorSize:
    """A symbolic integer: the size of one dimension of a tensor in the micro-batch, multiplied by ``sign``."""

    name: TensorPath
    dim: int
    sign: int = 1

    def compute_size(self, tensors: Tensors) -> int:
        return self.sign * tensors[self.name].shape[self.dim]

    @staticmethod
    def from_number(number: int, tensors: Tensors) -> TensorSize | int:
        """Find a tensor dimension of size ``number`` and return its ``TensorSize``, or else return ``number``.

        Ignores the first dimension of each tensor, and the numbers -1, 0 and 1.
        """
        if abs(number) > 1:
            for name, tensor in tensors.items():
                if abs(number) in tensor.shape[1:]:
                    return TensorSize(name, 1 + tensor.shape[1:].index(abs(number)), 1 if number > 0 else -1)
        return number


@dataclass(frozen=True, eq=False)
class BatchTensor:
    """A symbolic expression for one of the tensors in a micro-batch."""

    name: TensorPath


@dataclass(frozen=True, eq=False)
class DerivedTensor:
    """A symbolic expression for the result of a torch function whose arguments were computed from a micro-batch.

    Args:
        item: index of the result, if the function returns several.
        writes: whether the function writes its result into its first argument.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    item: int | None = None
    writes: bool = False


Expression = BatchTensor | DerivedTensor


@torch.no_grad()
def evaluate_expression(expression: Expression, tensors: Tensors, values: dict[int, Tensor] | None = None) -> Tensor:
    """Evaluate a symbolic expression on the tensors of a micro-batch."""
    values = {} if values is None else values
    if id(expression) in values:
        return values[id(expression)]
    if isinstance(expression, BatchTensor):
        return tensors[expression.name]

    def evaluate_argument(x: Any) -> Any:
        if isinstance(x, BatchTensor | DerivedTensor):
            return evaluate_expression(x, tensors, values)
        return x.compute_size(tensors) if isinstance(x, TensorSize) else x

    args, kwargs = (
        _map_nested(expression.args, evaluate_argument),
        _map_nested(dict(expression.kwargs), evaluate_argument),
    )
    if expression.writes:
        args = (args[0].clone(), *args[1:])
    result = expression.func(*args, **kwargs)
    if expression.item is not None:
        result = result[expression.item]
    out: Tensor = args[0] if expression.writes else result
    values[id(expression)] = out
    return out


def _map_nested(value: Any, func: Callable[[Any], Any]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_map_nested(x, func) for x in value)
    if type(value) is dict:
        return {key: _map_nested(x, func) for key, x in value.items()}
    if type(value) is slice:
        return slice(_map_nested(value.start, func), _map_nested(value.stop, func), _map_nested(value.step, func))
    return func(value)


class _UnknownArgumentError(Exception):
    """Raised if a recorded function has an argument that was not computed from the micro-batch."""


class LabelTracer:
    """A recorder of the torch functions that are called on the tensors of a micro-batch.

    Call ``record_function_call`` after each torch function.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._expressions: Any = WeakIdKeyDictionary()  # does not keep tensors alive
        for name, tensor in tensors.items():
            self._expressions[tensor] = BatchTensor(name)

    def get_expression(self, tensor: Tensor) -> Expression | None:
        expression: Expression | None = self._expressions.get(tensor)
        return expression

    def record_function_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        is_write = is_inplace(func, kwargs)
        written = args[0] if is_write and args and isinstance(args[0], Tensor) else None
        if written is None and not isinstance(out, Tensor | tuple | list):
            return
        derived = self._derive_expression(func, args, kwargs, is_write)
        if written is not None:
            self._store_expression(written, derived)
        elif isinstance(out, Tensor):
            self._store_expression(out, derived)
        elif derived is not None:
            for i, part in enumerate(out):
                if isinstance(part, Tensor):
                    self._store_expression(part, DerivedTensor(derived.func, derived.args, derived.kwargs, item=i))

    def _store_expression(self, tensor: Tensor, derived: DerivedTensor | None) -> None:
        if derived is not None:
            self._expressions[tensor] = derived
        elif tensor in self._expressions:
            del self._expressions[tensor]  # overwritten with an unknown value

    def _derive_expression(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], is_write: bool
    ) -> DerivedTensor | None:
        name = getattr(func, "__name__", "")
        if any(word in name for word in _RANDOM_OPS):
            return None
        num_known, has_sizes = 0, name in _OPS_WITH_SIZES

        def to_expression(x: Any) -> Any:
            nonlocal num_known
            if not isinstance(x, Tensor):
                return TensorSize.from_number(x, self._tensors) if has_sizes and type(x) is int else x
            expression = self.get_expression(x)
            if expression is not None:
                num_known += 1
                return expression
            if x.numel() > 1 or x.requires_grad:
                raise _UnknownArgumentError
            return x  # a scalar constant

        try:
            args, kwargs = _map_nested((tuple(args), dict(kwargs)), to_expression)
        except _UnknownArgumentError:
            return None
        return DerivedTensor(func, args, kwargs, writes=is_write) if num_known else None


_RANDOM_OPS = ("rand", "bernoulli", "multinomial", "normal", "dropout", "uniform")
"""Random operations are not repeated, because repeating them would change later random numbers."""

_OPS_WITH_SIZES = ("__getitem__", "__setitem__", "clamp", "clip", "narrow")
"""Operations in which an int argument that equals a size of the micro-batch is treated as that size."""


@dataclass(frozen=True)
class LabelTransform:
    """A common way to compute the target of a loss from the labels in a micro-batch: shift, slice or clamp them.

    Args:
        offset: number of leading entries of the last dimension to drop.
        shifted: whether an ignored label is appended first, as in causal language models.
        clamped: whether the labels are clamped to [0, ignored class], as in question answering.
    """

    name: TensorPath
    offset: int = 0
    shifted: bool = False
    clamped: bool = False

    def __call__(self, tensors: Tensors, ignore_index: int) -> Tensor:
        labels = tensors[self.name]
        if self.shifted:
            labels = F.pad(labels, (0, 1), value=ignore_index)
        if self.offset:
            labels = labels[..., self.offset :]
        return (labels.clamp(0, ignore_index) if self.clamped else labels).reshape(-1)


def find_label_transforms(
    target: Tensor, tensors: Tensors, ignore_index: int, clamped: bool, used_transforms: Collection[LabelTransform]
) -> list[LabelTransform]:
    """Find the transformations of micro-batch tensors that result in ``target``, most likely first.

    Several forms match if tensors are equal by chance or all labels are ignored. Tensors with a typical name for labels
    come first, then those that no other loss of the model has used.
    """
    flat = target.reshape(-1)
    used_names = {form.name for form in used_transforms}
    forms = _list_candidate_transforms(flat.numel(), tensors, clamped)
    matches = [form for form in forms if _has_equal_values(form(tensors, ignore_index), flat)]
    return sorted(matches, key=lambda form: (not _has_label_name(form.name), form.name in used_names))


def _list_candidate_transforms(num_labels: int, tensors: Tensors, clamped: bool) -> Iterator[LabelTransform]:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.dtype == torch.bool or not tensor.dim() or not tensor.numel():
            continue
        length = tensor.shape[-1]
        rows = tensor.numel() // length
        if tensor.numel() == num_labels:
            yield LabelTransform(name, clamped=clamped)
            yield LabelTransform(name, offset=1, shifted=True, clamped=clamped)
        elif 0 < num_labels < tensor.numel() and num_labels % rows == 0:
            yield LabelTransform(name, offset=length - num_labels // rows, clamped=clamped)


def _has_equal_values(labels: Tensor, target: Tensor) -> bool:
    return labels.shape == target.shape and bool(tolist_or_ones((labels.to(target.device) == target).all()))


def _has_label_name(name: TensorPath) -> bool:
    return any(word in str(name) for word in ("label", "target", "position"))
