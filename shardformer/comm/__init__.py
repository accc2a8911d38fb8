"""Autograd-aware collectives over a mesh axis, with checks that all ranks make the same calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.comm.recorder import CollectiveRecorder as CollectiveRecorder

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
