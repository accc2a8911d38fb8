"""The plan: what a policy means for one model, worked out and checked before anything is changed.

All ranks compare their plans, so a rank that disagrees, or cannot shard at all, stops every rank with the same words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import all_gather, broadcast, gather_objects
from shardformer.context import Axis, ParallelContext
from shardformer.errors import ConfigError, PolicyError, nearest
from shardformer.layers.linear import is_linear
from shardformer.policies.config import ShardConfig
from shardformer.policies.policy import (
    ModuleKey,
    ModulePolicyDescription,
    Policy,
    StackDescription,
    SubModuleReplacementDescription,
)

LARGE_SHARE = 0.1
"""Outside the stacks, a matrix with more than this share of all parameters needs a rule."""


@dataclass
class Target:
    """One module that a description matched."""

    path: str
    module: nn.Module
    description: ModulePolicyDescription

    def submodule(self, suffix: str) -> tuple[str, nn.Module | None]:
        path = f"{self.path}.{suffix}" if self.path and suffix else self.path or suffix
        try:
            return path, self.module.get_submodule(suffix)
        except AttributeError:
            return path, None


@dataclass
class Plan:
    """What will be done: the matched modules with their descriptions, and the stacks."""

    targets: list[Target]
    stacks: list[StackDescription] = field(default_factory=list)

    def replacements(self) -> Iterator[tuple[str, nn.Module, SubModuleReplacementDescription]]:
        """(path, native module, description) of every submodule that is there to be replaced."""
        for target in self.targets:
            for sub in target.description.sub_module_replacement or []:
                path, module = target.submodule(sub.suffix)
                if module is not None:
                    yield path, module, sub

    def lines(self) -> list[str]:
        """The plan as text that is equal on all ranks that agree."""
        out = []
        for path, module, sub in self.replacements():
            shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
            kwargs = {k: v for k, v in (sub.kwargs or {}).items() if k != "expand"}
            out.append(f"{path}: {type(module).__name__} {shapes} -> {_name(sub.target_module)} {kwargs}")
        return out


def make_plan(model: nn.Module, policy: Policy) -> Plan:
    """Matches the policy's rules against the model.

    Raises PolicyError for a rule that matches nothing, a submodule or attribute that does not exist, or a large
    parameter that no rule explains.
    """
    descriptions = policy.module_policy()
    plan = Plan(list(_match(model, descriptions)), policy.stacks())
    seen: dict[str, str] = {}
    for target in plan.targets:
        for sub in target.description.sub_module_replacement or []:
            path, module = target.submodule(sub.suffix)
            if module is None and not sub.ignore_if_not_exist:
                raise PolicyError(
                    f"There is no module {path!r}",
                    rule="Every rule of a policy matches a module",
                    remedy=nearest(sub.suffix, [n for n, _ in target.module.named_modules() if n])
                    + " Set ignore_if_not_exist=True if some models lack it",
                )
            if module is not None and seen.setdefault(path, sub.suffix) is not sub.suffix:
                raise PolicyError(
                    f"Two rules replace {path!r}",
                    rule="A module is replaced once",
                    remedy="Remove one of the two",
                )
        _check_attributes(target)
    _check_tied(model, plan)
    _check_explained(model, policy, plan)
    return plan


def _match(model: nn.Module, descriptions: Mapping[ModuleKey, ModulePolicyDescription]) -> Iterator[Target]:
    modules = list(model.named_modules())
    for key, description in descriptions.items():
        found = [Target(path, m, description) for path, m in modules if _matches(key, path, m)]
        if not found:
            known = {type(m).__name__ for _, m in modules} | {path for path, _ in modules if path}
            raise PolicyError(
                f"The rule for {_name(key)!r} matches no module of {type(model).__name__}",
                rule="Every rule of a policy matches a module: by class, class name or path with * for an index",
                remedy=nearest(_name(key), known),
            )
        yield from found


def _matches(key: ModuleKey, path: str, module: nn.Module) -> bool:
    if isinstance(key, type):
        return type(module) is key
    if key == path or key in (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"):
        return True
    return "*" in key and key.count(".") == path.count(".") and fnmatchcase(path, key)


def _check_tied(model: nn.Module, plan: Plan) -> None:
    """A weight that is cut in one module must not be used whole by another that it is tied to."""
    replaced = {id(module) for _, module, _ in plan.replacements()}
    cut = {id(p): path for path, module, _ in plan.replacements() for p in module.parameters(recurse=False)}
    for path, module in model.named_modules():
        if id(module) in replaced or not (is_linear(module) or isinstance(module, nn.Embedding)):
            continue
        for name, p in module.named_parameters(recurse=False):
            if id(p) in cut:
                raise PolicyError(
                    f"{path}.{name} is tied to {cut[id(p)]}.{name}, which is cut, but no rule names it",
                    rule="Modules that share a weight are cut together or stay whole together",
                    remedy=f"Name {path!r} too (an embedding, or a head), or leave {cut[id(p)]!r} whole",
                )


def _check_attributes(target: Target) -> None:
    for name in target.description.attribute_replacement or {}:
        owner_path, _, attribute = name.rpartition(".")
        path, owner = target.submodule(owner_path)
        if owner is None or not hasattr(owner, attribute):
            known = [] if owner is None else [n for n in vars(owner) if not n.startswith("_")]
            raise PolicyError(
                f"There is no attribute {attribute!r} on {path or 'the model'!r}",
                rule="An attribute that is rewritten exists and is read by the forward",
                remedy=nearest(attribute, known),
            )
    for name in target.description.method_replacement or {}:
        if not hasattr(target.module, name):
            raise PolicyError(
                f"There is no method {name!r} on {target.path or 'the model'!r} ({type(target.module).__name__})",
                rule="A method that is replaced exists",
                remedy=nearest(name, [n for n in dir(target.module) if not n.startswith("_")]),
            )


def _check_explained(model: nn.Module, policy: Policy, plan: Plan) -> None:
    whole = policy.replicated()
    if whole is None:
        return
    replaced = {id(p) for _, module, _ in plan.replacements() for p in module.parameters(recurse=False)}
    total = sum(p.numel() for p in model.parameters())
    inside = tuple(f"{s.layers}." for s in plan.stacks)
    for name, p in model.named_parameters():
        if p.dim() < 2 or id(p) in replaced or any(name == w or name.startswith(f"{w}.") for w in whole):
            continue
        if name.startswith(inside) or p.numel() > LARGE_SHARE * total:
            raise PolicyError(
                f"No rule explains {name!r} {tuple(p.shape)}, {p.numel() / total:.1%} of all parameters",
                rule="Every matrix of a layer, and every large one elsewhere, is cut or said to stay whole",
                remedy=f"Give it a role, or add it to the policy's `whole` ({', '.join(whole) or 'empty now'})",
            )


def agree(
    context: ParallelContext, config: ShardConfig, model: nn.Module, source: str, make: Callable[[], Plan]
) -> Plan:
    """Makes the plan on every rank and compares the plans.

    Every rank raises when one of them cannot make it, or when they differ. Communicates one gather of a hash.
    """
    plan: Plan | None = None
    problem: Exception | None = None
    try:
        plan = make()
    except Exception as error:  # any failure of one rank must reach the others, which would wait for it
        problem = error
    lines = [source, str(config.options()), *_model_lines(model), *(plan.lines() if plan else [])]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    for axis in (context.tensor, context.data):
        answers = gather_objects((digest, str(problem) if problem else None), axis)
        for rank, (_, said) in enumerate(answers):
            if said is not None and problem is None:
                raise ConfigError(
                    f"{axis.name} rank {rank} cannot shard this model: {said}",
                    rule="All ranks shard the same model in the same way, or none does",
                    remedy="See what that rank says",
                )
        if problem is None and len({d for d, _ in answers}) > 1:
            _raise_difference(axis, gather_objects(lines, axis))
    if problem is not None:
        raise problem
    assert plan is not None
    return plan


def _raise_difference(axis: Axis, all_lines: list[list[str]]) -> None:
    for rank, lines in enumerate(all_lines):
        if lines != all_lines[0]:
            pairs = zip(all_lines[0] + [""] * len(lines), lines + [""] * len(all_lines[0]), strict=False)
            mine, theirs = next((a, b) for a, b in pairs if a != b)
            raise ConfigError(
                f"Ranks disagree on what to do: {axis.name} rank 0 has {mine or 'nothing more'!r}, "
                f"rank {rank} has {theirs or 'nothing more'!r}",
                rule="All ranks shard the same model in the same way",
                remedy="Build the model and the config from the same settings on every rank",
            )


def _model_lines(model: nn.Module) -> list[str]:
    return [f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()]


def agree_on_weights(model: nn.Module, axes: list[Axis]) -> list[str]:
    """Makes every rank hold the first rank's weights and buffers, when samples of them show that they differ.

    Returns notes of what was done. Communicates one gather of a few numbers a tensor; the tensors only if they differ.
    """
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.device.type != "meta" and t.numel()]
    notes = []
    for axis in axes:
        if axis.size == 1 or not tensors:
            continue
        mine = torch.stack([_sample(t) for t in tensors])[None]
        every = all_gather(mine, axis, 0, purpose="check")
        if bool((every == every[0]).all()):
            continue
        for t in tensors:
            broadcast(t.data, axis)
        notes.append(f"The {axis.name} ranks held different weights: all took those of rank 0.")
    return notes


def _sample(t: Tensor) -> Tensor:
    flat = t.detach().reshape(-1)
    some = flat[:: max(flat.numel() // 1024, 1)][:2048].cpu().double().nan_to_num()
    weights = torch.arange(1, some.numel() + 1, dtype=torch.float64)
    return torch.stack([some.sum(), (some * weights.cos()).sum()])


def _name(key: Any) -> str:
    return key if isinstance(key, str) else getattr(key, "__name__", str(key))
