"""The proof that a small model can be cut into stages: two spans of it train as the whole does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardformer.config import ShardConfig
from shardformer.errors import ShardFormerError
from shardformer.mesh.axis import Axis
from shardformer.mesh.context import ParallelContext
from shardformer.pipeline.chain import Chain, UnitRange, holders, homes
from shardformer.pipeline.placeholders import Placeholders, is_placeholder
from shardformer.pipeline.stage_forward import StageForward, StagePass
from shardformer.policies.infer.prove import RELATIVE, Differs, Reference, allowed, copied, fields_of, weighted
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import Stack
from shardformer.sharding.stages import share_from_first

ONE_LAYER = "no two layers of it run one behind the other"


def described(policy: type[RolePolicy], model: nn.Module) -> RolePolicy:
    """The policy of one rank for ``model``."""
    out = policy()
    out.set_model(model)
    out.set_shard_config(ShardConfig(context=ParallelContext.from_group(Axis("tensor"))))
    return out


def chain_of(model: nn.Module, policy: type[RolePolicy], stacks: Sequence[Stack]) -> Chain:
    """The layers of these stacks in a row."""
    with_stacks: Any = type(policy.__name__, (policy,), {"stack": tuple(stacks)})
    return described(with_stacks, model).chain()


def stage_mismatch(reference: Reference, policy: type[RolePolicy], stacks: Sequence[Stack]) -> str | None:
    """What is wrong with two stages, with the cut behind the first layer, before the last, halfway, and where
    two stacks meet; None when nobody could tell."""
    try:
        chain = chain_of(reference.model, policy, stacks)
        count = len(chain.units)
        if count < 2:
            return ONE_LAYER
        ends = {1, count // 2, count - 1, *(at for start in chain.starts for at in (start - 1, start))}
        for bound in sorted(ends & set(range(1, count))):
            for truth in (reference, *reference.also):
                _compare(truth, chain, chain.spans([0, bound, count]))
    except Differs as difference:
        return str(difference)
    except ShardFormerError as error:
        return error.what
    except Exception as error:  # a forward that the cut breaks can raise anything
        return f"cut into stages it does not run ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
    return None


def _compare(reference: Reference, chain: Chain, spans: Sequence[UnitRange]) -> None:
    home = homes(reference.model, chain)
    held = holders(home, spans)
    stages: list[tuple[nn.Module, StageForward]] = []
    for stage in range(len(spans)):
        model, placeholders = copied(reference.model), Placeholders()
        placeholders.remove(model, {name: stage in stages_of for name, stages_of in held.items()})
        share_from_first(model, chain, [spans[stage]])
        stages.append((model, StageForward(model, chain, placeholders, home)))
    (first, first_passage), (second, second_passage) = stages
    _, payload = first_passage.run(first, StagePass(spans[0], {}), lambda: reference.run(first))
    if payload is None:
        raise Differs("its layers are not all run")
    received = {name: x.detach().requires_grad_(x.requires_grad) for name, x in payload.items()}
    output, _ = second_passage.run(second, StagePass(spans[1], received), lambda: reference.run(second))
    _compare_outputs(reference, output)
    trains = [name for name, x in payload.items() if x.requires_grad]
    if any(received[name].grad is None for name in trains):
        raise Differs("nothing is learned through the states that one stage hands to the next")
    if trains:
        torch.autograd.backward([payload[name] for name in trains], [received[name].grad for name in trains])
    _compare_gradients(reference.model, _sums(reference.model, [first, second]))


def _compare_outputs(reference: Reference, output: Any) -> None:
    """Compares what the last stage has of the output, and leaves the gradients of that in all models."""
    whole, given = _floats(reference.run(reference.model)), _floats(output)
    here = [at for at, x in enumerate(given) if not is_placeholder(x)]
    if len(whole) != len(given) or 0 not in here:
        raise Differs("what it gives reads what an earlier stage holds")
    for at in here:
        a, b = whole[at], given[at]
        if a.shape != b.shape or not (a - b).abs().max() <= RELATIVE * a.abs().max():
            raise Differs("what it gives differs")
    reference.model.zero_grad()
    for outputs in (whole, given):
        torch.stack([weighted(outputs[at], outputs[at].shape).double() for at in here]).sum().backward()


def _compare_gradients(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    expected = _sums(model, [model])
    model.zero_grad()
    if expected.keys() != found.keys():
        raise Differs(f"{sorted(expected.keys() ^ found.keys())[0]} has a gradient in one of the two only")
    bounds = allowed(expected)
    for name, gradient in expected.items():
        if gradient.numel() and not (gradient - found[name]).abs().max() <= bounds[name]:
            raise Differs(f"the gradient of {name} differs")


def _floats(output: Any) -> list[Tensor]:
    leaves = tree_leaves(fields_of(output))
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def _sums(whole: nn.Module, models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The gradients by name, summed over the stages that hold a parameter; by the first of its names, where tied."""
    first = {id(p): name for name, p in whole.named_parameters()}
    names = {name: first[id(p)] for name, p in whole.named_parameters(remove_duplicate=False)}
    out: dict[str, Tensor] = {}
    for model in models:
        for name, p in model.named_parameters():
            if p.grad is not None:
                out[names[name]] = out[names[name]] + p.grad if names[name] in out else p.grad.clone()
    return out
