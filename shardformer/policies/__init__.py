"""Policies that describe which layers of a model are sharded, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.pipeline.layer_sequence import LayerStackDescription as LayerStackDescription
    from shardformer.pipeline.layer_sequence import PipelineHints as PipelineHints
    from shardformer.pipeline.layer_sequence import SequenceParallelHints as SequenceParallelHints
    from shardformer.policies.module_descriptions import BlockArguments as BlockArguments
    from shardformer.policies.module_descriptions import BlockDescription as BlockDescription
    from shardformer.policies.module_descriptions import ModulePolicyDescription as ModulePolicyDescription
    from shardformer.policies.module_descriptions import (
        SubModuleReplacementDescription as SubModuleReplacementDescription,
    )
    from shardformer.policies.policy import Policy as Policy
    from shardformer.policies.role_policy import RolePolicy as RolePolicy
    from shardformer.policies.roles import MLP as MLP
    from shardformer.policies.roles import Attention as Attention
    from shardformer.policies.roles import AttentionInputs as AttentionInputs
    from shardformer.policies.roles import AttentionProjections as AttentionProjections
    from shardformer.policies.roles import Experts as Experts
    from shardformer.policies.roles import LayerStack as LayerStack

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
