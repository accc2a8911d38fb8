"""The attention function: softmax attention that never holds the scores of the whole batch.

on CUDA   flash-attn         where it is installed: 16 bit, no mask or a causal one
          torch's own        flash without a mask, memory-efficient with one; never the plain one (an error instead)
on CPU    torch's own flash  every dtype and mask, grouped heads, no dropout
          a few at a time    where a bias of the scores trains (T5's relative positions): the flash kernel gives it
                             no gradient, so the backward computes the scores of a few sequences of the batch at a time
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
KERNELS = {
    "cuda": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "cpu": [SDPBackend.FLASH_ATTENTION],
}
SCORES_AT_ONCE = 2**18
"""How many scores a backward holds, where those of one sequence are fewer: 1 MB in fp32."""
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "sinks", "indices", "block_indices", "cache", "output_attentions")
REMEDY_OFF = "Leave enable_flash_attention off"


@functools.cache
def flash_attn() -> Any:
    """The function of the flash-attn package; None where it is not installed."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    return flash_attn_func


def dropout_error(what: str, setting: str) -> ConfigError:
    return ConfigError(
        f"enable_flash_attention on the CPU with dropout of the attention weights, {what}",
        rule="torch's flash attention for the CPU has no dropout",
        remedy=f"Build the model with {setting} in its config, leave enable_flash_attention off, or train on a GPU",
    )


_SWITCHES = threading.RLock()
"""Which kernels torch may use is said for all threads at once, and ranks may be threads."""


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
    """Attention as transformers calls it: query (B, N, Q, D), key and value (B, K, S, D) -> (B, Q, N, D), None.

    ``attention_mask`` is bool (True: may see) or is added to the scores, and broadcasts to (B, N, Q, S); so does
    ``position_bias``, which is added too. Without a mask a module that is causal sees what is before.

    Raises ConfigError when no fused kernel gives what is asked for.
    """
    _check_call(query, dropout, kwargs)
    bias: Tensor | None = kwargs.get("position_bias")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = query.shape[2] > 1 and attention_mask is None and causal
    if causal and key.shape[2] > query.shape[2]:  # a cache that is not full yet
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        bias = None if bias is None else bias[..., : query.shape[2]]
    if query.is_cuda and attention_mask is None and bias is None and _fits_flash_attn(query, value):
        out = flash_attn()(*(t.transpose(1, 2) for t in (query, key, value)), dropout, scale, causal)
        return out.contiguous(), None
    if bias is not None and causal:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if bias is None and attention_mask is not None and attention_mask.requires_grad:
        bias, attention_mask = attention_mask, None
    query, key, value = _same_batch(query, key, value)
    out_width = value.shape[-1]
    query, key, value = _same_width(query, key, value)
    bias, attention_mask = _four_dims(bias), _four_dims(attention_mask)
    if bias is None:
        out = _fused(query, key, value, attention_mask, dropout, scale, causal)
    elif query.is_cuda:  # the memory-efficient kernel gives the bias its gradient
        out = _fused(query, key, value, _combined_bias(bias, attention_mask, query), dropout, scale, False)
    else:
        out = _in_chunks(query, key, value, bias, attention_mask, scale)
    return out[..., :out_width].transpose(1, 2).contiguous(), None


class FusedAttentionMode(TorchFunctionMode):
    """Inside of it a call of torch's attention is one of ``attention``: for a forward that makes that call itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._attention if func is TORCH_ATTENTION else func)(*args, **(kwargs or {}))

    def _attention(
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


def _check_call(query: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    check_attention_arguments("attention", kwargs, UNSUPPORTED_ARGUMENTS)
    if dropout > 0 and query.device.type == "cpu":
        raise dropout_error(f"p={dropout}", "the attention dropout at 0")


def check_attention_arguments(what: str, kwargs: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises ConfigError for an argument that the kernels do not know."""
    for name in names:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ConfigError(
                f"enable_flash_attention, and {what} was called with {name}",
                rule="The fused kernels compute plain softmax attention and do not return its weights",
                remedy=f"Call the model without {name}. Or {REMEDY_OFF.lower()}",
            )


def _fits_flash_attn(query: Tensor, value: Tensor) -> bool:
    widths = {query.shape[-1], value.shape[-1]}
    return (
        query.dtype in HALF and len(widths) == 1 and max(widths) <= FLASH_ATTN_MAX_HEAD_DIM and flash_attn() is not None
    )


