"""The hooks that come with the trainer: ``from shardformer.trainer.hooks import Checkpoint, Progress``."""

from shardformer.trainer.hooks.early_stopping import EarlyStopping

__all__ = ["EarlyStopping"]
