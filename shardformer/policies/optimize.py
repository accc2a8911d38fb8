"""The options beside tensor parallelism: fused norms, flash attention, compiled chains. Decided before anything changes."""

from __future__ import annotations

from torch import nn

from shardformer.errors import ConfigError
from shardformer.policies.config import ShardConfig
from shardformer.policies.plan import Plan
from shardformer.policies.policy import Policy
from shardformer.policies.record import ShardRecord


def check_optimizations(model: nn.Module, config: ShardConfig, policy: Policy) -> None:
    """Raises ConfigError for an option that this model or machine cannot do."""
    if config.enable_sequence_parallelism and not policy.stacks():
        raise ConfigError(
            f"enable_sequence_parallelism=True with {type(policy).__name__}, which names no stack of layers",
            rule="Sequence parallelism runs from the first layer of a stack to its last, between blocks",
            remedy="Write the policy as roles (RolePolicy with a Stack), or leave sequence parallelism off",
        )


def apply_optimizations(model: nn.Module, config: ShardConfig, plan: Plan, record: ShardRecord) -> None:
    """Makes the replacements that the options ask for."""
