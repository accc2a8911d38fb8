"""The proof that a model's sequence can be cut over ranks: on a small twin, whose ranks are threads, nobody can tell.

What cannot be told from a model's parts is found so: a forward that adds a bias of all positions, that reads a length
from what it is given, or a head that looks at more than one position where it should not. The proof also learns which
dim of each argument of a layer is the sequence's, where sizes alone would leave a doubt.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardformer.config import ShardConfig
from shardformer.errors import PolicyError
from shardformer.layers.attention.select import attention_classes
from shardformer.layout.state import state_of
from shardformer.mesh.context import ParallelContext
from shardformer.policies.infer.prove import Reference, difference
from shardformer.policies.infer.tokens import TokensIn
from shardformer.policies.infer.twin import twin_of
from shardformer.policies.policy import Policy
from shardformer.sharding.apply import Sharding
from shardformer.sharding.context import Learned, Sizes

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
_ONE_AT_A_TIME = threading.RLock()


def prove_context(model: nn.Module, find: Find, sizes: Sizes) -> ContextProof:
    """The proof for a model, made once for models of one class with one config. Communicates nothing.

    Args:
        find: (model, number of tensor ranks) -> its policy, and where that comes from.
        sizes: how the ranks of the sequence axis are laid out.
    """
    config: Any = getattr(model, "config", None)
    said = config.to_json_string() if hasattr(config, "to_json_string") else id(model)
    ring, group = min(sizes.ring, 2), min(sizes.group, 2)
    key = (type(model), said, ring, group, sizes.gathers)
    with _ONE_AT_A_TIME:
        if key not in _KNOWN:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                _KNOWN[key] = _prove(model, find, Sizes(ring, group, sizes.gathers))
        return _KNOWN[key]


def _prove(model: nn.Module, find: Find, sizes: Sizes) -> ContextProof:
    try:
        twin = twin_of(model)
    except PolicyError as error:
        return ContextProof(error.what)
    reference = Reference.of(twin.model, twin.run)
    runs: list[Any] = []
    gathers: list[tuple[str, str]] = []

    found, source = find(twin.model, 1)  # once for all ranks: it may be inferred

    def find_copy(*_: Any) -> tuple[Policy, str]:
        return copy.copy(found), source  # a user's own one is that of the model itself

    def shard(model: nn.Module, context: ParallelContext) -> None:
        view = context.view("sequence", ring=sizes.ring, ulysses=sizes.group)
        config = ShardConfig(context=view, context_parallel="gather" if sizes.gathers else "auto")
        proof = ContextProof(None, Learned(gathers=gathers))
        Sharding(model, config, find_copy, prove=lambda *_: proof, fresh=True).shard()
        if context.rank == 0:
            runs.append(state_of(model).context_run)

    ranks = sizes.ring * sizes.group
    against = difference(reference, shard, sequence=ranks)
    if against is not None and (mixing := _mixing(reference, found)):
        gathers, runs = mixing, []  # which ``shard`` reads
        if difference(reference, shard, sequence=ranks) is None:
            return ContextProof(None, Learned(runs[0].dims, mixing))
    return ContextProof(against, Learned(runs[0].dims) if against is None else Learned())


def _mixing(reference: Reference, found: Policy) -> list[tuple[str, str]]:
    """What mixes tokens in layers otherwise than by an attention that knows of positions: see ``Learned.gathers``."""
    policy = copy.copy(found)
    policy.set_model(reference.model)
    attentions = attention_classes(reference.model)
    out = []
    for stack in policy.stacks():
        for layer, name in TokensIn(reference, stack.layers).mixing():
            module = reference.model.get_submodule(f"{layer}.{name}")
            if not any(type(inner) in attentions for inner in module.modules()):
                out.append((stack.layers, name))
    return list(dict.fromkeys(out))
