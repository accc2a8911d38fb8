"""Checks before a model is sharded, compared over all ranks, and restoring the model if sharding fails."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, LaunchError, PolicyError, ShardFormerError
from shardformer.layout.shard_spec import Coords, ShardSpec
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, PARENT_METADATA_ATTRIBUTE, sharded_parameters
from shardformer.layout.tensor_relations import Group, Memory, overlapping, view_of
from shardformer.mesh.init_distributed import ENDED
from shardformer.mesh.parallel_context import ParallelContext, launcher_store
from shardformer.mesh.rank_failures import LostPeerError
from shardformer.meta_init.materialization import check_recipes, record_changes
from shardformer.module_paths import find_configs
from shardformer.pipeline.stage_manager import Stages
from shardformer.policies import legacy
from shardformer.policies.policy import Policy
from shardformer.sharding.apply_kernels import check_optimizations
from shardformer.sharding.plan import ShardingPlan, make_plan
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.torch_compat import tensor_hooks_of

ANNOUNCEMENTS = "shardformer/word"
FIRST_PAUSE_S, LAST_PAUSE_S = 0.002, 0.25
OTHER_PROCESSES_TIMEOUT_S = 10.0
"""How long to wait for the word of processes outside of the group given: they may not shard anything at all."""

T = TypeVar("T")


def check_process_group(config: ShardConfig) -> ParallelContext:
    """The grid to shard over, once the processes know that they gave groups that fit together.

    Before this no collective is possible, so the word goes through the launcher's store: each process writes down which
    group it gave, and reads on in what each of the others wrote.

    Raises LaunchError, on every process that shards just now, when one of them is not in the group it gave, and when a
    member of the group does not come, or an error ended it before; ConfigError when two members gave different groups.
    """
    context, problem = None, None
    try:
        context = config.resolve_context()
    except ShardFormerError as error:
        problem = error
    store = launcher_store() if context is None or context.world is None else context.world.store
    if store is not None:
        ranks = list(context.tensor.ranks) if context is not None else []
        kind = "the grid of launch_from_torch" if config.context is not None else "the process group"
        word = _Announcement(ranks, f"{kind} {ranks}", str(problem or ""))
        rank = dist.get_rank()
        store.set(f"{ANNOUNCEMENTS}/{rank}/{store.add(f'{ANNOUNCEMENTS}/{rank}', 1)}", json.dumps(astuple(word)))
        deadline = time.monotonic() + OTHER_PROCESSES_TIMEOUT_S
        # all are heard before anything is raised, so that a next call does not meet words of this one
        heard = [
            _read_announcements(store, other, word, deadline) for other in range(dist.get_world_size()) if other != rank
        ]
        problem = problem or next((trouble for trouble in heard if trouble is not None), None)
    if problem is not None:
        raise problem
    assert context is not None
    return context


@dataclass(frozen=True)
class _Announcement:
    """What a process wrote: the ranks of the group it gave, the group in words, and why it cannot shard if so."""

    ranks: list[int]
    group: str
    trouble: str


def _read_announcements(store: Any, other: int, mine: _Announcement, deadline: float) -> ShardFormerError | None:
    """Reads on in what process ``other`` wrote, to the next word that is about this process too. Returns what is wrong.

    A member of this one's group is waited for, others until the deadline. What they wrote about groups without this
    process is passed over; a word of theirs for a later call of ours stays.
    """
    me, is_member = dist.get_rank(), other in mine.ranks
    place = f"{ANNOUNCEMENTS}/{me}/of/{other}"
    while True:
        key = f"{ANNOUNCEMENTS}/{other}/{store.add(place, 0) + 1}"
        has_come, why = _wait_for_key(store, key, None if is_member else deadline, other)
        if not has_come:
            if is_member and why:
                return LaunchError(
                    f"Process {other} ended before it came to shard, by {why}",
                    rule="Processes that shard at one time all go on, or none does",
                    remedy="See what that process says",
                )
            said = f"Process {other} did not come to shard over {mine.group}, as process {me} did"
            return _other_group(LostPeerError, said) if is_member else None
        theirs = _Announcement(*json.loads(store.get(key)))
        is_about_us = me in theirs.ranks
        if is_about_us and not is_member and not mine.trouble:
            return None
        store.add(place, 1)
        if mine.trouble:
            return None  # one word for one; what is wrong here is known
        if theirs.trouble:
            return LaunchError(
                f"Process {other} cannot shard: {theirs.trouble}",
                rule="Processes that shard at one time all go on, or none does",
                remedy="See what that process says",
            )
        if is_about_us and theirs != mine:
            said = f"Process {me} shards over {mine.group}, process {other}, which is in it, over {theirs.group}"
            return _other_group(ConfigError, said)
        if is_about_us or not is_member:
            return None


def _other_group(kind: type[ShardFormerError], said: str) -> ShardFormerError:
    return kind(
        said,
        rule="The members of a group shard over the same group, in the same order",
        remedy="Give every process the group that it belongs to, made by the same code on all of them",
    )


def _wait_for_key(store: Any, key: str, deadline: float | None, other: int) -> tuple[bool, str]:
    """(whether ``key`` is written, the error that ended process ``other`` before, if it said so).

    Waits until the deadline, or the store's own timeout. It asks in place of ``store.wait``, which hears nothing of a
    process that has ended, and leaves a warning of torch's for each wait that was cut short.
    """
    end = time.monotonic() + store.timeout.total_seconds() if deadline is None else deadline
    pause_s = FIRST_PAUSE_S
    with suppress(RuntimeError):  # the process that has the store is gone
        while not store.check([key]):
            why = store.get(f"{ENDED}/{other}").decode() if store.check([f"{ENDED}/{other}"]) else ""
            if why or time.monotonic() >= end:
                return bool(store.check([key])), why
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return True, ""
    return False, ""


def check_not_sharded(model: nn.Module) -> None:
    """Raises ConfigError for a model that is sharded, even in part."""
    marks = {METADATA_ATTRIBUTE, PARENT_METADATA_ATTRIBUTE}
    if any([isinstance(m, ParallelModule) or not marks.isdisjoint(vars(m)) for m in model.modules()]):
        raise ConfigError(
            f"This {type(model).__name__} is sharded already",
            rule="A model is sharded once, and before anything is wrapped around it",
            remedy="Build the model again, or go on with the one that the first call returned",
        )


def check_unsharded(model: nn.Module) -> None:
    """Raises ConfigError for a model that is sharded already, even in part, or whose values cannot be had or cut."""
    check_not_sharded(model)
    if made := next(iter([name for name, p in model.named_parameters() if p.is_inference()]), None):
        raise ConfigError(
            f"{made} of this {type(model).__name__} was made under torch.inference_mode()",
            rule="Parameters take gradients and count their changes, which torch refuses of such tensors for good",
            remedy="Build or load the model outside of torch.inference_mode(); torch.no_grad() may stand around it",
        )
    check_recipes(model)


def make_checked_plan(model: nn.Module, policy: Policy, config: ShardConfig, *, cuts: bool = True) -> ShardingPlan:
    """What the policy does to the model, where all that was asked for can be.

    Args:
        cuts: whether weights are cut: see ``make_plan``.

    The model is as it was, but for what the policy's ``preprocess`` does. Raises as ``make_plan``; ConfigError for an
    option that cannot be.
    """
    policy.set_model(model)
    policy.set_shard_config(config)
    check_optimizations(model, config, policy)
    with record_changes(model):
        model = policy.preprocess() or model
    policy.set_model(model)
    if policy.changes_classes_or_ties:
        legacy.check_legacy(policy, model)
    return make_plan(model, policy, cuts=cuts)


def check_no_hooks(model: nn.Module, plan: ShardingPlan) -> None:
    """Raises ConfigError when a parameter that is to be cut has hooks: they would be lost, or be given a part."""
    cut = plan.sharded_parameter_ids()
    for p in model.parameters():
        if id(p) in cut and tensor_hooks_of(p):
            raise ConfigError(
                f"The parameter {cut[id(p)]!r} of this {type(model).__name__} has a hook",
                rule="It is cut: each tensor rank has a parameter of its own in its place, with a part of the gradient",
                remedy="Remove it; register it after sharding where what it does is right for a part",
            )


def check_views(model: nn.Module, plan: ShardingPlan, stages: Stages | None) -> None:
    """Raises ConfigError where a buffer or an attribute shares the memory of a parameter that is cut, or elsewhere."""
    cut = plan.sharded_parameter_ids()
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
    times = Counter([id(p) for m in model.modules() for p in m._parameters.values() if p is not None])
    return {key for key, count in _counts(model) if count - (by_counting - 1) > times[key]}


def _counts(model: nn.Module) -> list[tuple[int, int]]:
    held: list[tuple[int, int]] = []
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                held.append((id(p), sys.getrefcount(p)))
    return held


def check_no_optimizer(model: nn.Module, plan: ShardingPlan, stages: Stages | None, outside: Collection[int]) -> None:
    """Raises ConfigError when an optimizer holds a parameter that is to be cut: it would go on with the whole one.

    Args:
        outside: what ``held_outside`` said of the model before it was planned. Where that is no parameter that is cut,
            which is the usual case, nothing is searched: the collector looks through all objects of the process.
    """
    cut = plan.sharded_parameter_ids()
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
    for name, param, spec in sharded_parameters(model):
        other, first = seen.setdefault(id(param), (name, spec))
        if first != spec or tuple(param.shape) != spec.local_shape(coords):
            raise PolicyError(
                f"{name} holds {tuple(param.shape)} on this rank, its layout says {spec.local_shape(coords)}"
                + (f"; it is tied to {other}" if other != name else ""),
                rule="Modules that share a weight are cut the same way",
                remedy="Replace both by layers that cut the vocabulary, or leave both whole",
            )


@contextmanager
def restore_on_error(model: nn.Module) -> Iterator[None]:
    """Puts modules, parameters, hooks, attributes and configs back as they were when the body raises.

    The values of parameters are not copied: what a policy's own functions wrote into them stays.
    """
    params = [(p, p.requires_grad, dict(vars(p)), list(map(set, _hook_tables(p)))) for p in model.parameters()]
    modules = list(model.modules())
    before = [(m, type(m), dict(vars(m)), _tables(vars(m))) for m in modules]
    settings = [(c, dict(vars(c))) for c in find_configs(model)]
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
    return [p._backward_hooks or {}, getattr(p, "_post_accumulate_grad_hooks", None) or {}]


def _tables(attributes: dict[str, Any]) -> dict[str, Any]:
    """nn.Module's own tables: of parameters, buffers, submodules and hooks."""
    return {n: v.copy() for n, v in attributes.items() if n.startswith("_") and isinstance(v, dict | set)}


