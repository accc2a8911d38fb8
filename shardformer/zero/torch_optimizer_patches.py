"""Patches that make torch's optimizers, gradient scalers and gradient clipping work with sharded models.

``torch.amp.GradScaler`` skips a step if gradients are not finite. With the patch, all ranks of the model skip the step
if one rank has to, as torch's ``ShardedGradScaler`` does for FSDP.

Before a step, gradients that were not reduced over ranks are reduced or rejected: see ``check_gradients_before_step``.

An optimizer that is not element-wise (Adafactor, Muon, LAMB) computes a different update for a shard of a matrix. A
warning at the first step reports this.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardformer.comm.collectives import all_reduce
from shardformer.consistency.rank_divergence import (
    MONITOR_PATCHES,
    check_gradients_before_step,
    get_metadata_of_trained_models,
)
from shardformer.errors import ConfigError
from shardformer.gradients.clipping import CLIPPING_PATCHES
from shardformer.layout.sharding_metadata import group_by_metadata
from shardformer.torch_compat import has_data
from shardformer.torch_patches import Apply, Patch, Undo, replace_attribute
from shardformer.zero.elementwise_trial import needs_full_matrices
from shardformer.zero.optimizer_state_view import STATE_PATCHES, get_zero_optimizer
from shardformer.zero.zero_optimizer import ZeroOptimizer

CHECKED_ATTRIBUTE = "_shardformer_looked_at"
"""Name of an attribute that marks optimizers that were checked at their first step."""


def _install_grad_scaler_patch() -> Undo:
    scaler, name = torch.amp.GradScaler, "_unscale_grads_"
    return replace_attribute(scaler, name, _patch_unscale_grads(getattr(scaler, name)))


def _patch_unscale_grads(original: Any) -> Any:
    @wraps(original)
    def unscale(self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        found: dict[torch.device, Tensor] = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        for state in get_metadata_of_trained_models(optimizer):
            axes = [axis for axis in state.context.base_axes if axis.size > 1]
            worst = torch.stack([x.to(found_inf.device) for x in (found_inf, *found.values())]).max()
            for axis in axes:
                worst = all_reduce(worst.clone(), axis, op="max", purpose="norm")
            found.setdefault(found_inf.device, found_inf)
            for x in found.values():
                x.copy_(worst)
        return found

    return unscale


def _check_optimizer_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (holder := get_zero_optimizer(optimizer)) is not None and not holder.is_stepping:
        raise ConfigError(
            f"step() was called on the original {type(optimizer).__name__} that was passed to shard_optimizer.",
            remedy="Use the returned optimizer instead: optimizer = shardformer.shard_optimizer(model, optimizer).",
        )
    if isinstance(optimizer, ZeroOptimizer):
        return
    if holder is None:
        check_gradients_before_step(optimizer)
    if CHECKED_ATTRIBUTE in optimizer.__dict__:
        return
    optimizer.__dict__[CHECKED_ATTRIBUTE] = True
    entries_of_models = group_by_metadata(p for group in optimizer.param_groups for p in group["params"])
    entries = [e for some in entries_of_models.values() for e in some if e.spec.is_sharded]
    cut = [e.name for e in entries]
    if not cut or not has_data(entries[0].param):
        return
    try:
        reason = "the optimizer needs full parameters" if needs_full_matrices(optimizer) else None
    except ConfigError as error:
        reason = error.what
    if reason is not None:
        warnings.warn(
            f"{type(optimizer).__name__} updates shards of parameters such as {cut[0]} incorrectly: {reason}. Use "
            "optimizer = shardformer.shard_optimizer(model, optimizer), which gathers full parameters.",
            stacklevel=4,
        )


TRAINING_PATCHES: Mapping[Patch, Apply] = {
    **CLIPPING_PATCHES,
    **STATE_PATCHES,
    Patch(
        "torch.amp.GradScaler._unscale_grads_",
        "shardformer.zero.torch_optimizer_patches",
        "all ranks skip a step if one has gradients that are not finite",
    ): _install_grad_scaler_patch,
    Patch(
        "torch.optim.Optimizer: global hook before step()",
        "shardformer.zero.torch_optimizer_patches",
        "reduces gradients that ranks have not reduced; warns of optimizers that need full matrices",
    ): lambda: register_optimizer_step_pre_hook(_check_optimizer_before_step).remove,
    **MONITOR_PATCHES,
}
"""All patches of torch's gradient clipping, gradient scaler and optimizers."""
