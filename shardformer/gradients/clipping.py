"""Compute and clip the global gradient norm of a sharded model, counting every gradient element once.

``torch.nn.utils.clip_grad_norm_`` is patched to compute the same norm for the parameters of a sharded model.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from shardformer.comm.collectives import all_reduce
from shardformer.errors import ConfigError, check_number
from shardformer.layout.shard_spec import Coords, ShardSpec
from shardformer.layout.sharding_metadata import (
    ParamEntry,
    ShardingMetadata,
    get_local_metadata,
    get_or_build_metadata,
    group_params_by_metadata,
)
from shardformer.torch_patches import Apply, LibraryPatch, Undo, replace_decorated_function


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of a model so that their global norm is at most ``max_norm``.

    Has the same effect as ``torch.nn.utils.clip_grad_norm_`` on the unsharded model. All tensor ranks and pipeline
    stages must call it. Communicates one all-reduce of one number over each axis over which parameters are sharded.
    Under ZeRO, this is an all-reduce of four numbers over each axis.

    Args:
        model: A sharded or unsharded model.
        max_norm: Maximum norm. With ``inf``, the norm is only computed.
        norm_type: 2 for the 2-norm, ``inf`` or "inf" for the largest absolute value, or any p > 0.
        error_if_nonfinite: Raise RuntimeError if the norm is NaN or infinite, as torch does.

    Returns:
        The norm before clipping, identical on all ranks.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"clip_grad_norm_ expects a model, but got a {type(model).__name__}.",
            remedy="Use clip_grad_norm_(model, max_norm), without .parameters().",
        )
    owner = get_or_build_metadata(model).gradient_owner
    if owner is None:
        total = grad_norm(model, norm_type)
    else:
        total = owner.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
    if error_if_nonfinite:
        _check_norm_is_finite(total)
    if owner is None:
        clip_grads_with_norm_(model, total, max_norm)
    return total


def clip_grads_with_norm_(model: nn.Module, total_norm: Tensor, max_norm: float) -> None:
    """Scale gradients whose norm is ``total_norm`` so that their norm is at most ``max_norm``."""
    if math.isinf(max_norm):
        return  # inf / inf would make all gradients NaN
    scale = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scale.to(p.grad))


def grad_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """Compute the gradient norm of a sharded model over the shards of all ranks.

    Call this function on all ranks after ``backward``. Each gradient element counts once, even if several ranks store
    it. The gradients are not clipped.

    Args:
        model: a model that ``shard_model`` returned.
        norm_type: the p of the p-norm; ``math.inf`` for the largest absolute value.

    Returns:
        A scalar tensor, which is identical on all ranks. Communicates the same as ``clip_grad_norm_``.
    """
    state = get_or_build_metadata(model)
    if state.gradient_owner is not None:
        return state.gradient_owner.clip_grad_norm_(math.inf, norm_type)
    entries = state.get_entries_by_param_id()
    model_entries = [entries.get(id(p)) or ParamEntry("", p, ShardSpec(p.shape)) for p in model.parameters()]
    return compute_grad_norm(model_entries, state, norm_type)


def compute_grad_norm(param_entries: Sequence[ParamEntry], metadata: ShardingMetadata, norm_type: float) -> Tensor:
    """Compute the gradient norm of ``param_entries`` over the shards of all ranks.

    Communicates one all-reduce of one number over each axis over which a parameter of the model is sharded.
    """
    norm_type = parse_norm_type(norm_type)
    op = "max" if math.isinf(norm_type) else "sum"
    coords = metadata.coords
    names = [name for name in coords if any(name in e.reduction.norm_over for e in metadata.entries)]
    terms = [t for e in param_entries if (t := _compute_local_norm_term(e, norm_type, coords, names)) is not None]
    # use information that all ranks share: a rank or a stage may have no gradient
    is_wide = any(e.param.dtype in (torch.float64, torch.complex128) for e in metadata.entries)
    device = next((e.param.device for e in metadata.entries), torch.device("cpu"))
    dtype = torch.float64 if is_wide or "pipe" in names else torch.float32
    total = torch.zeros((), dtype=dtype, device=device)
    for term in terms:
        total = torch.maximum(total, term.to(total)) if op == "max" else total + term.to(total)
    for name in names:
        total = all_reduce(total, metadata.get_axis(name), op=op, purpose="norm")
    total = total if op == "max" else total ** (1.0 / norm_type)
    return total if is_wide else total.float()


def parse_norm_type(norm_type: float | str) -> float:
    """Convert a norm type, which is a number above 0 or "inf" as in torch, to a float."""
    number = math.inf if norm_type == "inf" else norm_type
    check_number("norm_type", number, example=2.0)
    return float(number)


def _compute_local_norm_term(
    entry: ParamEntry, norm_type: float, coords: Coords, axis_names: Sequence[str]
) -> Tensor | None:
    """Compute the contribution of a parameter's gradient on this rank to the global norm.

    This is the sum of the p-th powers of its elements, or for ``inf`` their largest absolute value. Elements that
    several ranks store are divided by the number of copies, so that the sum over ranks counts them once. Return None if
    there is no gradient, or if another rank with the same values counts it.
    """
    grad, reduction = entry.param.grad, entry.reduction
    others = [coords[name] for name in axis_names if name not in reduction.norm_over]
    if grad is None or any(others) or (reduction.stages and reduction.stages[0] != coords["pipe"]):
        return None
    num_copies = entry.spec.count_copies_per_element(coords)
    if grad.is_sparse:
        grad = grad.to_dense() if isinstance(num_copies, Tensor) else grad.coalesce().values()
    magnitude = grad.detach().abs()
    if magnitude.dtype in (torch.float16, torch.bfloat16):
        magnitude = magnitude.float()
    if math.isinf(norm_type):
        return magnitude.max() if magnitude.numel() else magnitude.new_zeros(())
    powers = magnitude**norm_type
    return (powers / num_copies.to(powers) if isinstance(num_copies, Tensor) else powers).sum()


_CLIPPED: ContextVar[Sequence[Tensor] | None] = ContextVar("clipped", default=None)
"""The parameters that were passed to the current ``clip_grad_norm_`` call of this thread."""


def _apply_clip_grad_norm_patch() -> Undo:
    clip = torch.nn.utils.clip_grad_norm_
    return replace_decorated_function(
        clip, _wrap_clip_grad_norm, (clip_grad, "clip_grad_norm_"), (torch.nn.utils, "clip_grad_norm_")
    )


def _apply_get_total_norm_patch() -> Undo:
    norm = torch.nn.utils.get_total_norm
    return replace_decorated_function(
        norm, _wrap_get_total_norm, (clip_grad, "_get_total_norm"), (torch.nn.utils, "get_total_norm")
    )


def _wrap_clip_grad_norm(original_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original_fn)
    def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for state in group_params_by_metadata(params):
            if state.gradient_owner is not None:
                state.gradient_owner.reduce_pending_grads()  # before .grad is read: no_sync leaves local gradients
        token = _CLIPPED.set(params)
        try:
            # torch warns if a generator is empty
            return original_fn(
                (p for p in params) if isinstance(parameters, GeneratorType) else params, *args, **kwargs
            )
        finally:
            _CLIPPED.reset(token)

    return clip_grad_norm_


def _wrap_get_total_norm(original_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original_fn)
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        params = _CLIPPED.get() or ()
        _reject_zero_optimizer_params(params, grads)
        found = _group_params_with_grads_by_model(params) if params else _group_grads_by_model(grads)
        if not found:
            return original_fn(grads, norm_type, error_if_nonfinite, foreach)
        known = {id(e.param.grad) for entries in found.values() for e in entries}  # norm_of replaces .grad
        norms = []
        for state, entries in found.items():
            if state.gradient_owner is not None:
                norms.append(state.gradient_owner.compute_grad_norm([e.param for e in entries], float(norm_type)))
            else:
                norms.append(compute_grad_norm(entries, state, float(norm_type)))
        if others := [g for g in grads if id(g) not in known]:
            norms.append(original_fn(others, norm_type, False, foreach))
        total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]), float(norm_type))
        if error_if_nonfinite:
            _check_norm_is_finite(total)
        return total

    return get_total_norm


def _check_norm_is_finite(total_norm: Tensor) -> None:
    if not bool(torch.isfinite(total_norm)):
        raise RuntimeError(
            f"The norm of the gradients is {total_norm.item()}, so the gradients cannot be clipped. To disable this "
            "error, set error_if_nonfinite=False."
        )


def _reject_zero_optimizer_params(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Raise ConfigError if ``params`` are the parameter shards of a ZeroOptimizer."""
    clipped = {id(x) for x in (*params, *grads)}
    for owner in (state.gradient_owner for state in get_local_metadata() if state.gradient_owner is not None):
        for p in (p for group in owner.param_groups for p in group["params"]):
            if id(p) in clipped or (p.grad is not None and id(p.grad) in clipped):
                raise ConfigError(
                    "torch.nn.utils.clip_grad_norm_ received the parameter shards of a ZeroOptimizer.",
                    remedy="Pass model.parameters(), or call shardformer.clip_grad_norm_(model, max_norm).",
                )


