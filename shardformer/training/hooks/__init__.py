"""Built-in hooks for ``Trainer``, such as ``Checkpoint`` and ``Progress``."""

from __future__ import annotations

from shardformer.training.hooks.checkpoint import Checkpoint as Checkpoint
from shardformer.training.hooks.early_stopping import EarlyStopping as EarlyStopping
from shardformer.training.hooks.experiment_trackers import JsonLines as JsonLines
from shardformer.training.hooks.experiment_trackers import Mlflow as Mlflow
from shardformer.training.hooks.experiment_trackers import TensorBoard as TensorBoard
from shardformer.training.hooks.experiment_trackers import Wandb as Wandb
from shardformer.training.hooks.gradient_monitor import GradientMonitor as GradientMonitor
from shardformer.training.hooks.metrics import Metrics as Metrics
from shardformer.training.hooks.moving_average import MovingAverage as MovingAverage
from shardformer.training.hooks.profiler import Profiler as Profiler
from shardformer.training.hooks.progress import Progress as Progress
from shardformer.training.hooks.throughput import Throughput as Throughput
