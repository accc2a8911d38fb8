"""Lazy initialization: build a model on the meta device, and later compute only the shards of this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.meta_init.lazy_init import LazyInit as LazyInit
    from shardformer.meta_init.lazy_init import materialize as materialize

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
