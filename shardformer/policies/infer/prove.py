"""The proof of a policy: its ranks, as threads, train as the plain model does, or it is not used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardformer.comm.params import param_specs
from shardformer.comm.rehearsal import Rehearsal
from shardformer.context import ParallelContext
from shardformer.policies.config import ShardConfig
from shardformer.policies.policy import Policy

RELATIVE = 1e-4
"""Of the largest number of a gradient. Some models cast to fp32 inside; what is wrong is larger by far."""

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
        loss = _loss(run(model))
        loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return Truth(model, run, loss.item(), gradients)


def fault(truth: Truth, policy: type[Policy], ranks: int, **options: bool) -> str | None:
    """What is wrong with ``policy`` over ``ranks`` tensor ranks; None when nobody could tell."""
    from shardformer.policies.sharder import shard_model

    def train(context: ParallelContext) -> str | None:
        model = copy.deepcopy(truth.model)
        shard_model(model, policy, config=_config(context, options))
        loss = _loss(truth.run(model))
        loss.backward()
        return _difference(truth, model, loss.item(), context.tensor.rank)

    try:
        return next((said for said in Rehearsal(ranks).run(train) if said), None)
    except Exception as error:  # a forward that the cut breaks can raise anything
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _config(context: ParallelContext, options: Mapping[str, Any]) -> ShardConfig:
    return ShardConfig(context=context, **options)


def _loss(output: Any) -> Tensor:
    floats = [x for x in tree_leaves(_fields(output)) if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([_weighted(x).double() for x in floats]).sum()


def _weighted(x: Tensor) -> Tensor:
    """A number of which no two places have the same gradient."""
    weights = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)
    return (x * weights).square().mean()


def _fields(output: Any) -> Any:
    return dict(output) if hasattr(output, "keys") else output


def _difference(truth: Truth, model: nn.Module, loss: float, rank: int) -> str | None:
    if not abs(loss - truth.loss) <= RELATIVE * abs(truth.loss):
        return f"the output differs: {loss:.6g} instead of {truth.loss:.6g}"
    specs = param_specs(model)
    for name, param in model.named_parameters():
        expected = truth.gradients[name]
        if (expected is None) != (param.grad is None):
            return f"{name} has {'a' if expected is None else 'no'} gradient"
        if expected is None or param.grad is None:
            continue
        own, scale = specs[name].slice(expected, rank), expected.abs().max().item()
        if own.shape != param.grad.shape or not (own - param.grad).abs().max().item() <= RELATIVE * max(scale, 1e-12):
            return f"the gradient of {name} differs"
    return None
