"""Recording of the operations that torch runs, and hooks on a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its bases no types
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def seeing_parts(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a hook as one that may see a local shard instead of the full tensor."""
    marked: Any = hook
    marked.sees_parts = True
    return hook
