"""ShardFormer: train the model you have over many devices, with the result you know."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardformer.activations.attach import store_activations as store_activations
    from shardformer.checkpoint.export import export_pretrained as export_pretrained
    from shardformer.checkpoint.files import DamagedError as DamagedError
    from shardformer.checkpoint.folder import Keep as Keep
    from shardformer.checkpoint.load import Loaded as Loaded
    from shardformer.checkpoint.load import load_checkpoint as load_checkpoint
    from shardformer.checkpoint.save import save_checkpoint as save_checkpoint
    from shardformer.checkpoint.save import start_checkpoint as start_checkpoint
    from shardformer.comm.recorder import Recorder as Recorder
    from shardformer.config import ShardConfig as ShardConfig
    from shardformer.engine.build import initialize as initialize
    from shardformer.engine.data import Batches as Batches
    from shardformer.engine.engine import Engine as Engine
    from shardformer.engine.parallel import Parallel as Parallel
    from shardformer.engine.pipeline import Pipeline as Pipeline
    from shardformer.errors import ConfigError as ConfigError
    from shardformer.errors import InputError as InputError
    from shardformer.errors import LaunchError as LaunchError
    from shardformer.errors import PolicyError as PolicyError
    from shardformer.errors import ShardFormerError as ShardFormerError
    from shardformer.errors import WorkerError as WorkerError
    from shardformer.layers.tensor.parallel_module import ParallelModule as ParallelModule
    from shardformer.layout.spec import ShardSpec as ShardSpec
    from shardformer.layout.split import Split as Split
    from shardformer.lazy.materialize import materialize as materialize
    from shardformer.lazy.pretrained import from_pretrained as from_pretrained
    from shardformer.lazy.recorder import LazyInit as LazyInit
    from shardformer.mesh.context import ParallelContext as ParallelContext
    from shardformer.mesh.launch import launch as launch
    from shardformer.mesh.launch import launch_from_slurm as launch_from_slurm
    from shardformer.mesh.launch import launch_from_torch as launch_from_torch
    from shardformer.optim.grad_norm import clip_grad_norm_ as clip_grad_norm_
    from shardformer.optim.grad_norm import grad_norm as grad_norm
    from shardformer.optim.hybrid import HybridAdam as HybridAdam
    from shardformer.optim.layerwise import LAMB as LAMB
    from shardformer.optim.layerwise import LARS as LARS
    from shardformer.optim.memory import Memory as Memory
    from shardformer.optim.memory import memory as memory
    from shardformer.optim.settings import LossScale as LossScale
    from shardformer.optim.settings import Offload as Offload
    from shardformer.optim.settings import Precision as Precision
    from shardformer.optim.zero import zero as zero
    from shardformer.pipeline.pairs import gather_over_data as gather_over_data
    from shardformer.pipeline.stage_manager import PipelineStageManager as PipelineStageManager
    from shardformer.policies.describe import Argument as Argument
    from shardformer.policies.describe import BlockArguments as BlockArguments
    from shardformer.policies.describe import BlockDescription as BlockDescription
    from shardformer.policies.describe import Col_Layer as Col_Layer
    from shardformer.policies.describe import Layer as Layer
    from shardformer.policies.describe import ModulePolicyDescription as ModulePolicyDescription
    from shardformer.policies.describe import Row_Layer as Row_Layer
    from shardformer.policies.describe import SubModuleReplacementDescription as SubModuleReplacementDescription
    from shardformer.policies.infer.infer import infer as infer
    from shardformer.policies.policy import Policy as Policy
    from shardformer.policies.registry import register as register
    from shardformer.policies.role_policy import MLP as MLP
    from shardformer.policies.role_policy import Attention as Attention
    from shardformer.policies.role_policy import Experts as Experts
    from shardformer.policies.role_policy import Inputs as Inputs
    from shardformer.policies.role_policy import Projections as Projections
    from shardformer.policies.role_policy import RolePolicy as RolePolicy
    from shardformer.policies.role_policy import SequenceNeeds as SequenceNeeds
    from shardformer.policies.role_policy import Stack as Stack
    from shardformer.policies.role_policy import StageNeeds as StageNeeds
    from shardformer.reduce.pause import no_sync as no_sync
    from shardformer.sharder import ModelSharder as ModelSharder
    from shardformer.sharder import ShardFormer as ShardFormer
    from shardformer.sharder import measure_costs as measure_costs
    from shardformer.sharder import shard_model as shard_model
    from shardformer.sharding.describe import describe as describe
    from shardformer.sharding.save import full_state_dict as full_state_dict
    from shardformer.trainer.hook import Hook as Hook
    from shardformer.trainer.trainer import Trainer as Trainer

_HOME = {
    "activations.attach": ["store_activations"],
    "checkpoint.export": ["export_pretrained"],
    "checkpoint.files": ["DamagedError"],
    "checkpoint.folder": ["Keep"],
    "checkpoint.load": ["Loaded", "load_checkpoint"],
    "checkpoint.save": ["save_checkpoint", "start_checkpoint"],
    "comm.recorder": ["Recorder"],
    "mesh.context": ["ParallelContext"],
    "mesh.launch": ["launch", "launch_from_slurm", "launch_from_torch"],
    "engine.build": ["initialize"],
    "engine.data": ["Batches"],
    "engine.engine": ["Engine"],
    "engine.parallel": ["Parallel"],
    "engine.pipeline": ["Pipeline"],
    "errors": ["ConfigError", "InputError", "LaunchError", "PolicyError", "ShardFormerError", "WorkerError"],
    "layers.tensor.parallel_module": ["ParallelModule"],
    "layout.spec": ["ShardSpec"],
    "layout.split": ["Split"],
    "lazy.materialize": ["materialize"],
    "lazy.pretrained": ["from_pretrained"],
    "lazy.recorder": ["LazyInit"],
    "optim.grad_norm": ["clip_grad_norm_", "grad_norm"],
    "optim.hybrid": ["HybridAdam"],
    "optim.layerwise": ["LAMB", "LARS"],
    "optim.memory": ["Memory", "memory"],
    "optim.settings": ["LossScale", "Offload", "Precision"],
    "optim.zero": ["zero"],
    "config": ["ShardConfig"],
    "sharding.save": ["full_state_dict"],
    "pipeline.pairs": ["gather_over_data"],
    "pipeline.stage_manager": ["PipelineStageManager"],
    "policies.infer.infer": ["infer"],
    "policies.policy": ["Policy"],
    "policies.describe": [
        "Argument",
        "BlockArguments",
        "BlockDescription",
        "Col_Layer",
        "Layer",
        "ModulePolicyDescription",
        "Row_Layer",
        "SubModuleReplacementDescription",
    ],
    "sharding.describe": ["describe"],
    "reduce.pause": ["no_sync"],
    "policies.registry": ["register"],
    "policies.role_policy": [
        "MLP",
        "Attention",
        "Experts",
        "Inputs",
        "Projections",
        "RolePolicy",
        "SequenceNeeds",
        "Stack",
        "StageNeeds",
    ],
    "sharder": ["ModelSharder", "ShardFormer", "measure_costs", "shard_model"],
    "trainer.hook": ["Hook"],
    "trainer.trainer": ["Trainer"],
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted([*_WHERE, "__version__"])


def __getattr__(name: str) -> Any:
    """Loads a public name where it is first used, so that importing the package costs nothing."""
    if name not in _WHERE:
        raise AttributeError(f"module 'shardformer' has no attribute {name!r}")
    return getattr(import_module(f"shardformer.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