def _set(table: Any, entries: Any) -> None:
    table.clear()
    table.update(entries)


Ties = list[Group]


def find_ties(model: nn.Module) -> Ties:
    """Groups of parameters, each by its first name, whose memory overlaps."""
    return overlapping(model.named_parameters())


def check_stages(ties: Ties, stages_of: Callable[[str], Sequence[int]]) -> None:
    """Raises ConfigError where parameters that share memory are held by different stages of a pipeline."""
    for group in ties:
        if len({tuple(stages_of(name)) for name in group}) > 1:
            raise _torn(group, "are held by different stages of the pipeline")


def restore_ties(model: nn.Module, ties: Ties, specs: Mapping[int, ShardSpec]) -> None:
    """Lets parts share their memory where the parameters did that they are parts of.

    Args:
        model: sharded.
        ties: as they were before.
        specs: the layouts of the parts, by their identity.

    Raises ConfigError where they were cut in different ways.
    """
    present = dict(model.named_parameters(remove_duplicate=False))
    for group in ties:
        parts = {name: present[name] for name in group if name in present}
        if not any(id(part) in specs for part in parts.values()):
            continue  # they are whole, or elsewhere
        if len({(str(specs.get(id(part))), group[name]) for name, part in parts.items()}) > 1:
            raise _torn(group, "are cut in different ways")
        first, *others = parts.values()
        for other in others:
            other.data = first.data


def _torn(group: Mapping[str, Memory], why: str) -> ConfigError:
    first, second, *_ = group
    return ConfigError(
        f"{first} and {second} share their memory, and {why}",
        rule="Parameters that share memory are one, which ranks hold alike: a step of one would not reach the other",
        remedy=f"Make them one parameter (module.weight = other.weight, in place of .data), or copy {second}'s values",
    )
