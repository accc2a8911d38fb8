"""Whether what a policy says is of the kind that is asked for: by the types of the fields, which are written once."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral
from typing import Any, Union, get_args, get_origin, get_type_hints

from shardformer.errors import PolicyError

WORDS = {str: "a string", int: "a whole number", bool: "True or False", type(None): "None", Any: "anything"}


def check_kinds(thing: Any) -> None:
    """Raises PolicyError for a field of a dataclass, or of one in it, whose value is not what its type says.

    >>> from shardformer.policies.roles import MLP
    >>> MLP("mlp", up=3, down="fc2")
    Traceback (most recent call last):
    shardformer.errors.PolicyError: MLP has up=3. `up` is a string or a list (each a string). Correct it in the policy.
    """
    kind: Any = type(thing)
    for field in fields(thing):
        value = getattr(thing, field.name)
        check_kind(kind.__name__, field.name, value, hints_of(kind)[field.name])
        for inner in _described_in(value):
            check_kinds(inner)


def check_kind(owner: str, name: str, value: Any, hint: Any) -> None:
    """Raises PolicyError for a value that the type ``hint`` does not allow."""
    if not _fits(value, hint):
        raise PolicyError(
            f"{owner} has {name}={value!r:.120}",
            rule=f"`{name}` is {in_words(hint)}",
            remedy=f"Write {name}=[{value!r:.80}]" if _fits([value], hint) else "Correct it in the policy",
        )


@cache
def hints_of(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def in_words(hint: Any) -> str:
    """A type as a sentence says it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(each) for each in arguments)
    if hint is Callable or origin is Callable:
        return "a function"
    if origin is type:
        return "a class"
    if _is_of(origin, Mapping):
        return f"a dict ({in_words(arguments[0])}: {in_words(arguments[1])})"
    if origin is tuple and arguments[-1] is not ...:
        return f"({', '.join(map(in_words, arguments))})"
    if _is_of(origin, Collection):
        return f"a list (each {in_words(arguments[0])})"
    return WORDS.get(hint) or f"{'an' if hint.__name__[0] in 'AEIOM' else 'a'} {hint.__name__}"


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
        if is_dataclass(each) and not isinstance(each, type) and type(each).__module__ in DESCRIBING:
            yield each


DESCRIBING = ("shardformer.policies.describe", "shardformer.policies.roles", "shardformer.pipeline.chain")
"""Where what a policy is made of is defined."""
