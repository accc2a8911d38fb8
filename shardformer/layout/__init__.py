"""Data classes that describe how parameters, activations and gradients are sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.layout.shard_spec import ShardSpec as ShardSpec
    from shardformer.layout.shard_spec import Split as Split

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
