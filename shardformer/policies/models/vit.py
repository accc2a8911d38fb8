"""ViT: pre-norm encoder of patches, learned positions."""

from __future__ import annotations

from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, Projections, Stack


class ViTPolicy(RolePolicy):
    stack = Stack(
        "layers",
        [
            Attention("attention", Projections(q="q_proj", k="k_proj", v="v_proj", out="o_proj")),
            MLP("mlp", up="fc1", down="fc2"),
        ],
        final_norm="layernorm",
    )
    whole = ("embeddings", "pooler?")
