"""Hooks of the trainer, as in ``from shardformer.training.hooks import Checkpoint, Progress``."""

from __future__ import annotations

from shardformer.training.hooks.checkpoint import Checkpoint
from shardformer.training.hooks.early_stopping import EarlyStopping
from shardformer.training.hooks.gradient_monitor import GradientMonitor
from shardformer.training.hooks.json_lines import JsonLines
from shardformer.training.hooks.metrics import Metrics
from shardformer.training.hooks.moving_average import MovingAverage
from shardformer.training.hooks.profiler import Profiler
from shardformer.training.hooks.progress import Progress
from shardformer.training.hooks.tensorboard import TensorBoard
from shardformer.training.hooks.throughput import Throughput

__all__ = [
    "Checkpoint",
    "EarlyStopping",
    "GradientMonitor",
    "JsonLines",
    "Metrics",
    "MovingAverage",
    "Profiler",
    "Progress",
    "TensorBoard",
    "Throughput",
]
