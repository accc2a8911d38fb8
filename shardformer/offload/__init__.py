"""Offload activations and optimizer states to host memory or files, or shard saved activations over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.offload.activations import offload_activations as offload_activations

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
