"""Compute and check the sharding plan, which lists all changes that sharding will make to a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardformer.errors import ConfigError, PolicyError, suggest_similar_names
from shardformer.layout.shard_spec import Split
from shardformer.module_paths import (
    get_attribute_by_path_or_none,
    get_parent_and_attribute_name,
    get_submodule_or_none,
    get_submodule_or_raise,
    is_linear_or_conv1d,
    join_path,
)
from shardformer.pipeline.layer_sequence import LayerStackDescription, SequenceParallelHints
from shardformer.pipeline.stage_forward import ParameterPlaceholders
from shardformer.policies.module_descriptions import (
    BlockDescription,
    ModuleKey,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
)
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import check_no_missing_roles, get_checked_module_descriptions


@dataclass(frozen=True)
class ShardingPlan:
    """Lists all changes that sharding will make to a model. Paths are relative to the full model.

    Args:
        model: the plain model.
        stacks: the model's stacks of layers.
        replacements: path of a submodule -> its replacement.
        parameters: path of a parameter or buffer that the policy names directly -> dim -> how that dim is split.
        attributes: path of an attribute -> its value after sharding.
        functions: (path of a module, function that modifies its parameters in place).
        methods: path of a method -> the function that replaces it.
        blocks: (path of the described module, tensor-parallel block).
        full_sequence_modules: paths of modules in a layer that receive the full sequence under sequence parallelism,
            or all hidden features on a tensor grid.
        token_free_modules: paths of modules in a layer whose inputs have no token dimension, under sequence
            parallelism.
        per_token_args: (path of a layer or of a module in it, name of an argument that has one entry per token, in
            addition to the hidden states).
    """

    model: nn.Module
    stacks: list[LayerStackDescription]
    replacements: dict[str, SubModuleReplacementDescription] = field(default_factory=dict)
    parameters: dict[str, dict[int, Split]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    functions: list[tuple[str, Callable[[nn.Module], Any]]] = field(default_factory=list)
    methods: dict[str, Callable[..., Any]] = field(default_factory=dict)
    blocks: list[tuple[str, BlockDescription]] = field(default_factory=list)
    full_sequence_modules: list[str] = field(default_factory=list)
    token_free_modules: list[str] = field(default_factory=list)
    per_token_args: list[tuple[str, str]] = field(default_factory=list)

    def get_sharded_param_names_by_id(self) -> dict[int, str]:
        """Map the ``id`` of each parameter that will be sharded to the name of the parameter."""
        modules = {path: self.model.get_submodule(path) for path in self.replacements}
        out = {id(p): f"{path}.{n}" for path, m in modules.items() for n, p in m.named_parameters(recurse=False)}
        return out | {
            id(get_attribute_by_path_or_none(self.model, name)): name
            for name, splits in self.parameters.items()
            if splits
        }

    def restrict_to_local_stage(self, placeholders: ParameterPlaceholders) -> ShardingPlan:
        """Return a copy of the plan that covers only the modules of this pipeline stage."""

        def is_on_local_stage(module_path: str) -> bool:
            return not placeholders.has_placeholders(self.model.get_submodule(module_path))

        def has_param_or_buffer(param_path: str) -> bool:
            owner, name = get_parent_and_attribute_name(self.model, param_path)
            return name in {**owner._parameters, **owner._buffers}

        return replace(
            self,
            replacements={path: sub for path, sub in self.replacements.items() if is_on_local_stage(path)},
            parameters={path: splits for path, splits in self.parameters.items() if has_param_or_buffer(path)},
            blocks=[(path, block) for path, block in self.blocks if is_on_local_stage(block.row)],
            full_sequence_modules=[path for path in self.full_sequence_modules if is_on_local_stage(path)],
            token_free_modules=[path for path in self.token_free_modules if is_on_local_stage(path)],
            per_token_args=[(path, name) for path, name in self.per_token_args if is_on_local_stage(path)],
        )

    def get_lines_to_compare_across_ranks(self) -> list[str]:
        """Describe the plan as lines of text, so that ranks can check that their plans are identical."""
        out = []
        for path, sub in self.replacements.items():
            module = self.model.get_submodule(path)
            shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
            kwargs = {k: v for k, v in (sub.kwargs or {}).items() if k != "expand"}
            target = f"{get_display_name(sub.target_module)} {_format_without_object_addresses(kwargs)}"
            out.append(f"{path}: {type(module).__name__} {shapes} -> {target}")
        out += [f"{path}: {splits}" for path, splits in self.parameters.items()]
        # only the names of attributes: their values differ between ranks with different numbers of heads
        out += [*self.attributes, *self.methods, *(f"{path}: {get_display_name(f)}" for path, f in self.functions)]
        out += [f"{path}: {block}" for path, block in self.blocks]
        return [*out, *(f"{path}: gathered" for path in self.full_sequence_modules), *map(str, self.stacks)]


def make_sharding_plan(model: nn.Module, policy: Policy, *, apply_sharding_rules: bool = True) -> ShardingPlan:
    """Create the plan that shards a model according to the rules of a policy.

    Args:
        apply_sharding_rules: whether the rules are applied. If False, the plan contains only the stacks of layers.

    Raises:
        PolicyError: if a rule matches nothing, a submodule or attribute does not exist, two rules match one module,
            or no rule covers a large parameter.
    """
    plan = ShardingPlan(model, policy.stacks())
    for path, module, description in _iter_matching_modules(
        model, get_checked_module_descriptions(policy) if apply_sharding_rules else {}
    ):
        for sub in description.sub_module_replacement or []:
            _add_module_replacement(plan, path, module, sub)
        _add_sharded_parameters(plan, path, module, description.parameters or {})
        for block in description.blocks or []:
            _add_tensor_parallel_block(plan, path, module, block)
        _add_attribute_changes(plan, path, module, description, policy.axis.size)
    for stack in plan.stacks:
        for needed in (stack.layers, stack.final_norm, stack.context[0] if stack.context else None):
            if needed is not None:
                get_submodule_or_raise(model, needed, error_hint="")
    if not apply_sharding_rules:
        return plan
    if policy.shard_config.enable_sequence_parallelism:
        plan.full_sequence_modules.extend(_iter_full_sequence_module_paths(plan))
        plan.token_free_modules.extend(_iter_sequence_hint_paths(plan, lambda needs: needs.token_free_modules))
        plan.per_token_args.extend(_iter_per_token_args(plan))
    _check_tied_weights_are_all_sharded(plan)
    matched = {
        *plan.get_sharded_param_names_by_id(),
        *(id(get_attribute_by_path_or_none(plan.model, name)) for name in plan.parameters),
    }
    check_no_missing_roles(policy, plan.model, matched, [stack.layers for stack in plan.stacks])
    return plan


def _iter_full_sequence_module_paths(plan: ShardingPlan) -> Iterator[str]:
    around = dict.fromkeys(_iter_sequence_hint_paths(plan, lambda needs: needs.gather_with_blocks))
    ends = tuple(end for _, block in plan.blocks for end in (block.entry, block.row))
    yield from around
    for path in _iter_sequence_hint_paths(plan, lambda needs: needs.gather_modules):
        if path not in around and not any(f"{end}.".startswith(f"{path}.") for end in ends):
            yield path


def _iter_per_token_args(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    for stack in plan.stacks:
        for index, layer in plan.model.get_submodule(stack.layers).named_children():
            for module, _, name in (hint.rpartition(".") for hint in stack.sequence.per_token_args):
                if get_submodule_or_none(layer, module) is not None:
                    yield join_path(stack.layers, index, module), name


def _iter_sequence_hint_paths(
    plan: ShardingPlan, select_hint: Callable[[SequenceParallelHints], Sequence[str]]
) -> Iterator[str]:
    """Yield the full paths of modules that the policy lists for special handling under sequence parallelism."""
    for stack in plan.stacks:
        for index, layer in plan.model.get_submodule(stack.layers).named_children():
            for name in select_hint(stack.sequence):
                if get_submodule_or_none(layer, name) is not None:
                    yield join_path(stack.layers, index, name)


def _add_module_replacement(
    plan: ShardingPlan, module_path: str, module: nn.Module, replacement: SubModuleReplacementDescription
) -> None:
    path = join_path(module_path, replacement.suffix)
    if replacement.ignore_if_not_exist and get_submodule_or_none(module, replacement.suffix) is None:
        return
    get_submodule_or_raise(
        module, replacement.suffix, module_path, " Set ignore_if_not_exist=True if some models do not have it"
    )
    if not path:
        raise PolicyError(
            "A rule of the policy replaces the full model instead of a submodule.",
            remedy="Pass the path of a submodule, or change the class of the model with inject_policy().",
        )
    if not callable(getattr(replacement.target_module, "from_native_module", None)):
        target = get_display_name(replacement.target_module)
        raise PolicyError(
            f"The policy replaces {path!r} with {target}, which has no from_native_module method.",
            remedy="Implement from_native_module(module, process_group, **kwargs), or use a parallel layer such as "
            "Linear1D_Col.",
        )
    module = get_submodule_or_raise(plan.model, path)
    for other, known in plan.replacements.items():
        if f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}."):
            raise PolicyError(
                f"Two rules of the policy overlap: one replaces {other!r}, and the other {path!r}.",
                remedy="Remove one of the two rules.",
            )
        is_same = plan.model.get_submodule(other) is module
        if is_same and (known.target_module, known.kwargs or {}) != (
            replacement.target_module,
            replacement.kwargs or {},
        ):
            first, second = (
                f"{get_display_name(rule.target_module)} (kwargs={_format_without_object_addresses(rule.kwargs or {})})"
                for rule in (known, replacement)
            )
            raise PolicyError(
                f"{other!r} and {path!r} are the same module, but the policy replaces it with {first} and {second}.",
                remedy="Use the same class and arguments in both rules, or remove one of the rules.",
            )
    plan.replacements[path] = replacement


def _add_sharded_parameters(
    plan: ShardingPlan, module_path: str, module: nn.Module, splits_by_param_path: Mapping[str, dict[int, Split]]
) -> None:
    for inner, splits in splits_by_param_path.items():
        owner_path, _, name = inner.rpartition(".")
        owner, path = get_submodule_or_none(module, owner_path), join_path(module_path, inner)
        known = {} if owner is None else {**owner._parameters, **owner._buffers}
        if owner is None or known.get(name) is None:
            near = suggest_similar_names(name if owner else owner_path, known or [n for n, _ in module.named_modules()])
            raise PolicyError(
                f"The policy shards {path!r}, which is not a parameter or buffer of the model.",
                remedy=f"Fix the name in the policy. {near}",
            )
        if name in owner._buffers and name not in owner._non_persistent_buffers_set:
            raise PolicyError(
                f"The policy shards the buffer {path}, but ShardFormer cannot shard a buffer that the state dict "
                "contains.",
                remedy="Keep the buffer replicated, or register it with persistent=False.",
            )
        if (owner_path := join_path(module_path, owner_path)) in plan.replacements:
            raise PolicyError(
                f"The policy shards the parameter {path}, but also replaces its module {owner_path!r}.",
                remedy="Remove one of the two rules.",
            )
        plan.parameters[path] = splits


def _add_tensor_parallel_block(
    plan: ShardingPlan, module_path: str, module: nn.Module, block: BlockDescription
) -> None:
    for suffix in (*block.columns, *block.cross_columns, block.row):
        get_submodule_or_raise(module, suffix, module_path, "")
    entry, block = get_submodule_or_raise(module, block.entry, module_path, ""), block.with_path_prefix(module_path)
    named = {*plan.parameters, *(join_path(block.entry, name) for name in block.replicated_terms or ())}
    own = [n for name, _ in entry.named_parameters(recurse=False) if (n := join_path(block.entry, name)) not in named]
    if own and block.entry not in (*block.columns, *block.cross_columns):
        where = (
            "`parameters`"
            if block.arguments is None
            else "`local_attrs` of the Attention, as 'heads', 'width' or 'inside'"
        )
        raise PolicyError(
            f"The policy has no rule for {own[0]}, a parameter of an attention module or MLP.",
            remedy=f"Add the parameter to {where} in the policy, or move the parameter into a submodule.",
        )
    plan.blocks.append((module_path, block))


def _add_attribute_changes(
    plan: ShardingPlan, module_path: str, module: nn.Module, description: ModulePolicyDescription, tp_size: int
) -> None:
    default_cut = [s.suffix for s in description.sub_module_replacement or [] if "split" not in (s.kwargs or {})]
    for name, value in (description.attribute_replacement or {}).items():
        owner_path, _, attribute = name.rpartition(".")
        if (owner := get_attribute_by_path_or_none(module, owner_path)) is None or not hasattr(owner, attribute):
            known = vars(owner) if owner is not None else [n for n, _ in module.named_modules() if n]
            wrong = attribute if owner is not None else owner_path
            near = suggest_similar_names(wrong, [n for n in known if n[:1] != "_"])
            where = join_path(module_path, owner_path) or "the model"
            raise PolicyError(
                f"The policy changes the attribute {attribute!r} of {where}, which does not exist.",
                remedy=f"Fix the name in attribute_replacement. {near}",
            )
        even_submodules = [
            suffix for suffix in default_cut if f"{suffix}.".startswith(f"{owner_path}." if owner_path else "")
        ]
        _check_attribute_divisible(name, getattr(owner, attribute), value, tp_size, even_submodules)
        plan.attributes[join_path(module_path, name)] = value
    for name, method in (description.method_replacement or {}).items():
        if not callable(getattr(module, name, None)):
            where = module_path or "the model"
            near = suggest_similar_names(name, [n for n in dir(module) if not n.startswith("_")])
            raise PolicyError(
                f"The policy replaces the method {name!r} of {where} ({type(module).__name__}), which does not exist.",
                remedy=f"Fix the name in method_replacement. {near}",
            )
        plan.methods[join_path(module_path, name)] = method
    plan.functions.extend((module_path, function) for function in description.param_replacement or [])


def _check_attribute_divisible(
    attr_name: str, old_value: Any, new_value: Any, tp_size: int, evenly_split_submodules: Sequence[str]
) -> None:
    """Raise ConfigError if a count such as num_heads is not divisible by the tensor-parallel size."""
    if (
        type(old_value) is int
        and type(new_value) is int
        and old_value % tp_size
        and new_value == old_value // tp_size
        and evenly_split_submodules
    ):
        fits = ", ".join(str(n) for n in range(1, old_value + 1) if old_value % n == 0)
        raise ConfigError(
            f"{attr_name}={old_value} is not divisible by the tensor size {tp_size}.",
            remedy=f"Use a tensor size of {fits}, or a RolePolicy, which supports uneven numbers of heads.",
        )


def _iter_matching_modules(
    model: nn.Module, descriptions: Mapping[ModuleKey, ModulePolicyDescription]
) -> Iterator[tuple[str, nn.Module, ModulePolicyDescription]]:
    modules = list(model.named_modules())
    for key, description in descriptions.items():
        found = [(path, m, description) for path, m in modules if _matches_key(key, path, m)]
        if not found:
            known = {type(m).__name__ for _, m in modules} | {path for path, _ in modules if path}
            key_name = get_display_name(key)
            raise PolicyError(
                f"The policy's rule for {key_name!r} matches no module of {type(model).__name__}.",
                remedy="Write the rule for a class, a class name, or a path with * for an index. "
                + suggest_similar_names(key_name, known),
            )
        yield from found


def _matches_key(module_key: ModuleKey, module_path: str, module: nn.Module) -> bool:
    if isinstance(module_key, type):
        return type(module) is module_key
    if module_key == module_path or module_key in (
        type(module).__name__,
        f"{type(module).__module__}.{type(module).__qualname__}",
    ):
        return True
    return (
        "*" in module_key and module_key.count(".") == module_path.count(".") and fnmatchcase(module_path, module_key)
    )


def _check_tied_weights_are_all_sharded(plan: ShardingPlan) -> None:
    """Raise PolicyError if a module that is not sharded uses a weight that is tied to a sharded weight.

    A linear layer or embedding reads its own parameters. Any other module reads those that its forward pass names.
    BERT's head owns the bias of its decoder but does not read it.
    """
    sharded = plan.get_sharded_param_names_by_id()
    replaced = {id(plan.model.get_submodule(path)) for path in plan.replacements}
    named = {
        (id(owner), name)
        for owner, name in (get_parent_and_attribute_name(plan.model, path) for path in plan.parameters)
    }
    for path, module in plan.model.named_modules():
        reads_all = is_linear_or_conv1d(module) or isinstance(module, nn.Embedding)
        for name, p in module.named_parameters(recurse=False) if id(module) not in replaced else ():
            if (
                id(p) not in sharded
                or (id(module), name) in named
                or not (reads_all or _is_attribute_read_in_forward(type(module), name))
            ):
                continue
            other = sharded[id(p)]
            name, owner = join_path(path, name), other.rpartition(".")[0]
            raise PolicyError(
                f"The parameter {name} is tied to the sharded parameter {other}, but the policy does not shard {name}.",
                remedy=f"Add {path!r} to the policy, for example as the `head`, or keep {owner!r} replicated.",
            )


def _is_attribute_read_in_forward(module_cls: type[nn.Module], attr_name: str) -> bool:
    """Return whether the ``forward`` method of a class, or any method it calls, reads the attribute ``attr_name``."""
    waiting, seen = ["forward"], set[str]()
    while waiting:
        method = waiting.pop()
        code = getattr(inspect.unwrap(getattr(module_cls, method, None) or len), "__code__", None)
        if code is None or method in seen:
            continue
        seen.add(method)
        if attr_name in code.co_names:
            return True
        waiting += code.co_names
    return False


def get_display_name(named_object: Any) -> str:
    return (
        named_object
        if isinstance(named_object, str)
        else getattr(named_object, "__name__", type(named_object).__name__)
    )


def _format_without_object_addresses(value: Any) -> str:
    """Format a value without object addresses, so that the text is identical in every process."""
    if value is None or isinstance(value, str | int | float | Split):
        return repr(value)
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(
                f"{_format_without_object_addresses(k)}: {_format_without_object_addresses(v)}"
                for k, v in value.items()
            )
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_format_without_object_addresses, value)) + "]"
    return get_display_name(value)
