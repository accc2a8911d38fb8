"""ZeRO: optimizers whose state, gradients and parameters are sharded over data-parallel ranks."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.zero.memory_estimate import MemoryEstimate as MemoryEstimate
    from shardformer.zero.mixed_precision import LossScale as LossScale
    from shardformer.zero.optimizers import LAMB as LAMB
    from shardformer.zero.optimizers import LARS as LARS
    from shardformer.zero.optimizers import HybridAdam as HybridAdam


class _CallablePackage(ModuleType):
    """A module that supports the deprecated call ``shardformer.zero(optimizer, model)``."""

    def __call__(self, optimizer: Any, model: Any, **options: Any) -> Any:
        import warnings

        from shardformer.zero.shard_optimizer import shard_optimizer

        warnings.warn(
            "shardformer.zero is deprecated. Use shardformer.shard_optimizer instead.", DeprecationWarning, stacklevel=2
        )
        return shard_optimizer(model, optimizer, **options)


__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
setattr(sys.modules[__name__], "__class__", _CallablePackage)  # noqa: B010  (an assignment to a subscript)
