"""The plan: what a policy means for one model, worked out and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardformer.errors import ConfigError, PolicyError, did_you_mean
from shardformer.layout.shard_spec import Split
from shardformer.module_paths import find_module, get_at, get_module, join_path, parent_of
from shardformer.pipeline.layer_sequence import SequenceParallelHints, StackDescription
from shardformer.pipeline.stage_forward import MissingParams
from shardformer.policies.module_descriptions import (
    BlockDescription,
    ModuleKey,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
)
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import checked_descriptions
from shardformer.sharding.module_aliases import readers_of

LARGE_SHARE = 0.1
"""Outside the stacks, a matrix with more than this share of all parameters needs a rule."""


@dataclass(frozen=True)
class ShardingPlan:
    """What will be done to a model. All paths are those of the whole model.

    Args:
        model: the plain model.
        stacks: its stacks of layers.
        replacements: path of a submodule that is there -> what takes its place.
        parameters: path of a parameter or buffer that a policy names itself -> dim -> how it is cut.
        attributes: path of an attribute -> its value after sharding.
        functions: (path of a module, function that changes its parameters in place).
        methods: path of a method -> the function that takes its place.
        blocks: (path of the described module, block).
        full_sequence_modules: paths of modules in a layer that are given the whole sequence where it is cut between
        blocks, or, on
            a tensor grid, all hidden features.
        token_free_modules: paths of modules in a layer that are given no tokens, where the sequence is cut between
        blocks.
        per_token_args: (path of a layer or of a module in it, its argument) of what is given for each token beside
        the states.
    """

    model: nn.Module
    stacks: list[StackDescription]
    replacements: dict[str, SubModuleReplacementDescription] = field(default_factory=dict)
    parameters: dict[str, dict[int, Split]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    functions: list[tuple[str, Callable[[nn.Module], Any]]] = field(default_factory=list)
    methods: dict[str, Callable[..., Any]] = field(default_factory=dict)
    blocks: list[tuple[str, BlockDescription]] = field(default_factory=list)
    full_sequence_modules: list[str] = field(default_factory=list)
    token_free_modules: list[str] = field(default_factory=list)
    per_token_args: list[tuple[str, str]] = field(default_factory=list)

    def sharded_parameter_ids(self) -> dict[int, str]:
        """The identity of every parameter that is cut, and a name of it."""
        modules = {path: self.model.get_submodule(path) for path in self.replacements}
        out = {id(p): f"{path}.{n}" for path, m in modules.items() for n, p in m.named_parameters(recurse=False)}
        return out | {id(get_at(self.model, name)): name for name, splits in self.parameters.items() if splits}

    def restricted(self, placeholders: MissingParams) -> ShardingPlan:
        """What of it is about modules whose parameters are on this stage."""

        def is_here(path: str) -> bool:
            return not placeholders.has_any(self.model.get_submodule(path))

        def has(path: str) -> bool:
            owner, name = parent_of(self.model, path)
            return name in {**owner._parameters, **owner._buffers}

        return replace(
            self,
            replacements={path: sub for path, sub in self.replacements.items() if is_here(path)},
            parameters={path: splits for path, splits in self.parameters.items() if has(path)},
            blocks=[(path, block) for path, block in self.blocks if is_here(block.row)],
            full_sequence_modules=[path for path in self.full_sequence_modules if is_here(path)],
            token_free_modules=[path for path in self.token_free_modules if is_here(path)],
            per_token_args=[(path, name) for path, name in self.per_token_args if is_here(path)],
        )

    def fingerprint(self) -> list[str]:
        """The plan as text that is equal on all ranks that agree."""
        out = []
        for path, sub in self.replacements.items():
            module = self.model.get_submodule(path)
            shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
            kwargs = {k: v for k, v in (sub.kwargs or {}).items() if k != "expand"}
            out.append(
                f"{path}: {type(module).__name__} {shapes} -> {qualified_name(sub.target_module)} {_text(kwargs)}"
            )
        out += [f"{path}: {splits}" for path, splits in self.parameters.items()]
        # of attributes the names only: their values differ where ranks hold different numbers of heads
        out += [*self.attributes, *self.methods, *(f"{path}: {qualified_name(f)}" for path, f in self.functions)]
        out += [f"{path}: {block}" for path, block in self.blocks]
        return [*out, *(f"{path}: gathered" for path in self.full_sequence_modules), *map(str, self.stacks)]


def make_plan(model: nn.Module, policy: Policy, *, cuts: bool = True) -> ShardingPlan:
    """Matches the policy's rules against the model.

    Args:
        cuts: whether weights are cut. Without, the stacks are all that is planned: whatever a layer is made of, its
            weights stay whole.

    Raises PolicyError for a rule that matches nothing, a submodule or attribute that does not exist, two rules for one
    module, or a large parameter that no rule explains.
    """
    plan = ShardingPlan(model, policy.stacks())
    for path, module, description in _match(model, checked_descriptions(policy) if cuts else {}):
        for sub in description.sub_module_replacement or []:
            _add_replacement(plan, path, module, sub)
        _add_parameters(plan, path, module, description.parameters or {})
        for block in description.blocks or []:
            _add_block(plan, path, module, block)
        _add_changes(plan, path, module, description, policy.axis.size)
    for stack in plan.stacks:
        for needed in (stack.layers, stack.final_norm, stack.context[0] if stack.context else None):
            if needed is not None:
                get_module(model, needed, hint="")
    if not cuts:
        return plan
    if policy.shard_config.enable_sequence_parallelism:
        plan.full_sequence_modules.extend(_gathered(plan))
        plan.token_free_modules.extend(_in_layers(plan, lambda needs: needs.token_free_modules))
        plan.per_token_args.extend(_beside(plan))
    _check_tied(plan)
    _check_explained(policy, plan)
    return plan


def _gathered(plan: ShardingPlan) -> Iterator[str]:
    """Paths of the modules that stacks name as given the whole sequence."""
    around = dict.fromkeys(_in_layers(plan, lambda needs: needs.gather_with_blocks))
    ends = tuple(end for _, block in plan.blocks for end in (block.entry, block.row))
    yield from around
    for path in _in_layers(plan, lambda needs: needs.gather_modules):
        if path not in around and not any(f"{end}.".startswith(f"{path}.") for end in ends):
            yield path


def _beside(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    for stack in plan.stacks:
        for index, layer in plan.model.get_submodule(stack.layers).named_children():
            for module, _, name in (said.rpartition(".") for said in stack.sequence.per_token_args):
                if find_module(layer, module) is not None:
                    yield join_path(stack.layers, index, module), name


def _in_layers(plan: ShardingPlan, named: Callable[[SequenceParallelHints], Sequence[str]]) -> Iterator[str]:
    """Paths of the modules that stacks name so; not every layer has each."""
    for stack in plan.stacks:
        for index, layer in plan.model.get_submodule(stack.layers).named_children():
            yield from (
                join_path(stack.layers, index, n) for n in named(stack.sequence) if find_module(layer, n) is not None
            )


def _add_replacement(plan: ShardingPlan, at: str, module: nn.Module, sub: SubModuleReplacementDescription) -> None:
    path = join_path(at, sub.suffix)
    if sub.ignore_if_not_exist and find_module(module, sub.suffix) is None:
        return
    get_module(module, sub.suffix, at, " Set ignore_if_not_exist=True if some models lack it")
    if not path:
        raise PolicyError(
            "A rule replaces the whole model",
            rule="Submodules are replaced; the model itself stays",
            remedy="Name submodules, or give the model another class with inject_policy()",
        )
    if not callable(getattr(sub.target_module, "from_native_module", None)):
        raise PolicyError(
            f"{path!r} is to become a {qualified_name(sub.target_module)}, which has no from_native_module",
            rule="A target module makes itself of the native one: from_native_module(module, process_group, **kwargs)",
            remedy="Give it that method, or name a parallel layer such as Linear1D_Col",
        )
    for other in plan.replacements:
        if path == other or path.startswith(f"{other}.") or other.startswith(f"{path}."):
            raise PolicyError(
                f"Two rules replace {path!r}" + (f" and {other!r}, one inside the other" if path != other else ""),
                rule="A module is replaced once",
                remedy="Remove one of the two",
            )
    _check_alias(plan, path, get_module(plan.model, path), sub)
    plan.replacements[path] = sub


def _check_alias(plan: ShardingPlan, path: str, module: nn.Module, sub: SubModuleReplacementDescription) -> None:
    """A module that the model holds under several names becomes one thing."""
    for other, known in plan.replacements.items():
        is_same = plan.model.get_submodule(other) is module
        if is_same and (known.target_module, known.kwargs or {}) != (sub.target_module, sub.kwargs or {}):
            raise PolicyError(
                f"{other!r} and {path!r} are one module, which two rules replace: one by a "
                f"{qualified_name(known.target_module)} with {_text(known.kwargs or {})}, the other by a "
                f"{qualified_name(sub.target_module)} with {_text(sub.kwargs or {})}",
                rule="A module that is held under several names is replaced by one",
                remedy="Give both rules the same class and arguments, or remove one of the two",
            )


def _add_parameters(plan: ShardingPlan, at: str, module: nn.Module, parameters: Mapping[str, dict[int, Split]]) -> None:
    for inner, splits in parameters.items():
        owner_path, _, name = inner.rpartition(".")
        owner, path = find_module(module, owner_path), join_path(at, inner)
        known = {} if owner is None else {**owner._parameters, **owner._buffers}
        if owner is None or known.get(name) is None:
            raise PolicyError(
                f"There is no parameter or buffer {path!r}",
                rule="Every rule of a policy matches something",
                remedy=did_you_mean(name if owner else owner_path, known or [n for n, _ in module.named_modules()]),
            )
        if name in owner._buffers and name not in owner._non_persistent_buffers_set:
            raise PolicyError(
                f"{path} is a buffer that is saved with the model",
                rule="A policy cuts parameters, and buffers that are not saved: those are gathered by nobody",
                remedy="Leave it whole, or register it with persistent=False",
            )
        if (owner_path := join_path(at, owner_path)) in plan.replacements:
            raise PolicyError(
                f"{path} is named, and {owner_path!r} is replaced",
                rule="A module that is replaced brings its parameters with it",
                remedy="Remove one of the two",
            )
        plan.parameters[path] = splits


def _add_block(plan: ShardingPlan, at: str, module: nn.Module, block: BlockDescription) -> None:
    for suffix in (*block.columns, *block.cross_columns, block.row):
        get_module(module, suffix, at, "")
    entry, block = get_module(module, block.entry, at, ""), block.within(at)
    said = {*plan.parameters, *(join_path(block.entry, name) for name in block.replicated_terms or ())}
    own = [n for name, _ in entry.named_parameters(recurse=False) if (n := join_path(block.entry, name)) not in said]
    if own and block.entry not in (*block.columns, *block.cross_columns):
        raise PolicyError(
            f"{own[0]} is a parameter of the module at a block's entry itself",
            rule="Inside a block each rank has a part of such a gradient, behind its exit the whole; modules show it",
            remedy="Say in `parameters` what it counts, give it a module of its own, or leave this block whole",
        )
    plan.blocks.append((at, block))


def _add_changes(
    plan: ShardingPlan, at: str, module: nn.Module, description: ModulePolicyDescription, size: int
) -> None:
    """Attributes, methods, and functions that change parameters."""
    default_cut = [s.suffix for s in description.sub_module_replacement or [] if "split" not in (s.kwargs or {})]
    for name, value in (description.attribute_replacement or {}).items():
        owner_path, _, attribute = name.rpartition(".")
        if (owner := get_at(module, owner_path)) is None or not hasattr(owner, attribute):
            known = vars(owner) if owner is not None else [n for n, _ in module.named_modules() if n]
            raise PolicyError(
                f"There is no attribute {attribute!r} on {join_path(at, owner_path) or 'the model'!r}",
                rule="An attribute that is rewritten exists and is read by the forward",
                remedy=did_you_mean(attribute if owner is not None else owner_path, [n for n in known if n[:1] != "_"]),
            )
        evenly = [suffix for suffix in default_cut if f"{suffix}.".startswith(f"{owner_path}." if owner_path else "")]
        _check_count(name, getattr(owner, attribute), value, size, evenly)
        plan.attributes[join_path(at, name)] = value
    for name, method in (description.method_replacement or {}).items():
        if not callable(getattr(module, name, None)):
            raise PolicyError(
                f"There is no method {name!r} on {at or 'the model'!r} ({type(module).__name__})",
                rule="A method that is replaced exists",
                remedy=did_you_mean(name, [n for n in dir(module) if not n.startswith("_")]),
            )
        plan.methods[join_path(at, name)] = method
    plan.functions.extend((at, function) for function in description.param_replacement or [])


def _check_count(name: str, before: Any, value: Any, size: int, evenly: Sequence[str]) -> None:
    """A count of heads that is divided with a remainder, beside features that are cut evenly: heads would be torn."""
    if type(before) is int and type(value) is int and before % size and value == before // size and evenly:
        fits = ", ".join(str(n) for n in range(1, before + 1) if before % n == 0)
        raise ConfigError(
            f"A tensor size of {size} makes {name} {value}, which was {before}, and cuts {evenly[0]!r} evenly",
            rule="What an attribute counts is cut whole: the tensor size divides it",
            remedy=f"Use a tensor size of {fits}, or a RolePolicy, which cuts uneven numbers of heads",
        )


def _match(
    model: nn.Module, descriptions: Mapping[ModuleKey, ModulePolicyDescription]
) -> Iterator[tuple[str, nn.Module, ModulePolicyDescription]]:
    modules = list(model.named_modules())
    for key, description in descriptions.items():
        found = [(path, m, description) for path, m in modules if _matches(key, path, m)]
        if not found:
            known = {type(m).__name__ for _, m in modules} | {path for path, _ in modules if path}
            raise PolicyError(
                f"The rule for {qualified_name(key)!r} matches no module of {type(model).__name__}",
                rule="Every rule of a policy matches a module: by class, class name or path with * for an index",
                remedy=did_you_mean(qualified_name(key), known),
            )
        yield from found


def _matches(key: ModuleKey, path: str, module: nn.Module) -> bool:
    if isinstance(key, type):
        return type(module) is key
    if key == path or key in (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"):
        return True
    return "*" in key and key.count(".") == path.count(".") and fnmatchcase(path, key)


def _check_tied(plan: ShardingPlan) -> None:
    """A weight that is cut in one module must not be used whole by another that it is tied to."""
    replaced = {id(plan.model.get_submodule(path)) for path in plan.replacements}
    named = {(id(owner), name) for owner, name in (parent_of(plan.model, path) for path in plan.parameters)}
    for path, name, other in readers_of(plan.model, plan.sharded_parameter_ids(), replaced):
        if (id(plan.model.get_submodule(path)), name) not in named:
            raise PolicyError(
                f"{join_path(path, name)} is tied to {other}, which is cut, but no rule names it",
                rule="Modules that share a weight are cut together or stay whole together",
                remedy=f"Name {path!r} too (an embedding, or a head), or leave {other.rpartition('.')[0]!r} whole",
            )


def _check_explained(policy: Policy, plan: ShardingPlan) -> None:
    whole = policy.replicated()
    if whole is None:
        return
    model, replaced = (
        plan.model,
        {*plan.sharded_parameter_ids(), *(id(get_at(plan.model, name)) for name in plan.parameters)},
    )
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
            remedy=f"Give it a role, or add it to the policy's `keep_replicated` ({known or 'empty now'})",
        )


def _in_any_layer(name: str, stacks: Sequence[str]) -> str:
    """``layers.0.mlp.2.weight`` -> ``layers.*.mlp.2.weight``, where the stack is ``layers.``."""
    stack = next((s for s in stacks if name.startswith(s)), name)
    layer, dot, rest = name.removeprefix(stack).partition(".")
    return f"{stack}*{dot}{rest}" if layer.isdigit() else name


def qualified_name(key: Any) -> str:
    return key if isinstance(key, str) else getattr(key, "__name__", type(key).__name__)


def _text(value: Any) -> str:
    """A value as text that is the same in every process: no address of an object is in it."""
    if value is None or isinstance(value, str | int | float | Split):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return qualified_name(value)
