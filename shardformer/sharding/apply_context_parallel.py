"""Set up context parallelism: check the model and its attention, and install hooks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from shardformer.context_parallel import attention
from shardformer.context_parallel.method import (
    GROUP,
    RING,
    choose_context_parallel_sizes,
    is_context_parallel_method_set,
)
from shardformer.context_parallel.model_hooks import (
    ContextParallelModelHook,
    GatherFullSequenceHook,
    ShardLayerStackSequenceHook,
    register_local_positions_hooks,
)
from shardformer.context_parallel.sequence_layout import ContextParallelState, Dims
from shardformer.errors import ConfigError
from shardformer.kernels.attention_registration import find_attention_classes, find_attention_configs
from shardformer.kernels.model_specific_attention import calls_attention_interface
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.module_paths import get_submodule_or_none
from shardformer.pipeline.layer_sequence import LayerStackDescription
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.parallel_module import ParallelModule


def check_context_parallel_support(
    model: nn.Module,
    layer_stacks: Sequence[LayerStackDescription],
    context: ParallelContext,
    attention_method: str,
    policy_notes: Sequence[str] = (),
) -> None:
    """Raise ConfigError if context parallelism does not support the model."""
    if not layer_stacks:
        reason = f". {' '.join(policy_notes).removesuffix('.')}" if policy_notes else ""
        raise ConfigError(
            f"Context parallelism (sequence={context.sequence.size}) requires a LayerStack, but the policy of "
            f"{type(model).__name__} has none{reason}.",
            remedy="Write a RolePolicy with a LayerStack, or remove the sequence axis.",
        )
    if why := get_unsupported_attention_reason(model):
        if is_context_parallel_method_set(context, attention_method):
            raise ConfigError(
                f"{type(model).__name__} does not support context_parallel={attention_method!r} with "
                f"sequence={context.sequence.size}, because it {why}.",
                remedy="Use context_parallel='auto' with one size for the sequence axis, or use tensor parallelism "
                "with enable_sequence_parallelism=True instead.",
            )
        return
    choose_context_parallel_sizes(model, context, attention_method)


def get_unsupported_attention_reason(model: nn.Module) -> str | None:
    """Explain why context parallelism cannot replace the model's attention, or return None if it can."""
    classes = find_attention_classes(model)
    own = sorted(cls.__name__ for cls, source in classes.items() if not calls_attention_interface(source))
    if own:
        return f"implements its own attention in {', '.join(own)}"
    return None if classes else "has no attention module that uses the AttentionInterface"


@dataclass(frozen=True)
class ContextParallelTrialResult:
    """Results of a trial run of a small copy of the model with context parallelism.

    Args:
        dims: sequence dimensions of the arguments of layers and full-sequence modules.
        gathers: (path of a stack's layers, path of a module in each layer) of modules that need the full sequence.
        is_whole: whether the full-sequence modules include the attention modules, which then stay unmodified.
        reads_between: whether the model reads or writes positions of the hidden states between two layers.
        unproven: name of an input with which the sequence cannot be sharded -> reason.
    """

    dims: Dims = field(default_factory=dict)
    gathers: Sequence[tuple[str, str]] = ()
    is_whole: bool = False
    reads_between: bool = False
    unproven: Mapping[str, str] = field(default_factory=dict)


