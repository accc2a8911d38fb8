"""The mean losses of ``torch.nn.functional``: what each divides its sum by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.comm.values import has_values
from shardformer.pipeline.targets import Size, Tensors

_CLASSES = "cross_entropy nll_loss linear_cross_entropy"
_ELEMENTS = """
    binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss huber_loss kl_div
    hinge_embedding_loss poisson_nll_loss soft_margin_loss
    """
_OTHERS = """
    cosine_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
    triplet_margin_loss triplet_margin_with_distance_loss gaussian_nll_loss ctc_loss
    """

WATCHED: Mapping[Any, str] = {
    getattr(F, name): kind
    for kind, names in (("classes", _CLASSES), ("elements", _ELEMENTS), ("others", _OTHERS))
    for name in names.split()
    if hasattr(F, name)
}
"""By what a loss counts: by classes that are not ignored, by elements, or by what it gives without a reduction."""

_SUMS_WEIGHTS = tuple(getattr(F, name) for name in ("mse_loss", "l1_loss", "huber_loss"))
"""Their mean with weights is divided by the sum of the weights; that of the others by the number of elements."""

Count = Tensor | int


@dataclass(frozen=True, eq=False)
class LossCall:
    """One call of a loss.

    Args:
        named: the arguments by name.
        basis: the tensor that says what counts, to be found in other micro-batches: the labels, or weights.
        ignored: the class that does not count.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    named: Mapping[str, Any]
    reduction: str
    basis: Tensor | None
    ignored: int | None

    @classmethod
    def of(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LossCall:
        bound = _signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        named = bound.arguments
        reduction: str = named["reduction"]
        if named.get("size_average") is not None or named.get("reduce") is not None:
            reduction = _legacy(named.get("size_average"), named.get("reduce"))
        basis = named.get("target", named.get("targets"))
        if func in _SUMS_WEIGHTS and named.get("weight") is not None:
            basis = named["weight"]
        return cls(func, args, kwargs, named, reduction, basis, named.get("ignore_index"))

    @property
    def name(self) -> str:
        return str(getattr(self.func, "__name__", self.func))

    @property
    def is_mean(self) -> bool:
        return self.reduction in ("mean", "batchmean")

    @property
    def has_classes(self) -> bool:
        """Whether the basis holds class indices."""
        return WATCHED[self.func] == "classes" and self.basis is not None and not self.basis.is_floating_point()

    @property
    def has_weights(self) -> bool:
        return self.named.get("weight") is not None and (self.has_classes or self.func in _SUMS_WEIGHTS)

    def given(self) -> Tensor:
        """The loss as it was called."""
        loss: Tensor = self.func(*self.args, **self.kwargs)
        return loss

    def summed(self) -> Tensor:
        """The same loss as a sum."""
        return self._reduced("sum")

    def count(self) -> Count:
        """What the mean divides by, here."""
        if self.has_classes or self.has_weights:
            assert self.basis is not None
            return self.count_in(self.basis, self.ignored)
        first: Tensor = next(iter(self.named.values()))
        numel: int
        if self.reduction == "batchmean":
            return first.shape[0] if first.dim() else 1
        if WATCHED[self.func] == "elements":
            assert self.basis is not None
            numel = torch.broadcast_shapes(first.shape, self.basis.shape).numel()
            return numel
        if WATCHED[self.func] == "classes":  # probabilities of classes
            assert self.basis is not None
            return self.basis.numel() // self._num_classes()
        with torch.no_grad():
            return self._reduced("none").numel()

    def count_in(self, basis: Tensor, ignored: int | None) -> Count:
        """What the mean divides by where ``basis`` is the labels, or the weights: all, if they have no values."""
        if not has_values(basis):
            return basis.numel()
        weight: Tensor | None = self.named.get("weight")
        if not self.has_classes:
            return basis.detach().sum(dtype=torch.float64)
        counted = torch.ones_like(basis, dtype=torch.bool) if ignored is None else basis != ignored
        if weight is None:
            return counted.sum()
        of_target = weight.detach().double()[torch.where(counted, basis, 0).to(weight.device)]
        return torch.where(counted.to(weight.device), of_target, 0.0).sum()

    @property
    def ignores_beyond(self) -> bool:
        """Whether the ignored class is the one behind the last, as of positions that are out of the text."""
        return self.has_classes and self.ignored == self._num_classes()

    def ignored_in(self, here: Tensors, there: Tensors) -> int | None:
        """The ignored class in another micro-batch: where it is the number of classes, that may be a length."""
        if self.ignored is None or not self.ignores_beyond:
            return self.ignored
        size = Size.named(self.ignored, here)
        return size.of(there) if isinstance(size, Size) else size

    def _num_classes(self) -> int:
        if "linear_weight" in self.named:
            return int(self.named["linear_weight"].shape[0])
        logits: Tensor = self.named["input"]
        return logits.shape[1] if logits.dim() > 1 else logits.shape[0]

    def _reduced(self, reduction: str) -> Tensor:
        rest = {name: value for name, value in self.named.items() if name not in _REDUCTION}
        first = [rest.pop(name) for name in list(rest)[:2]]  # as vocabulary-parallel logits expect them
        loss: Tensor = self.func(*first, **rest, reduction=reduction)
        return loss


_REDUCTION = ("size_average", "reduce", "reduction")


@cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _legacy(size_average: bool | None, reduce: bool | None) -> str:
    """The names of reductions that torch had before."""
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"
