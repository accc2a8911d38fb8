"""Pipeline parallelism: pipeline stages, micro-batch schedules, and the losses of micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.pipeline.contrastive_losses import gather_over_data as gather_over_data

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
