"""Save a checkpoint under one parallel layout, and load it under any other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.checkpoint.load import LoadedCheckpoint as LoadedCheckpoint
    from shardformer.checkpoint.retention import CheckpointRetention as CheckpointRetention
    from shardformer.checkpoint.save import async_save_checkpoint as async_save_checkpoint

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
