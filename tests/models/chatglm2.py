"""Small model with the structure and module names of ChatGLM2, whose code is distributed with its weights.

It has RMS norms, rotary positions on half of each head, and hidden states of shape (sequence, batch, hidden). Query,
key and value are one fused linear with grouped KV heads, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.verify.small_models import register_small_model_family

# S sequence, B batch, H hidden, N heads, G groups, D head dim


@dataclass
class ChatGLMConfig:
    """Config fields of ChatGLM2 that the model reads."""

    num_layers: int = 2
    padded_vocab_size: int = 127
    hidden_size: int = 48
    ffn_hidden_size: int = 70
    kv_channels: int = 8
    num_attention_heads: int = 6
    multi_query_group_num: int = 2
    seq_length: int = 64
    layernorm_epsilon: float = 1e-5
    add_qkv_bias: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    num_labels: int = 3
    model_type: str = "chatglm"

    @property
    def vocab_size(self) -> int:
        return self.padded_vocab_size


@dataclass
class ChatGLMOutput:
    """Output of a head."""

    logits: Tensor
    loss: Tensor | None = None


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        normed = hidden_states * torch.rsqrt(variance + self.eps)
        return (self.weight * normed).to(dtype)


def _rotate(x_SBND: Tensor) -> Tensor:
    """Rotate pairs in the first half of each head by an angle proportional to the position."""
    length, width = x_SBND.shape[0], x_SBND.shape[-1] // 2
    speed = 1.0 / (10000 ** (torch.arange(0, width, 2, dtype=x_SBND.dtype, device=x_SBND.device) / width))
    angle = torch.outer(torch.arange(length, dtype=x_SBND.dtype, device=x_SBND.device), speed)[:, None, None]
    turned, kept = x_SBND[..., :width], x_SBND[..., width:]
    a, b = turned[..., ::2], turned[..., 1::2]
    pairs = torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    return torch.cat((pairs.flatten(-2), kept), -1)


class CoreAttention(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.hidden_size_per_partition = config.kv_channels * config.num_attention_heads

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any) -> Tensor:
        """Attention over (S, B, N, D) tensors; the mask is True for hidden positions."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        context = F.scaled_dot_product_attention(q, k, v, ~attention_mask).permute(2, 0, 1, 3)
        return context.reshape(*context.shape[:-2], self.hidden_size_per_partition)


class SelfAttention(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.hidden_size_per_attention_head = config.kv_channels
        self.num_attention_heads_per_partition = config.num_attention_heads
        self.num_multi_query_groups_per_partition = config.multi_query_group_num
        self.projection_size = config.kv_channels * config.num_attention_heads
        self.qkv_hidden_size = self.projection_size + 2 * config.kv_channels * config.multi_query_group_num
        self.query_key_value = nn.Linear(config.hidden_size, self.qkv_hidden_size, bias=config.add_qkv_bias)
        self.core_attention = CoreAttention(config)
        self.dense = nn.Linear(self.projection_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        size, heads = self.hidden_size_per_attention_head, self.num_attention_heads_per_partition
        groups = self.num_multi_query_groups_per_partition
        mixed = self.query_key_value(hidden_states)
        q, k, v = mixed.split([heads * size, groups * size, groups * size], dim=-1)
        q, k, v = (x.view(*x.shape[:-1], -1, size) for x in (q, k, v))
        q, k = _rotate(q), _rotate(k)
        k, v = (
            x.unsqueeze(-2).expand(-1, -1, -1, heads // groups, -1).reshape(*x.shape[:2], heads, size) for x in (k, v)
        )
        out: Tensor = self.dense(self.core_attention(q, k, v, attention_mask))
        return out


class MLP(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.dense_4h_to_h = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = torch.chunk(self.dense_h_to_4h(hidden_states), 2, dim=-1)
        out: Tensor = self.dense_4h_to_h(F.silu(gate) * up)
        return out


class GLMBlock(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.self_attention = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config)
        self.hidden_dropout = config.hidden_dropout

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        attended = self.self_attention(self.input_layernorm(hidden_states), attention_mask)
        hidden_states = hidden_states + F.dropout(attended, self.hidden_dropout, self.training)
        out = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + F.dropout(out, self.hidden_dropout, self.training)


class GLMTransformer(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GLMBlock(config) for _ in range(config.num_layers))
        self.final_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        out: Tensor = self.final_layernorm(hidden_states)
        return out


class Embedding(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.word_embeddings(input_ids)
        return embedded.transpose(0, 1).contiguous()


class ChatGLMModel(nn.Module):
    base_model_prefix = "transformer"

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.encoder = GLMTransformer(config)
        self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = input_ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None].bool()
        out: Tensor = self.encoder(self.embedding(input_ids), ~seen)
        return out


class ChatGLMForConditionalGeneration(nn.Module):
    base_model_prefix = "transformer"

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.config, self.transformer = config, ChatGLMModel(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        hidden_states = self.transformer(input_ids, attention_mask)
        logits = self.transformer.output_layer(hidden_states).transpose(0, 1).contiguous()
        if labels is None:
            return ChatGLMOutput(logits)
        shifted = logits[..., :-1, :].contiguous()
        loss = F.cross_entropy(shifted.view(-1, shifted.size(-1)), labels[..., 1:].reshape(-1), ignore_index=-100)
        return ChatGLMOutput(logits, loss)


class ChatGLMForSequenceClassification(nn.Module):
    base_model_prefix = "transformer"

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.config, self.transformer = config, ChatGLMModel(config)
        self.classifier_head = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits = self.classifier_head(self.transformer(input_ids, attention_mask)[-3])
        return ChatGLMOutput(logits, None if labels is None else F.cross_entropy(logits, labels))


def config(changes: Mapping[str, Any]) -> ChatGLMConfig:
    return ChatGLMConfig(**changes)


register_small_model_family(
    "chatglm",
    __name__,
    ("ChatGLMForConditionalGeneration", "ChatGLMForSequenceClassification"),
    num_layers_field="num_layers",
)
