"""Trainer hooks, such as checkpointing and early stopping, and the base class for custom hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.training.hook import Hook as Hook
    from shardformer.training.hooks import Checkpoint as Checkpoint
    from shardformer.training.hooks import EarlyStopping as EarlyStopping
    from shardformer.training.hooks import GradientMonitor as GradientMonitor
    from shardformer.training.hooks import JsonLines as JsonLines
    from shardformer.training.hooks import Metrics as Metrics
    from shardformer.training.hooks import Mlflow as Mlflow
    from shardformer.training.hooks import MovingAverage as MovingAverage
    from shardformer.training.hooks import Profiler as Profiler
    from shardformer.training.hooks import Progress as Progress
    from shardformer.training.hooks import TensorBoard as TensorBoard
    from shardformer.training.hooks import Throughput as Throughput
    from shardformer.training.hooks import Wandb as Wandb

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