def _group_params_with_grads_by_model(params: Sequence[Tensor]) -> dict[ShardingMetadata, list[ParamEntry]]:
    """Group the parameters that have gradients by the sharded model to which they belong."""
    found = {}
    for state, entries in group_params_by_metadata(params).items():
        entries = [e for e in entries if e.param.grad is not None]
        if _has_sharded_grads(state) and (entries or state.context.pipe.size > 1):
            found[state] = entries
    return found


def _group_grads_by_model(grads: Sequence[Tensor]) -> dict[ShardingMetadata, list[ParamEntry]]:
    """Group the parameters whose gradients are in ``grads`` by the sharded model to which they belong."""
    if not grads:
        return _find_model_without_local_grads()
    missing = {id(g) for g in grads}
    found = {}
    for state in filter(_has_sharded_grads, get_local_metadata()):
        entries = [e for e in state.entries if e.param.grad is not None and id(e.param.grad) in missing]
        if entries:
            found[state] = entries
            missing -= {id(e.param.grad) for e in entries}
        if not missing:
            break
    return found


def _has_sharded_grads(metadata: ShardingMetadata) -> bool:
    return metadata.gradient_owner is not None or any(
        metadata.get_axis(name).size > 1 for e in metadata.entries for name in e.reduction.norm_over
    )


