"""Train an existing PyTorch model across many devices, with the same results as on a single device.

    import shardformer

    parallel = shardformer.ParallelConfig(tensor=2, data=2)
    engine = shardformer.initialize(model, optimizer, train_data=data, batch_size=32, parallel=parallel)
    shardformer.Trainer(engine).fit(epochs=3)
    engine.export("exported")

Start the script with ``shardformer run --nproc_per_node 4 script.py``, or call ``notebook_launcher`` in a notebook.

Train under any layout:
    initialize              an Engine from a model, an optimizer, data and a ParallelConfig
    Trainer                 a training loop with progress, validation and checkpoints; hooks are in shardformer.hooks
    notebook_launcher       run a function of a notebook in several processes

Shard a model in your own loop:
    launch_from_torch       join the processes, and return the ParallelContext with this process's rank on each axis
    shard_model             shard the model in place
    from_pretrained         build and load only the shards of this process
    Pipeline                run the forward and backward pass of a model that is split into stages
    no_sync                 accumulate gradients over several backward passes
    clip_grad_norm_         clip by the norm over all shards
    shard_optimizer         ZeRO stages 1 to 3, with MixedPrecision and OffloadConfig

Inspect and save:
    describe_sharding       what was sharded and how
    estimate_memory         the memory of a model under ZeRO
    measure_pipeline_costs  the time of each layer, to split it into stages of equal time
    save_checkpoint         save for any other layout; load_checkpoint loads it
    export_pretrained       save for from_pretrained of transformers
    full_state_dict         gather the full weights

Models without a policy:
    derive_policy           derive and validate how to shard a model
    register_policy         use your policy for a class of models

``shardformer.verify.verify`` compares sharded and plain training. Errors derive from ShardFormerError.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardformer.public_names import RenamedModuleFinder, make_lazy_getattr_and_all

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
    from shardformer.local_ranks.worker_pool import notebook_launcher as notebook_launcher
    from shardformer.mesh.init_distributed import launch_from_torch as launch_from_torch
    from shardformer.mesh.parallel_context import ParallelContext as ParallelContext
    from shardformer.offload.host import OffloadConfig as OffloadConfig
    from shardformer.pipeline.pipeline import Pipeline as Pipeline
    from shardformer.policies.policy import register_policy as register_policy
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
_MOVED = {
    "compat": "Argument Col_Layer Layer ModelSharder PipelineStageManager Row_Layer ShardConfig ShardFormer launch "
    "launch_from_slurm",
    "gradients": "grad_norm",
    "hooks": "Hook",
    "layout": "ShardSpec Split",
    "meta_init": "LazyInit materialize",
    "pipeline": "gather_over_data",
    "policies": "Attention BlockArguments BlockDescription Experts MLP ModulePolicyDescription Policy RolePolicy "
    "SubModuleReplacementDescription",
    "tensor_parallel": "ParallelModule",
    "zero": "HybridAdam LAMB LARS LossScale",
}
"""Module -> its public names that were in ``shardformer`` before."""
_RENAMED = {
    **{name: f"shardformer.{module}.{name}" for module, names in _MOVED.items() for name in names.split()},
    "Batches": "shardformer.training.ShardedDataLoader", "DamagedError": "shardformer.CorruptCheckpointError",
    "Inputs": "shardformer.policies.AttentionInputs", "Keep": "shardformer.checkpoint.CheckpointRetention",
    "Loaded": "shardformer.checkpoint.LoadedCheckpoint", "Memory": "shardformer.zero.MemoryEstimate",
    "Offload": "shardformer.OffloadConfig", "Parallel": "shardformer.ParallelConfig",
    "Precision": "shardformer.MixedPrecision", "Projections": "shardformer.policies.AttentionProjections",
    "Recorder": "shardformer.comm.CollectiveRecorder", "SequenceNeeds": "shardformer.policies.SequenceParallelHints",
    "Stack": "shardformer.policies.LayerStack", "StageNeeds": "shardformer.policies.PipelineHints",
    "describe": "shardformer.describe_sharding", "infer": "shardformer.derive_policy",
    "measure_costs": "shardformer.measure_pipeline_costs", "memory": "shardformer.estimate_memory",
    "register": "shardformer.register_policy", "start_checkpoint": "shardformer.checkpoint.async_save_checkpoint",
    "store_activations": "shardformer.offload.offload_activations",
}  # fmt: skip
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
sys.meta_path.insert(0, RenamedModuleFinder(_RENAMED_MODULES))  # precedes empty folders left by an earlier checkout
__getattr__, _names = make_lazy_getattr_and_all(__name__, _RENAMED)
__all__ = [*_names, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]
