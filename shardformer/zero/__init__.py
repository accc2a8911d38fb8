"""ZeRO: optimizers whose state, gradients and parameters are sharded over data-parallel ranks.

``shardformer.zero(optimizer, model)`` is also a function. Importing a module of this package would hide that function,
so the package itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from shardformer.zero.shard_optimizer import zero

        return zero(*args, **kwargs)


setattr(sys.modules[__name__], "__class__", _CallablePackage)  # noqa: B010  (an assignment to a subscript)
