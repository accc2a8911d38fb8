"""Softmax attention with fused kernels, which avoid storing all attention scores in memory.

CUDA   flash-attn, if it is installed, for 16 bits without a mask or with a causal one
       torch's flash kernel without a mask, its memory-efficient kernel with one; an error instead of the math kernel
CPU    torch's flash kernel, for all dtypes and masks and grouped-query attention, without dropout
       for a trainable bias of the scores (T5), whose gradient the flash kernel does not compute: the backward pass
       recomputes the scores of a few sequences of the batch at a time
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from shardformer.errors import ConfigError
from shardformer.torch_compat import fused_sdp_choice

# B batch, N query heads, K key heads, Q and S lengths of queries and keys, D head dim

HALF = (torch.bfloat16, torch.float16)
FLASH_ATTN_MAX_HEAD_DIM = 256
TORCH_ATTENTION = F.scaled_dot_product_attention
KERNELS = {"cuda": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], "cpu": [SDPBackend.FLASH_ATTENTION]}
SCORES_AT_ONCE = 2**18
"""Maximum number of scores that a backward pass stores at a time (1 MB in fp32), unless one sequence has more."""
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "sinks", "indices", "block_indices", "cache", "output_attentions")


@functools.cache
def get_flash_attn_func() -> Any:
    """Return ``flash_attn_func`` of the flash-attn package, or None if it is not installed."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    return flash_attn_func


_KERNEL_CHOICE_LOCK = threading.RLock()
"""Lock for torch's choice of kernels. It is global for the process, in which ranks may be threads."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with fused kernels. Can be registered in transformers' ``AttentionInterface``.

    query (B, N, Q, D), key and value (B, K, S, D) -> (B, Q, N, D) and None.

    ``attention_mask`` is bool (True: visible) or is added to the scores, and broadcasts to (B, N, Q, S). The keyword
    argument ``position_bias`` is added to the scores. Without a mask, a causal module attends to earlier positions.

    Raises:
        ConfigError: if no fused kernel supports the arguments.
    """
    _check_attention_call(query, dropout, kwargs)
    bias: Tensor | None = kwargs.get("position_bias")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = query.shape[2] > 1 and attention_mask is None and causal
    if causal and key.shape[2] > query.shape[2]:  # a static cache with unused positions at its end
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        bias = None if bias is None else bias[..., : query.shape[2]]
    if query.is_cuda and attention_mask is None and bias is None and _is_flash_attn_supported(query, value):
        out = get_flash_attn_func()(*(t.transpose(1, 2) for t in (query, key, value)), dropout, scale, causal)
        return out.contiguous(), None
    if bias is not None and causal:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if bias is None and attention_mask is not None and attention_mask.requires_grad:
        bias, attention_mask = attention_mask, None
    query, key, value = _expand_to_same_batch_size(query, key, value)
    out_width = value.shape[-1]
    query, key, value = _pad_to_same_head_dim(query, key, value)
    bias, attention_mask = _view_mask_as_4d(bias), _view_mask_as_4d(attention_mask)
    if bias is None:
        out = _fused_attention(query, key, value, attention_mask, dropout, scale, causal)
    elif query.is_cuda:  # the memory-efficient kernel computes the gradient of the bias
        out = _fused_attention(query, key, value, _add_mask_to_bias(bias, attention_mask, query), dropout, scale, False)
    else:
        out = _attention_with_position_bias(query, key, value, bias, attention_mask, scale)
    return out[..., :out_width].transpose(1, 2).contiguous(), None


