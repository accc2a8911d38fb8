"""A verb's options as a dataclass, a field an option: the table that its help is made of and that its tests read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def takes(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Makes a verb of a function that takes one ``kind``, a dataclass.

    A field is ``Annotated`` with what its help says, or with a ``typer.Option`` or ``typer.Argument`` of its own. One
    that is true or false is a switch, ``--its-name``, without a ``--no-its-name``.
    """

    def decorate(verb: Callable[[T], None]) -> Callable[..., None]:
        def called(**given: Any) -> None:
            verb(kind(**given))

        hints = get_type_hints(kind, include_extras=True)
        parameters = [_parameter(field, hints[field.name]) for field in fields(kind)]
        called.__name__, called.__qualname__, called.__module__ = verb.__name__, verb.__qualname__, verb.__module__
        called.__doc__ = verb.__doc__
        vars(called)["__signature__"] = Signature(parameters)
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def _parameter(field: Field[Any], hint: Any) -> Parameter:
    plain, said = get_args(hint)
    names = [f"--{field.name.replace('_', '-')}"] if plain is bool else []
    option = typer.Option(*names, help=said) if isinstance(said, str) else said
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[plain, option])
