"""Attention that transformers does not dispatch, on the fused kernels: a function that takes a method's place each.

A class is named here that computes softmax attention in its own forward. The function computes what its method does
and calls ``attention``; all around it stays the model's own. What the class says for sharding (its number of heads) is
read where the class reads it.
"""

# B batch, N heads of this rank, Q and S lengths of queries and keys, D head dim, H hidden, L tokens of a window

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
from shardformer.layers.attention.kernels import REMEDY_OFF, attention, check_arguments

Output = tuple[Tensor, Tensor | None]


def bloom(
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
    """ALiBi adds to a score what depends on the head and the key: one more feature of the key, times one.

    So it needs no bias, which the flash kernel of CUDA would not take.
    """
    q_BNQD, k_BNSD, v_BNSD = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        k_BNSD, v_BNSD = layer_past.update(k_BNSD, v_BNSD, self.layer_idx)
    slopes_BNS1 = alibi.view(*k_BNSD.shape[:-1], 1).to(k_BNSD.dtype)
    q_BNQE = torch.cat([q_BNQD * self.inv_norm_factor, torch.ones_like(q_BNQD[..., :1])], -1)
    k_BNSE = torch.cat([k_BNSD, slopes_BNS1], -1)
    p = _rate(self, self.attention_dropout)
    out_BQND, _ = attention(self, q_BNQE, k_BNSE, v_BNSD, attention_mask, p, scaling=1.0)
    out: Tensor = F.dropout(self.dense(out_BQND.flatten(2)), p=self.hidden_dropout, training=self.training)
    return residual + out, None


def gpt_neo(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Output:
    """Scores without a scale; a local layer sees a window."""
    q_length, length = query.shape[2], key.shape[2]
    mask = attention_mask
    if self.attention_type == "local" or mask is not None:
        seen = self.bias[:, :, length - q_length : length, :length]
        if mask is None or mask.dtype == torch.bool:
            mask = seen if mask is None else seen & mask
        else:
            mask = torch.where(seen, mask, torch.finfo(mask.dtype).min)
    p = _rate(self, self.attn_dropout)
    out_BQND, _ = attention(self, query.to(value.dtype), key.to(value.dtype), value, mask, p, scaling=1.0)
    return out_BQND.transpose(1, 2), None


def gptj(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Output:
    p, scale = _rate(self, self.attn_dropout), 1.0 / float(self.scale_attn)
    query, key = query.to(value.dtype), key.to(value.dtype)
    out_BQND, _ = attention(self, query, key, value, attention_mask, p, scaling=scale)
    return out_BQND.transpose(1, 2), None


def sam_vision(self: Any, hidden_states: Tensor, output_attentions: bool | None = None) -> Output:
    """Positions along height and width are added to the scores, each a product with the query."""
    batch, height, width, _ = hidden_states.shape
    tokens, heads = height * width, self.num_attention_heads
    qkv_3BNSD = self.qkv(hidden_states).reshape(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = qkv_3BNSD.unbind(0)
    bias = None
    if self.use_rel_pos:
        flat, size = query.reshape(batch * heads, tokens, -1), (height, width)
        bias = self.get_decomposed_rel_pos(flat, self.rel_pos_h, self.rel_pos_w, size, size)
        bias = bias.reshape(batch, heads, tokens, tokens)
    # the class on torch's own attention leaves the dropout out
    p = 0.0 if "Sdpa" in type(self).__name__ or not self.training else float(self.dropout)
    out_BQND, _ = attention(self, query, key, value, None, p, self.scale, is_causal=False, position_bias=bias)
    return self.proj(out_BQND.reshape(batch, height, width, -1)), None


def swinv2(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
) -> tuple[Tensor]:
    """The cosine of query and key, times a scale of each head; relative positions come from an MLP."""
    projections = (self.query, self.key, self.value)
    heads = (-1, self.num_attention_heads, self.attention_head_size)
    q, k, v = (project(hidden_states).unflatten(-1, heads[1:]).transpose(1, 2) for project in projections)
    table = self.continuous_position_bias_mlp(self.relative_coords_table).view(-1, self.num_attention_heads)
    mask = None if attention_mask is None else 2 * attention_mask  # the class adds it twice
    return (_cosine_attention(self, q, k, v, mask, table, self.dropout),)


def timm_swinv2(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """timm's, with one linear for q, k and v, whose biases stand beside it."""
    if self.q_bias is None:
        qkv = self.qkv(x)
    else:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
    q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
    out: Tensor = self.proj_drop(self.proj(_cosine_attention(self, q, k, v, mask, table, self.attn_drop)))
    return out


def _cosine_attention(
    self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor, dropout: Any
) -> Tensor:
    """q, k, v (B, N, L, D) of the windows of all images, a mask (windows of one, L, L) -> (B, L, N * D)."""
    scale_N11 = torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
    q, k = F.normalize(q, dim=-1) * scale_N11, F.normalize(k, dim=-1)
    area = self.window_size[0] * self.window_size[1]
    bias_LLN = table[self.relative_position_index.view(-1)].view(area, area, -1)
    bias_1NLL = 16 * torch.sigmoid(bias_LLN.permute(2, 0, 1).contiguous())[None]
    if mask is not None:
        mask = mask[:, None].repeat(len(q) // len(mask), 1, 1, 1)
    p = _rate(self, dropout)
    out, _ = attention(self, q, k, v, mask, p, scaling=1.0, is_causal=False, position_bias=bias_1NLL)
    return out.flatten(2)


def _rate(module: nn.Module, dropout: Any) -> float:
    return float(dropout.p) if module.training else 0.0


# -- which ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnAttention:
    """How a class of attention comes to the kernels.

    Args:
        method: what is replaced, by ``function``.
        dropout: the attribute that holds the rate of the dropout of its weights.
        bias: the parameters of it whose values are added to the scores, if any.
    """

    method: str
    function: Callable[..., Any]
    dropout: str
    bias: str = ""


def chatglm(self: Any, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any) -> Tensor:
    """ChatGLM2's core, of states that lie (length, batch, heads, head dim); its mask is True where nothing is seen."""
    q_BNQD, k_BNSD, v_BNSD = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
    mask = None if attention_mask is None else ~attention_mask
    out_BQND, _ = attention(self, q_BNQD, k_BNSD, v_BNSD, mask)
    return out_BQND.transpose(0, 1).flatten(2)


OWN = {
    "CoreAttention": OwnAttention("forward", chatglm, ""),
    "BloomAttention": OwnAttention("forward", bloom, "attention_dropout"),
    "GPTNeoSelfAttention": OwnAttention("_attn", gpt_neo, "attn_dropout"),
    "GPTJAttention": OwnAttention("_attn", gptj, "attn_dropout"),
    "SamVisionAttention": OwnAttention("forward", sam_vision, "dropout", "rel_pos"),
    "SamVisionSdpaAttention": OwnAttention("forward", sam_vision, "", "rel_pos"),
    "Swinv2SelfAttention": OwnAttention("forward", swinv2, "dropout", "continuous_position_bias_mlp"),
    "timm.models.swin_transformer_v2.WindowAttention": OwnAttention("forward", timm_swinv2, "attn_drop", "cpb_mlp"),
}
"""By the name of the class, and of its module where others have that name too."""
SDPA = ("FalconAttention",)
"""Classes that call torch's scaled_dot_product_attention themselves where their config says "sdpa"."""


def own_of(cls: type[nn.Module]) -> OwnAttention | None:
    """None also for a class that dispatches its attention in this version of transformers (GPT-J from 5.24 on)."""
    own = OWN.get(cls.__name__) or OWN.get(f"{cls.__module__}.{cls.__name__}")
    if own is None:
        return None
    source = source_of(cls)  # type: ignore[arg-type]  # mypy reads __hash__ as the instances'
    return None if is_on_interface(source) else own


@functools.cache
def source_of(cls: Any) -> str:
    """The code of the methods of a class and of those it inherits from; empty where there is none to read."""
    parts = []
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        # not of the class at once: Python parses a file for that, which two threads cannot do at the same time
        for method in filter(inspect.isfunction, vars(base).values()):
            try:
                parts.append(inspect.getsource(method))
            except (OSError, TypeError):
                continue
    return "\n".join(parts)


def is_on_interface(source: str) -> bool:
    return "get_interface(" in source


def own_modules(model: nn.Module) -> Iterator[tuple[str, Any, OwnAttention]]:
    for path, module in model.named_modules():
        if (own := own_of(type(module))) is not None:
            yield path, module, own


def check_own(model: nn.Module) -> None:
    """Raises ConfigError for a module that would compute something else than its function here."""
    for path, module, own in own_modules(model):
        theirs: Any = getattr(type(module), own.method, None)
        takes, ours = ([] if f is None else list(inspect.signature(f).parameters) for f in (theirs, own.function))
        if takes != ours:
            raise ConfigError(
                f"enable_flash_attention for {path} ({type(module).__name__}), whose {own.method} takes {takes[1:]}",
                rule=f"What takes its place takes {ours[1:]}: this version of transformers computes something else",
                remedy=f"{REMEDY_OFF} for this model, or use the transformers that pyproject.toml names",
            )
        if getattr(module, "slow_but_exact", False) and module.pretraining_tp > 1:
            raise ConfigError(
                f"enable_flash_attention for {path}, slow_but_exact=True and pretraining_tp={module.pretraining_tp}",
                rule="These compute the output projection in slices, to reproduce the rounding of a training run",
                remedy=f"Set slow_but_exact=False in the config. Or {REMEDY_OFF.lower()}",
            )
    for path, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if type(module).__name__ in SDPA and config._attn_implementation == "eager" and config.alibi:
            raise ConfigError(
                f"enable_flash_attention for {path} ({type(module).__name__}) with eager attention and alibi=True",
                rule="The eager attention of this class adds ALiBi twice, its fused one once",
                remedy=f'Load the model with attn_implementation="sdpa". Or {REMEDY_OFF.lower()}',
            )


def replace_own(model: nn.Module) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Puts the functions in place. Gives what was replaced: (path of the method, its name, the function)."""
    for path, module, own in list(own_modules(model)):
        if own.method in vars(module):
            continue  # in place already
        setattr(module, own.method, own.function.__get__(module))
        refuse = lambda module, _, kwargs: check_arguments(type(module).__name__, kwargs, ["output_attentions"])  # noqa: E731
        module.register_forward_pre_hook(refuse, with_kwargs=True)
        yield f"{path}.{own.method}", own.method, own.function
