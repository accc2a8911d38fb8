"""The loss of a batch that runs as micro-batches: equal to the loss of the whole batch.

A mean over tokens is no mean of the micro-batches' means where they count differently many: some labels are padding,
the last micro-batch is short. The model calls its losses itself, so while its head runs, ``LossWeights`` stands before
the mean losses of ``torch.nn.functional``, and the i-th of them becomes

    mean_m * n_mi / N_i             n_mi = what it counts in micro-batch m,   N_i = sum of n_mi over all micro-batches

so that the micro-batches' losses add up to the whole batch's, for every sum of such means with fixed factors. N_i is
needed before the other micro-batches' forwards, as 1F1B runs a backward early: the first forward shows how the i-th
loss's target comes from the micro-batch's own tensors (``targets``), and the same is done to the others'.

Nothing is believed: every micro-batch's count must be the one that was predicted, and its loss a sum of what was
watched with the same factors, else a ConfigError tells to give ``loss_weight``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardformer.comm.collectives import all_reduce
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.mesh.parallel_context import Axis
from shardformer.pipeline.label_tracing import LabelForm, LabelTracer, TensorSize, evaluate, find_label_forms
from shardformer.pipeline.micro_batches import Tensors, named_tensors_in, rebuild_container
from shardformer.torch_compat import has_data, to_list

_CLASSES = "cross_entropy nll_loss linear_cross_entropy"
_ELEMENTS = """
    binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss huber_loss kl_div
    hinge_embedding_loss poisson_nll_loss soft_margin_loss
    """
_OTHERS = """
    cosine_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
    triplet_margin_loss triplet_margin_with_distance_loss gaussian_nll_loss ctc_loss
    """

RECORDED_LOSSES: Mapping[Any, str] = {
    getattr(F, name): kind
    for kind, names in (("classes", _CLASSES), ("elements", _ELEMENTS), ("others", _OTHERS))
    for name in names.split()
    if hasattr(F, name)
}
"""By what a loss counts: by classes that are not ignored, by elements, or by what it gives without a reduction."""

_SUMS_WEIGHTS = tuple(getattr(F, name) for name in ("mse_loss", "l1_loss", "huber_loss"))
"""Their mean with weights is divided by the sum of the weights; that of the others by the number of elements."""

LossCount = Tensor | int


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
        return RECORDED_LOSSES[self.func] == "classes" and self.basis is not None and not self.basis.is_floating_point()

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

    def count(self) -> LossCount:
        """What the mean divides by, here."""
        if self.has_classes or self.has_weights:
            assert self.basis is not None
            return self.count_in(self.basis, self.ignored)
        first: Tensor = next(iter(self.named.values()))
        numel: int
        if self.reduction == "batchmean":
            return first.shape[0] if first.dim() else 1
        if RECORDED_LOSSES[self.func] == "elements":
            assert self.basis is not None
            numel = torch.broadcast_shapes(first.shape, self.basis.shape).numel()
            return numel
        if RECORDED_LOSSES[self.func] == "classes":  # probabilities of classes
            assert self.basis is not None
            return self.basis.numel() // self._num_classes()
        with torch.no_grad():
            return self._reduced("none").numel()

    def count_in(self, basis: Tensor, ignored: int | None) -> LossCount:
        """What the mean divides by where ``basis`` is the labels, or the weights: all, if they have no values."""
        if not has_data(basis):
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
        size = TensorSize.named(self.ignored, here)
        return size.of(there) if isinstance(size, TensorSize) else size

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


# m micro-batch, i call of a loss, n counts, N their sum

LossWeight = Callable[[Mapping[str, Any]], float]
Problem = Callable[[], ConfigError]


@dataclass
class _LossTotals:
    """The i-th call of a loss in every micro-batch: what it counts, of a mean as predicted."""

    name: str
    is_mean: bool
    n_m: list[float] = field(default_factory=list)
    total: float = 0.0  # of all micro-batches, and of those of other data ranks where these are averaged over
    seen: dict[int, LossCount] = field(default_factory=dict)

    def is_like(self, call: LossCall) -> bool:
        return (self.name, self.is_mean) == (call.name, call.is_mean)


@dataclass
class _Forward:
    """What the losses of one micro-batch gave. Tensors with a history stay only until ``of``."""

    parts: list[Tensor] = field(default_factory=list)  # the model has copies, which it may write to
    reductions: list[str] = field(default_factory=list)


class LossWeights:
    """Makes the mean losses of micro-batches their parts of the whole batch's.

    Around the head of each micro-batch's forward: ``start(m)`` and ``stop()``. Then ``of(m, loss)`` gives what to call
    backward on, and ``finish()`` comes before the optimizer's step. A single
    micro-batch is the whole batch, and its loss stays as it is.

    Args:
        micro_batches: all of them, as the model is given them; their shapes may differ.
        sizes: how many samples each has.
        loss_weight: micro-batch -> the number of what counts in it. The loss is then its share of their sum, and no
            loss is watched.
        found: what earlier steps found out of the model's losses. It is added to.
        over: (the data axis, the device to communicate from), where the whole batch is that of all data ranks. Parts
            are then this many times as large as there are ranks, since their gradients are averaged. Communicates one
            number for each loss, before the first backward.
        counts: whether ``counted`` is wanted of a single micro-batch.

    The host waits for the device at the first forward and in ``finish`` alone; on the CPU all is checked at once.
    """

    def __init__(
        self,
        micro_batches: Sequence[Mapping[str, Any]],
        sizes: Sequence[int],
        loss_weight: LossWeight | None = None,
        found: dict[int, LabelForm] | None = None,
        over: tuple[Axis, torch.device] | None = None,
        *,
        counts: bool = False,
    ) -> None:
        assert len(micro_batches) == len(sizes), (len(micro_batches), len(sizes))
        self._micro_batches, self._sizes = micro_batches, sizes
        self._found = {} if found is None else found
        self._over = over if over is not None and over[0].size > 1 else None
        self._num_ranks = 1 if self._over is None else self._over[0].size
        self._is_whole = len(micro_batches) == 1 and self._over is None
        self._counts, self._weight = counts, 0.0
        self._shares = None if loss_weight is None else self._shares_by(loss_weight)
        self._losses: list[_LossTotals] = []
        self._first: int | None = None
        self._forwards: dict[int, _Forward] = {}
        self._factors: dict[int, Tensor] = {}  # of each micro-batch's losses in its loss, all in one tensor
        self._later: list[tuple[Tensor, Problem]] = []
        self._watch: _LossRecorder | None = None
        self._evaluates = not torch.is_grad_enabled()
        self.is_explained = self._shares is None
        """Whether all losses so far are means over classes that the batch holds: each sample has its own."""

    def start(self, index: int) -> None:
        """From here on losses are those of micro-batch ``index``, until ``stop()``, which must follow in any case."""
        self.stop()
        if self._shares is not None or (self._is_whole and not self._counts):
            return
        if self._first is None:
            self._first = index
        if index == self._first:
            self._losses = []
        self._forwards[index] = _Forward()
        needs_labels = index == self._first and not self._is_whole
        trace = LabelTracer(dict(named_tensors_in(self._micro_batches[index]))) if needs_labels else None
        self._watch = _LossRecorder(self, index, trace)
        self._watch.__enter__()

    def stop(self) -> None:
        """Ends what ``start`` began; does nothing where nothing began."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)

    def of(self, index: int, loss: Tensor) -> Tensor:
        """The micro-batch's part of the whole batch's loss: the sum of all parts is that loss.

        Raises ConfigError where the loss is not made of what was watched, as far as its gradient tells.
        """
        if self._shares is not None:
            share = self._shares[index]
            return loss * share if share else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        if self._is_whole:
            return loss
        forward = self._forwards.pop(index, _Forward())
        if not forward.parts:
            unreduced = " but with reduction='none'" if "none" in forward.reductions else ""
            raise no_sum_of_means(
                f"The model called no loss of torch.nn.functional{unreduced}, and it gave {loss.detach()}"
            )
        if loss.numel() != 1:
            raise no_sum_of_means(f"The loss of micro-batch {index} has the shape {tuple(loss.shape)}")
        if len(forward.parts) != len(self._losses):
            raise no_sum_of_means(
                f"Micro-batch {index} called {len(forward.parts)} losses, micro-batch {self._first} {len(self._losses)}"
            )
        self._check_sum(index, loss, forward)
        return loss.detach() if self._evaluates else loss

    def finish(self) -> None:
        """After all forwards: raises ConfigError for what was not right in one of them."""
        checks, self._later = self._later, []
        if checks:
            good = to_list(torch.stack([ok for ok, _ in checks]))
            for (_, problem), ok in zip(checks, good, strict=True):
                if not ok:
                    raise problem()
        self._check_own_means()

    @property
    def counted(self) -> float | None:
        """What the whole batch's loss is a mean over; None where it is a sum, or of means that count differently."""
        if self._shares is not None:
            return self._weight
        return found.pop() if len(found := {x.total if x.is_mean else None for x in self._losses}) == 1 else None

    @property
    def factors(self) -> Tensor:
        """A number of the factors of the means in the loss, which are the same on all data ranks."""
        slopes = next(iter(self._factors.values()), torch.zeros(0, dtype=torch.float64))
        return (slopes * torch.arange(1, len(slopes) + 1, device=slopes.device)).sum()

    def call(self, index: int, trace: LabelTracer | None, call: LossCall) -> Tensor:
        """A watched loss of micro-batch ``index``: its part of the whole; a sum as it is."""
        forward = self._forwards[index]
        forward.reductions.append(call.reduction)
        if self._is_whole:
            self._losses.append(
                _LossTotals(call.name, call.is_mean, total=float(call.count()) if call.is_mean else 0.0)
            )
        if self._is_whole or call.reduction == "none":
            return call.given()
        number = len(forward.parts)
        if index == self._first:
            self._losses.append(_LossTotals(call.name, call.is_mean))
            if call.is_mean:
                self._total(self._losses[-1], partial(self._predict, index, trace, call, number))
            else:
                self.is_explained = False
        elif number >= len(self._losses) or not self._losses[number].is_like(call):
            raise no_sum_of_means(f"{call.name} was called as loss {number} of micro-batch {index} alone")
        elif call.is_mean:
            self._verify(index, number, call)
        part = self._part(self._losses[number], index, call)
        if self._evaluates:
            part = part.detach().requires_grad_()
        forward.parts.append(part)
        with self.following(index):
            return part.clone()

    def following(self, index: int) -> AbstractContextManager[Any]:
        """Around what is done to the losses: in an evaluation, too, gradients tell how the whole depends on them."""
        return torch.enable_grad() if self._evaluates and self._forwards[index].parts else nullcontext()

    def _part(self, loss: _LossTotals, index: int, call: LossCall) -> Tensor:
        if not call.is_mean:
            loss.seen[index] = call.count()
            return call.given() * self._num_ranks if self._over is not None else call.given()
        n, total = loss.n_m[index], loss.total
        if not total:  # the whole batch's is not a number either
            return call.given()
        return call.given() * (n * self._num_ranks / total) if n else call.summed() * 0.0

    def _total(self, loss: _LossTotals, counts: Callable[[], list[float]]) -> None:
        """Notes what a loss counts here, and in the whole batch. No rank waits for one on which that cannot be told."""
        try:
            loss.n_m = counts()
        except ShardFormerError:
            self._summed(math.nan)
            raise
        loss.total = self._summed(sum(loss.n_m))

    def _summed(self, here: float) -> float:
        """A number of this rank's micro-batches, of all ranks'."""
        if self._over is None:
            return here
        axis, device = self._over
        summed = all_reduce(torch.tensor(here, dtype=torch.float64, device=device), axis, purpose="loss")
        total = float(summed) if has_data(summed) else here * axis.size
        if math.isnan(here) or not math.isnan(total):
            return total
        raise InputError(
            "What counts in the loss could not be told on another data rank", remedy="Read the error of that rank"
        )

    def _shares_by(self, loss_weight: LossWeight) -> list[float]:
        weights = [float(loss_weight(m)) for m in self._micro_batches]
        total = self._weight = self._summed(sum(weights))
        if not total > 0 or min(weights) < 0:
            raise ConfigError(
                f"loss_weight gave {weights} for the micro-batches",
                rule="It is the number of what counts in a micro-batch, and something counts",
                remedy="Count the labels that are not ignored, such as int((micro_batch['labels'] != -100).sum())",
            )
        return [weight * self._num_ranks / total for weight in weights]

    def _predict(self, first: int, trace: LabelTracer | None, call: LossCall, number: int) -> list[float]:
        """What the call counts in each micro-batch."""
        here = call.count()
        tensors = [dict(named_tensors_in(m)) for m in self._micro_batches]
        n_m = self._by_basis(first, trace, call, number, tensors)
        self.is_explained = self.is_explained and n_m is not None and call.has_classes
        if n_m is None:
            n_m = self._by_sample(first, call, here)
        n_m[first] = here
        if any(isinstance(n, Tensor) for n in n_m):
            device = next(n.device for n in n_m if isinstance(n, Tensor))
            n_m = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=device) for n in n_m]).tolist()
        return [float(n) for n in n_m]

    def _by_basis(
        self, first: int, trace: LabelTracer | None, call: LossCall, number: int, tensors: list[dict[Any, Tensor]]
    ) -> list[Any] | None:
        """Counts in what the others have for the labels here; None where the labels came from nowhere."""
        basis, here = call.basis, tensors[first]
        if basis is None:
            return None
        n, counts = call.count(), call.has_classes or call.has_weights

        def count(m: int, there: Tensor) -> LossCount:
            if counts:
                return call.count_in(there.to(basis.device), call.ignored_in(here, tensors[m]))
            assert isinstance(n, int)
            return n * there.numel() // max(basis.numel(), 1)

        expression = None if trace is None else trace.expression_of(basis)
        if expression is not None:
            try:
                again = [evaluate(expression, of_m) for of_m in tensors]
            except (RuntimeError, IndexError, TypeError, ValueError, KeyError):
                again = []  # a length of its own in a micro-batch of another length
            if again and _is_alike(again[first], basis):
                return [count(m, there) for m, there in enumerate(again)]
        if not call.has_classes:
            return None
        ignored = -100 if call.ignored is None else call.ignored
        used = [form for i, form in self._found.items() if i < number]
        forms = find_label_forms(basis, here, ignored, call.ignores_beyond, used)
        if not forms:
            return None
        form = self._found[number] if self._found.get(number) in forms else forms[0]
        self._found[number] = form
        there_m = [call.ignored_in(here, of_m) for of_m in tensors]
        return [count(m, form(tensors[m], ignored if i is None else i)) for m, i in enumerate(there_m)]

    def _by_sample(self, first: int, call: LossCall, here: LossCount) -> list[Any]:
        """Counts in proportion to the samples, where nothing is ignored."""
        size = self._sizes[first]
        full = call.basis.numel() if call.has_classes and call.basis is not None else None
        if call.has_weights or (full is not None and int(here) != full) or int(here) % size:
            shape = None if call.basis is None else tuple(call.basis.shape)
            raise no_sum_of_means(
                f"{call.name} counts {float(here):g} in {size} samples of micro-batch {first}, by labels of shape "
                f"{shape} that the micro-batch does not hold"
            )
        return [int(here) // size * other for other in self._sizes]

    def _verify(self, index: int, number: int, call: LossCall) -> None:
        expected, seen = self._losses[number].n_m[index], torch.as_tensor(call.count())
        name = call.name  # what is kept for later keeps no logits
        self._expect(
            (seen - expected).abs() <= 1e-6 * abs(expected),
            lambda: no_sum_of_means(
                f"{name}, loss {number} of the model, counts {float(seen):g} in micro-batch {index}, and "
                f"{expected:g} were expected"
            ),
        )

    def _check_sum(self, index: int, loss: Tensor, forward: _Forward) -> None:
        """The loss is the sum of its parts times their slopes, and the slopes are those of the first micro-batch."""
        if loss.requires_grad:
            slopes = self._slopes(loss, forward)
        elif self._evaluates:  # it was detached, or is made of other things than what was watched
            slopes = loss.new_ones(len(forward.parts), dtype=torch.float64)
        else:  # nothing trains
            return
        values = torch.stack([part.detach().double() for part in forward.parts]) * slopes
        dtypes = [loss.dtype, *(part.dtype for part in forward.parts)]
        bound = 8 * max(torch.finfo(dtype).eps for dtype in dtypes)
        whole, of_parts = loss.detach().double(), values.sum()
        scale = whole.abs() + values.abs().sum()
        self._expect(  # a loss that is not a number passes, as it would without us
            ~((whole - of_parts).abs() > bound * scale),
            lambda: no_sum_of_means(
                f"The loss of micro-batch {index} is {float(whole):.6g}, and the means in it add up to "
                f"{float(of_parts):.6g}: it holds another term, or is no sum of them"
            ),
        )
        self._factors[index] = slopes
        before = self._factors[next(iter(self._factors))]
        self._expect(
            ~((slopes - before).abs() > bound * before.abs()).any(),
            lambda: no_sum_of_means(
                f"The means in the loss have the factors {slopes.tolist()} in micro-batch {index} and "
                f"{before.tolist()} in another"
            ),
        )

    @staticmethod
    def _slopes(loss: Tensor, forward: _Forward) -> Tensor:
        """By what each part is multiplied in the loss."""
        with_grad = [i for i, part in enumerate(forward.parts) if part.requires_grad]
        grads = torch.autograd.grad(loss, [forward.parts[i] for i in with_grad], retain_graph=True, allow_unused=True)
        given = dict(zip(with_grad, grads, strict=True))
        zero = loss.new_zeros((), dtype=torch.float64)
        return torch.stack([zero if (g := given.get(i)) is None else g.double() for i in range(len(forward.parts))])

    def _check_own_means(self) -> None:
        """A sum that the model divides by what counts in the micro-batch is a mean by another name."""
        for number, loss in enumerate(self._losses):
            n_m = {m: float(n) for m, n in loss.seen.items()}
            total = self._summed(sum(n_m.values())) if n_m else 0.0
            for m, n in n_m.items():
                slope = float(self._factors[m][number]) if m in self._factors else 0.0
                if n < total and abs(slope * n - 1) < 1e-6:
                    raise no_sum_of_means(
                        f"The model divides the sum of {loss.name} by {n:g}, what micro-batch {m} counts"
                    )

    def _expect(self, ok: Tensor, problem: Problem) -> None:
        """Raises the problem now where that costs nothing, and in ``finish`` where the device would be waited for."""
        if ok.device.type != "cpu":
            self._later.append((ok, problem))
        elif not to_list(ok):
            raise problem()


class _LossRecorder(TorchFunctionMode):
    """Sees every function of torch while a head runs."""

    def __init__(self, weights: LossWeights, index: int, trace: LabelTracer | None) -> None:
        super().__init__()
        self._weights, self._index, self._trace = weights, index, trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RECORDED_LOSSES:
            return self._weights.call(self._index, self._trace, LossCall.of(func, args, kwargs))
        with self._weights.following(self._index):
            out = func(*args, **kwargs)
        if self._trace is not None:
            self._trace.record(func, args, kwargs, out)
        return out


def _is_alike(x: Tensor, basis: Tensor) -> bool:
    return x.shape == basis.shape and bool(to_list((x.detach().to(basis) == basis.detach()).all()))


def no_sum_of_means(what: str) -> ConfigError:
    return ConfigError(
        what,
        rule="The loss of several micro-batches is that of the whole batch if it is a sum of mean losses of "
        "torch.nn.functional, with fixed factors, whose labels come from the micro-batch",
        remedy="Pass loss_weight=, a function micro_batch -> number of what counts in it: the loss is then the mean of "
        "the micro-batches' losses by these weights, with all terms in them, such as the balancing loss of routers or "
        "a penalty. Or use a loss that is a sum, or num_items_in_batch in the batch. Without micro-batches, "
        "average_loss_over='ranks' takes the mean of the data ranks' losses",
    )


IS_TRYING: ContextVar[bool] = ContextVar("shardformer_is_trying_a_loss", default=False)
RELATIVE, ABSOLUTE = 1e-3, 1e-6
"""How far losses may differ by rounding, in 32 bits."""


class Gathers(Exception):
    """Raised where a loss that is tried out gathers the samples of all data ranks."""


@torch.no_grad()
def compares_outputs(loss_fn: Callable[..., Any], output: Any, batch: Any, size: int, num_parts: int) -> bool:
    """Whether it is known that a loss compares samples, from the losses of two of them, on one rank alone.

    The loss of two samples is between their own if it is a mean over what counts in them, or their sum.

    Args:
        output, batch: of ``size`` samples.
        num_parts: with one, a loss that calls ``gather_over_data`` is right.
    """
    if size < 2:
        return False
    token = IS_TRYING.set(True)
    try:
        alone = [float(loss_fn(_rows(output, size, i, i + 1), _rows(batch, size, i, i + 1))) for i in (0, 1)]
        both = float(loss_fn(_rows(output, size, 0, 2), _rows(batch, size, 0, 2)))
    except Gathers:
        return num_parts > 1
    except Exception:  # a loss that cannot be cut is not judged
        return False
    finally:
        IS_TRYING.reset(token)
    if not all(map(math.isfinite, (*alone, both))):
        return False
    room = ABSOLUTE + RELATIVE * max(abs(x) for x in (*alone, both))
    is_mean = min(alone) - room <= both <= max(alone) + room
    return not is_mean and abs(both - sum(alone)) > room


def _rows(value: Any, size: int, begin: int, end: int) -> Any:
    """Some samples out of tensors that have a row for each."""
    if isinstance(value, Tensor):
        return value[begin:end].clone() if value.dim() and value.shape[0] == size else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _rows(getattr(value, f.name), size, begin, end) for f in dataclasses.fields(value) if f.init}
        kind: Any = type(value)
        return kind(**fields)
    if isinstance(value, Mapping):
        return rebuild_container(value, {name: _rows(each, size, begin, end) for name, each in value.items()})
    if isinstance(value, (list, tuple)):
        return rebuild_container(value, [_rows(each, size, begin, end) for each in value])
    return value
