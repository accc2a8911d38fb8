"""What torch ran meanwhile, and hooks that look into a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its bases no types
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def seeing_parts(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, which may see a rank's part of what it would see in the plain model."""
    marked: Any = hook
    marked.sees_parts = True
    return hook
