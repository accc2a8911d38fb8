"""The options beside tensor parallelism: fused norms, flash attention, compiled chains."""

from __future__ import annotations

from torch import nn

from shardformer.context import local_device
from shardformer.errors import ConfigError
from shardformer.layers.attention import check_flash_attention, use_flash_attention
from shardformer.layers.norm import fused_norm
from shardformer.policies.config import ShardConfig
from shardformer.policies.policy import Policy
from shardformer.policies.record import ShardRecord


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
        for _, norm in _norms(model):
            fused_norm(norm)


def apply_optimizations(model: nn.Module, config: ShardConfig, record: ShardRecord) -> None:
    """Makes the replacements that the options ask for, and records them."""
    if config.enable_flash_attention:
        record.notes.append(f"Attention: {use_flash_attention(model, local_device())}.")
    if config.enable_fused_normalization:
        for path, norm in _norms(model):
            new = fused_norm(norm)
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, new)
            record.add(path, norm, new, kind="norm")


def _norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every norm of the model. Raises ConfigError when it has none: the option would have no effect."""
    found = [(path, m) for path, m in model.named_modules() if type(m).__name__.endswith("Norm")]
    if not found:
        raise ConfigError(
            f"enable_fused_normalization=True, but {type(model).__name__} has no norm",
            rule="An option without effect is an error",
            remedy="Leave enable_fused_normalization off",
        )
    return found
