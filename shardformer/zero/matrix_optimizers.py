"""Whole parameters for optimizers that need them (Muon, Adafactor), found by trial: one rank owns each."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.comm.collectives import all_gather_objects
from shardformer.errors import ConfigError
from shardformer.gradients.buckets import GradientSlot
from shardformer.layout.tensor_relations import max_difference
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.torch_compat import has_step_hooks, state_when_made, without_fake_tensors

SHAPES, CUT, STEPS, BOUND = ((6, 4), (4, 6)), 10, 3, 1e-6


@without_fake_tensors()
def needs_full_matrices(optimizer: Optimizer) -> bool:
    """Whether the optimizer gives other numbers for a matrix than for two parts of it.

    A few steps are made with the settings of each of its groups, on small matrices: one whole and in two parts, two
    together and each alone. Raises ConfigError for one that cannot do these steps, or that gives other numbers for a
    matrix when there is another one.
    """
    return any([_needs_whole(optimizer, group) for group in optimizer.param_groups])


def _needs_whole(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    first, second = (torch.randn(s, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for s in SHAPES)
    try:
        together = _after(optimizer, group, [first, second])
        alone = _after(optimizer, group, [first]) + _after(optimizer, group, [second])
    except Exception as error:
        raise _probe_error(optimizer, f"it cannot ({type(error).__name__}: {error!s:.120})") from error
    if (difference := _difference(together, alone)) >= BOUND:
        raise _probe_error(optimizer, f"the numbers of one differ by {difference:.1e} when there is another")
    try:
        parts = _after(optimizer, group, [first.flatten()[:CUT], first.flatten()[CUT:]], like=[first])
    except Exception:  # some take matrices alone
        return True
    return _difference([torch.cat(parts)], [alone[0].flatten()]) >= BOUND


@without_fake_tensors()
def can_step_separately(optimizer: Optimizer) -> bool:
    """Whether it gives the same numbers where each parameter gets a step of its own, one after the other.

    One that counts its steps by itself, or in a group, does not; one with hooks would run them several times.
    """
    if has_step_hooks(optimizer):
        return False
    return all(_can_step_apart(optimizer, group) for group in optimizer.param_groups)


def _can_step_apart(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    values = [torch.randn(s, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for s in SHAPES]
    ends = []
    for is_apart in (False, True):
        params = [nn.Parameter(value.clone()) for value in values]
        tried = _copy_optimizer(optimizer, group, params)
        for step in range(STEPS):
            for param, value in zip(params, values, strict=True):
                param.grad = value.roll(step + 1, 0) / (step + 2)
            for turn in [[param] for param in params] if is_apart else [params]:
                tried.param_groups[0]["params"] = turn
                tried.step()
        ends.append([param.detach() for param in params])
    return _difference(*ends) == 0


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(map(max_difference, ours, theirs))


def _after(
    optimizer: Optimizer, group: dict[str, Any], values: Sequence[Tensor], like: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """The numbers after a few steps.

    Args:
        like: the matrices of which the values are parts, whose gradients they get.
    """
    params = [nn.Parameter(value.clone()) for value in values]
    tried = _copy_optimizer(optimizer, group, params)
    for step in range(STEPS):
        grads = [value.roll(step + 1, 0) / (step + 2) for value in like or values]
        if like is not None:
            grads = list(torch.cat([g.flatten() for g in grads]).split([value.numel() for value in values]))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        tried.step()
    return [param.detach() for param in params]


def _copy_optimizer(optimizer: Optimizer, group: dict[str, Any], params: list[nn.Parameter]) -> Any:
    """The same optimizer of other parameters, without state and hooks.

    A scheduler puts a ``step`` of its own before the class's, which would step the optimizer itself.
    """
    kind = type(optimizer)
    own = {k: v for k, v in optimizer.__dict__.items() if not (callable(v) and hasattr(kind, k))}
    hooks: dict[str, Any] = {name: OrderedDict() for name in own if name.startswith("_optimizer_step_")}
    tried: Any = object.__new__(kind)
    here = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in group.items()}  # a rate of learning, of a GPU
    if "capturable" in here:
        here["capturable"] = False  # which torch refuses on the CPU, and changes no number
    tried.__dict__.update(own, param_groups=[{**here, "params": params}], state=defaultdict(dict), **hooks)
    for param in params:
        if state := state_when_made(optimizer, group, param):
            tried.state[param] = state
    return tried


def state_after_step(optimizer: Optimizer, group: dict[str, Any], value: Tensor) -> dict[str, Any]:
    """What the optimizer keeps of a parameter after a step."""
    param = nn.Parameter(value.clone())
    param.grad = torch.ones_like(param)
    tried = _copy_optimizer(optimizer, group, [param])
    tried.step()
    return dict(tried.state[param])


def state_bytes(optimizer: Optimizer, group: dict[str, Any], param: Tensor, itemsize: int = 0) -> float:
    """What an optimizer keeps of one parameter: measured on a small one with as many dims.

    Args:
        itemsize: of the numbers that it updates; by default those of ``param``.
    """
    small = [min(n, 4) for n in param.shape]
    with without_fake_tensors():
        state = state_after_step(optimizer, group, torch.zeros(small))
    found = 0.0
    for x in (x for x in state.values() if isinstance(x, Tensor) and x.dim()):
        full = [n if have == part else have for n, part, have in zip(param.shape, small, x.shape, strict=False)]
        found += prod(full) * ((itemsize or param.element_size()) if x.is_floating_point() else x.element_size())
    return found


def _probe_error(optimizer: Optimizer, why: str) -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__} was tried on small matrices: {why}",
        rule="zero gives an optimizer parts of parameters, or whole ones, but no rank gives it all of them",
        remedy="Use one that changes each parameter by itself (SGD, AdamW, Muon, Adafactor), or this one without zero",
    )


def assign_owners(gradients: Sequence[GradientSlot], params: Collection[int], context: ParallelContext) -> None:
    """Lets one rank have all of each of these parameters, by identity. All processes call it, in one order.

    Communicates the names of the axes, where an optimizer of any rank asks for it, and the ranks' coordinates, and
    makes groups. Raises ConfigError for a cut parameter that several stages hold.
    """
    chosen = [gradient for gradient in gradients if id(gradient.param) in params]
    cut = {id(g): _gradient_axes(g, context) for g in chosen if g.entry.spec.is_sharded}
    wanted = set(cut.values())
    for axis in context.base_axes:
        wanted = {names for theirs in all_gather_objects(wanted, axis) for names in theirs}
    axes = {names: context.flatten(*names) for names in sorted(wanted)}
    holders = {names: all_gather_objects(dict(context.coords), axis) for names, axis in axes.items()}
    for gradient in chosen:
        if gradient.entry.reduction.stages and id(gradient) in cut:
            raise ConfigError(
                f"{gradient.entry.name} is cut over tensor ranks and held by several stages",
                rule="An optimizer that looks at whole matrices gets a cut one from the ranks of one stage",
                remedy="Give it to an optimizer that changes each number by itself: AdamW for tables and heads",
            )
        names = cut.get(id(gradient))
        if names is None:
            gradient.gather_to_owner(None)
        else:
            gradient.gather_to_owner(axes[names], holders[names])


def _gradient_axes(gradient: GradientSlot, context: ParallelContext) -> tuple[str, ...]:
    names = {*gradient.entry.reduction.sum_over, *gradient.entry.spec.axes}
    return tuple(n for n, size in context.grid.sizes.items() if size > 1 and ({n} | context.expand_views([n])) & names)
