"""Policy of ViT, a pre-norm image encoder with learned positions."""

from __future__ import annotations

from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Q_K_V_O, Attention, LayerStack


class ViTPolicy(RolePolicy):
    stack = LayerStack(
        "layers", [Attention("attention", Q_K_V_O), MLP("mlp", up="fc1", down="fc2")], final_norm="layernorm"
    )
    keep_replicated = ("embeddings", "pooler?")
