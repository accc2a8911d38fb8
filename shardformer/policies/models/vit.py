"""ViT: pre-norm encoder of patches, learned positions."""

from shardformer.policies.role_policy import MLP, Attention, Projections, RolePolicy, Stack


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
