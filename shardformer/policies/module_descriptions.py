"""Dataclasses that describe how sharding changes a module, and checks of their field types."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from numbers import Integral
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import nn

from shardformer.errors import PolicyError
from shardformer.layout.shard_spec import Split
from shardformer.pipeline.layer_sequence import prepend_path_to_fields
from shardformer.tensor_parallel.block import HeadRange

ModuleKey = str | type[nn.Module]
"""Selects modules by class, by class name, or by path with ``*`` for indices."""


@dataclass
class SubModuleReplacementDescription:
    """Describes which parallel layer replaces a submodule.

    Args:
        suffix: path of the submodule inside the described module.
        target_module: a class whose ``from_native_module(module, process_group, **kwargs)`` creates the replacement.
        kwargs: keyword arguments of ``from_native_module``.
        ignore_if_not_exist: whether a missing submodule is skipped instead of raising an error.
    """

    suffix: str
    target_module: Any
    kwargs: dict[str, Any] | None = None
    ignore_if_not_exist: bool = False


@dataclass
class BlockArguments:
    """Describes the arguments of an attention module that differ between tensor-parallel ranks.

    Args:
        at: path of the module.
        region_inputs: arguments that enter the tensor-parallel region on their own.
        head_dims: argument -> its dim that counts heads.
        bounds: (number of heads, first head of this rank, end of this rank's heads).
        width: features of this rank's heads, for a forward pass that reads them as the last dim of its input.
        kv_heads: (number of KV heads, indices of those that this rank's forward pass reads, in its order).
    """

    at: str
    region_inputs: Sequence[str] = ()
    head_dims: Mapping[str, int] = field(default_factory=dict)
    bounds: HeadRange = field(default=(0, 0, 0), repr=False)  # excluded from repr, which ranks compare
    width: int | None = field(default=None, repr=False)
    kv_heads: tuple[int, tuple[int, ...]] = field(default=(0, ()), repr=False)


@dataclass
class BlockDescription:
    """Describes a tensor-parallel attention module or MLP, and its column- and row-parallel linear layers.

    Args:
        entry: path of the module whose first tensor argument enters the region.
        columns: paths of the column-parallel linear layers that read that argument.
        row: path of the row-parallel linear layer at the exit.
        cross_columns: paths of column-parallel linear layers that read another input (the states in cross-attention).
        arguments: arguments of `forward` in the block that depend on the rank.
        fuse_activation: whether an activation directly follows the columns, so that their bias can be fused with it.
        shared_exit: path of an earlier block's row-parallel linear layer whose output the layer adds to this block's,
            so that both use one collective.
        gather_module: path of a module that needs the full sequence outside the block, too, under sequence
            parallelism.
        replicated_terms: for a module that is a block by itself (``entry`` and ``row`` both name it, all inputs enter
            and its output leaves): replicated parameters and modules in it that are added to the output. Each rank
            adds an equal fraction of them. None for other blocks.
    """

    entry: str
    columns: Sequence[str]
    row: str
    cross_columns: Sequence[str] = ()
    arguments: BlockArguments | None = None
    fuse_activation: bool = False
    shared_exit: str | None = None
    gather_module: str | None = None
    replicated_terms: Sequence[str] | None = None

    def with_path_prefix(self, prefix: str) -> BlockDescription:
        """Return a copy with ``prefix`` prepended to all module paths."""
        own = prepend_path_to_fields(
            self, prefix, "entry", "columns", "row", "cross_columns", "shared_exit", "gather_module"
        )
        return replace(own, arguments=self.arguments and prepend_path_to_fields(self.arguments, prefix, "at"))

    @property
    def contains_exit_layer(self) -> bool:
        """Whether the module ``entry`` contains the row-parallel linear layer ``row``."""
        return f"{self.row}.".startswith(f"{self.entry}." if self.entry else "")


@dataclass
class ModulePolicyDescription:
    """Describes how sharding changes one kind of module: its attributes, parameters and submodules.

    Names of attributes and parameters may be paths.

    Args:
        attribute_replacement: attribute -> its value after sharding.
        param_replacement: functions that modify the module's parameters in place.
        sub_module_replacement: submodules and their replacements.
        method_replacement: method name -> function that replaces it.
        blocks: replaced linear layers that share one entry and one exit.
        parameters: direct parameter or buffer -> dim -> split. An empty dict keeps it replicated and sums its
            gradient over the ranks, for a parameter inside the ``entry`` of a block. Elsewhere, it has no effect.
    """

    attribute_replacement: dict[str, Any] | None = None
    param_replacement: list[Callable[[nn.Module], Any]] | None = None
    sub_module_replacement: list[SubModuleReplacementDescription] | None = None
    method_replacement: dict[str, Callable[..., Any]] | None = None
    blocks: list[BlockDescription] | None = None
    parameters: dict[str, dict[int, Split]] | None = None


def merge_descriptions(descriptions: Sequence[ModulePolicyDescription]) -> ModulePolicyDescription:
    """Merge several descriptions of the same module into one."""
    return ModulePolicyDescription(
        attribute_replacement={n: value for d in descriptions for n, value in (d.attribute_replacement or {}).items()},
        sub_module_replacement=[sub for d in descriptions for sub in d.sub_module_replacement or []],
        blocks=[block for d in descriptions for block in d.blocks or []],
        parameters={n: splits for d in descriptions for n, splits in (d.parameters or {}).items()},
    )


TYPE_NAMES = {str: "a string", int: "a whole number", bool: "True or False", type(None): "None", Any: "anything"}


def check_dataclass_field_types(dataclass_instance: Any) -> None:
    """Raise PolicyError if a field of a dataclass, or of a nested dataclass, has a value of the wrong type.

    >>> from shardformer.policies.roles import MLP
    >>> MLP("mlp", up="fc1", down=3)
    Traceback (most recent call last):
    shardformer.errors.PolicyError: MLP has the invalid value down=3. `down` must be a string. Fix `down` in the policy.
    """
    kind: Any = type(dataclass_instance)
    for item in fields(dataclass_instance):
        value = getattr(dataclass_instance, item.name)
        check_value_type(kind.__name__, item.name, value, get_cached_type_hints(kind)[item.name])
        for inner in _iter_nested_descriptions(value):
            check_dataclass_field_types(inner)


def check_value_type(owner_name: str, value_name: str, value: Any, type_hint: Any) -> None:
    """Raise PolicyError if the type of ``value`` does not match ``type_hint``."""
    if not _is_instance_of_hint(value, type_hint):
        raise PolicyError(
            f"{owner_name} has the invalid value {value_name}={value!r:.120}.",
            rule=f"`{value_name}` must be {format_type_hint(type_hint)}",
            remedy=f"Use {value_name}=[{value!r:.80}]"
            if _is_instance_of_hint([value], type_hint)
            else f"Fix `{value_name}` in the policy",
        )


@cache
def get_cached_type_hints(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls)


def format_type_hint(type_hint: Any) -> str:
    """Convert a type hint to words for an error message, such as "a string"."""
    origin, arguments = get_origin(type_hint), get_args(type_hint)
    if origin in (Union, types.UnionType):
        return " or ".join(format_type_hint(each) for each in arguments)
    if type_hint is Callable or origin is Callable:
        return "a function"
    if origin is type:
        return "a class"
    if _is_subclass(origin, Mapping):
        return f"a dict ({format_type_hint(arguments[0])}: {format_type_hint(arguments[1])})"
    if origin is tuple and arguments[-1] is not ...:
        return f"({', '.join(map(format_type_hint, arguments))})"
    if _is_subclass(origin, Collection):
        return f"a list (each {format_type_hint(arguments[0])})"
    return TYPE_NAMES.get(type_hint) or f"{'an' if type_hint.__name__[0] in 'AEIOM' else 'a'} {type_hint.__name__}"


def _is_instance_of_hint(value: Any, type_hint: Any) -> bool:
    origin, arguments = get_origin(type_hint), get_args(type_hint)
    if type_hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_is_instance_of_hint(value, each) for each in arguments)
    if origin is Callable:
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if _is_subclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            _is_instance_of_hint(k, arguments[0]) and _is_instance_of_hint(v, arguments[1]) for k, v in value.items()
        )
    if _is_subclass(origin, Collection):
        if not isinstance(value, Collection) or isinstance(value, str | Mapping):
            return False
        if origin is tuple and arguments[-1] is not ...:
            return len(value) == len(arguments) and all(map(_is_instance_of_hint, value, arguments))
        return all(_is_instance_of_hint(each, arguments[0]) for each in value)
    if type_hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, type_hint)


def _is_subclass(candidate: Any, parent_class: type) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, parent_class)


def _iter_nested_descriptions(field_value: Any) -> Iterator[Any]:
    for each in (
        field_value if isinstance(field_value, Sequence) and not isinstance(field_value, str) else [field_value]
    ):
        if is_dataclass(each) and not isinstance(each, type) and type(each).__module__ in POLICY_MODULES:
            yield each


POLICY_MODULES = (
    "shardformer.policies.module_descriptions",
    "shardformer.policies.roles",
    "shardformer.pipeline.layer_sequence",
)
"""Modules that define the dataclasses of a policy."""
