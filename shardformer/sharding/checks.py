"""What a model must be before it is sharded and after, and how it is put back where sharding fails half-way."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardformer.comm.shared_memory import view_of
from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, PolicyError
from shardformer.layers.tensor.parallel_module import ParallelModule
from shardformer.layout.spec import ShardSpec
from shardformer.layout.split import Coords
from shardformer.layout.state import PART, ROOT, cut_in
from shardformer.lazy.materialize import check_recipes, recording
from shardformer.policies import first_form
from shardformer.policies.paths import configs_in
from shardformer.policies.policy import Policy
from shardformer.sharding.optimize import check_optimizations
from shardformer.sharding.plan import Plan, make_plan
from shardformer.sharding.stages import Stages


def check_not_sharded(model: nn.Module) -> None:
    """Raises ConfigError for a model that is sharded, even in part."""
    if any({ROOT, PART} & m.__dict__.keys() or isinstance(m, ParallelModule) for m in model.modules()):
        raise ConfigError(
            f"This {type(model).__name__} is sharded already",
            rule="A model is sharded once, and before anything is wrapped around it",
            remedy="Build the model again, or go on with the one that the first call returned",
        )


def check_plain(model: nn.Module) -> None:
    """Raises ConfigError for a model that is sharded already, even in part, or whose values cannot be had or cut."""
    check_not_sharded(model)
    if made := next((name for name, p in model.named_parameters() if p.is_inference()), None):
        raise ConfigError(
            f"{made} of this {type(model).__name__} was made under torch.inference_mode()",
            rule="Parameters take gradients and count their changes, which torch refuses of such tensors for good",
            remedy="Build or load the model outside of torch.inference_mode(); torch.no_grad() may stand around it",
        )
    check_recipes(model)


def checked_plan(model: nn.Module, policy: Policy, config: ShardConfig, *, cuts: bool = True) -> Plan:
    """What the policy does to the model, where all that was asked for can be.

    Args:
        cuts: whether weights are cut: see ``make_plan``.

    The model is as it was, but for what the policy's ``preprocess`` does. Raises as ``make_plan``; ConfigError for an
    option that cannot be.
    """
    policy.set_model(model)
    policy.set_shard_config(config)
    check_optimizations(model, config, policy)
    with recording(model):
        model = policy.preprocess() or model
    policy.set_model(model)
    first_form.check(policy, model)
    return make_plan(model, policy, cuts=cuts)


def check_unhooked(model: nn.Module, plan: Plan) -> None:
    """Raises ConfigError when a parameter that is to be cut has hooks: they would be lost, or be given a part."""
    cut = plan.cut()
    for p in model.parameters():
        if id(p) in cut and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)):
            raise ConfigError(
                f"The parameter {cut[id(p)]!r} of this {type(model).__name__} has a hook",
                rule="It is cut: each tensor rank has a parameter of its own in its place, with a part of the gradient",
                remedy="Remove it; register it after sharding where what it does is right for a part",
            )


def check_views(model: nn.Module, plan: Plan, stages: Stages | None) -> None:
    """Raises ConfigError where a buffer or an attribute shares the memory of a parameter that is cut, or elsewhere."""
    cut = plan.cut()
    moved = [(n, p) for n, p in model.named_parameters() if id(p) in cut or not (stages is None or stages.is_here(n))]
    if found := view_of(model, moved):
        view, name = found
        raise ConfigError(
            f"{view} of this {type(model).__name__} is a view of the parameter {name}: it lies in its memory",
            rule=f"{name} is cut, or held by another stage, so that {view} would no longer follow it",
            remedy=f"Read {name} itself where {view} is read, or give {view} memory of its own (.clone())",
        )


def held_outside(model: nn.Module) -> set[int]:
    """Identities of the parameters that something beside the modules of the model refers to: an optimizer, a list.

    By their counts of references, which are compared with those of a parameter that only its module has.
    """
    alone = nn.Module()
    alone.only = nn.Parameter(torch.empty(0))
    ((_, by_counting),) = _counts(alone)
    times = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    return {key for key, count in _counts(model) if count - (by_counting - 1) > times[key]}


def _counts(model: nn.Module) -> Iterator[tuple[int, int]]:
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                yield id(p), sys.getrefcount(p)


def check_unheld(model: nn.Module, plan: Plan, stages: Stages | None, outside: Collection[int]) -> None:
    """Raises ConfigError when an optimizer holds a parameter that is to be cut: it would go on with the whole one.

    Args:
        outside: what ``held_outside`` said of the model before it was planned. Where that is no parameter that is cut,
            which is the usual case, nothing is searched: the collector looks through all objects of the process.
    """
    cut = plan.cut()
    if stages is not None:
        cut |= {id(p): name for name, p in model.named_parameters() if not stages.is_here(name)}
    if not cut.keys() & outside:
        return
    mine = [p for p in model.parameters() if id(p) in cut]
    # not gc.get_objects(): it shows tuples to this thread that others are still making, which makes those fail
    lists = [x for x in gc.get_referrers(*mine) if type(x) is list and x is not mine]
    for group in gc.get_referrers(*lists):
        if type(group) is dict and "lr" in group and isinstance(group.get("params"), list):
            held = next((cut[id(p)] for p in group["params"] if id(p) in cut), None)
            if held is not None:
                raise ConfigError(
                    f"An optimizer holds {held!r} of this {type(model).__name__}",
                    rule="Sharding puts parts in the place of parameters, and an optimizer trains what it was given",
                    remedy="Shard the model first, then make the optimizer of model.parameters()",
                )


def check_layouts(model: nn.Module, coords: Coords) -> None:
    """Raises PolicyError where a part is not what the layout beside it says: tied weights that were cut in two ways."""
    seen: dict[int, tuple[str, ShardSpec]] = {}
    for name, param, spec in cut_in(model):
        other, first = seen.setdefault(id(param), (name, spec))
        if first != spec or tuple(param.shape) != spec.local_shape(coords):
            raise PolicyError(
                f"{name} holds {tuple(param.shape)} on this rank, its layout says {spec.local_shape(coords)}"
                + (f"; it is tied to {other}" if other != name else ""),
                rule="Modules that share a weight are cut the same way",
                remedy="Replace both by layers that cut the vocabulary, or leave both whole",
            )


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Puts modules, parameters, hooks, attributes and configs back as they were when the body raises.

    The values of parameters are not copied: what a policy's own functions wrote into them stays.
    """
    params = [(p, p.requires_grad, dict(vars(p)), _hooks_of(p)) for p in model.parameters()]
    modules = list(model.modules())
    before = [(m, type(m), dict(vars(m)), _tables(vars(m))) for m in modules]
    settings = [(c, dict(vars(c))) for c in configs_in(model)]
    try:
        yield
    except BaseException:
        for m, kind, attributes, tables in before:
            m.__class__ = kind
            _set(vars(m), attributes)
            for name, entries in tables.items():
                _set(vars(m)[name], entries)
        for c, attributes in settings:
            _set(vars(c), attributes)
        for p, trains, attributes, hooks in params:
            if p.requires_grad != trains:
                p.requires_grad_(trains)
            _set(vars(p), attributes)
            for table, own in zip(_hook_tables(p), hooks, strict=True):
                for key in table.keys() - own:
                    del table[key]
        raise


def _hook_tables(p: nn.Parameter) -> list[dict[int, Any]]:
    """The hooks on a parameter, by the keys of their handles."""
    return [getattr(p, name, None) or {} for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]


def _hooks_of(p: nn.Parameter) -> list[set[int]]:
    return [set(table) for table in _hook_tables(p)]


def _tables(attributes: dict[str, Any]) -> dict[str, Any]:
    """nn.Module's own tables: of parameters, buffers, submodules and hooks."""
    return {n: v.copy() for n, v in attributes.items() if n.startswith("_") and isinstance(v, dict | set)}


def _set(table: Any, entries: Any) -> None:
    table.clear()
    table.update(entries)
