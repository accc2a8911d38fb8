"""Shard optimizer states, master weights, gradients and parameters over data-parallel ranks (ZeRO).

This module also patches torch's optimizers, ``torch.amp.GradScaler`` and gradient clipping. ``GradScaler`` skips a step
if gradients are not finite. With the patch, all ranks of the model skip the step if one rank has to, as torch's
``ShardedGradScaler`` does for FSDP. Before a step, ``check_gradients_before_step`` reduces or rejects gradients that
were not reduced over ranks, and ``check_gradients_outside_sharded_models`` rejects those of other modules. At the first
step, a warning reports optimizers that are not element-wise (Adafactor, Muon, LAMB), because they compute a different
update for a shard of a matrix.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardformer.comm.collective_call import run_and_compare_across_ranks
from shardformer.comm.collectives import all_gather_objects, all_reduce, broadcast, compute_numel_and_hash
from shardformer.consistency.ddp_and_fsdp_guards import (
    check_no_parameters_added_after_sharding,
    check_not_in_ddp,
    forbid_data_parallel_wrappers,
)
from shardformer.consistency.initial_weights import is_different_across_ranks
from shardformer.consistency.rank_divergence import (
    MONITOR_PATCHES,
    check_gradients_before_step,
    check_gradients_outside_sharded_models,
    get_metadata_of_trained_models,
    get_numeric_options,
)
from shardformer.errors import ConfigError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.gradients.buckets import GradientSlot
from shardformer.gradients.clipping import CLIPPING_PATCHES
from shardformer.gradients.reducer import GradientReducer
from shardformer.layout.activation_layout import ActivationLayout, ModelRegion
from shardformer.layout.packed_weights import (
    find_quantized_weights,
    get_packed_tensors,
    unregister_quantized_parameters,
)
from shardformer.layout.shard_spec import ShardSpec
from shardformer.layout.sharding_metadata import (
    METADATA_ATTRIBUTE,
    ParamEntry,
    ShardingMetadata,
    check_is_module,
    find_view_and_parameter_names,
    get_gradient_reduction,
    get_sharding_metadata,
    group_overlapping_tensors,
    group_params_by_metadata,
)
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.disk import check_disk_space
from shardformer.offload.host import OffloadConfig
from shardformer.public_names import deprecate_renamed_function_arguments
from shardformer.torch_compat import has_real_data
from shardformer.torch_patches import Apply, LibraryPatch, Undo, install_patches, replace_attribute
from shardformer.zero.config import ZeroOptions, as_optimizer_list
from shardformer.zero.elementwise_trial import (
    can_step_params_separately,
    estimate_optimizer_state_bytes,
    requires_full_matrices,
)
from shardformer.zero.memory_estimate import check_free_memory_option
from shardformer.zero.mixed_precision import MixedPrecision
from shardformer.zero.optimizer_state_view import STATE_PATCHES, get_zero_optimizer
from shardformer.zero.zero_optimizer import ZeroOptimizer

ACTION = "train with these optimizers"


def _format_options_per_line(optimizers_and_options: tuple[list[Optimizer], ZeroOptions]) -> list[str]:
    """Format the options and optimizer classes as lines of text, to compare them between ranks."""
    optimizers, options = optimizers_and_options
    return [f"{name}={value!r}" for name, value in vars(options).items()] + [type(o).__name__ for o in optimizers]


def check_zero_support(
    model: nn.Module, optimizers: Sequence[Optimizer], zero_options: ZeroOptions, metadata: ShardingMetadata
) -> None:
    check_optimizer_params(optimizers, metadata)
    check_no_shared_param_memory(model, metadata)
    check_free_memory_option(zero_options, metadata.context.device)
    check_file_offload_support(zero_options, optimizers, metadata)


def check_optimizer_params(optimizers: Sequence[Optimizer], metadata: ShardingMetadata) -> None:
    """Raise ConfigError if optimizers share a parameter, or contain one that is not in the model."""
    if metadata.gradient_owner is not None:
        raise ConfigError(
            "shard_optimizer was called twice on this model.",
            remedy="Pass all optimizers in one call, as in shard_optimizer(model, [first, second]). To use a new "
            "optimizer, save the model and load it again.",
        )
    names = {id(entry.param): entry.name for entry in metadata.entries}
    seen: set[int] = set()
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        given = [p for group in optimizer.param_groups for p in group["params"]]
        strange = next((p for p in given if id(p) not in names), None)
        if strange is not None:
            raise ConfigError(
                f"{kind} contains a parameter of shape {tuple(strange.shape)} that is not a parameter of the model.",
                remedy="Create the optimizer from model.parameters() after you call shard_model. If only a submodule "
                "is sharded, shard the whole model instead.",
            )
        if twice := next((names[id(p)] for p in given if id(p) in seen), None):
            raise ConfigError(
                f"The parameter {twice} is in two optimizers, which would both update it.",
                remedy="Remove the parameter from one of the optimizers.",
            )
        seen |= {id(p) for p in given}


def _check_stages_use_same_options(optimizers: Sequence[Optimizer], metadata: ShardingMetadata) -> None:
    """Raise ConfigError on all ranks if pipeline stages use different optimizer options for a parameter they share.

    Communicates the options of shared parameters over pipe.
    """
    stages = metadata.stages
    if stages is None or not stages.shared:
        return
    options = {
        id(p): (type(optimizer).__name__, *get_numeric_options(group))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    shared = [entry for entry in metadata.entries if entry.reduction.stages]
    local = {stages.get_first_name(entry.name): (entry.name, options.get(id(entry.param))) for entry in shared}
    known: dict[str, tuple[str, Any]] = {}
    for name, (local_name, used) in chain.from_iterable(
        each.items() for each in all_gather_objects(local, metadata.context.pipe)
    ):
        other_name, other = known.setdefault(name, (local_name, used))
        if used != other:
            raise ConfigError(
                f"Pipeline stages share the parameter {name}, but use different optimizer options for it: "
                f"{other or 'no optimizer'} for {other_name} and {used or 'no optimizer'} for {local_name}.",
                remedy="If you select parameters by name, select all names of a tied parameter. Or create the "
                "optimizer before the model is sharded, and call shardformer.initialize.",
            )


def check_no_shared_param_memory(model: nn.Module, metadata: ShardingMetadata) -> None:
    """Raise ConfigError if a parameter shares memory with another parameter or tensor of the model."""
    params = [(entry.name, entry.param) for entry in metadata.entries if has_real_data(entry.param)]
    if group := next(iter(group_overlapping_tensors(params)), None):
        first, second, *_ = (name for name, _ in params if name in group)
        raise ConfigError(
            f"ZeRO does not support parameters that share memory, such as {second} and {first}.",
            remedy="Use one parameter in both modules (a.weight = b.weight), or clone one of the parameters.",
        )
    if found := find_view_and_parameter_names(model, params):
        view, name = found
        raise ConfigError(
            f"ZeRO does not support views of parameters, but {view} is a view of {name}.",
            remedy=f"Use {name} instead of {view} in the model, or clone {view}.",
        )


def check_file_offload_support(
    zero_options: ZeroOptions, optimizers: Sequence[Optimizer], metadata: ShardingMetadata
) -> None:
    """Raise ConfigError if optimizers do not support offload to files, or if their states do not fit on the disk."""
    if (folder := zero_options.offload.folder) is None:
        return
    if not all(map(can_step_params_separately, optimizers)):
        names = ", ".join(type(o).__name__ for o in optimizers)
        raise ConfigError(
            f"offload='nvme:{folder}' updates each parameter separately, which {names} does not support.",
            remedy="Use offload='cpu', or an optimizer that counts steps per parameter, such as torch.optim.AdamW.",
        )
    reducers = [reducer for reducer in metadata.reducers if isinstance(reducer, GradientReducer)]
    ranks = {id(g.param): g.axis.size for reducer in reducers for g in reducer.gradients if zero_options.stage > 0}
    size = 0.0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                wide = torch.promote_types(p.dtype, torch.float32).itemsize
                size += (p.numel() * wide + estimate_optimizer_state_bytes(optimizer, group, p, wide)) / ranks.get(
                    id(p), 1
                )
    try:
        check_disk_space(folder, 2 * round(size))
    except OSError as error:
        rank = metadata.context.rank
        raise ConfigError(
            f"Optimizer states cannot be offloaded to files in {folder!r} on rank {rank}: {error}.",
            remedy="Use an existing directory with enough free space. shardformer.estimate_memory returns the "
            "required size.",
        ) from error


WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def get_or_create_sharding_metadata(model: nn.Module, context: ParallelContext | None, stage: int) -> ShardingMetadata:
    """Return the sharding metadata of a model, or create it if the model is not sharded.

    Raises:
        ConfigError: The model is wrapped, for example in DistributedDataParallel, was sharded with another context, or
            has a sharded submodule.
    """
    check_is_module(model)
    wrapper = next((name for m in model.modules() for c in type(m).__mro__ if (name := c.__name__) in WRAPPERS), None)
    if wrapper is not None:
        raise ConfigError(
            f"ZeRO does not support wrapped models, but the model is wrapped in {wrapper}.",
            remedy="Pass the unwrapped model to shard_optimizer, and use it in the training loop.",
        )
    if isinstance(table := model.__dict__.get(METADATA_ATTRIBUTE), ShardingMetadata):
        if context is not None and context is not table.context:
            raise ConfigError(
                "The context passed to shard_optimizer differs from the context of the sharded model.",
                remedy="Omit context= to use the context of the model.",
            )
        return table
    context = context or _create_data_parallel_context()
    _check_no_sharded_submodule(model, context, stage)
    return _create_unsharded_metadata(model, context)


def _check_no_sharded_submodule(model: nn.Module, context: ParallelContext, stage: int) -> None:
    """Raise ConfigError if a submodule is sharded, unless the stage shards nothing and the data ranks are the same."""
    for path, module in model.named_modules():
        if not isinstance(table := module.__dict__.get(METADATA_ATTRIBUTE), ShardingMetadata):
            continue
        ranks = [axis.ranks for axis in table.context.base_axes if axis.size > 1]
        if ranks and (stage != 0 or ranks != [context.data.ranks]):
            is_wrapper = {id(p) for p in model.parameters()} <= table.get_entries_by_param_id().keys()
            raise ConfigError(
                f"shard_optimizer cannot train this {type(model).__name__} with stage={stage}, because only its "
                f"submodule {path} is sharded, over {table.context}.",
                remedy=f"Pass the submodule {path} to shard_optimizer, because it contains all parameters."
                if is_wrapper
                else "Build the model again, and pass the whole model to shard_model before shard_optimizer.",
            )


def _create_data_parallel_context() -> ParallelContext:
    if dist.is_available() and dist.is_initialized():
        return ParallelContext.from_default_process_group({"data": dist.get_world_size()})
    return ParallelContext.from_sizes({})


def _create_unsharded_metadata(model: nn.Module, context: ParallelContext) -> ShardingMetadata:
    """Create sharding metadata for an unsharded model, and broadcast its weights to all data-parallel ranks."""
    if any(axis.size > 1 for name, axis in context.axes.items() if name != "data"):
        raise ConfigError(
            f"context={context} requires a model from shard_model, but {type(model).__name__} is not sharded.",
            remedy="Call shardformer.shard_model(model, context=context) before shard_optimizer.",
        )
    install_patches(TRAINING_PATCHES)
    packed = [
        compute_numel_and_hash(t)
        for weight in find_quantized_weights(model).values()
        for t in get_packed_tensors(weight)
    ]
    if context.data.size > 1 and is_different_across_ranks(packed, context.data):
        raise ConfigError(
            f"The quantized weights of {type(model).__name__} differ between ranks.",
            remedy="Load the same model with the same quantization config on all ranks.",
        )
    unregister_quantized_parameters(model)
    table, stream = ShardingMetadata(context), ActivationLayout()
    for name, param in model.named_parameters():
        spec = ShardSpec(param.shape)
        table.entries.append(
            ParamEntry(name, param, spec, get_gradient_reduction(spec, stream, ModelRegion.OUTSIDE, context.sizes))
        )
    if context.data.size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            broadcast(tensor.detach(), context.data)
        table.reducers = [GradientReducer([GradientSlot(e, context.data, table.coords) for e in table.entries])]
    table.attach_to_model(model)

    if context.data.size > 1:
        forbid_data_parallel_wrappers(model, context)

    def check_forward_pre_hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        check_not_in_ddp(model, context)
        check_no_parameters_added_after_sharding(model, table)
        for reducer in table.reducers:
            reducer.prepare_for_backward()

    register_forward_hooks(model, HookOrder.CHECKS, check_forward_pre_hook)
    return table


@deprecate_renamed_function_arguments({}, ("optimizer", "model"))
def shard_optimizer(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    stage: int = 1,
    precision: str | MixedPrecision = "fp32",
    offload: str | OffloadConfig | None = None,
    max_grad_norm: float | None = None,
    on_nonfinite: str = "raise",
    keep_frozen: bool = True,
    reshard_after_forward: bool | int | str | None = None,
    bucket_bytes: int | None = None,
    overlap: bool = True,
    context: ParallelContext | None = None,
) -> ZeroOptimizer:
    """Shard the optimizer state, gradients and parameters of a model over its data-parallel ranks (ZeRO).

    >>> model = shardformer.shard_model(model, context=context)                                   # doctest: +SKIP
    >>> optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=2)       # doctest: +SKIP

    Args:
        optimizer: One or several optimizers of the parameters of ``model``. Element-wise optimizers get slices of
            parameters. Others (Muon, Adafactor) get full parameters, each on one rank. A short test decides which.
        model: The result of ``shard_model``, or any other module, which is then trained with data parallelism.
        stage: ZeRO stage. 0 shards nothing, 1 the optimizer state, 2 also gradients, which are then reduced in every
            backward pass, and 3 also parameters, which are gathered layer by layer.
        precision: "fp32" keeps the dtype of the parameters. "bf16" and "fp16" use 16-bit parameters and fp32 master
            weights. A ``MixedPrecision`` has more options. With fp16, call ``optimizer.backward(loss)``.
        offload: "cpu" keeps master weights, optimizer state and gradients in host memory, and updates them there.
            "nvme:DIR" keeps master weights and optimizer state in files. See ``OffloadConfig``.
        max_grad_norm: Maximum gradient norm, to which ``step`` clips the gradients. None disables clipping.
        on_nonfinite: Whether a NaN or infinite gradient makes ``step`` "raise" InputError on all ranks, "skip" the step
            (as fp16 always does), or "ignore" it.
        keep_frozen: Whether stage 3 leaves frozen parameters unsharded.
        reshard_after_forward: Whether stage 3 frees each layer between its forward and backward pass. None means True,
            or False in a pipeline. A number of bytes keeps as much of the last layers. "free" fills free GPU memory.
        bucket_bytes: Size of a gradient bucket in bytes. None uses the value of ``shard_model``, by default 25 MB.
        overlap: Whether communication of gradients and of stage 3 layers overlaps with computation.
        context: Mesh of a model that was not sharded. None uses all processes as data-parallel ranks.

    Returns:
        An optimizer that replaces yours. For an unsharded model, the weights of the first rank are communicated.

    Raises:
        ConfigError: A combination is not supported, or stages use different options for a tied parameter.
    """
    table = get_or_create_sharding_metadata(model, context, stage)

    def make_optimizers_and_options() -> tuple[list[Optimizer], ZeroOptions]:
        optimizers = as_optimizer_list(optimizer)
        places = OffloadConfig.from_argument(offload, optimizers)
        dtypes, steps = MixedPrecision.from_value(precision), (max_grad_norm, on_nonfinite)
        options = ZeroOptions(stage, dtypes, places, *steps, keep_frozen, reshard_after_forward, bucket_bytes, overlap)
        check_zero_support(model, optimizers, options, table)
        return optimizers, options

    made = run_and_compare_across_ranks(table.context, make_optimizers_and_options, _format_options_per_line, ACTION)
    _check_stages_use_same_options(made[0], table)
    return ZeroOptimizer(model, table, *made)


def must_shard_optimizers(model: nn.Module, optimizers: Sequence[Optimizer], zero_stage: int | None) -> bool:
    """Return whether training requires ``shard_optimizer``, for ZeRO or for optimizers that need full matrices.

    If an optimizer fails the test for full matrices, it returns True, so that ``shard_optimizer`` raises the error.
    Communicates one object per rank if ``zero_stage`` is None and an axis other than "data" has several ranks.
    """
    metadata = get_sharding_metadata(model)
    axes = [axis for axis in metadata.context.base_axes if axis.size > 1]
    if not optimizers or isinstance(optimizers[0], ZeroOptimizer):
        return False
    if zero_stage is not None or all(axis.name == "data" for axis in axes):
        return zero_stage is not None
    try:
        is_needed = any([requires_full_matrices(optimizer) for optimizer in optimizers])
    except ConfigError:
        is_needed = True
    is_needed = is_needed and any(entry.spec.is_sharded for entry in metadata.entries)
    for axis in axes:
        is_needed = any(all_gather_objects(is_needed, axis))
    return is_needed


CHECKED_ATTRIBUTE = "_shardformer_looked_at"
"""Name of an attribute that marks optimizers that were checked at their first step."""


def _install_grad_scaler_patch() -> Undo:
    scaler, name = torch.amp.GradScaler, "_unscale_grads_"
    return replace_attribute(scaler, name, _patch_unscale_grads(getattr(scaler, name)))


def _patch_unscale_grads(original_unscale_grads: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original_unscale_grads)
    def unscale_grads(
        grad_scaler: torch.amp.GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.finish_reduction_and_set_grads()
        found: dict[torch.device, Tensor] = original_unscale_grads(
            grad_scaler, optimizer, inv_scale, found_inf, allow_fp16
        )
        for state in get_metadata_of_trained_models(optimizer):
            axes = [axis for axis in state.context.base_axes if axis.size > 1]
            worst = torch.stack([x.to(found_inf.device) for x in (found_inf, *found.values())]).max()
            for axis in axes:
                worst = all_reduce(worst.clone(), axis, op="max", purpose="norm")
            found.setdefault(found_inf.device, found_inf)
            for x in found.values():
                x.copy_(worst)
        return found

    return unscale_grads


def _optimizer_step_pre_hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (holder := get_zero_optimizer(optimizer)) is not None and not holder.is_stepping:
        raise ConfigError(
            f"step() was called on the original {type(optimizer).__name__} that was passed to shard_optimizer.",
            remedy="Use the returned optimizer instead: optimizer = shardformer.shard_optimizer(model, optimizer).",
        )
    if isinstance(optimizer, ZeroOptimizer):
        return
    if holder is None:
        check_gradients_before_step(optimizer)
        check_gradients_outside_sharded_models(optimizer)
    if CHECKED_ATTRIBUTE in optimizer.__dict__:
        return
    optimizer.__dict__[CHECKED_ATTRIBUTE] = True
    entries_of_models = group_params_by_metadata(p for group in optimizer.param_groups for p in group["params"])
    entries = [e for some in entries_of_models.values() for e in some if e.spec.is_sharded]
    cut = [e.name for e in entries]
    if not cut or not has_real_data(entries[0].param):
        return
    try:
        reason = "the optimizer needs full parameters" if requires_full_matrices(optimizer) else None
    except ConfigError as error:
        reason = error.what
    if reason is not None:
        warnings.warn(
            f"{type(optimizer).__name__} updates shards of parameters such as {cut[0]} incorrectly: {reason}. Use "
            "optimizer = shardformer.shard_optimizer(model, optimizer), which gathers full parameters.",
            stacklevel=4,
        )


TRAINING_PATCHES: Mapping[LibraryPatch, Apply] = {
    **CLIPPING_PATCHES,
    **STATE_PATCHES,
    LibraryPatch(
        "torch.amp.GradScaler._unscale_grads_",
        "shardformer.zero.shard_optimizer",
        "makes all ranks skip a step if one rank has gradients that are not finite",
    ): _install_grad_scaler_patch,
    LibraryPatch(
        "torch.optim.Optimizer: global hook before step()",
        "shardformer.zero.shard_optimizer",
        "reduces gradients that are not reduced yet, and warns about optimizers that need full matrices",
    ): lambda: register_optimizer_step_pre_hook(_optimizer_step_pre_hook).remove,
    **MONITOR_PATCHES,
}
"""All patches of torch's gradient clipping, gradient scaler and optimizers."""
