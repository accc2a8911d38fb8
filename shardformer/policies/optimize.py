"""The options beside tensor parallelism: fused norms, flash attention, compiled chains."""

from __future__ import annotations

from torch import nn

from shardformer.context import local_device
from shardformer.errors import ConfigError
from shardformer.layers.attention import check_flash_attention, use_flash_attention
from shardformer.layers.fused import JitActivation, JitDropout, jit_problem, start_chain
from shardformer.layers.linear import Linear1D_Col, Linear1D_Row
from shardformer.layers.norm import fused_norm
from shardformer.policies.config import ShardConfig
from shardformer.policies.plan import Plan
from shardformer.policies.policy import Policy, StackDescription
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
    if config.enable_jit_fused:
        _check_chains(model, policy)


def _check_chains(model: nn.Module, policy: Policy) -> None:
    problem = jit_problem()
    if problem is not None:
        raise ConfigError(
            "enable_jit_fused=True",
            rule=f"Chains are compiled by torch.compile, and {problem}",
            remedy="Bring what is missing, or leave enable_jit_fused off",
        )
    found = _elementwise(model, policy.stacks())
    for _, module in found:
        (JitDropout if isinstance(module, nn.Dropout) else JitActivation).from_native_module(module)
    if not found:
        raise ConfigError(
            f"enable_jit_fused=True, but {type(model).__name__} has no activation that is a module of its own",
            rule="An option without effect is an error",
            remedy="Leave enable_jit_fused off",
        )


def apply_optimizations(model: nn.Module, config: ShardConfig, plan: Plan, record: ShardRecord) -> None:
    """Makes the replacements that the options ask for, and records them."""
    if config.enable_flash_attention:
        record.notes.append(f"Attention: {use_flash_attention(model, local_device())}.")
    if config.enable_fused_normalization:
        for path, norm in _norms(model):
            new = fused_norm(norm)
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, new)
            record.add(path, norm, new, kind="norm")
    if config.enable_jit_fused:
        _fuse_chains(model, plan, record)


def _fuse_chains(model: nn.Module, plan: Plan, record: ShardRecord) -> None:
    """Linears before an activation or a residual hand their bias on, and what follows takes it into one kernel."""
    for path, native in _elementwise(model, plan.stacks):
        kind = JitDropout if isinstance(native, nn.Dropout) else JitActivation
        new = kind.from_native_module(native)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, new)
        record.add(path, native, new, kind="chain")
    for target in plan.targets:
        for block in target.description.blocks or []:
            for name in [*(block.columns if block.activated else ()), block.row]:
                linear = target.module.get_submodule(name)
                if isinstance(linear, Linear1D_Col | Linear1D_Row) and linear.bias is not None:
                    linear.finish = start_chain


def _elementwise(model: nn.Module, stacks: list[StackDescription]) -> list[tuple[str, nn.Module]]:
    """The activations and dropouts of the layers: modules without parameters, buffers or children."""
    inside = tuple(f"{s.layers}." for s in stacks)
    return [
        (path, m)
        for path, m in model.named_modules()
        if (path.startswith(inside) or not stacks)
        and not isinstance(m, nn.Identity)
        and not any(True for _ in m.children())
        and not m._parameters
        and not m._buffers
    ]


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