class FusedAttentionMode(TorchFunctionMode):
    """Context manager that restricts ``F.scaled_dot_product_attention`` to fused kernels."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._scaled_dot_product_attention if func is TORCH_ATTENTION else func)(*args, **(kwargs or {}))

    def _scaled_dot_product_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        out_BQND, _ = attention(self._module, query, key, value, attn_mask, dropout_p, scale, is_causal)
        return out_BQND.transpose(1, 2)


def _check_attention_call(query: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    check_no_unsupported_arguments("attention", kwargs, UNSUPPORTED_ARGUMENTS)
    if dropout > 0 and query.device.type == "cpu":
        raise ConfigError(
            f"The fused kernels do not support attention dropout on the CPU, but got dropout={dropout}.",
            remedy="Set the attention dropout to 0 in the config, or set enable_flash_attention=False.",
        )


def check_no_unsupported_arguments(
    caller_name: str, kwargs: Mapping[str, Any], unsupported_names: Sequence[str]
) -> None:
    """Raise ConfigError if a call has an argument that the fused kernels do not support."""
    for name in unsupported_names:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ConfigError(
                f"enable_flash_attention=True does not support the argument {name}, which was passed to {caller_name}.",
                remedy=f"Call the model without {name}, or set enable_flash_attention=False.",
            )


def _is_flash_attn_supported(query: Tensor, value: Tensor) -> bool:
    widths = {query.shape[-1], value.shape[-1]}
    return (
        query.dtype in HALF
        and len(widths) == 1
        and max(widths) <= FLASH_ATTN_MAX_HEAD_DIM
        and get_flash_attn_func() is not None
    )


def _expand_to_same_batch_size(*tensors: Tensor) -> list[Tensor]:
    """Expand tensors with batch size 1, such as learned queries, to the batch size of the others."""
    batch = max(t.shape[0] for t in tensors)
    return [t if t.shape[0] == batch else t.expand(batch, -1, -1, -1) for t in tensors]


def _pad_to_same_head_dim(*tensors: Tensor) -> list[Tensor]:
    """Zero-pad queries, keys and values to the same head dimension, as fused kernels require."""
    width = max(t.shape[-1] for t in tensors)
    if tensors[0].is_cuda:
        width = -(-width // 8) * 8  # for 16 bits the kernels read 16 bytes at a time
    padded = [t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors]
    return [t if t.stride(-1) == 1 else t.contiguous() for t in padded]


def _view_mask_as_4d(attention_mask: Tensor | None) -> Tensor | None:
    return (
        attention_mask
        if attention_mask is None or attention_mask.dim() == 4
        else attention_mask[(None,) * (4 - attention_mask.dim())]
    )


def _add_mask_to_bias(position_bias: Tensor, attention_mask: Tensor | None, query: Tensor) -> Tensor:
    """Combine position bias and mask into one additive mask."""
    if attention_mask is None:
        added = position_bias
    elif attention_mask.dtype == torch.bool:
        added = torch.where(attention_mask, position_bias, torch.finfo(position_bias.dtype).min)
    else:
        added = position_bias + attention_mask
    return added if added.dtype in (query.dtype, torch.float32) else added.to(query.dtype)


def _repeat_kv_heads(tensor: Tensor, num_repeats: int) -> Tensor:
    return tensor if num_repeats == 1 else tensor.repeat_interleave(num_repeats, dim=1)


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """Call ``F.scaled_dot_product_attention`` with fused kernels only. Raises ConfigError if none is available."""
    groups = query.shape[1] // key.shape[1]
    grouped = groups > 1 and (query.device.type == "cpu" or (attention_mask is None and query.dtype in HALF))
    if not grouped:
        key, value = _repeat_kv_heads(key, groups), _repeat_kv_heads(value, groups)
    if attention_mask is not None and attention_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        attention_mask = attention_mask.to(query.dtype)
    run = functools.partial(
        F.scaled_dot_product_attention,
        query,
        key,
        value,
        attention_mask,
        dropout,
        is_causal,
        scale=scale,
        enable_gqa=grouped,
    )
    kernels = KERNELS.get(query.device.type)
    if kernels is None or torch.compiler.is_compiling():  # torch then chooses the kernel when the graph runs
        return run()
    # On the CPU, ask torch for its choice: sdpa_kernel would affect other threads that call torch's attention.
    choose = functools.partial(fused_sdp_choice, query, key, value, attention_mask, dropout, is_causal)
    if query.device.type == "cpu" and SDPBackend(choose(scale=scale, enable_gqa=grouped)) in kernels:
        return run()
    with _KERNEL_CHOICE_LOCK, sdpa_kernel(kernels):
        try:
            return run()
        except (RuntimeError, UserWarning) as error:  # UserWarning if the user turned warnings into errors
            reasons = _explain_kernel_rejection(run)
            if reasons is None:
                raise
            mask_shape = None if attention_mask is None else tuple(attention_mask.shape)
            raise ConfigError(
                f"No fused attention kernel on {query.device.type} supports a query of shape {tuple(query.shape)}, a "
                f"key of shape {tuple(key.shape)} and a mask of shape {mask_shape} in {query.dtype}: {reasons}.",
                remedy="Set enable_flash_attention=False, or change the shapes or the dtype.",
            ) from error


def _explain_kernel_rejection(attention_fn: Callable[[], Tensor]) -> str | None:
    """Find out why torch rejected the fused kernels, or None if the call failed for another reason."""
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            attention_fn()
        except RuntimeError as error:
            reported = "; ".join(str(w.message).partition(" (Triggered")[0] for w in reasons)
            return reported or str(error) if "kernel" in str(error).lower() else None
    return None


# --- trainable bias of the scores on the CPU


def _attention_with_position_bias(
    query: Tensor, key: Tensor, value: Tensor, position_bias: Tensor, attention_mask: Tensor | None, scale: float
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    groups = query.shape[1] // key.shape[1]
    is_trained = position_bias.requires_grad and torch.is_grad_enabled()
    is_shared = position_bias.shape[0] == 1 and (attention_mask is None or attention_mask.shape[0] == 1)
    if torch.compiler.is_compiling() or (is_shared and not is_trained):
        return _fused_attention(
            query, key, value, _add_mask_to_bias(position_bias, attention_mask, query), 0.0, scale, False
        )
    key, value = _repeat_kv_heads(key, groups), _repeat_kv_heads(value, groups)
    out: Tensor = _AttentionWithPositionBias.apply(query, key, value, position_bias, attention_mask, scale)
    return out


class _AttentionWithPositionBias(Function):
    """Autograd function for flash attention on the CPU with a trainable position bias.

    The forward pass calls the flash kernel, for a few sequences of the batch at a time if their masks differ. The
    backward pass recomputes the scores of these sequences, N*Q*S per sequence. It stores at most SCORES_AT_ONCE scores
    at a time, unless one sequence has more.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, bias, *(() if mask is None else (mask,)))
        ctx.scale = scale
        bias = bias.detach()  # the kernel raises for a bias that requires a gradient, even under no_grad
        if bias.shape[0] == 1 and (mask is None or mask.shape[0] == 1):
            return _fused_attention(query, key, value, _add_mask_to_bias(bias, mask, query), 0.0, scale, False)
        outs = []
        for chunk in _get_batch_slices_within_score_limit(query, key):
            q, k, v, bias_b, mask_b = _slice_batch(chunk, query, key, value, bias, mask)
            assert q is not None and k is not None and v is not None and bias_b is not None
            outs.append(_fused_attention(q, k, v, _add_mask_to_bias(bias_b, mask_b, q), 0.0, scale, False))
        return torch.cat(outs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, *rest = ctx.saved_tensors
        mask = rest[0] if rest else None
        needed = [i for i in range(4) if ctx.needs_input_grad[i]]
        grads: list[Tensor | None] = [
            torch.zeros_like(t) if i in needed else None for i, t in enumerate((query, key, value, bias))
        ]
        for chunk in _get_batch_slices_within_score_limit(query, key):
            parts = _slice_batch(chunk, query, key, value, bias, mask)
            inputs = [t.detach().requires_grad_() for t in parts[:4] if t is not None]
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                out = _eager_attention(inputs[0], inputs[1], inputs[2], inputs[3], parts[4], ctx.scale)
            chunk_grads = torch.autograd.grad(out, [inputs[i] for i in needed], grad_output[chunk])
            for i, g in zip(needed, chunk_grads, strict=True):
                into = grads[i]
                assert into is not None
                (into[chunk] if into.shape[0] > 1 else into).add_(g)
        return (*grads, None, None)


def _get_batch_slices_within_score_limit(query: Tensor, key: Tensor) -> list[slice]:
    """Split the batch into slices whose attention scores fit into the memory limit."""
    batch, heads, length = query.shape[:3]
    size = max(1, SCORES_AT_ONCE // max(heads * length * key.shape[2], 1))
    return [slice(start, start + size) for start in range(0, batch, size)]


def _slice_batch(batch_slice: slice, *tensors: Tensor | None) -> list[Tensor | None]:
    """Slice tensors along the batch dimension. Tensors with batch size 1 are kept, because they broadcast."""
    return [t if t is None or t.shape[0] == 1 else t[batch_slice] for t in tensors]


def _eager_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    scores = query @ key.transpose(2, 3) * scale
    wide = torch.float32 if scores.dtype in HALF else scores.dtype
    weights = (scores.to(wide) + _add_mask_to_bias(bias, mask, query)).softmax(-1)
    return weights.to(value.dtype) @ value
