"""ViT: pre-norm encoder of patches, learned positions."""

from __future__ import annotations

from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack


class ViTPolicy(RolePolicy):
    stack = LayerStack(
        "layers",
        [
            Attention("attention", AttentionProjections(q="q_proj", k="k_proj", v="v_proj", out="o_proj")),
            MLP("mlp", up="fc1", down="fc2"),
        ],
        final_norm="layernorm",
    )
    whole = ("embeddings", "pooler?")
