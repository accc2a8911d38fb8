"""Training engine, data loader, and the trainer with its hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.training.data_loader import ShardedDataLoader as ShardedDataLoader
    from shardformer.training.metrics_plot import plot_metrics as plot_metrics

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
