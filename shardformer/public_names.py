"""Public names of a package that are imported when they are first used, and earlier names of arguments.

A package lists its public names as imports under ``if TYPE_CHECKING:``, where type checkers and editors see them, and
gets its ``__getattr__`` from here. Importing the package then imports none of their modules.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import getsource
from types import ModuleType
from typing import Any, TypeVar, cast

from shardformer.errors import ConfigError, did_you_mean

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def lazy_names(package: str, renamed: Mapping[str, str] | None = None) -> tuple[Callable[[str], Any], list[str]]:
    """Returns the ``__getattr__`` and the ``__all__`` of a package.

    Args:
        package: its ``__name__``.
        renamed: an earlier name -> the full name that replaces it. Using one raises a DeprecationWarning.

    ``__getattr__`` raises AttributeError for an unknown name, with the nearest known one.
    """
    found = _names_in(getsource(sys.modules[package]))

    def load(name: str) -> Any:
        if name in found:
            module, original = found[name]
            if module == package:  # a module of the package
                return import_module(f"{package}.{name}")
            return getattr(import_module(module), original)
        if name in (renamed or {}):
            new = (renamed or {})[name]
            warnings.warn(f"{package}.{name} is now {new}", DeprecationWarning, stacklevel=2)
            home, _, last = new.rpartition(".")
            return getattr(import_module(home), last)
        # a package is asked for private names by importlib, copy and pickle
        hint = "" if name.startswith("_") else f". {did_you_mean(name, [*found, *(renamed or {})])}"
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[package])

    return load, sorted(found)


def renamed_arguments(
    names: Mapping[str, str],
    values: Mapping[str, Mapping[Any, str]] | None = None,
    attributes: Mapping[str, str] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Lets a class take arguments, and have attributes, by their earlier names, with a DeprecationWarning.

    Args:
        names: an earlier name of an argument -> its name.
        values: a name -> an earlier value -> the value, for arguments that were passed by their earlier name.
        attributes: an earlier name of an attribute or method -> its name.

    Raises ConfigError if an argument is passed by both names.
    """

    def decorate(kind: type[T]) -> type[T]:
        init = kind.__init__

        @wraps(init)
        def __init__(self: T, *args: Any, **given: Any) -> None:
            for new, value in _take_renamed(kind.__name__, given, names):
                known = (values or {}).get(new, {})
                given[new] = known.get(value, value) if isinstance(value, str | bool) else value
            init(self, *args, **given)

        kind.__init__ = __init__  # type: ignore[method-assign, assignment]
        for old, new in (attributes or {}).items():
            setattr(kind, old, _renamed_attribute(f"{kind.__name__}.{old} is now {new}", new))
        return kind

    return decorate


def renamed_parameters(names: Mapping[str, str], earlier_order: Sequence[str] = ()) -> Callable[[F], F]:
    """Lets a function take arguments by their earlier names, and in an earlier order, with a DeprecationWarning.

    Args:
        names: an earlier name of an argument -> its name.
        earlier_order: the names of the parameters from when the model was the second one.

    Raises ConfigError if an argument is passed by both names.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            given |= dict(_take_renamed(function.__name__, given, names))
            is_earlier = earlier_order and args and not _is_model(args[0])
            if is_earlier and ("model" in given or any(map(_is_model, args[1:2]))):
                warnings.warn(f"{function.__name__} takes the model first now", DeprecationWarning, stacklevel=2)
                given |= dict(zip(earlier_order, args))
                args = args[len(earlier_order) :]
            return function(*args, **given)

        return cast(F, call)

    return decorate


def _is_model(value: Any) -> bool:
    return hasattr(value, "named_parameters")


def _take_renamed(owner: str, given: dict[str, Any], names: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Takes the arguments that were passed by an earlier name out of ``given``. Returns them by their names."""
    found = []
    for old in [name for name in given if name in names]:
        new = names[old]
        if new in given:
            both = f"{owner} got both {old}= and {new}="
            raise ConfigError(both, rule=f"{old} is now {new}", remedy=f"Pass {new}=")
        warnings.warn(f"{owner}({old}=) is now {new}=", DeprecationWarning, stacklevel=3)
        found.append((new, given.pop(old)))
    return found


def _renamed_attribute(message: str, new: str) -> property:
    def access(function: Callable[..., Any], *arguments: Any) -> Any:
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        return function(*arguments)

    return property(lambda x: access(getattr, x, new), lambda x, value: access(setattr, x, new, value))


def _names_in(source: str) -> dict[str, tuple[str, str]]:
    """Public name -> (module, its name there), of the imports under ``if TYPE_CHECKING:``."""
    return {
        alias.asname or alias.name: (statement.module or "", alias.name)
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


class RenamedModules(MetaPathFinder, Loader):
    """Imports modules under earlier names, with a DeprecationWarning that gives the new name.

    Args:
        names: earlier full name -> the module that holds its public names now. Parents of nested names are listed too.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of an earlier name, None for any other."""
        return ModuleSpec(fullname, self, is_package=True) if fullname in self._names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module that reads its names from the new one."""
        new = self._names[spec.name]
        warnings.warn(f"{spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = lambda name: getattr(import_module(new), name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""
