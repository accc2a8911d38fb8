"""Sharding policy for LLaMA, Mistral, Qwen2 and Qwen3, decoders with rotary positions and a gated MLP."""

from __future__ import annotations

from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Q_K_V_O, Attention, LayerStack


class LlamaPolicy(RolePolicy):
    attention = Attention("self_attn", Q_K_V_O, local_attrs={"num_key_value_groups": "groups"})
    stack = LayerStack(
        "layers", [attention, MLP("mlp", up=["gate_proj", "up_proj"], down="down_proj")], final_norm="norm"
    )
    embeddings = "embed_tokens"
    head = "lm_head"
