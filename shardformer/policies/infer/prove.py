"""The proof of a policy: its ranks, as threads, train as the plain model does, or it is not used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardformer.comm.params import param_specs
from shardformer.comm.rehearsal import Rehearsal
from shardformer.context import ParallelContext
from shardformer.sharding.config import ShardConfig
from shardformer.sharding.policy import Policy
from shardformer.sharding.sharder import Sharding

RELATIVE = 1e-4
"""Of the largest number of a gradient. Some models cast to fp32 inside; what is wrong is larger by far."""
ROUNDING = 64
"""Times the precision and the largest gradient of all: what is zero but for rounding, as a key's bias."""

Run = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Truth:
    """The plain model, what it gives, and the gradients of the mean square of that."""

    model: nn.Module
    run: Run
    loss: float
    gradients: dict[str, Tensor | None]

    @staticmethod
    def of(model: nn.Module, run: Run) -> Truth:
        """Runs ``model`` forward and backward."""
        model.zero_grad()
        loss = loss_of(run(model))
        loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return Truth(model, run, loss.item(), gradients)

    def check_finite(self) -> None:
        """Raises ValueError where nothing could be told from it: in fp64 some mask with what fp32 cannot hold."""
        of = [("the output", torch.tensor(self.loss)), *(("a gradient", g) for g in self.gradients.values())]
        for what, numbers in of:
            if numbers is not None and not numbers.isfinite().all():
                raise ValueError(f"{what} is not finite, in {next(self.model.parameters()).dtype}")


def fault(truth: Truth, policy: type[Policy], ranks: int, **options: bool) -> str | None:
    """What is wrong with ``policy`` over ``ranks`` tensor ranks; None when nobody could tell."""

    def train(context: ParallelContext) -> str | None:
        model = copy.deepcopy(truth.model)
        Sharding(model, _config(context, options), lambda _: (policy(), "to be proven"), fresh=True).shard()
        loss = loss_of(truth.run(model))
        loss.backward()
        return _difference(truth, model, loss.item(), context.tensor.rank)

    try:
        return next((said for said in Rehearsal(ranks).run(train) if said), None)
    except Exception as error:  # a forward that the cut breaks can raise anything
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _config(context: ParallelContext, options: Mapping[str, Any]) -> ShardConfig:
    return ShardConfig(context=context, **options)


def loss_of(output: Any, *, alike: bool = False) -> Tensor:
    """The mean squares of all that a model gives, as one number; ``alike`` weighs the samples of a batch alike."""
    floats = [x for x in tree_leaves(_fields(output)) if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([_weighted(x, x.shape[alike:]).double() for x in floats]).sum()


def _weighted(x: Tensor, shape: torch.Size) -> Tensor:
    """A number of which no two places of the last dims, of that shape, have the same gradient."""
    weights = torch.linspace(0.5, 1.5, shape.numel(), dtype=x.dtype, device=x.device).view(shape)
    return (x * weights).square().mean()


def _fields(output: Any) -> Any:
    if is_dataclass(output) and not hasattr(output, "keys"):
        return vars(output)
    return dict(output) if hasattr(output, "keys") else output


def _difference(truth: Truth, model: nn.Module, loss: float, rank: int) -> str | None:
    if not abs(loss - truth.loss) <= RELATIVE * abs(truth.loss):
        return f"the output differs: {loss:.6g} instead of {truth.loss:.6g}"
    specs = param_specs(model)
    floor = ROUNDING * max((_rounding(g) for g in truth.gradients.values() if g is not None and g.numel()), default=0.0)
    for name, param in model.named_parameters():
        expected = truth.gradients[name]
        if (expected is None) != (param.grad is None):
            return f"{name} has {'a' if expected is None else 'no'} gradient"
        if expected is None or param.grad is None or not expected.numel():
            continue
        own, allowed = specs[name].slice(expected, rank), max(RELATIVE * expected.abs().max().item(), floor)
        if own.shape != param.grad.shape or not (own - param.grad).abs().max().item() <= allowed:
            return f"the gradient of {name} differs"
    return None


def _rounding(gradient: Tensor) -> float:
    """The smallest step that its precision takes beside the largest number of a gradient."""
    return torch.finfo(gradient.dtype).eps * gradient.abs().max().item()
