"""The options beside tensor parallelism: fused norms, flash attention, compiled chains."""

from __future__ import annotations

from functools import partial

from torch import nn

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError
from shardformer.layers.attention.select import check_flash_attention, use_flash_attention
from shardformer.mesh.context import local_device
from shardformer.policies.policy import Policy
from shardformer.sharding.describe import ShardRecord
from shardformer.sharding.fuse_chains import check_chains, fuse_chains
from shardformer.sharding.fuse_norms import check_norms, fuse_norms
from shardformer.sharding.plan import Plan


def check_optimizations(model: nn.Module, config: ShardConfig, policy: Policy) -> None:
    """Raises ConfigError for an option that this model or machine cannot do. Changes nothing."""
    if config.enable_sequence_parallelism and not policy.stacks():
        raise ConfigError(
            f"enable_sequence_parallelism=True with {type(policy).__name__}, which names no stack of layers",
            rule="Sequence parallelism runs from the first layer of a stack to its last, between blocks",
            remedy="Write the policy as roles (RolePolicy with a Stack), or leave sequence parallelism off",
        )
    if config.enable_flash_attention:
        check_flash_attention(model, local_device())
    if config.enable_fused_normalization:
        check_norms(model)
    if config.enable_jit_fused:
        check_chains(model, policy)


def apply_optimizations(model: nn.Module, config: ShardConfig, plan: Plan, record: ShardRecord) -> None:
    """Makes the replacements that the options ask for, and records them."""
    if config.enable_flash_attention:
        replaced = partial(record.add, kind="method")
        record.notes.append(f"Attention: {use_flash_attention(model, local_device(), replaced)}.")
    if config.enable_fused_normalization:
        fuse_norms(model, record)
    if config.enable_jit_fused:
        fuse_chains(model, plan, record)
