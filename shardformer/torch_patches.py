"""Install, list and remove patches of torch and transformers functions.

A feature that replaces a function of torch or transformers, or registers a global hook, calls ``install_patch`` with a
``Patch`` and a function that applies it. ``installed()`` lists the patches of this process, and ``uninstall()`` reverts
them. The next ``shard_model`` installs the patches it needs again.

>>> from shardformer import torch_patches
>>> for patch in torch_patches.installed():                                    # doctest: +SKIP
...     print(patch.name, "by", patch.by, "because", patch.reason)
>>> torch_patches.uninstall()
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from shardformer.errors import ConfigError

Undo = Callable[[], None]
Apply = Callable[[], Undo]
"""Function that applies a patch and returns a function that reverts it."""


@dataclass(frozen=True)
class LibraryPatch:
    """Description of a patch of torch or transformers: what it replaces, and why.

    Args:
        name: the replaced function, or the table that gets an entry.
        by: the function or module that replaces it.
        reason: why the library needs the change.
    """

    name: str
    by: str
    reason: str


_LOCK = threading.RLock()
_INSTALLED: dict[LibraryPatch, Undo] = {}
_BLOCKS: dict[LibraryPatch, int] = {}  # number of active ``temporary_patch`` blocks of each patch, in all threads


def installed() -> tuple[LibraryPatch, ...]:
    """Return the patches that are installed in this process, oldest first."""
    with _LOCK:
        return tuple(_INSTALLED)


def install_patch(patch: LibraryPatch, apply_fn: Apply) -> None:
    """Install a patch in this process, unless it is already installed."""
    install_patches({patch: apply_fn})


def install_patches(patches: Mapping[LibraryPatch, Apply]) -> None:
    """Install the patches that are not yet installed in this process."""
    with _LOCK:
        for patch, apply in patches.items():
            if patch not in _INSTALLED:
                _INSTALLED[patch] = apply()


def uninstall() -> None:
    """Remove all patches of torch and transformers, except active ``temporary_patch`` blocks.

    Sharded models need the patches, so do not continue to train them.

    Raises ConfigError if another library has patched the same function later. That patch and older ones then remain.
    """
    with _LOCK:
        for patch, undo in reversed(list(_INSTALLED.items())):
            if patch not in _BLOCKS:
                undo()
                del _INSTALLED[patch]


@contextmanager
def temporary_patch(patch: LibraryPatch, apply_fn: Apply) -> Iterator[None]:
    """Install a patch for the duration of a ``with`` block. Threads share the patch, and the last block removes it."""
    with _LOCK:
        install_patch(patch, apply_fn)
        _BLOCKS[patch] = _BLOCKS.get(patch, 0) + 1
    try:
        yield
    finally:
        with _LOCK:
            _BLOCKS[patch] -= 1
            if not _BLOCKS[patch]:
                del _BLOCKS[patch]
                _INSTALLED.pop(patch)()


def replace_attribute(target: Any, attribute_name: str, new_value: Any) -> Undo:
    """Replace an attribute of a module or class. Returns a function that restores the original."""
    original = getattr(target, attribute_name)
    setattr(target, attribute_name, new_value)

    def undo() -> None:
        if (current := getattr(target, attribute_name)) is not new_value:
            where = f"{getattr(target, '__name__', type(target).__name__)}.{attribute_name}"
            raise ConfigError(
                f"{where} cannot be restored, because another library has patched it since: {current!r}.",
                remedy="Remove the other library's patch, and call shardformer.torch_patches.uninstall() again.",
            )
        setattr(target, attribute_name, original)

    return undo


class PostImportHook(MetaPathFinder):
    """Import hook that calls a function after a module is imported.

    Args:
        module_name: the module.
        callback: the function.
    """

    def __init__(self, module_name: str, callback: Callable[[], object]) -> None:
        self._name, self._call, self._thread = module_name, callback, threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or getattr(self._thread, "is_searching", False):
            return None
        self._thread.is_searching = True  # asks the other finders
        try:
            spec = find_spec(name)
        finally:
            self._thread.is_searching = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._call()

            loader.exec_module = exec_module
        return spec


def call_after_import(module_name: str, patch: LibraryPatch, callback: Callable[[], object]) -> None:
    """Call a function after a module is imported, or immediately if it is already imported.

    Args:
        module_name: the module.
        patch: description of the entry that ``sys.meta_path`` gets if the module is not yet imported.
    """
    if module_name in sys.modules:
        callback()
        return

    def apply() -> Undo:
        finder = PostImportHook(module_name, callback)
        sys.meta_path.insert(0, finder)
        return lambda: sys.meta_path.remove(finder)

    install_patch(patch, apply)


def replace_decorated_function(
    decorated_fn: Any, make_replacement: Callable[[Any], Any], *locations: tuple[Any, str]
) -> Undo:
    """Replace the function inside a decorator, even for code that has already imported the decorated function.

    Args:
        decorated_fn: the decorated function.
        make_replacement: original function -> new function.
        locations: the locations of the decorated function, as (module, name). They are replaced if this version of the
            library decorates it differently. Functions that a script imported before then stay unchanged.
    """
    original = getattr(decorated_fn, "__wrapped__", decorated_fn)
    new = make_replacement(original)
    for cell in getattr(decorated_fn, "__closure__", None) or ():
        if cell.cell_contents is original:
            return chain_undo_functions(
                replace_attribute(cell, "cell_contents", new), replace_attribute(decorated_fn, "__wrapped__", new)
            )
    return chain_undo_functions(*(replace_attribute(module, name, new) for module, name in locations))


def chain_undo_functions(*undo_functions: Undo) -> Undo:
    """Combine several undo functions into one, which calls them in reverse order."""

    def undo_all() -> None:
        for each in reversed(undo_functions):
            each()

    return undo_all
