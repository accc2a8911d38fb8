"""Deprecated names from ColossalAI's ShardFormer and earlier versions, so that old scripts still work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.config import ShardConfig as ShardConfig
    from shardformer.mesh.init_distributed import launch as launch
    from shardformer.mesh.init_distributed import launch_from_slurm as launch_from_slurm
    from shardformer.pipeline.stage_manager import PipelineStageManager as PipelineStageManager
    from shardformer.policies.legacy import Argument as Argument
    from shardformer.policies.legacy import Col_Layer as Col_Layer
    from shardformer.policies.legacy import Layer as Layer
    from shardformer.policies.legacy import Row_Layer as Row_Layer
    from shardformer.policies.policy import Policy as Policy
    from shardformer.shard_model_api import ModelSharder as ModelSharder
    from shardformer.shard_model_api import ShardFormer as ShardFormer

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
