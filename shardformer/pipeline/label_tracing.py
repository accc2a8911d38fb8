"""How a loss's target came from the micro-batch, so that those of other micro-batches are known before they run.

A head may shift its labels, clamp them, flatten them, write into a copy of them. Whoever watches the head's functions
(``LabelTracer``) knows the target as an expression over the micro-batch's own tensors, and can work it out for a
micro-batch that did not run yet. Where that is not seen (the labels were copied on their way), the target is looked for
among the micro-batch's tensors by its content, in the forms that heads give it (``find_label_forms``).
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
from shardformer.pipeline.micro_batches import TensorPath, Tensors
from shardformer.torch_compat import to_list


@dataclass(frozen=True)
class TensorSize:
    """A size of one of the micro-batch's tensors, or less than nothing by as much."""

    name: TensorPath
    dim: int
    sign: int = 1

    def of(self, tensors: Tensors) -> int:
        return self.sign * tensors[self.name].shape[self.dim]

    @staticmethod
    def named(number: int, tensors: Tensors) -> TensorSize | int:
        """The number as a size beyond the rows; the number itself where there is none, or too small to tell."""
        if abs(number) > 1:
            for name, tensor in tensors.items():
                if abs(number) in tensor.shape[1:]:
                    return TensorSize(name, 1 + tensor.shape[1:].index(abs(number)), 1 if number > 0 else -1)
        return number


@dataclass(frozen=True, eq=False)
class BatchTensor:
    """A tensor of the micro-batch."""

    name: TensorPath


@dataclass(frozen=True, eq=False)
class DerivedTensor:
    """What a function of torch made of tensors of the micro-batch: its arguments hold ``BatchTensor``,
    ``DerivedTensor`` and sizes.

    Args:
        item: which of several results.
        writes: the function writes into its first argument, which is the result.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    item: int | None = None
    writes: bool = False


Expression = BatchTensor | DerivedTensor


@torch.no_grad()
def evaluate(expression: Expression, tensors: Tensors, known: dict[int, Tensor] | None = None) -> Tensor:
    """The expression's value for a micro-batch."""
    known = {} if known is None else known
    if id(expression) in known:
        return known[id(expression)]
    if isinstance(expression, BatchTensor):
        return tensors[expression.name]

    def value(x: Any) -> Any:
        if isinstance(x, BatchTensor | DerivedTensor):
            return evaluate(x, tensors, known)
        return x.of(tensors) if isinstance(x, TensorSize) else x

    args, kwargs = _mapped(expression.args, value), _mapped(dict(expression.kwargs), value)
    if expression.writes:
        args = (args[0].clone(), *args[1:])
    result = expression.func(*args, **kwargs)
    if expression.item is not None:
        result = result[expression.item]
    out: Tensor = args[0] if expression.writes else result
    known[id(expression)] = out
    return out


def _mapped(value: Any, how: Callable[[Any], Any]) -> Any:
    """Nested arguments with ``how`` done to what is in them."""
    if type(value) in (tuple, list):
        return type(value)(_mapped(x, how) for x in value)
    if type(value) is dict:
        return {key: _mapped(x, how) for key, x in value.items()}
    if type(value) is slice:
        return slice(_mapped(value.start, how), _mapped(value.stop, how), _mapped(value.step, how))
    return how(value)


class _Unknown(Exception):
    """An argument is no expression over the micro-batch."""


