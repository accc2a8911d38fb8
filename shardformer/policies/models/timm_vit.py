"""timm's ViT and DeiT: pre-norm encoder, q, k and v behind each other, perhaps with norms and scales between."""

from shardformer.policies.models.timm import TIMM_MLP, TimmPolicy
from shardformer.policies.role_policy import Attention, Inputs, Projections, Stack


class TimmViTPolicy(TimmPolicy):
    stack = Stack(
        "blocks",
        [
            Attention(
                "attn",
                Projections(qkv="qkv", out="proj"),
                counts={"num_heads": "heads", "attn_dim?": "width", "norm": "heads"},
                inputs=Inputs(give_width=True),  # where there is no attn_dim
            ),
            TIMM_MLP,
        ],
        final_norm="norm",
    )
    whole = (
        "patch_embed",
        "pos_embed?",
        "cls_token?",
        "reg_token?",
        "dist_token?",
        "attn_pool?",
        "head?",
        "head_dist?",
    )
