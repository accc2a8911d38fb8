"""ShardFormer: train the model you have over many devices, with the result you know."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
# name -> module, or module:new name for the names of before
_HOME = {
    "Argument": "shardformer.policies.legacy",
    "Attention": "shardformer.policies.roles",
    "Batches": "shardformer.training.data_loader",
    "BlockArguments": "shardformer.policies.module_descriptions",
    "BlockDescription": "shardformer.policies.module_descriptions",
    "Col_Layer": "shardformer.policies.legacy",
    "ConfigError": "shardformer.errors",
    "DamagedError": "shardformer.checkpoint.file_format",
    "Engine": "shardformer.training.engine",
    "Experts": "shardformer.policies.roles",
    "Hook": "shardformer.training.hook",
    "HybridAdam": "shardformer.zero.optimizers",
    "InputError": "shardformer.errors",
    "Inputs": "shardformer.policies.roles",
    "Keep": "shardformer.checkpoint.directory",
    "LAMB": "shardformer.zero.optimizers",
    "LARS": "shardformer.zero.optimizers",
    "LaunchError": "shardformer.errors",
    "Layer": "shardformer.policies.legacy",
    "LazyInit": "shardformer.meta_init.lazy_init",
    "Loaded": "shardformer.checkpoint.load",
    "LossScale": "shardformer.zero.mixed_precision",
    "MLP": "shardformer.policies.roles",
    "Memory": "shardformer.zero.memory_estimate",
    "ModelSharder": "shardformer.shard_model_api",
    "ModulePolicyDescription": "shardformer.policies.module_descriptions",
    "Offload": "shardformer.offload.host",
    "Parallel": "shardformer.config",
    "ParallelContext": "shardformer.mesh.parallel_context",
    "ParallelModule": "shardformer.tensor_parallel.parallel_module",
    "Pipeline": "shardformer.pipeline.pipeline",
    "PipelineStageManager": "shardformer.pipeline.stage_manager",
    "Policy": "shardformer.policies.policy",
    "PolicyError": "shardformer.errors",
    "Precision": "shardformer.zero.mixed_precision",
    "Projections": "shardformer.policies.roles",
    "Recorder": "shardformer.comm.recorder",
    "RolePolicy": "shardformer.policies.role_policy",
    "Row_Layer": "shardformer.policies.legacy",
    "SequenceNeeds": "shardformer.pipeline.layer_sequence",
    "ShardConfig": "shardformer.config",
    "ShardFormer": "shardformer.shard_model_api",
    "ShardFormerError": "shardformer.errors",
    "ShardSpec": "shardformer.layout.shard_spec",
    "Split": "shardformer.layout.shard_spec",
    "Stack": "shardformer.policies.roles",
    "StageNeeds": "shardformer.pipeline.layer_sequence",
    "SubModuleReplacementDescription": "shardformer.policies.module_descriptions",
    "Trainer": "shardformer.training.trainer",
    "WorkerError": "shardformer.errors",
    "clip_grad_norm_": "shardformer.gradients.clipping",
    "describe": "shardformer.sharding.describe",
    "export_pretrained": "shardformer.weights.save_pretrained",
    "from_pretrained": "shardformer.weights.from_pretrained",
    "full_state_dict": "shardformer.weights.state_dict",
    "gather_over_data": "shardformer.pipeline.paired_losses",
    "grad_norm": "shardformer.gradients.clipping",
    "infer": "shardformer.discovery.derive_policy",
    "initialize": "shardformer.training.initialize",
    "launch": "shardformer.mesh.init_distributed",
    "launch_from_slurm": "shardformer.mesh.init_distributed",
    "launch_from_torch": "shardformer.mesh.init_distributed",
    "load_checkpoint": "shardformer.checkpoint.load",
    "materialize": "shardformer.meta_init.materialize",
    "measure_costs": "shardformer.shard_model_api",
    "memory": "shardformer.zero.memory_estimate",
    "no_sync": "shardformer.gradients.reducer",
    "register": "shardformer.policies.registry",
    "save_checkpoint": "shardformer.checkpoint.save",
    "shard_model": "shardformer.shard_model_api",
    "start_checkpoint": "shardformer.checkpoint.save",
    "store_activations": "shardformer.offload.activations",
    "zero": "shardformer.zero",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardformer' has no attribute {name!r}")
    module, _, new = _HOME[name].partition(":")
    found = import_module(module)
    return found if module == f"{__name__}.{name}" else getattr(found, new or name)