def _find_model_without_local_grads() -> dict[ShardingMetadata, list[ParamEntry]]:
    """Find the pipeline model to clip on a stage that has no gradients."""
    if len(get_local_metadata()) > 1 or any(state.gradient_owner is not None for state in get_local_metadata()):
        gc.collect()  # ignore models that are no longer referenced
    states = [state for state in get_local_metadata() if state.context.pipe.size > 1]
    if not states and any(state.gradient_owner is not None for state in get_local_metadata()):
        raise ConfigError(
            "torch.nn.utils.clip_grad_norm_ received no gradients, because ZeRO does not store them in .grad.",
            remedy="Pass model.parameters(), or call shardformer.clip_grad_norm_(model, max_norm).",
        )
    if len(states) > 1:
        raise ConfigError(
            "torch.nn.utils.clip_grad_norm_ received no gradients and cannot determine which of the "
            f"{len(states)} pipeline models in this process to clip.",
            remedy="Call shardformer.clip_grad_norm_(model, max_norm) instead.",
        )
    return {state: [] for state in states}


CLIPPING_PATCHES: Mapping[LibraryPatch, Apply] = {
    LibraryPatch(
        "torch.nn.utils.get_total_norm",
        "shardformer.gradients.clipping",
        "counts each element of sharded gradients once, over all ranks",
    ): _apply_get_total_norm_patch,
    LibraryPatch(
        "torch.nn.utils.clip_grad_norm_",
        "shardformer.gradients.clipping",
        "clips by the global norm of a sharded model, including gradients that ZeRO keeps",
    ): _apply_clip_grad_norm_patch,
}
"""Scripts may have imported the functions, so the patches replace the code below their ``no_grad`` decorator."""
