"""ShardFormer: train your existing model across many devices, with the same results as on one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardformer.public_names import RenamedModules, lazy_names

if TYPE_CHECKING:
    from shardformer import checkpoint as checkpoint
    from shardformer import comm as comm
    from shardformer import compat as compat
    from shardformer import gradients as gradients
    from shardformer import hooks as hooks
    from shardformer import layout as layout
    from shardformer import meta_init as meta_init
    from shardformer import offload as offload
    from shardformer import pipeline as pipeline
    from shardformer import policies as policies
    from shardformer import tensor_parallel as tensor_parallel
    from shardformer import training as training
    from shardformer import verify as verify
    from shardformer import zero as zero
    from shardformer.checkpoint.file_format import CorruptCheckpointError as CorruptCheckpointError
    from shardformer.checkpoint.load import load_checkpoint as load_checkpoint
    from shardformer.checkpoint.save import save_checkpoint as save_checkpoint
    from shardformer.config import ParallelConfig as ParallelConfig
    from shardformer.discovery.derive_policy import derive_policy as derive_policy
    from shardformer.errors import ConfigError as ConfigError
    from shardformer.errors import InputError as InputError
    from shardformer.errors import LaunchError as LaunchError
    from shardformer.errors import PolicyError as PolicyError
    from shardformer.errors import ShardFormerError as ShardFormerError
    from shardformer.errors import WorkerError as WorkerError
    from shardformer.gradients.clipping import clip_grad_norm_ as clip_grad_norm_
    from shardformer.gradients.reducer import no_sync as no_sync
    from shardformer.mesh.init_distributed import launch_from_torch as launch_from_torch
    from shardformer.mesh.parallel_context import ParallelContext as ParallelContext
    from shardformer.offload.host import OffloadConfig as OffloadConfig
    from shardformer.pipeline.pipeline import Pipeline as Pipeline
    from shardformer.policies.registry import register_policy as register_policy
    from shardformer.shard_model_api import measure_pipeline_costs as measure_pipeline_costs
    from shardformer.shard_model_api import shard_model as shard_model
    from shardformer.sharding.describe import describe_sharding as describe_sharding
    from shardformer.training.engine import Engine as Engine
    from shardformer.training.initialize import initialize as initialize
    from shardformer.training.trainer import Trainer as Trainer
    from shardformer.weights.from_pretrained import from_pretrained as from_pretrained
    from shardformer.weights.save_pretrained import export_pretrained as export_pretrained
    from shardformer.weights.state_dict import full_state_dict as full_state_dict
    from shardformer.zero.memory_estimate import estimate_memory as estimate_memory
    from shardformer.zero.mixed_precision import MixedPrecision as MixedPrecision
    from shardformer.zero.shard_optimizer import shard_optimizer as shard_optimizer

__version__ = "0.1.0"
_RENAMED = {
    "Argument": "shardformer.compat.Argument",
    "Attention": "shardformer.policies.Attention",
    "Batches": "shardformer.training.ShardedDataLoader",
    "BlockArguments": "shardformer.policies.BlockArguments",
    "BlockDescription": "shardformer.policies.BlockDescription",
    "Col_Layer": "shardformer.compat.Col_Layer",
    "DamagedError": "shardformer.CorruptCheckpointError",
    "Experts": "shardformer.policies.Experts",
    "Hook": "shardformer.hooks.Hook",
    "HybridAdam": "shardformer.zero.HybridAdam",
    "Inputs": "shardformer.policies.AttentionInputs",
    "Keep": "shardformer.checkpoint.CheckpointRetention",
    "LAMB": "shardformer.zero.LAMB",
    "LARS": "shardformer.zero.LARS",
    "Layer": "shardformer.compat.Layer",
    "LazyInit": "shardformer.meta_init.LazyInit",
    "Loaded": "shardformer.checkpoint.LoadedCheckpoint",
    "LossScale": "shardformer.zero.LossScale",
    "MLP": "shardformer.policies.MLP",
    "Memory": "shardformer.zero.MemoryEstimate",
    "ModelSharder": "shardformer.compat.ModelSharder",
    "ModulePolicyDescription": "shardformer.policies.ModulePolicyDescription",
    "Offload": "shardformer.OffloadConfig",
    "Parallel": "shardformer.ParallelConfig",
    "ParallelModule": "shardformer.tensor_parallel.ParallelModule",
    "PipelineStageManager": "shardformer.compat.PipelineStageManager",
    "Policy": "shardformer.policies.Policy",
    "Precision": "shardformer.MixedPrecision",
    "Projections": "shardformer.policies.AttentionProjections",
    "Recorder": "shardformer.comm.CollectiveRecorder",
    "RolePolicy": "shardformer.policies.RolePolicy",
    "Row_Layer": "shardformer.compat.Row_Layer",
    "SequenceNeeds": "shardformer.policies.SequenceParallelHints",
    "ShardConfig": "shardformer.compat.ShardConfig",
    "ShardFormer": "shardformer.compat.ShardFormer",
    "ShardSpec": "shardformer.layout.ShardSpec",
    "Split": "shardformer.layout.Split",
    "Stack": "shardformer.policies.LayerStack",
    "StageNeeds": "shardformer.policies.PipelineHints",
    "SubModuleReplacementDescription": "shardformer.policies.SubModuleReplacementDescription",
    "describe": "shardformer.describe_sharding",
    "gather_over_data": "shardformer.pipeline.gather_over_data",
    "grad_norm": "shardformer.gradients.grad_norm",
    "infer": "shardformer.derive_policy",
    "launch": "shardformer.compat.launch",
    "launch_from_slurm": "shardformer.compat.launch_from_slurm",
    "materialize": "shardformer.meta_init.materialize",
    "measure_costs": "shardformer.measure_pipeline_costs",
    "memory": "shardformer.estimate_memory",
    "register": "shardformer.register_policy",
    "start_checkpoint": "shardformer.checkpoint.async_save_checkpoint",
    "store_activations": "shardformer.offload.offload_activations",
}
"""Earlier public names, which still work with a DeprecationWarning."""
_RENAMED_MODULES = {
    "shardformer.layers": "shardformer.tensor_parallel",
    "shardformer.layout.spec": "shardformer.layout.shard_spec",
    "shardformer.layout.stream": "shardformer.layout.activation_layout",
    "shardformer.policies.basepolicy": "shardformer.compat",
    "shardformer.testing.pool": "shardformer.local_ranks.worker_pool",
    "shardformer.testing.threads": "shardformer.local_ranks.threads",
    "shardformer.trainer": "shardformer.training.trainer",
    "shardformer.trainer.hooks": "shardformer.hooks",
}
"""Earlier names of documented modules."""
sys.meta_path.insert(0, RenamedModules(_RENAMED_MODULES))  # precedes empty folders left by an earlier checkout
__getattr__, _names = lazy_names(__name__, _RENAMED)
__all__ = [*_names, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]
