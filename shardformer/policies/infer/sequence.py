"""How sequence parallelism serves a model, found on its small twin: what of a layer needs the whole sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shardformer.pipeline.chain import SequenceNeeds
from shardformer.policies.describe import BlockDescription
from shardformer.policies.infer.prove import Reference, mismatch
from shardformer.policies.infer.tokens import TokensIn
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import Stack
from shardformer.sharding.plan import make_plan

Stacks = Sequence[Stack]
WAYS = (
    frozenset[str](),
    frozenset({"between"}),
    frozenset({"mixing"}),
    frozenset({"mixing", "attentions"}),
    frozenset({"mixing", "holders"}),
    frozenset({"mixing", "attentions", "holders"}),
    frozenset({"mixing", "attentions", "holders", "between"}),
)
"""What is given the whole sequence, in the order in which it is tried: see ``_Found`` and ``SequenceNeeds``."""


@dataclass(frozen=True)
class _Found:
    """What the layers of a stack may need, by what their modules did with its tokens.

    Args:
        mixing: children of layers that carry something from token to token, and hold no block.
        attentions: what holds the block of an attention from its entry to its exit.
        holders: what holds blocks that are given other things than the tokens of the stack, and gives these back; and
            what is given a number for each token beside them, as a router that reads which token it is.
        apart: modules that are given no tokens.
        beside: arguments that are given for each token beside the hidden states.
    """

    mixing: tuple[str, ...]
    attentions: tuple[str, ...]
    holders: tuple[str, ...]
    apart: tuple[str, ...]
    beside: tuple[str, ...]

    def needs(self, way: frozenset[str]) -> SequenceNeeds:
        gathers = self.mixing if "mixing" in way else ()
        around = _each(name for part in ("attentions", "holders") if part in way for name in getattr(self, part))
        given = {"", *gathers, *around}
        beside = tuple(name for name in self.beside if name.rpartition(".")[0] in given)
        return SequenceNeeds(gathers, around, beside, self.apart, "between" in way)


def along_sequence(
    reference: Reference, policy: type[RolePolicy], layers: Sequence[str], ranks: int
) -> tuple[Stacks, str | None]:
    """The stacks with what sequence parallelism has to know of them, and why it cannot be, if so.

    Args:
        layers: the path of each stack, of the whole model.
    """
    proven = [policy.stack] if isinstance(policy.stack, Stack) else list(policy.stack)
    first = _against(reference, policy, proven, ranks)
    if first is None:
        return proven, None
    blocks, tried = _blocks(reference.model, policy), [proven]
    found = [_found(TokensIn(reference, path), blocks) for path in layers]
    for way in WAYS:
        stacks = [replace(stack, sequence=x.needs(way)) for stack, x in zip(proven, found, strict=True)]
        if stacks not in tried:
            tried.append(stacks)
            if _against(reference, policy, stacks, ranks) is None:
                return stacks, None
    return proven, first


def _against(reference: Reference, policy: type[RolePolicy], stacks: Stacks, ranks: int) -> str | None:
    tried = type(policy.__name__, (policy,), {"stack": stacks})
    return mismatch(reference, tried, ranks, enable_sequence_parallelism=True)


def _blocks(model: nn.Module, policy: type[RolePolicy]) -> list[BlockDescription]:
    found = policy()
    found.set_model(model)
    return [block for _, block in make_plan(model, found).blocks]


def _found(tokens: TokensIn, blocks: Sequence[BlockDescription]) -> _Found:
    mixing, holders, attentions, apart = [], [], [], []
    for outer, name in tokens.mixing():
        inside = [block for block in blocks if f"{block.entry}.".startswith(f"{outer}.{name}.")]
        if not inside:
            mixing.append(name)
        elif all(block.arguments is None for block in inside):  # an attention gathers what it is given
            holders.append(name)
    for block in blocks:
        above = tokens.above(block.entry)
        fed = [name for name, path in above.items() if tokens.is_fed(path)]
        if block.arguments is not None:
            exits = tokens.above(block.row)
            attentions += [name for name in fed if name in exits][-1:]
        elif above and not tokens.is_given_tokens(block.entry):
            holders += fed[-1:]
            apart += [] if fed else [next(iter(above))]
        else:
            holders += [name for name in fed if tokens.is_given_numbers(above[name])]
    return _Found(*map(_each, (mixing, attentions, holders, apart, tokens.beside())))


def _each(names: Iterable[str]) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(names))
