"""Descriptions of what replaces the modules of a model, and the check of their field types."""

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
from shardformer.pipeline.layer_sequence import with_path_prefix
from shardformer.tensor_parallel.block import HeadRange

ModuleKey = str | type[nn.Module]
"""Which modules a description is about: their class, their class's name, or their path with ``*`` for indices."""


@dataclass
class SubModuleReplacementDescription:
    """One submodule and the module that takes its place.

    Args:
        suffix: path of the submodule inside the described module.
        target_module: a class whose ``from_native_module(module, process_group, **kwargs)`` makes the replacement.
        kwargs: handed to ``from_native_module``.
        ignore_if_not_exist: whether a submodule that is not there is passed over, instead of an error.
    """

    suffix: str
    target_module: Any
    kwargs: dict[str, Any] | None = None
    ignore_if_not_exist: bool = False


@dataclass
class BlockArguments:
    """What a forward is given beside the first tensor of a block's entry, or reads off that, where ranks matter to it.

    Args:
        at: path of the module whose forward it is.
        region_inputs: those of its arguments that enter by themselves.
        head_dims: argument -> which of its dims counts the heads.
        bounds: how many heads there are, from which to which this rank has.
        width: the width of this rank's heads, for a forward that reads it as the last dim of what enters.
        kv_heads: how many key-value heads there are, and those that this rank's forward sees, in its order.
    """

    at: str
    region_inputs: Sequence[str] = ()
    head_dims: Mapping[str, int] = field(default_factory=dict)
    bounds: HeadRange = field(default=(0, 0, 0), repr=False)  # ranks differ in it, and agree on the rest
    width: int | None = field(default=None, repr=False)
    kv_heads: tuple[int, tuple[int, ...]] = field(default=(0, ()), repr=False)


@dataclass
class BlockDescription:
    """A part of the described module that enters the tensor-parallel region once and leaves it once.

    Args:
        entry: path of the module whose first tensor argument enters.
        columns: paths of the column-parallel linears that read what entered.
        row: path of the row-parallel linear at the exit.
        cross_columns: paths of column-parallel linears that read something else that has entered (cross-attention's
        states).
        arguments: what else the forward of a module in it is given.
        fuse_activation: whether an activation follows the columns at once, so that their bias can be fused with it.
        shared_exit: path of an earlier block's row-parallel linear, which exits with this one's: the layer adds them.
        gather_module: path of a module that needs the whole sequence, under sequence parallelism, outside of the
            block too.
        replicated_terms: for a module that is a block by itself, named by ``entry`` and ``row`` (all that it is given
        enters,
            and what it gives leaves): the parameters and modules in it that stay whole and are added to what it gives,
            of which each rank adds an equal part. None for any other block.
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

    def within(self, path: str) -> BlockDescription:
        """The same block of a model that holds the described module at ``path``."""
        own = with_path_prefix(self, path, "entry", "columns", "row", "cross_columns", "shared_exit", "gather_module")
        return replace(own, arguments=self.arguments and with_path_prefix(self.arguments, path, "at"))

    @property
    def holds_exit(self) -> bool:
        """Whether the module at the entry holds the linear at the exit too."""
        return f"{self.row}.".startswith(f"{self.entry}." if self.entry else "")


@dataclass
class ModulePolicyDescription:
    """What becomes of the modules of one kind.

    Args:
        attribute_replacement: attribute (a path may lead to it) -> its value after sharding.
        param_replacement: functions that change the module's parameters in place.
        sub_module_replacement: submodules and what takes their place.
        method_replacement: method name -> function that takes its place.
        blocks: which of the replaced linears share one entry and one exit.
        parameters: parameter or buffer that a module holds itself (a path may lead to it) -> dim -> how it is cut.
            Without any dim it stays whole, and is read by what this rank has of a block: its gradient is summed.
    """

    attribute_replacement: dict[str, Any] | None = None
    param_replacement: list[Callable[[nn.Module], Any]] | None = None
    sub_module_replacement: list[SubModuleReplacementDescription] | None = None
    method_replacement: dict[str, Callable[..., Any]] | None = None
    blocks: list[BlockDescription] | None = None
    parameters: dict[str, dict[int, Split]] | None = None


def merge_descriptions(descriptions: Sequence[ModulePolicyDescription]) -> ModulePolicyDescription:
    """What several descriptions of one kind of module say together, of what roles say."""
    return ModulePolicyDescription(
        attribute_replacement={n: value for d in descriptions for n, value in (d.attribute_replacement or {}).items()},
        sub_module_replacement=[sub for d in descriptions for sub in d.sub_module_replacement or []],
        blocks=[block for d in descriptions for block in d.blocks or []],
        parameters={n: splits for d in descriptions for n, splits in (d.parameters or {}).items()},
    )


TYPE_NAMES = {str: "a string", int: "a whole number", bool: "True or False", type(None): "None", Any: "anything"}


def check_field_types(thing: Any) -> None:
    """Raises PolicyError for a field of a dataclass, or of one in it, whose value is not what its type says.

    >>> from shardformer.policies.roles import MLP
    >>> MLP("mlp", up=3, down="fc2")
    Traceback (most recent call last):
    shardformer.errors.PolicyError: MLP has up=3. `up` is a string or a list (each a string). Correct it in the policy.
    """
    kind: Any = type(thing)
    for item in fields(thing):
        value = getattr(thing, item.name)
        check_type(kind.__name__, item.name, value, type_hints_of(kind)[item.name])
        for inner in _described_in(value):
            check_field_types(inner)


def check_type(owner: str, name: str, value: Any, hint: Any) -> None:
    """Raises PolicyError for a value that the type ``hint`` does not allow."""
    if not _fits(value, hint):
        raise PolicyError(
            f"{owner} has {name}={value!r:.120}",
            rule=f"`{name}` is {describe_type(hint)}",
            remedy=f"Write {name}=[{value!r:.80}]" if _fits([value], hint) else "Correct it in the policy",
        )


@cache
def type_hints_of(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def describe_type(hint: Any) -> str:
    """A type as a sentence says it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(each) for each in arguments)
    if hint is Callable or origin is Callable:
        return "a function"
    if origin is type:
        return "a class"
    if _is_of(origin, Mapping):
        return f"a dict ({describe_type(arguments[0])}: {describe_type(arguments[1])})"
    if origin is tuple and arguments[-1] is not ...:
        return f"({', '.join(map(describe_type, arguments))})"
    if _is_of(origin, Collection):
        return f"a list (each {describe_type(arguments[0])})"
    return TYPE_NAMES.get(hint) or f"{'an' if hint.__name__[0] in 'AEIOM' else 'a'} {hint.__name__}"


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is Callable:
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if _is_of(origin, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items()
        )
    if _is_of(origin, Collection):
        if not isinstance(value, Collection) or isinstance(value, str | Mapping):
            return False
        if origin is tuple and arguments[-1] is not ...:
            return len(value) == len(arguments) and all(map(_fits, value, arguments))
        return all(_fits(each, arguments[0]) for each in value)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, hint)


def _is_of(origin: Any, kind: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _described_in(value: Any) -> Iterator[Any]:
    """The descriptions that stand in a field: one, or in a list."""
    for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        if is_dataclass(each) and not isinstance(each, type) and type(each).__module__ in POLICY_MODULES:
            yield each


POLICY_MODULES = (
    "shardformer.policies.module_descriptions",
    "shardformer.policies.roles",
    "shardformer.pipeline.layer_sequence",
)
"""Where what a policy is made of is defined."""
