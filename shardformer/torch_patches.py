"""Every patch of another library: installed, listed and removed here.

A feature that replaces a function of torch or transformers, or registers a global hook, calls ``install`` with a
``Patch`` and a function that applies it. ``installed()`` lists what is patched in this process; ``uninstall()`` puts
everything back. The next ``shard_model`` installs again what it needs.

>>> from shardformer import torch_patches
>>> for patch in torch_patches.installed():                                    # doctest: +SKIP
...     print(patch.name, "by", patch.by, "because", patch.reason)
>>> torch_patches.uninstall()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardformer.errors import ConfigError

Undo = Callable[[], None]


@dataclass(frozen=True)
class Patch:
    """One change of another library.

    Args:
        name: what is replaced, or the table that gets an entry.
        by: the function or the module that does the work.
        reason: what the library cannot know without it.
    """

    name: str
    by: str
    reason: str


_LOCK = threading.RLock()
_INSTALLED: dict[Patch, Undo] = {}
_BLOCKS: dict[Patch, int] = {}
"""Of the patches of ``temporarily`` that are in use: by how many blocks, in all threads."""


def installed() -> tuple[Patch, ...]:
    """The patches that are installed in this process, in the order of their installation."""
    with _LOCK:
        return tuple(_INSTALLED)


def install(patch: Patch, apply: Callable[[], Undo]) -> None:
    """Installs a patch, once per process: ``apply`` changes the library and returns a function that undoes it."""
    with _LOCK:
        if patch not in _INSTALLED:
            _INSTALLED[patch] = apply()


def uninstall() -> None:
    """Removes all patches, the last one first. Those of a running ``with`` block stay until the block ends.

    Models that are sharded need the patches: shard again, or train no more.

    Raises ConfigError where someone else has patched the same function afterwards. This patch and older ones stay.
    """
    with _LOCK:
        for patch, undo in reversed(list(_INSTALLED.items())):
            if patch not in _BLOCKS:
                undo()
                del _INSTALLED[patch]


@contextmanager
def temporarily(patch: Patch, apply: Callable[[], Undo]) -> Iterator[None]:
    """Installs a patch for the duration of a block. Blocks of several threads share it; the last one removes it."""
    with _LOCK:
        install(patch, apply)
        _BLOCKS[patch] = _BLOCKS.get(patch, 0) + 1
    try:
        yield
    finally:
        with _LOCK:
            _BLOCKS[patch] -= 1
            if not _BLOCKS[patch]:
                del _BLOCKS[patch]
                _INSTALLED.pop(patch)()


def replace_attribute(owner: Any, name: str, new: Any) -> Undo:
    """Replaces an attribute of a module or class. Returns a function that puts the original back."""
    original = getattr(owner, name)
    setattr(owner, name, new)

    def undo() -> None:
        if getattr(owner, name) is not new:
            where = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
            raise ConfigError(
                f"{where} was replaced again after shardformer had replaced it, by {getattr(owner, name)!r}",
                rule="Patches are removed in the reverse order of their installation",
                remedy="Remove the other patch first, then call shardformer.torch_patches.uninstall()",
            )
        setattr(owner, name, original)

    return undo


def replace_decorated(function: Any, make: Callable[[Any], Any], *places: tuple[Any, str]) -> Undo:
    """Replaces the function inside of a decorator, so that scripts that imported the decorated one use the new one.

    Args:
        function: the decorated function.
        make: returns the new function, given the original one.
        places: where the library has the decorated function, as (module, name). They are replaced if a version of the
            library decorates otherwise; what a script imported before then stays the original.
    """
    original = getattr(function, "__wrapped__", function)
    new = make(original)
    for cell in getattr(function, "__closure__", None) or ():
        if cell.cell_contents is original:
            return all_of(
                replace_attribute(cell, "cell_contents", new), replace_attribute(function, "__wrapped__", new)
            )
    return all_of(*(replace_attribute(module, name, new) for module, name in places))


def all_of(*undo: Undo) -> Undo:
    """Undoes several changes, the last one first."""

    def undo_all() -> None:
        for each in reversed(undo):
            each()

    return undo_all
