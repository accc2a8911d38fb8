"""Fused attention for models with their own attention code, such as BLOOM, GPT-J and SAM.

``OVERRIDES`` lists classes that compute softmax attention in their own `forward`. An override computes the same with
``attention``, and leaves the other methods unchanged. It reads attributes that sharding changes, such as the number of
local heads, from the module.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.kernels.attention import (
    attention,
    check_no_unsupported_arguments,
)

# B batch, N local heads, Q and S lengths of queries and keys, D head dim, H hidden, L tokens of a window

Output = tuple[Tensor, Tensor | None]


def bloom_attention(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> Output:
    """Compute BLOOM attention with its ALiBi bias in fused kernels.

    The bias is an additional feature of each key (1 in each query), because CUDA's flash kernel supports no bias.
    """
    q_BNQD, k_BNSD, v_BNSD = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        k_BNSD, v_BNSD = layer_past.update(k_BNSD, v_BNSD, self.layer_idx)
    slopes_BNS1 = alibi.view(*k_BNSD.shape[:-1], 1).to(k_BNSD.dtype)
    q_BNQE = torch.cat([q_BNQD * self.inv_norm_factor, torch.ones_like(q_BNQD[..., :1])], -1)
    k_BNSE = torch.cat([k_BNSD, slopes_BNS1], -1)
    p = _get_dropout_rate(self, self.attention_dropout)
    out_BQND, _ = attention(self, q_BNQE, k_BNSE, v_BNSD, attention_mask, p, scaling=1.0)
    out: Tensor = F.dropout(self.dense(out_BQND.flatten(2)), p=self.hidden_dropout, training=self.training)
    return residual + out, None


def gpt_neo_attention(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> Output:
    """Compute GPT-Neo attention, which is unscaled and has a sliding window in local layers."""
    q_length, length = query.shape[2], key.shape[2]
    mask = attention_mask
    if self.attention_type == "local" or mask is not None:
        visible = self.bias[:, :, length - q_length : length, :length]
        if mask is None or mask.dtype == torch.bool:
            mask = visible if mask is None else visible & mask
        else:
            mask = torch.where(visible, mask, torch.finfo(mask.dtype).min)
    p = _get_dropout_rate(self, self.attn_dropout)
    out_BQND, _ = attention(self, query.to(value.dtype), key.to(value.dtype), value, mask, p, scaling=1.0)
    return out_BQND.transpose(1, 2), None


def gptj_attention(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> Output:
    p, scale = _get_dropout_rate(self, self.attn_dropout), 1.0 / float(self.scale_attn)
    query, key = query.to(value.dtype), key.to(value.dtype)
    out_BQND, _ = attention(self, query, key, value, attention_mask, p, scaling=scale)
    return out_BQND.transpose(1, 2), None


def sam_vision_attention(self: Any, hidden_states: Tensor, output_attentions: bool | None = None) -> Output:
    """Compute attention in SAM's vision encoder, with its relative position bias."""
    batch, height, width, _ = hidden_states.shape
    tokens, heads = height * width, self.num_attention_heads
    qkv_3BNSD = self.qkv(hidden_states).reshape(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = qkv_3BNSD.unbind(0)
    bias = None
    if self.use_rel_pos:
        flat, size = query.reshape(batch * heads, tokens, -1), (height, width)
        bias = self.get_decomposed_rel_pos(flat, self.rel_pos_h, self.rel_pos_w, size, size)
        bias = bias.reshape(batch, heads, tokens, tokens)
    # SamVisionSdpaAttention applies no dropout
    p = 0.0 if "Sdpa" in type(self).__name__ or not self.training else float(self.dropout)
    out_BQND, _ = attention(self, query, key, value, None, p, self.scale, is_causal=False, position_bias=bias)
    return self.proj(out_BQND.reshape(batch, height, width, -1)), None


def swinv2_attention(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
) -> tuple[Tensor]:
    """Compute Swin V2 attention from scaled cosine similarities and a learned position bias."""
    projections = (self.query, self.key, self.value)
    heads = (-1, self.num_attention_heads, self.attention_head_size)
    q, k, v = (project(hidden_states).unflatten(-1, heads[1:]).transpose(1, 2) for project in projections)
    table = self.continuous_position_bias_mlp(self.relative_coords_table).view(-1, self.num_attention_heads)
    mask = None if attention_mask is None else 2 * attention_mask  # SwinV2SelfAttention adds the mask twice
    return (_swinv2_cosine_attention(self, q, k, v, mask, table, self.dropout),)


def timm_swinv2_attention(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the Swin V2 attention of timm, which has one linear layer for q, k and v."""
    if self.q_bias is None:
        qkv = self.qkv(x)
    else:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
    q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
    out: Tensor = self.proj_drop(self.proj(_swinv2_cosine_attention(self, q, k, v, mask, table, self.attn_drop)))
    return out


def _swinv2_cosine_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias_table: Tensor, dropout_layer: Any
) -> Tensor:
    scale_N11 = torch.clamp(module.logit_scale, max=math.log(1.0 / 0.01)).exp()
    q, k = F.normalize(q, dim=-1) * scale_N11, F.normalize(k, dim=-1)
    area = module.window_size[0] * module.window_size[1]
    bias_LLN = bias_table[module.relative_position_index.view(-1)].view(area, area, -1)
    bias_1NLL = 16 * torch.sigmoid(bias_LLN.permute(2, 0, 1).contiguous())[None]
    if mask is not None:
        mask = mask[:, None].repeat(len(q) // len(mask), 1, 1, 1)
    p = _get_dropout_rate(module, dropout_layer)
    out, _ = attention(module, q, k, v, mask, p, scaling=1.0, is_causal=False, position_bias=bias_1NLL)
    return out.flatten(2)


def _get_dropout_rate(module: nn.Module, dropout_layer: nn.Dropout) -> float:
    return float(dropout_layer.p) if module.training else 0.0


# --- the overrides


@dataclass(frozen=True)
class AttentionOverride:
    """Fused replacement for one method of an attention class.

    Args:
        method: the method that ``function`` replaces.
        dropout: the attribute that contains the dropout rate of the attention weights.
        bias: a pattern for the names of the parameters of the position bias, if there is one.
    """

    method: str
    function: Callable[..., Any]
    dropout: str
    bias: str = ""


def chatglm_attention(
    self: Any, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None
) -> Tensor:
    """Compute ChatGLM2 attention for inputs of shape (length, batch, heads, head dim).

    The mask is True for masked keys.
    """
    q_BNQD, k_BNSD, v_BNSD = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
    mask = None if attention_mask is None else ~attention_mask
    out_BQND, _ = attention(self, q_BNQD, k_BNSD, v_BNSD, mask)
    return out_BQND.transpose(0, 1).flatten(2)


OVERRIDES = {
    "CoreAttention": AttentionOverride("forward", chatglm_attention, ""),
    "BloomAttention": AttentionOverride("forward", bloom_attention, "attention_dropout"),
    "GPTNeoSelfAttention": AttentionOverride("_attn", gpt_neo_attention, "attn_dropout"),
    "GPTJAttention": AttentionOverride("_attn", gptj_attention, "attn_dropout"),
    "SamVisionAttention": AttentionOverride("forward", sam_vision_attention, "dropout", "rel_pos"),
    "SamVisionSdpaAttention": AttentionOverride("forward", sam_vision_attention, "", "rel_pos"),
    "Swinv2SelfAttention": AttentionOverride("forward", swinv2_attention, "dropout", "continuous_position_bias_mlp"),
    "timm.models.swin_transformer_v2.WindowAttention": AttentionOverride(
        "forward", timm_swinv2_attention, "attn_drop", "cpb_mlp"
    ),
}
"""Class name -> override. The key includes the module if other classes have the same name."""
SDPA = ("FalconAttention",)
"""Classes that call torch's scaled_dot_product_attention if their config selects "sdpa"."""


def find_attention_override(cls: type[nn.Module]) -> AttentionOverride | None:
    """Find the fused replacement for a method of an attention class, or None if it needs none.

    Classes that use transformers' attention interface need none, such as GPT-J since transformers 5.24.
    """
    override = OVERRIDES.get(cls.__name__) or OVERRIDES.get(f"{cls.__module__}.{cls.__name__}")
    if override is None:
        return None
    source = get_class_source(cls)  # type: ignore[arg-type]  # mypy reads __hash__ as the instances'
    return None if calls_attention_interface(source) else override


@functools.cache
def get_class_source(cls: type) -> str:
    """Return the source code of a class's methods, including base classes, or "" if there is no source."""
    parts = []
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        # Not the source of the class: inspect would parse the file, which is not thread-safe.
        for method in filter(inspect.isfunction, vars(base).values()):
            try:
                parts.append(inspect.getsource(method))
            except (OSError, TypeError):
                continue
    return "\n".join(parts)


def calls_attention_interface(source_code: str) -> bool:
    return "get_interface(" in source_code


def iter_attention_overrides(model: nn.Module) -> Iterator[tuple[str, Any, AttentionOverride]]:
    for path, module in model.named_modules():
        if (override := find_attention_override(type(module))) is not None:
            yield path, module, override


def check_attention_overrides(model: nn.Module) -> None:
    """Raise ConfigError if a fused replacement does not match the model's attention method."""
    for path, module, override in iter_attention_overrides(model):
        original: Any = getattr(type(module), override.method, None)
        found, expected = (
            [] if f is None else list(inspect.signature(f).parameters) for f in (original, override.function)
        )
        if found != expected:
            raise ConfigError(
                f"enable_flash_attention=True does not support {path} in this version of transformers: "
                f"{type(module).__name__}.{override.method} has the arguments {found[1:]}, not {expected[1:]}.",
                remedy="Install a supported version of transformers, or set enable_flash_attention=False.",
            )
        if getattr(module, "slow_but_exact", False) and module.pretraining_tp > 1:
            raise ConfigError(
                "enable_flash_attention=True does not support slow_but_exact=True with "
                f"pretraining_tp={module.pretraining_tp}, as in {path}.",
                remedy="Set slow_but_exact=False in the config, or set enable_flash_attention=False.",
            )
    for path, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if type(module).__name__ in SDPA and config._attn_implementation == "eager" and config.alibi:
            raise ConfigError(
                f"enable_flash_attention=True does not support alibi=True with the eager attention of {path}.",
                remedy='Load the model with attn_implementation="sdpa", or set enable_flash_attention=False.',
            )


def apply_attention_overrides(model: nn.Module) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Replace methods of a model's attention modules by fused versions, and yield each replaced method."""
    for path, module, override in list(iter_attention_overrides(model)):
        if override.method in vars(module):
            continue  # installed before
        setattr(module, override.method, override.function.__get__(module))
        register_forward_hooks(module, HookOrder.CHECKS, _check_no_output_attentions_pre_hook, with_kwargs=True)
        yield f"{path}.{override.method}", override.method, override.function


def _check_no_output_attentions_pre_hook(module: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_no_unsupported_arguments(type(module).__name__, kwargs, ["output_attentions"])
