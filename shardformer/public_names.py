"""Lazy imports of public names in a package, and support for deprecated names.

A package lists its public names as imports under ``if TYPE_CHECKING:``, for type checkers and editors, and gets its
``__getattr__`` from here. Importing the package therefore imports none of their modules.
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
from importlib.util import find_spec
from inspect import getsource
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from shardformer.errors import ConfigError, suggest_similar_names

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def make_lazy_getattr_and_all(
    package_name: str, new_names_by_old_name: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], list[str]]:
    """Create the ``__getattr__`` and ``__all__`` of a package that imports its public names lazily.

    Args:
        package_name: its ``__name__``.
        new_names_by_old_name: earlier name -> the full name that replaces it. Using an earlier name raises a
            DeprecationWarning.

    ``__getattr__`` raises AttributeError for an unknown name, with the nearest known names.
    """
    module = sys.modules[package_name]
    found = _parse_lazy_imports(getsource(module))
    # dir() lists the public names, even before they are imported, and no helpers of the module
    vars(module)["__dir__"] = lambda: sorted({*found, *(name for name in vars(module) if name.startswith("__"))})

    def load_attribute(name: str) -> Any:
        if name in found:
            module, original = found[name]
            if module == package_name:  # a module of the package
                return import_module(f"{package_name}.{name}")
            return getattr(import_module(module), original)
        if name in (new_names_by_old_name or {}):
            new = (new_names_by_old_name or {})[name]
            warnings.warn(f"{package_name}.{name} is deprecated. Use {new} instead.", DeprecationWarning, stacklevel=2)
            home, _, last = new.rpartition(".")
            return getattr(import_module(home), last)
        # importlib, copy and pickle look up private names
        hint = (
            ""
            if name.startswith("_")
            else f". {_suggest_public_names(package_name, name, found, new_names_by_old_name or {})}"
        )
        # without obj=, for which Python would add a second suggestion
        raise AttributeError(f"module {package_name!r} has no attribute {name!r}{hint}", name=name)

    return load_attribute, sorted(found)


def _suggest_public_names(
    package_name: str,
    unknown_name: str,
    public_names: Mapping[str, tuple[str, str]],
    new_names_by_old_name: Mapping[str, str],
) -> str:
    for full_name in (f"{package_name}.{each}" for each, (module, _) in public_names.items() if module == package_name):
        spec = find_spec(full_name)
        if spec and spec.origin and unknown_name in _parse_lazy_imports(Path(spec.origin).read_text(encoding="utf-8")):
            return f"Use {full_name}.{unknown_name}"
    return suggest_similar_names(unknown_name, [*public_names, *new_names_by_old_name])


def deprecate_renamed_arguments(
    renamed_arguments: Mapping[str, str],
    renamed_values: Mapping[str, Mapping[Any, str]] | None = None,
    renamed_attributes: Mapping[str, str] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Create a class decorator that supports deprecated names of arguments and attributes.

    Args:
        renamed_arguments: earlier name of an argument -> its name.
        renamed_values: name of an argument -> earlier value -> value, for arguments passed by their earlier name.
        renamed_attributes: earlier name of an attribute or method -> its name.

    Raises ConfigError if an argument is passed by both names.
    """

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__

        @wraps(init)
        def init_with_renamed_args(self: T, *args: Any, **kwargs: Any) -> None:
            for new, value in _pop_renamed_arguments(cls.__name__, kwargs, renamed_arguments):
                known = (renamed_values or {}).get(new, {})
                kwargs[new] = known.get(value, value) if isinstance(value, str | bool) else value
            init(self, *args, **kwargs)

        if renamed_arguments:
            cls.__init__ = init_with_renamed_args  # type: ignore[method-assign, assignment]
        for old, new in (renamed_attributes or {}).items():
            setattr(cls, old, _make_deprecated_property(f"{cls.__name__}.{old} is deprecated. Use {new} instead.", new))
        return cls

    return decorate


def deprecate_renamed_function_arguments(
    renamed_parameters: Mapping[str, str], old_parameter_order: Sequence[str] = ()
) -> Callable[[F], F]:
    """Create a function decorator that supports deprecated argument names and a deprecated argument order.

    Args:
        renamed_parameters: earlier name of an argument -> its name.
        old_parameter_order: the names of the first parameters when the model was the second one.

    Raises ConfigError if an argument is passed by both names.
    """

    def decorate(fn: F) -> F:
        @wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            kwargs |= dict(_pop_renamed_arguments(fn.__name__, kwargs, renamed_parameters))
            is_earlier = old_parameter_order and args and not _looks_like_model(args[0])
            if is_earlier and ("model" in kwargs or any(map(_looks_like_model, args[1:2]))):
                warnings.warn(
                    f"{fn.__name__} now takes the model as its first argument. Pass the model first.",
                    DeprecationWarning,
                    stacklevel=2,
                )
                kwargs |= dict(zip(old_parameter_order, args))
                args = args[len(old_parameter_order) :]
            return fn(*args, **kwargs)

        return cast(F, wrapper)

    return decorate


def _looks_like_model(candidate: Any) -> bool:
    return hasattr(candidate, "named_parameters")


def _pop_renamed_arguments(
    owner_name: str, kwargs: dict[str, Any], renamed_arguments: Mapping[str, str]
) -> list[tuple[str, Any]]:
    found = []
    for old in [name for name in kwargs if name in renamed_arguments]:
        new = renamed_arguments[old]
        if new in kwargs:
            raise ConfigError(f"{owner_name} received both {old} and its new name {new}.", remedy=f"Pass only {new}.")
        warnings.warn(f"{owner_name}({old}=) is deprecated. Use {new}= instead.", DeprecationWarning, stacklevel=3)
        found.append((new, kwargs.pop(old)))
    return found


def _make_deprecated_property(message: str, new_name: str) -> property:
    def warn_and_call(accessor: Callable[..., Any], *args: Any) -> Any:
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        return accessor(*args)

    return property(
        lambda x: warn_and_call(getattr, x, new_name), lambda x, value: warn_and_call(setattr, x, new_name, value)
    )


def _parse_lazy_imports(source_code: str) -> dict[str, tuple[str, str]]:
    """Parse the imports under ``if TYPE_CHECKING:`` into a dict: public name -> (module, name in module)."""
    return {
        alias.asname or alias.name: (statement.module or "", alias.name)
        for node in ast.parse(source_code).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


class RenamedModuleFinder(MetaPathFinder, Loader):
    """Import hook for deprecated module names, which warns and forwards to the renamed module.

    Args:
        new_names_by_old_name: earlier full name -> the module that replaces it. Parents of nested names are listed too.
    """

    def __init__(self, new_names_by_old_name: Mapping[str, str]) -> None:
        self._names = new_names_by_old_name

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return an import spec for a deprecated module name, or None for other names."""
        return ModuleSpec(fullname, self, is_package=True) if fullname in self._names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create a module that forwards attribute access to the renamed module."""
        new = self._names[spec.name]
        warnings.warn(f"{spec.name} is deprecated. Use {new} instead.", DeprecationWarning, stacklevel=2)
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = lambda name: getattr(import_module(new), name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the forwarding module has no code to execute."""
