"""The hooks that come with the trainer: ``from shardformer.trainer.hooks import Checkpoint, Progress``."""

from shardformer.trainer.hooks.checkpoint import Checkpoint
from shardformer.trainer.hooks.early_stopping import EarlyStopping
from shardformer.trainer.hooks.gradient_watch import GradientWatch
from shardformer.trainer.hooks.json_lines import JsonLines
from shardformer.trainer.hooks.metrics import Metrics
from shardformer.trainer.hooks.moving_average import MovingAverage
from shardformer.trainer.hooks.profiler import Profiler
from shardformer.trainer.hooks.progress import Progress
from shardformer.trainer.hooks.tensorboard import TensorBoard
from shardformer.trainer.hooks.throughput import Throughput

__all__ = [
    "Checkpoint", "EarlyStopping", "GradientWatch", "JsonLines", "Metrics", "MovingAverage", "Profiler", "Progress",
    "TensorBoard", "Throughput",
]  # fmt: skip
