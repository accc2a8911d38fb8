"""The proof of a policy: its ranks, as threads, train as the plain model does, or it is not used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardformer.config import ShardConfig
from shardformer.errors import ShardFormerError
from shardformer.layout.split import Coords
from shardformer.layout.state import specs_of, state_of
from shardformer.mesh.context import ParallelContext
from shardformer.policies.infer.blame import said_by
from shardformer.policies.policy import Policy
from shardformer.sharding.apply import Sharding
from shardformer.testing.threads import run_as_threads
from shardformer.testing.zoo.inputs import Forward

RELATIVE = 1e-4
"""Of the largest number of a gradient. Some models cast to fp32 inside; what is wrong is larger by far."""
ROUNDING = 64
"""Times the precision and the largest gradient of all: what is zero but for rounding, as a key's bias."""

INSIDE = torch.finfo(torch.float32).eps / 2
"""What one operation rounds away where a model casts to fp32 inside, of the numbers that it is given."""
OPERATIONS = 16
"""Of which the roundings may add up."""


@dataclass(frozen=True)
class Reference:
    """The plain model, what it gives, and the gradients of the mean square of that.

    Args:
        also: the same of further batches, with inputs that the first one lacks (images).
    """

    model: nn.Module
    run: Forward
    loss: float
    gradients: dict[str, Tensor | None]
    also: tuple[Reference, ...] = ()

    @cached_property
    def allowed(self) -> dict[str, float]:
        """By how much each gradient may differ."""
        return allowed(self.gradients)

    @cached_property
    def rounding(self) -> dict[str, float]:
        """By how much gradients may differ where the model computes in fp32 inside.

        Measured, as it depends on what cancels out: the gradient of one number, a scale, is the sum of all tokens' and
        may be much smaller than these. So each weight is moved by what fp32 rounds away, and the gradients compared.
        """
        moved = copied(self.model)
        draws = torch.Generator().manual_seed(0)
        for p in moved.parameters():
            signs = torch.randint(0, 2, p.shape, generator=draws).to(p) * 2 - 1
            p.data = p.detach() * (1 + INSIDE * signs)  # not in place: its values are shared
        found = Reference.of(moved, self.run).gradients
        both = {name: (g, found[name]) for name, g in self.gradients.items() if g is not None and g.numel()}
        measured = {n: OPERATIONS * (a - b).abs().max().item() for n, (a, b) in both.items() if b is not None}
        most = ROUNDING * INSIDE * max((a.abs().max().item() for a, _ in both.values()), default=0.0)
        return {name: min(x, most) for name, x in measured.items()}  # a router that chose another expert is no rounding

    def is_near(self, name: str, difference: float) -> bool:
        """Whether a gradient of this name that differs by so much is the same but for rounding."""
        return difference <= self.allowed[name] or difference <= self.rounding.get(name, 0.0)

    @staticmethod
    def of(model: nn.Module, run: Forward) -> Reference:
        """Runs ``model`` forward and backward."""
        model.zero_grad()
        with torch.enable_grad():  # whoever infers may be about to compute without
            loss = loss_of(run(model))
            loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return Reference(model, run, loss.item(), gradients)

    def check_finite(self) -> None:
        """Raises ValueError where nothing could be told from it: in fp64 some mask with what fp32 cannot hold."""
        of = [("the output", torch.tensor(self.loss)), *(("a gradient", g) for g in self.gradients.values())]
        for what, numbers in of:
            if numbers is not None and not numbers.isfinite().all():
                raise ValueError(f"{what} is not finite, in {next(self.model.parameters()).dtype}")


def allowed(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    """By how much gradients may differ from these."""
    given = {name: g for name, g in gradients.items() if g is not None and g.numel()}
    largest = {name: g.abs().max().item() for name, g in given.items()}
    floor = ROUNDING * max((torch.finfo(g.dtype).eps * largest[name] for name, g in given.items()), default=0.0)
    return {name: max(RELATIVE * x, floor) for name, x in largest.items()}


def mismatch(reference: Reference, policy: type[Policy], ranks: int, **options: bool) -> str | None:
    """What is wrong with ``policy`` over ``ranks`` tensor ranks; None when nobody could tell."""

    def shard(model: nn.Module, context: ParallelContext) -> None:
        config = ShardConfig(context=context, **options)  # type: ignore[arg-type]  # of switches alone
        Sharding(model, config, lambda *_: (policy(), "to be proven"), fresh=True).shard()

    return difference(reference, shard, tensor=ranks)


def difference(reference: Reference, shard: Callable[[nn.Module, ParallelContext], None], **sizes: int) -> str | None:
    """By what a model that ``shard`` shards, over ranks that are threads, can be told; None when nobody could tell."""

    def train(context: ParallelContext) -> None:
        model = copied(reference.model)
        shard(model, context)
        for truth in (reference, *reference.also):
            model.zero_grad()
            loss = loss_of(truth.run(model))
            if not abs(loss.item() - truth.loss) <= RELATIVE * abs(truth.loss):
                raise Differs(f"the output differs: {loss.item():.6g} instead of {truth.loss:.6g}")
            loss.backward()
            compare_gradients(truth, model, state_of(model).coords)

    try:
        run_as_threads(train, **sizes, in_turn=True)
        return None
    except Differs as difference:
        return str(difference)
    except ShardFormerError as error:
        return error.what
    except Exception as error:  # a forward that the cut breaks can raise anything
        return f"cut so, it does not run ({said_by(error)})"


class Differs(Exception):
    """What is not as in the plain model; a rank raises it, so that the others wait for it no longer."""


def copied(model: nn.Module) -> nn.Module:
    """A copy whose parameters share their values with the model's, and have gradients of their own."""
    own: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters() if type(p) is nn.Parameter
    }
    return copy.deepcopy(model, own)


def loss_of(output: Any, *, alike: bool = False) -> Tensor:
    """The mean squares of all that a model gives, as one number; ``alike`` weighs the samples of a batch alike."""
    floats = [x for x in tree_leaves(fields_of(output)) if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([weighted(x, x.shape[alike:]).double() for x in floats]).sum()


def weighted(x: Tensor, shape: torch.Size) -> Tensor:
    """A number of which no two places of the last dims, of that shape, have the same gradient."""
    weights = torch.linspace(0.5, 1.5, shape.numel(), dtype=x.dtype, device=x.device).view(shape)
    return (x * weights).square().mean()


def fields_of(output: Any) -> Any:
    if is_dataclass(output) and not hasattr(output, "keys"):
        return vars(output)
    return dict(output) if hasattr(output, "keys") else output


def compare_gradients(reference: Reference, model: nn.Module, coords: Coords) -> None:
    """Raises Differs where the gradients of a rank's model are not its parts of the reference's."""
    specs = specs_of(model)
    for name, param in model.named_parameters():
        expected = reference.gradients[name]
        if (expected is None) != (param.grad is None):
            raise Differs(f"{name} has {'a' if expected is None else 'no'} gradient")
        if expected is None or param.grad is None or not expected.numel():
            continue
        own = specs[name].slice(expected, coords)
        if own.shape != param.grad.shape or not reference.is_near(name, (own - param.grad).abs().max().item()):
            raise Differs(f"the gradient of {name} differs")
