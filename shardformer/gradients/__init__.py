"""Reduce gradients over ranks in buckets, compute their global norm, and clip them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.gradients.clipping import grad_norm as grad_norm

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
