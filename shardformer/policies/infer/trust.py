"""Whether a registered policy may be used for a model: for the code of its library; other code is proven on a twin.

A subclass with a norm over features that are cut, a forward that somebody put in an instance's place: a table that was
written for the library's class knows nothing of it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from types import MethodType

from torch import nn

from shardformer.errors import PolicyError
from shardformer.layers.norm import is_elementwise
from shardformer.policies.infer.own_code import runs_library_code
from shardformer.policies.infer.prove import mismatch
from shardformer.policies.infer.twin import twin_of
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy

RANKS = 2


def check_trusted(model: nn.Module, policy: Policy) -> None:
    """Raises PolicyError where layers run code that the policy was not written for, and that no proof covers.

    Where that code needs tokens that sequence parallelism has on other ranks, the policy refuses that from now on.
    Communicates nothing. A model of the library's own code is not looked at any further.
    """
    own = copy.copy(policy)
    own.set_model(model)
    layers = [stack.layers for stack in own.stacks()]
    foreign = dict(foreign_in(model, layers))
    if not foreign:
        return
    path, module = next(iter(foreign.items()))
    against, along_sequence = _against(model, type(policy), layers, foreign)
    if isinstance(policy, RolePolicy) and along_sequence is not None:
        why = f"with the code of {path} ({type(module).__name__}) {along_sequence}"
        policy.against_sequence = policy.against_sequence or why
    if against is not None:
        raise PolicyError(
            f"{path} ({type(module).__name__}) runs code that {type(policy).__name__} was not written for: {against}",
            rule="A registered policy is used for the code of its library; other code is proven on a small twin",
            remedy="Write policy=shardformer.infer(model), a policy of your own (docs/policies.md), or use the "
            "library's class",
        )


def foreign_in(model: nn.Module, layers: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of some layers whose forward is no library's, without those that look at one feature at a time."""
    for stack in layers:
        for path, module in model.get_submodule(stack).named_modules(prefix=stack):
            if not runs_library_code(module) and (module._modules or not is_elementwise(module)):
                yield path, module


def _against(
    model: nn.Module, policy: type[Policy], layers: list[str], foreign: dict[str, nn.Module]
) -> tuple[str | None, str | None]:
    """Why it must not be used, and why not with sequence parallelism; None where nobody can tell."""
    try:
        twin = twin_of(model)
        _take_over(twin.model, foreign)
        lacks = _kinds(foreign) - _kinds(dict(foreign_in(twin.model, layers)))
        if lacks:
            return f"no small twin of the model has {', '.join(sorted(lacks))}", None
        reference = twin.reference()
    except PolicyError as error:
        return error.what, None
    except Exception as error:
        return f"on a small twin it does not run ({type(error).__name__}: {str(error)[:120]})", None
    if (against := mismatch(reference, policy, RANKS)) is not None:
        return against, None
    return None, mismatch(reference, policy, RANKS, enable_sequence_parallelism=True)


def _take_over(twin: nn.Module, foreign: dict[str, nn.Module]) -> None:
    """Gives a twin that was built of the config what somebody changed in the model that was built."""
    own = dict(twin.named_modules())
    for path, module in foreign.items():
        other = own.get(path)
        if other is None:
            continue
        if type(other) is not type(module) and issubclass(type(module), type(other)):
            other.__class__ = type(module)
        method = vars(module).get("forward")
        if "forward" not in vars(other) and inspect.ismethod(method) and method.__self__ is module:
            other.__dict__["forward"] = MethodType(method.__func__, other)


def _kinds(foreign: dict[str, nn.Module]) -> set[str]:
    """What runs other code, in words: a class, or the function that took the place of its forward."""
    return {
        f"the {type(m).__name__}" + (f" with {vars(m)['forward'].__qualname__}" if "forward" in vars(m) else "")
        for m in foreign.values()
        if "forward" not in vars(m) or hasattr(vars(m)["forward"], "__qualname__")
    }
