"""Sharding policy for ChatGLM2 and ChatGLM3, decoders with rotary positions and a fused gate and up projection."""

from __future__ import annotations

from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack


class ChatGLMPolicy(RolePolicy):
    stack = LayerStack(
        "encoder.layers",
        [
            Attention(
                "self_attention",
                AttentionProjections(qkv="query_key_value", out="dense"),
                local_attrs={
                    "num_attention_heads_per_partition": "heads",
                    "num_multi_query_groups_per_partition": "kv_heads",
                    "core_attention.hidden_size_per_partition": "width",
                    "core_attention.num_attention_heads_per_partition?": "heads",
                },
            ),
            MLP("mlp", up="dense_h_to_4h", down="dense_4h_to_h", fused=2),
        ],
        final_norm="encoder.final_layernorm?",
    )
    embeddings = "embedding.word_embeddings"
    head = "transformer.output_layer"
    keep_replicated = ("prefix_encoder?",)
    num_kv_heads = ".num_multi_query_groups_per_partition"
