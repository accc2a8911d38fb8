"""The proof that a model's sequence can be cut over ranks: on a small twin, whose ranks are threads, nobody can tell.

What cannot be told from a model's parts is found so: a forward that adds a bias of all positions, that reads a length
from what it is given, or a head that looks at more than one position where it should not. The proof also learns which
dim of each argument of a layer is the sequence's, where sizes alone would leave a doubt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardformer.config import ShardConfig
from shardformer.errors import PolicyError
from shardformer.layers.attention.select import attention_classes
from shardformer.layout.state import state_of
from shardformer.mesh.context import ParallelContext
from shardformer.policies.infer.own_code import known_by
from shardformer.policies.infer.prove import Reference, difference
from shardformer.policies.infer.tokens import TokensIn
from shardformer.policies.infer.twin import ONE_AT_A_TIME, twin_or_copy_of
from shardformer.policies.policy import Policy
from shardformer.sharding.apply import Sharding
from shardformer.sharding.context import Learned, Sizes, not_dispatched

Find = Callable[[nn.Module, int], tuple[Policy, str]]


@dataclass(frozen=True)
class ContextProof:
    """What was found on the twin.

    Args:
        against: why the sequence cannot be cut; None where nobody could tell.
        learned: which dim of an argument is the sequence's, and what is given the whole sequence.
    """

    against: str | None
    learned: Learned = field(default_factory=Learned)


_KNOWN: dict[Hashable, ContextProof] = {}


def prove_context(model: nn.Module, find: Find, sizes: Sizes, *, may_be_whole: bool = True) -> ContextProof:
    """The proof for a model, made once for models of a library's classes with one config. Communicates nothing.

    Args:
        find: (model, number of tensor ranks) -> its policy, and where that comes from.
        sizes: how the ranks of the sequence axis are laid out.
        may_be_whole: whether attentions may stay as they are, each computed for all positions on every rank.
    """
    ring, group, kind = min(sizes.ring, 2), min(sizes.group, 2), known_by(model)
    key = (kind, ring, group, sizes.gathers, may_be_whole)
    with ONE_AT_A_TIME:
        if key in _KNOWN:
            return _KNOWN[key]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            proof = _prove(model, find, Sizes(ring, group, sizes.gathers), may_be_whole)
        if kind is not None:
            _KNOWN[key] = proof
        return proof


def _prove(model: nn.Module, find: Find, sizes: Sizes, may_be_whole: bool) -> ContextProof:
    try:
        twin = twin_or_copy_of(model)
    except PolicyError as error:
        return ContextProof(error.what)
    reference = twin.reference()
    found, source = find(twin.model, 1)  # once for all ranks: it may be inferred
    policy = copy.copy(found)
    policy.set_model(twin.model)
    stacks = [TokensIn(reference, stack.layers) for stack in policy.stacks()]
    if any(tokens.shape[0] != twin.samples == tokens.shape[1] for tokens in stacks):
        return ContextProof("its layers are given (sequence, batch, hidden)")

    def find_copy(*_: Any) -> tuple[Policy, str]:
        return copy.copy(found), source  # a user's own one is that of the model itself

    def tried(learned: Learned, reference: Reference) -> ContextProof:
        runs: list[Any] = []

        def shard(model: nn.Module, context: ParallelContext) -> None:
            if not learned.is_whole:
                context = context.view("sequence", ring=sizes.ring, ulysses=sizes.group)
            config = ShardConfig(context=context, context_parallel="gather" if sizes.gathers else "auto")
            proven = ContextProof(None, learned)
            Sharding(model, config, find_copy, prove=lambda *_, **__: proven, optional=True, fresh=True).shard()
            if context.rank == 0:
                runs.append(state_of(model).context_run)

        against = difference(reference, shard, sequence=sizes.ring * sizes.group)
        return ContextProof(against) if runs == [] else ContextProof(against, replace(learned, dims=runs[0].dims))

    why = not_dispatched(twin.model)
    against = ""
    ways = list(_ways(twin.model, stacks, is_dispatched=why is None, may_be_whole=may_be_whole))
    ways += [replace(way, reads_between=True) for way in ways]
    for learned in ways:
        proof = tried(learned, reference)
        if proof.against is None:
            return replace(proof, learned=replace(proof.learned, unproven=twin.unproven(None)))
        against = against or proof.against
    for learned in ways if reference.also else ():
        proof = tried(learned, replace(reference, also=()))
        if proof.against is None:
            return replace(proof, learned=replace(proof.learned, unproven=twin.unproven(against)))
    if why is not None:
        against = f"it {why}, and {against or 'nothing was seen to mix tokens'}"
    return ContextProof(against)


def _ways(
    model: nn.Module, stacks: Sequence[TokensIn], *, is_dispatched: bool, may_be_whole: bool
) -> Iterator[Learned]:
    """What is given the whole sequence, in the order in which it is tried."""
    if is_dispatched:
        yield Learned()
    classes = attention_classes(model)

    def attends(layer: str, name: str) -> bool:
        return any(type(inner) in classes for inner in model.get_submodule(f"{layer}.{name}").modules())

    attending = _each((t.layers, name) for t in stacks for layer, name in t.children() if attends(layer, name))
    apart = _each((t.layers, name) for t in stacks for layer, name in t.mixing() if not attends(layer, name))
    if is_dispatched and apart:
        yield Learned(gathers=apart)
    if may_be_whole:
        yield from (Learned(gathers=_each(names), is_whole=True) for names in (attending, attending + apart) if names)


def _each(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each once, in order."""
    return list(dict.fromkeys(pairs))