def _same_batch(*tensors: Tensor) -> list[Tensor]:
    """Learned queries come with a batch of 1."""
    batch = max(t.shape[0] for t in tensors)
    return [t if t.shape[0] == batch else t.expand(batch, -1, -1, -1) for t in tensors]


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """The kernels want one head dim, contiguous: zeros beyond change neither the scores nor the rest of the output."""
    width = max(t.shape[-1] for t in tensors)
    if tensors[0].is_cuda:
        width = -(-width // 8) * 8  # in 16 bit they read 16 bytes at a time
    padded = [t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors]
    return [t if t.stride(-1) == 1 else t.contiguous() for t in padded]


def _four_dims(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None or mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]


def _combined_bias(bias: Tensor, mask: Tensor | None, query: Tensor) -> Tensor:
    """Bias and mask as one tensor that is added to the scores."""
    if mask is None:
        added = bias
    elif mask.dtype == torch.bool:
        added = torch.where(mask, bias, torch.finfo(bias.dtype).min)
    else:
        added = bias + mask
    return added if added.dtype in (query.dtype, torch.float32) else added.to(query.dtype)


def _repeated(x: Tensor, times: int) -> Tensor:
    """(B, K, S, D) -> (B, K * times, S, D), each head ``times`` times in a row."""
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float, causal: bool
) -> Tensor:
    """torch's attention, (B, N, Q, D), by a fused kernel or not at all."""
    groups = query.shape[1] // key.shape[1]
    grouped = groups > 1 and (query.device.type == "cpu" or (mask is None and query.dtype in HALF))
    if not grouped:
        key, value = _repeated(key, groups), _repeated(value, groups)
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        mask = mask.to(query.dtype)
    run = functools.partial(
        F.scaled_dot_product_attention, query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped
    )
    kernels = KERNELS.get(query.device.type)
    if kernels is None:
        return run()
    # on the CPU torch is asked what it takes: the switch would be turned for a rank that calls torch's attention itself
    how = functools.partial(fused_sdp_choice, query, key, value, mask, dropout, causal)
    if query.device.type == "cpu" and SDPBackend(how(scale=scale, enable_gqa=grouped)) in kernels:
        return run()
    with _SWITCHES, sdpa_kernel(kernels):
        try:
            return run()
        except (RuntimeError, UserWarning) as error:  # a warning where the user made them errors
            why = _why_no_kernel(run)
            if why is None:
                raise
            seen = None if mask is None else tuple(mask.shape)
            sizes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, mask {seen}"
            raise ConfigError(
                f"enable_flash_attention, and no fused kernel takes {sizes} in {query.dtype}",
                rule=f"The kernels for {query.device.type} say: {why}",
                remedy=f"Change what they name. Or {REMEDY_OFF.lower()}",
            ) from error


def _why_no_kernel(run: Callable[[], Tensor]) -> str | None:
    """What torch says of each kernel; None where that is not why it failed."""
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            run()
        except RuntimeError as error:
            said = "; ".join(str(w.message).partition(" (Triggered")[0] for w in reasons)
            return said or str(error) if "kernel" in str(error).lower() else None
    return None


# -- a bias of the scores that trains, on the CPU ----------------------------------------------------------------------


def _in_chunks(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    groups = query.shape[1] // key.shape[1]
    trains = bias.requires_grad and torch.is_grad_enabled()
    if not trains and bias.shape[0] == 1 and (mask is None or mask.shape[0] == 1):
        return _fused(query, key, value, _combined_bias(bias, mask, query), 0.0, scale, False)
    key, value = _repeated(key, groups), _repeated(value, groups)
    out: Tensor = _InChunks.apply(query, key, value, bias, mask, scale)
    return out


class _InChunks(Function):
    """Flash attention with a bias that gets a gradient.

    Forward is the flash kernel, for a few sequences of the batch at a time where they have different masks. Backward
    computes the scores of these again, and throws them away: N*Q*S of one sequence, of more where that is below
    SCORES_AT_ONCE, as in the windows of an image.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, bias, *(() if mask is None else (mask,)))
        ctx.scale = scale
        bias = bias.detach()  # the kernel refuses one that trains, whether gradients are recorded or not
        if bias.shape[0] == 1 and (mask is None or mask.shape[0] == 1):
            return _fused(query, key, value, _combined_bias(bias, mask, query), 0.0, scale, False)
        outs = []
        for chunk in _chunks(query, key):
            q, k, v, bias_b, mask_b = _part(chunk, query, key, value, bias, mask)
            assert q is not None and k is not None and v is not None and bias_b is not None
            outs.append(_fused(q, k, v, _combined_bias(bias_b, mask_b, q), 0.0, scale, False))
        return torch.cat(outs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, *rest = ctx.saved_tensors
        mask = rest[0] if rest else None
        wanted = [i for i in range(4) if ctx.needs_input_grad[i]]
        grads: list[Tensor | None] = [
            torch.zeros_like(t) if i in wanted else None for i, t in enumerate((query, key, value, bias))
        ]
        for chunk in _chunks(query, key):
            parts = _part(chunk, query, key, value, bias, mask)
            inputs = [t.detach().requires_grad_() for t in parts[:4] if t is not None]
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                out = _reference_attention(inputs[0], inputs[1], inputs[2], inputs[3], parts[4], ctx.scale)
            found = torch.autograd.grad(out, [inputs[i] for i in wanted], grad[chunk])
            for i, g in zip(wanted, found, strict=True):
                into = grads[i]
                assert into is not None
                (into[chunk] if into.shape[0] > 1 else into).add_(g)
        return (*grads, None, None)


def _chunks(query: Tensor, key: Tensor) -> list[slice]:
    """The batch in parts of whose scores so many are held at once."""
    batch, heads, length = query.shape[:3]
    size = max(1, SCORES_AT_ONCE // max(heads * length * key.shape[2], 1))
    return [slice(start, start + size) for start in range(0, batch, size)]


def _part(chunk: slice, *tensors: Tensor | None) -> list[Tensor | None]:
    """The part of each tensor for these sequences; those with a batch of 1 hold for all."""
    return [t if t is None or t.shape[0] == 1 else t[chunk] for t in tensors]


def _reference_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    scores = query @ key.transpose(2, 3) * scale
    wide = torch.float32 if scores.dtype in HALF else scores.dtype
    weights = (scores.to(wide) + _combined_bias(bias, mask, query)).softmax(-1)
    return weights.to(value.dtype) @ value