class LabelTracer:
    """What became of a micro-batch's tensors, as told by ``record`` after each function of torch."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._known: Any = WeakIdKeyDictionary()  # no tensor lives longer for it
        for name, tensor in tensors.items():
            self._known[tensor] = BatchTensor(name)

    def expression_of(self, tensor: Tensor) -> Expression | None:
        found: Expression | None = self._known.get(tensor)
        return found

    def record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        is_write = is_inplace(func, kwargs)
        written = args[0] if is_write and args and isinstance(args[0], Tensor) else None
        if written is None and not isinstance(out, Tensor | tuple | list):
            return
        made = self._made(func, args, kwargs, is_write)
        if written is not None:
            self._note(written, made)
        elif isinstance(out, Tensor):
            self._note(out, made)
        elif made is not None:
            for i, part in enumerate(out):
                if isinstance(part, Tensor):
                    self._note(part, DerivedTensor(made.func, made.args, made.kwargs, item=i))

    def _note(self, tensor: Tensor, made: DerivedTensor | None) -> None:
        if made is not None:
            self._known[tensor] = made
        elif tensor in self._known:
            del self._known[tensor]  # written into with what is not known

    def _made(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], is_write: bool
    ) -> DerivedTensor | None:
        name = getattr(func, "__name__", "")
        if any(word in name for word in _RANDOM):
            return None
        num_known, has_sizes = 0, name in _TAKES_SIZES

        def named(x: Any) -> Any:
            nonlocal num_known
            if not isinstance(x, Tensor):
                return TensorSize.named(x, self._tensors) if has_sizes and type(x) is int else x
            expression = self.expression_of(x)
            if expression is not None:
                num_known += 1
                return expression
            if x.numel() > 1 or x.requires_grad:
                raise _Unknown
            return x  # a number

        try:
            made = DerivedTensor(func, _mapped(tuple(args), named), _mapped(dict(kwargs), named), writes=is_write)
        except _Unknown:
            return None
        return made if num_known else None


_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "dropout", "uniform")
"""To do these again would change what follows."""

_TAKES_SIZES = ("__getitem__", "__setitem__", "clamp", "clip", "narrow")
"""Where a number that is the length of the micro-batch is meant to be that."""


@dataclass(frozen=True)
class LabelForm:
    """A tensor of the micro-batch in one of the forms that heads give to labels, flattened.

    Args:
        cut: how many entries of the last dim are left out at its start; of a shift, 1, and one that is ignored follows.
        clamped: between 0 and the ignored class, as question answering does.
    """

    name: TensorPath
    cut: int = 0
    shifted: bool = False
    clamped: bool = False

    def __call__(self, tensors: Tensors, ignored: int) -> Tensor:
        labels = tensors[self.name]
        if self.shifted:
            labels = F.pad(labels, (0, 1), value=ignored)
        if self.cut:
            labels = labels[..., self.cut :]
        return (labels.clamp(0, ignored) if self.clamped else labels).reshape(-1)


def find_label_forms(
    target: Tensor, tensors: Tensors, ignored: int, clamped: bool, used: Collection[LabelForm]
) -> list[LabelForm]:
    """All forms of the micro-batch's tensors with the content of ``target``: the likeliest first.

    Several have it where two tensors are alike by chance, or all is ignored. Then what is named as labels are comes
    before what is not, and a tensor that no other loss of the model took (``used``) before one that did.
    """
    flat = target.reshape(-1)
    taken = {form.name for form in used}
    found = [form for form in _forms(flat.numel(), tensors, clamped) if _is_same(form(tensors, ignored), flat)]
    return sorted(found, key=lambda form: (not _is_named(form.name), form.name in taken))


def _forms(size: int, tensors: Tensors, clamped: bool) -> Iterator[LabelForm]:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.dtype == torch.bool or not tensor.dim() or not tensor.numel():
            continue
        length = tensor.shape[-1]
        rows = tensor.numel() // length
        if tensor.numel() == size:
            yield LabelForm(name, clamped=clamped)
            yield LabelForm(name, cut=1, shifted=True, clamped=clamped)
        elif 0 < size < tensor.numel() and size % rows == 0:
            yield LabelForm(name, cut=length - size // rows, clamped=clamped)


def _is_same(form: Tensor, flat: Tensor) -> bool:
    return form.shape == flat.shape and bool(to_list((form.to(flat.device) == flat).all()))


def _is_named(name: TensorPath) -> bool:
    return any(word in str(name) for word in ("label", "target", "position"))
