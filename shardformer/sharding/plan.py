"""The plan: what a policy means for one model, worked out and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

from torch import nn

from shardformer.errors import ConfigError, PolicyError, nearest
from shardformer.layers.tensor.linear import is_linear
from shardformer.layout.split import Split
from shardformer.pipeline.chain import StackDescription
from shardformer.policies.describe import (
    BlockDescription,
    ModuleKey,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
)
from shardformer.policies.policy import Policy

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

    def owner(self, path: str) -> Any:
        """What stands at ``path``, a module or another object such as its config; None where nothing does."""
        try:
            return attrgetter(path)(self.module) if path else self.module
        except AttributeError:
            return None


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

    def parameters(self) -> Iterator[tuple[str, nn.Module, str, dict[int, Split]]]:
        """(path, module, name, splits) of every parameter and buffer that a policy names itself."""
        for target in self.targets:
            for path, splits in (target.description.parameters or {}).items():
                owner_path, _, name = path.rpartition(".")
                full_path, owner = target.submodule(owner_path)
                if owner is not None:
                    yield full_path, owner, name, splits

    def cut(self) -> dict[int, str]:
        """The identity of every parameter that is cut, and a name of it."""
        out = {id(p): f"{path}.{n}" for path, m, _ in self.replacements() for n, p in m.named_parameters(recurse=False)}
        return out | {id(getattr(m, n)): f"{path}.{n}" for path, m, n, splits in self.parameters() if splits}

    def lines(self) -> list[str]:
        """The plan as text that is equal on all ranks that agree."""
        out = []
        for path, module, sub in self.replacements():
            shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
            kwargs = {k: v for k, v in (sub.kwargs or {}).items() if k != "expand"}
            out.append(f"{path}: {type(module).__name__} {shapes} -> {name_of(sub.target_module)} {_text(kwargs)}")
        out += [f"{path}.{name}: {splits}" for path, _, name, splits in self.parameters()]
        for target in self.targets:
            d = target.description
            # of attributes the names only: their values differ where ranks hold different numbers of heads
            changed = [*(d.attribute_replacement or {}), *(d.method_replacement or {})]
            functions = [name_of(f) for f in d.param_replacement or []]
            if changed or functions or d.blocks:
                out.append(f"{target.path}: {changed} {functions} {d.blocks or ''}")
        return [*out, *map(str, self.stacks)]


def make_plan(model: nn.Module, policy: Policy) -> Plan:
    """Matches the policy's rules against the model.

    Raises PolicyError for a rule that matches nothing, a submodule or attribute that does not exist, two rules for one
    module, or a large parameter that no rule explains.
    """
    plan = Plan(list(_match(model, _descriptions(policy))), policy.stacks())
    replaced: list[str] = []
    for target in plan.targets:
        for sub in target.description.sub_module_replacement or []:
            path = _check_replacement(target, sub)
            if path is not None:
                _check_replaced_once(path, replaced)
                replaced.append(path)
        _check_parameters(target, replaced)
        for block in target.description.blocks or []:
            _check_block(target, block)
        _check_attributes(target)
        _check_counts(target, policy.axis.size)
    for stack in plan.stacks:
        for needed in (stack.layers, stack.final_norm, stack.context[0] if stack.context else None):
            if needed is not None:
                _require(Target("", model, ModulePolicyDescription()), needed)
    _check_tied(model, plan)
    _check_explained(model, policy, plan)
    return plan


def _descriptions(policy: Policy) -> Mapping[ModuleKey, ModulePolicyDescription]:
    said: Any = policy.module_policy()
    values = list(said.values()) if isinstance(said, Mapping) else [said]
    wrong = next((v for v in values if not isinstance(v, ModulePolicyDescription)), None)
    if wrong is not None or not isinstance(said, Mapping):
        raise PolicyError(
            f"{type(policy).__name__}.module_policy() gave {wrong!r:.80}",
            rule="It returns a dict: class, class name or path of modules -> ModulePolicyDescription",
            remedy="Return that dict; docs/policies.md has an example",
        )
    return said


def _require(target: Target, suffix: str, hint: str = "") -> None:
    path, module = target.submodule(suffix)
    if module is None:
        raise PolicyError(
            f"There is no module {path!r}",
            rule="Every rule of a policy matches a module",
            remedy=nearest(suffix, [n for n, _ in target.module.named_modules() if n]) + hint,
        )


def _check_replacement(target: Target, sub: SubModuleReplacementDescription) -> str | None:
    """The path of the module that is replaced; None when it may lack and does."""
    path, module = target.submodule(sub.suffix)
    if module is None and sub.ignore_if_not_exist:
        return None
    _require(target, sub.suffix, " Set ignore_if_not_exist=True if some models lack it")
    if not path:
        raise PolicyError(
            "A rule replaces the whole model",
            rule="Submodules are replaced; the model itself stays",
            remedy="Name submodules, or give the model another class with inject_policy()",
        )
    if not callable(getattr(sub.target_module, "from_native_module", None)):
        raise PolicyError(
            f"{path!r} is to become a {name_of(sub.target_module)}, which has no from_native_module",
            rule="A target module makes itself of the native one: from_native_module(module, process_group, **kwargs)",
            remedy="Give it that method, or name a parallel layer such as Linear1D_Col",
        )
    return path


def _check_block(target: Target, block: BlockDescription) -> None:
    for suffix in (block.entry, *block.columns, *block.others, block.row):
        _require(target, suffix)
    path, entry = target.submodule(block.entry)
    assert entry is not None
    at = f"{block.entry}." if block.entry else ""
    said = [*(target.description.parameters or {}), *(f"{at}{name}" for name in block.summands or ())]
    own = [name for name, _ in entry.named_parameters(recurse=False) if f"{at}{name}" not in said]
    if own and block.entry not in (*block.columns, *block.others):
        raise PolicyError(
            f"{path}.{own[0]} is a parameter of the module at a block's entry itself",
            rule="Inside a block each rank has a part of such a gradient, behind its exit the whole; modules show it",
            remedy="Say in `parameters` what it counts, give it a module of its own, or leave this block whole",
        )


def _check_replaced_once(path: str, replaced: Sequence[str]) -> None:
    for other in replaced:
        if path == other or path.startswith(f"{other}.") or other.startswith(f"{path}."):
            raise PolicyError(
                f"Two rules replace {path!r}" + (f" and {other!r}, one inside the other" if path != other else ""),
                rule="A module is replaced once",
                remedy="Remove one of the two",
            )


def _match(model: nn.Module, descriptions: Mapping[ModuleKey, ModulePolicyDescription]) -> Iterator[Target]:
    modules = list(model.named_modules())
    for key, description in descriptions.items():
        found = [Target(path, m, description) for path, m in modules if _matches(key, path, m)]
        if not found:
            known = {type(m).__name__ for _, m in modules} | {path for path, _ in modules if path}
            raise PolicyError(
                f"The rule for {name_of(key)!r} matches no module of {type(model).__name__}",
                rule="Every rule of a policy matches a module: by class, class name or path with * for an index",
                remedy=nearest(name_of(key), known),
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
    named = {(id(module), name) for _, module, name, _ in plan.parameters()}
    cut = plan.cut()
    for path, module in model.named_modules():
        if id(module) in replaced or not (is_linear(module) or isinstance(module, nn.Embedding)):
            continue
        for name, p in module.named_parameters(recurse=False):
            if id(p) in cut and (id(module), name) not in named:
                other = cut[id(p)]
                raise PolicyError(
                    f"{path}.{name} is tied to {other}, which is cut, but no rule names it",
                    rule="Modules that share a weight are cut together or stay whole together",
                    remedy=f"Name {path!r} too (an embedding, or a head), or leave {other.rpartition('.')[0]!r} whole",
                )


def _check_attributes(target: Target) -> None:
    for name in target.description.attribute_replacement or {}:
        owner_path, _, attribute = name.rpartition(".")
        owner = target.owner(owner_path)
        if owner is None or not hasattr(owner, attribute):
            at = ".".join(part for part in (target.path, owner_path) if part)
            known = vars(owner) if owner is not None else [n for n, _ in target.module.named_modules() if n]
            raise PolicyError(
                f"There is no attribute {attribute!r} on {at or 'the model'!r}",
                rule="An attribute that is rewritten exists and is read by the forward",
                remedy=nearest(attribute if owner is not None else owner_path, [n for n in known if n[:1] != "_"]),
            )
    for name in target.description.method_replacement or {}:
        if not callable(getattr(target.module, name, None)):
            raise PolicyError(
                f"There is no method {name!r} on {target.path or 'the model'!r} ({type(target.module).__name__})",
                rule="A method that is replaced exists",
                remedy=nearest(name, [n for n in dir(target.module) if not n.startswith("_")]),
            )


def _check_parameters(target: Target, replaced: Sequence[str]) -> None:
    for path in target.description.parameters or {}:
        owner_path, _, name = path.rpartition(".")
        full_path, owner = target.submodule(owner_path)
        known = {} if owner is None else {**owner._parameters, **owner._buffers}
        if known.get(name) is None:
            raise PolicyError(
                f"There is no parameter or buffer {f'{full_path}.{name}'.lstrip('.')!r}",
                rule="Every rule of a policy matches something",
                remedy=nearest(name if owner else owner_path, known or [n for n, _ in target.module.named_modules()]),
            )
        assert owner is not None
        if name in owner._buffers and name not in owner._non_persistent_buffers_set:
            raise PolicyError(
                f"{full_path}.{name} is a buffer that is saved with the model",
                rule="A policy cuts parameters, and buffers that are not saved: those are gathered by nobody",
                remedy="Leave it whole, or register it with persistent=False",
            )
        if full_path in replaced:
            raise PolicyError(
                f"{full_path}.{name} is named, and {full_path!r} is replaced",
                rule="A module that is replaced brings its parameters with it",
                remedy="Remove one of the two",
            )


def _check_counts(target: Target, size: int) -> None:
    """A count of heads that is divided with a remainder, beside features that are cut evenly: heads would be torn."""
    default_cut = [s for s in target.description.sub_module_replacement or [] if "split" not in (s.kwargs or {})]
    for name, value in (target.description.attribute_replacement or {}).items():
        owner_path, _, attribute = name.rpartition(".")
        before = getattr(target.owner(owner_path), attribute)
        evenly = [s.suffix for s in default_cut if f"{s.suffix}.".startswith(f"{owner_path}." if owner_path else "")]
        if type(before) is int and type(value) is int and before % size and value == before // size and evenly:
            fits = ", ".join(str(n) for n in range(1, before + 1) if before % n == 0)
            raise ConfigError(
                f"A tensor size of {size} makes {name} {value}, which was {before}, and cuts {evenly[0]!r} evenly",
                rule="What an attribute counts is cut whole: the tensor size divides it",
                remedy=f"Use a tensor size of {fits}, or a RolePolicy, which cuts uneven numbers of heads",
            )


def _check_explained(model: nn.Module, policy: Policy, plan: Plan) -> None:
    whole = policy.replicated()
    if whole is None:
        return
    replaced = {*plan.cut(), *(id(getattr(module, name)) for _, module, name, _ in plan.parameters())}
    total = sum(p.numel() for p in model.parameters())
    inside = tuple(f"{s.layers}." for s in plan.stacks)
    left: dict[str, nn.Parameter] = {}
    for name, p in model.named_parameters():
        if p.dim() < 2 or id(p) in replaced or any(name == w or name.startswith(f"{w}.") for w in whole):
            continue
        if name.startswith(inside) or p.numel() > LARGE_SHARE * total:
            left[name] = p
    if left:
        name, p = next(iter(left.items()))
        _, *others = dict.fromkeys(_in_any_layer(n, inside) for n in left)
        known = ", ".join(dict.fromkeys(_in_any_layer(n, inside) for n in whole))
        raise PolicyError(
            f"No rule explains {name!r} {tuple(p.shape)}, {p.numel() / total:.1%} of all parameters"
            + (f", nor {', '.join(map(repr, others))}" if others else ""),
            rule="Every matrix of a layer, and every large one elsewhere, is cut or said to stay whole",
            remedy=f"Give it a role, or add it to the policy's `whole` ({known or 'empty now'})",
        )


def _in_any_layer(name: str, stacks: Sequence[str]) -> str:
    """``layers.0.mlp.2.weight`` -> ``layers.*.mlp.2.weight``, where the stack is ``layers.``."""
    stack = next((s for s in stacks if name.startswith(s)), name)
    layer, dot, rest = name.removeprefix(stack).partition(".")
    return f"{stack}*{dot}{rest}" if layer.isdigit() else name


def name_of(key: Any) -> str:
    return key if isinstance(key, str) else getattr(key, "__name__", type(key).__name__)


def _text(value: Any) -> str:
    """A value as text that is the same in every process: no address of an object is in it."""
    if value is None or isinstance(value, str | int | float | Split):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return name_of(value)
