"""The options beside tensor parallelism: fused norms, flash attention, activations in one kernel with their bias."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError
from shardformer.kernels.attention_registration import check_flash_attention, use_flash_attention
from shardformer.kernels.fused_ops import defer_bias, fused_norm
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.module_paths import parent_of
from shardformer.policies.policy import Policy
from shardformer.sharding.apply_context_parallel import check_context
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.layers import Linear1D_Col
from shardformer.tensor_parallel.parallel_module import ParallelModule, keep_hooks

# by class name: written out in several operations where torch has one kernel; and what is one already
WRITTEN_OUT = ("NewGELUActivation", "AccurateGELUActivation", "FastGELUActivation", "BloomGelu")
ACTIVATIONS = (*WRITTEN_OUT, "GELU", "GELUActivation", "GELUTanh", "PytorchGELUTanh", "SiLU", "SiLUActivation", "ReLU")


def check_optimizations(model: nn.Module, config: ShardConfig, policy: Policy) -> None:
    """Raises ConfigError for an option that this model or machine cannot do. Changes nothing."""
    if config.enable_sequence_parallelism and not policy.stacks():
        raise ConfigError(
            f"enable_sequence_parallelism=True with {type(policy).__name__}, which names no stack of layers",
            rule="Sequence parallelism runs from the first layer of a stack to its last, between blocks",
            remedy="Write the policy as roles (RolePolicy with a Stack), or leave sequence parallelism off",
        )
    if config.uses_context_parallel:
        check_context(model, policy.stacks(), config.resolve_context(), config.context_parallel, policy.notes)
    if config.enable_flash_attention:
        check_flash_attention(model, config.resolve_context().device)
    if config.enable_fused_normalization:
        check_norms(model)
    if config.enable_jit_fused:
        check_activations(model, config.resolve_context().device)


def apply_optimizations(model: nn.Module, config: ShardConfig, plan: ShardingPlan, state: ShardingMetadata) -> None:
    """Makes the replacements that the options ask for, and records them."""
    if config.enable_flash_attention and not config.uses_context_parallel:  # whose kernels are fused ones, too
        replaced = partial(state.note, kind="method")
        state.notes.append(f"Attention: {use_flash_attention(model, state.context.device, replaced)}.")
    if config.enable_fused_normalization:
        fuse_norms(model, state)
    if config.enable_jit_fused:
        fuse_activations(model, plan, state)


def check_activations(model: nn.Module, device: torch.device) -> None:
    """Raises ConfigError where nothing compiles, or where the option would have no effect."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        problem = "enable_jit_fused=True, but triton, with which torch.compile makes kernels for a GPU, is missing"
    elif not any(type(module).__name__ in ACTIVATIONS for module in model.modules()):
        problem = f"enable_jit_fused=True, but {type(model).__name__} has no GELU, SiLU or ReLU that is a module"
    else:
        return
    rule = "It needs an activation that is a module and, on a GPU, triton; an option without effect is an error"
    raise ConfigError(problem, rule=rule, remedy="Leave enable_jit_fused off")


def fuse_activations(model: nn.Module, plan: ShardingPlan, state: ShardingMetadata) -> None:
    """Activations by torch's own kernels, and linears before one hand their bias on to it."""
    for path, native in list(model.named_modules(remove_duplicate=False)):
        if type(native).__name__ in WRITTEN_OUT:
            _put(model, path, native, nn.GELU("tanh").train(native.training), "activation", state)
    found: Counter[str] = Counter()
    for path, block in plan.blocks:
        acts = sorted({type(m).__name__ for m in model.get_submodule(path).modules()} & {*ACTIVATIONS})
        modules = [model.get_submodule(name) for name in block.columns if block.fuse_activation and acts]
        columns = [m for m in modules if isinstance(m, Linear1D_Col) and not m.skip_bias_add]
        for column in columns:
            column.finish = defer_bias
        if columns:
            terms = ("bias", " or ".join(acts), "gate")
            found[" and ".join(terms[columns[0].bias is None : 1 + len(columns)])] += 1
    said = ", ".join(f"{count} {what}" for what, count in found.items())
    state.notes.append(f"In one kernel: {said or 'activations alone'}.")


def check_norms(model: nn.Module) -> None:
    """Raises ConfigError for a model with no norm, or with none that is recognised: the option would have no effect."""
    problem: ConfigError | None = None
    for _, norm in _norms(model):
        try:
            fused_norm(norm)
            return
        except ConfigError as error:
            problem = problem or error
    raise problem or ConfigError(
        f"enable_fused_normalization=True, but {type(model).__name__} has no norm",
        rule="An option without effect is an error",
        remedy="Leave enable_fused_normalization off",
    )


def fuse_norms(model: nn.Module, state: ShardingMetadata) -> None:
    """Replaces and records every norm that is recognised; notes what stays."""
    left: Counter[str] = Counter()
    for path, norm in list(_norms(model)):
        kind = type(norm).__name__
        if isinstance(norm, ParallelModule):
            left[f"{kind} (its statistics are summed over the ranks)"] += 1
            continue
        try:
            _put(model, path, norm, fused_norm(norm), "norm", state)
        except ConfigError:
            left[f"{kind} (neither a layer norm nor an RMS norm over the last dim)"] += 1
    if left:
        state.notes.append(f"Norms that stay as they are: {', '.join(f'{n} {kind}' for kind, n in left.items())}.")


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and not module._modules:
            yield path, module


def _put(model: nn.Module, path: str, native: nn.Module, new: nn.Module, kind: str, state: ShardingMetadata) -> None:
    """Puts a module into the place of another, with its hooks, and records it."""
    keep_hooks(new, native)
    setattr(*parent_of(model, path), new)
    state.note(path, native, new, kind=kind)
