"""The proof that a model can be cut over a tensor grid: on a small twin, whose ranks are threads, nobody can tell.

The twin also shows which dim of each argument of an attention counts the samples of a batch: it is run with two batches
of unlike numbers of samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardformer.config import ShardConfig
from shardformer.errors import PolicyError
from shardformer.mesh.context import ParallelContext
from shardformer.mesh.tensor_grid import NAMES, TensorGrid
from shardformer.policies.infer.own_code import known_by
from shardformer.policies.infer.prove import difference
from shardformer.policies.infer.twin import ONE_AT_A_TIME, Twin, twin_of
from shardformer.policies.policy import Policy
from shardformer.sharding.apply import Sharding
from shardformer.sharding.grid import Samples, given_more, key_of, tensors_in
from shardformer.testing.zoo.inputs import Forward, runner

Shapes = dict[tuple[str, str], tuple[int, ...]]
Find = Callable[[nn.Module, int], tuple[Policy, str]]


@dataclass(frozen=True)
class GridProof:
    """What was found on the twin.

    Args:
        against: why the model cannot be cut so; None where nobody could tell.
        samples: which dim of an attention's argument counts samples; None for one that is of no sample.
        unproven: the inputs with which it cannot be, and why.
    """

    against: str | None
    samples: Samples = field(default_factory=dict)
    unproven: Mapping[str, str] = field(default_factory=dict)


_KNOWN: dict[Hashable, GridProof] = {}


def prove_grid(model: nn.Module, find: Find, grid: TensorGrid) -> GridProof:
    """The proof for a model, made once for models of a library's classes with one config. Communicates nothing.

    It is made on two ranks along each axis that has more than one.

    Args:
        find: (model, number of tensor ranks) -> its policy, and where that comes from.
    """
    kind = known_by(model)
    sizes = tuple(min(axis.size, 2) for axis in (grid.row, grid.column, grid.depth))
    key = (kind, grid.mode, sizes)
    with ONE_AT_A_TIME:
        if key in _KNOWN:
            return _KNOWN[key]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            proof = _prove(model, find, grid.mode, dict(zip(NAMES, sizes, strict=True)))
        if kind is not None:
            _KNOWN[key] = proof
        return proof


def _prove(model: nn.Module, find: Find, mode: str, sizes: dict[str, int]) -> GridProof:
    try:
        twin = twin_of(model)
    except PolicyError as error:
        return GridProof(error.what)
    wider = _wider(twin)
    reference = twin.reference(wider)
    total = sizes["row"] * sizes["column"] * sizes["depth"]

    found, source = find(twin.model, total)  # once for all ranks: it may be inferred
    policy = copy.copy(found)  # a user's own one is that of the model itself
    policy.set_model(twin.model)
    policy.set_shard_config(ShardConfig(context=ParallelContext.of({})))
    samples = _samples_in(twin, wider, given_more(policy), [s.layers for s in policy.stacks()])
    proof = GridProof(None, samples)

    def find_copy(*_: Any) -> tuple[Policy, str]:
        return copy.copy(found), source

    def shard(model: nn.Module, context: ParallelContext) -> None:
        config = ShardConfig(context=context.view("tensor", **sizes), tensor_parallel_mode=mode)
        Sharding(model, config, find_copy, prove_grid=lambda *_: proof, fresh=True).shard()

    against = difference(reference, shard, tensor=total)
    if against is not None and reference.also and difference(replace(reference, also=()), shard, tensor=total) is None:
        return replace(proof, unproven=twin.unproven(against))
    proof = replace(proof, unproven=twin.unproven(None))
    return proof if against is None else GridProof(against)


def _wider(twin: Twin) -> Forward:
    """A call with one sample more, so that no grid divides the batch."""
    count = twin.samples
    more = {n: torch.cat((x, x[:1])) if x.dim() and len(x) == count else x for n, x in twin.batch.items()}
    return runner(twin.model, more)


def _samples_in(twin: Twin, wider: Forward, attentions: list[str], stacks: list[str]) -> Samples:
    """Which dim of each argument grows as the batch does."""
    count = twin.samples
    narrow, wide = (_shapes(twin.model, run, attentions, stacks) for run in (twin.run, wider))
    samples: Samples = {}
    for key, shape in narrow.items():
        other = wide.get(key, shape)
        grown = [
            d for d, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b and a * (count + 1) == b * count
        ]
        if grown or shape[:1] != (1,):  # one for all samples here may be one for each elsewhere: position_ids
            samples[key] = grown[0] if grown else None
    return samples


def _shapes(
    model: nn.Module, run: Forward, attentions: list[str], stacks: list[str]
) -> dict[tuple[str, str], tuple[int, ...]]:
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    hooks = []
    layers = {path: next(model.get_submodule(path).children()) for path in stacks}
    for path, module in {**layers, **{path: model.get_submodule(path) for path in attentions}}.items():

        def note(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            found.update({key_of(path, name): tuple(x.shape) for name, x in tensors_in(module, args, kwargs)})

        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad():
        run(model)
    for hook in hooks:
        hook.remove()
    return found
