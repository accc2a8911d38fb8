"""LLaMA, Mistral, Qwen 2 and 3: pre-norm decoder, rotary positions, grouped KV heads, gated MLP."""

from __future__ import annotations

from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack


class LlamaPolicy(RolePolicy):
    stack = LayerStack(
        "layers",
        [
            Attention(
                "self_attn",
                AttentionProjections(q="q_proj", k="k_proj", v="v_proj", out="o_proj"),
                counts={"num_key_value_groups": "groups"},
            ),
            MLP("mlp", up=["gate_proj", "up_proj"], down="down_proj"),
        ],
        final_norm="norm",
    )
    embeddings = "embed_tokens"
    head = "lm_head"
