"""How sequence parallelism serves a model, found on its small twin: what of a layer needs the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from shardformer.layers.norm import is_elementwise, norm_kind
from shardformer.layers.tensor.linear import is_linear
from shardformer.policies.infer.prove import Reference, mismatch
from shardformer.policies.paths import matching
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import Attention, Role, Stack

Stacks = Sequence[Stack]


def along_sequence(
    reference: Reference, policy: type[RolePolicy], layers: Sequence[str], ranks: int
) -> tuple[Stacks, str | None]:
    """The stacks with what sequence parallelism has to know of them, and why it cannot be, if so.

    Tried in turn: the sequence is cut everywhere between the blocks; what holds no block is given all of it (a
    convolution, an attention that stays whole); attentions as well, around their modules.

    Args:
        layers: the path of each stack, of the whole model.
    """
    proven = [policy.stack] if isinstance(policy.stack, Stack) else list(policy.stack)
    gathering = [replace(s, gathers=names_in(reference.model, path)) for s, path in zip(proven, layers, strict=True)]
    around = [replace(s, blocks=[given_all(role) for role in s.blocks]) for s in gathering]
    first: str | None = None
    for stacks in (proven, gathering, around):
        tried = type(policy.__name__, (policy,), {"stack": stacks})
        against = mismatch(reference, tried, ranks, enable_sequence_parallelism=True)
        if against is None:
            return stacks, None
        first = first or against
    return proven, first


def names_in(model: nn.Module, layers: str) -> tuple[str, ...]:
    """The children of layers that may carry something from token to token."""
    return tuple(dict.fromkeys(_names(model, layers)))


def _names(model: nn.Module, layers: str) -> Iterator[str]:
    paths = [path for path, _ in model.named_modules()]
    for path in matching(f"{layers}.*", paths):
        for name, child in model.get_submodule(path).named_children():
            by_token = is_linear(child) or norm_kind(child) is not None or is_elementwise(child)
            if not by_token and next(child.parameters(), None) is not None:
                yield name


def given_all(role: Role) -> Role:
    """The role of an attention whose module is given the whole sequence, not its projections alone."""
    return replace(role, inputs=replace(role.inputs, whole_sequence=True)) if isinstance(role, Attention) else role