def install_context_parallel_attention(
    model: nn.Module,
    metadata: ShardingMetadata,
    attention_method: str,
    trial_result: ContextParallelTrialResult,
    *,
    has_dropout: bool,
) -> None:
    """Install context-parallel attention, and hooks that gather the full sequence for modules that need it.

    Communicates to create process groups.
    """
    context = metadata.context
    sizes = choose_context_parallel_sizes(model, context, attention_method)
    has_view = RING in context.axes and GROUP in context.axes
    view = context if has_view else context.reshape_axis("sequence", **{RING: sizes.ring, GROUP: sizes.group})
    metadata.context_run = run = ContextParallelState(
        context.sequence,
        view.axis(RING),
        view.axis(GROUP),
        sizes.all_gather_kv,
        trial_result.is_whole,
        dims=dict(trial_result.dims),
    )
    classes = () if trial_result.is_whole else tuple(find_attention_classes(model))
    if not trial_result.is_whole:
        _enable_context_parallel_attention(model, run, classes)
    ContextParallelModelHook(run, model, has_random_ops=has_dropout)
    for path, name in trial_result.gathers:
        for layer in model.get_submodule(path).children():
            mixing = get_submodule_or_none(layer, name)
            if mixing is not None and not any(type(inner) in classes for inner in mixing.modules()):
                metadata.region_hooks.append(
                    GatherFullSequenceHook(run, (path, name), mixing, has_random_ops=has_dropout)
                )
    how = "attention is computed in full on every rank" if trial_result.is_whole else sizes
    metadata.notes.append(f"Context parallelism: {how}.")
    if trial_result.gathers:
        named = ", ".join(f"{layers}.*.{name}" for layers, name in trial_result.gathers)
        what = "" if trial_result.is_whole else " (other than attention)"
        metadata.notes.append(f"Every rank computes all positions of modules that mix positions{what}: {named}.")


def _enable_context_parallel_attention(
    model: nn.Module, context_state: ContextParallelState, attention_classes: tuple[type, ...]
) -> None:
    attention.register_context_parallel_attention()
    for config in find_attention_configs(model):
        config._attn_implementation = attention.NAME
    for module in model.modules():
        if type(module) in attention_classes:
            module.__dict__[attention.RUN] = context_state
        attention.patch_relative_position_bias(module, context_state)


def install_context_parallel_hooks(
    model: nn.Module,
    layer_stacks: Sequence[LayerStackDescription],
    metadata: ShardingMetadata,
    trial_result: ContextParallelTrialResult,
    *,
    has_dropout: bool,
) -> None:
    """Install hooks that shard the sequence across ranks inside the layers of a model.

    Call this after modules were replaced with parallel layers.
    """
    run, inside = metadata.context_run, set[int]()
    for stack in layer_stacks:
        if stack.whole_sequence:
            metadata.notes.append(f"The sequence is not sharded in {stack.layers}: {stack.whole_sequence}.")
            continue
        layers = [layer for layer in model.get_submodule(stack.layers)._modules.values() if layer is not None]
        norm = model.get_submodule(stack.final_norm) if stack.final_norm else None
        last = [*(layers if trial_result.reads_between else ()), norm or layers[-1]]
        metadata.region_hooks.append(
            ShardLayerStackSequenceHook(run, stack.layers, layers, last, has_random_ops=has_dropout)
        )
        inside |= {id(m) for layer in (*layers, *([norm] if norm is not None else [])) for m in layer.modules()}
    for module in model.modules():
        if isinstance(module, ParallelModule) and id(module) not in inside:
            register_local_positions_hooks(module)


def warn_about_unsharded_attention(model: nn.Module, context: ParallelContext) -> None:
    """Warn on rank 0 that context parallelism does not shard this model's attention."""
    if context.rank == 0:
        warnings.warn(
            f"The attention of {type(model).__name__} cannot be sharded over the sequence axis, so each of the "
            f"{context.sequence.size} ranks on this axis computes the full attention. Call "
            "shardformer.describe_sharding(model) for details.",
            stacklevel=5,
        )


def adapt_plan_to_context_parallel(
    plan: ShardingPlan, trial_result: ContextParallelTrialResult, *, has_sequence_parallelism: bool
) -> ShardingPlan:
    """Give attention and MLP separate collectives in the plan if every rank computes the full attention.

    Args:
        has_sequence_parallelism: whether sequence parallelism over the tensor axis is also enabled, which raises
            ConfigError for such attention.
    """
    if not trial_result.is_whole:
        return plan
    if has_sequence_parallelism:
        raise ConfigError(
            f"{type(plan.model).__name__} does not support enable_sequence_parallelism=True with sequence > 1, because "
            "ShardFormer cannot shard the attention of this model over the sequence axis.",
            remedy="Set enable_sequence_parallelism=False, or remove the sequence axis.",
        )
    return replace(plan, blocks=[(path, replace(block, shared_exit=None)) for path, block in plan.blocks])
