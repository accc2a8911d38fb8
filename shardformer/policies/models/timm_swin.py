"""timm's Swin and Swin V2: windows in stages, heads that double by stage, a bias a head for each place in a window."""

from shardformer.policies.models.swin import AGAINST_SEQUENCE
from shardformer.policies.models.timm import TIMM_MLP, TimmPolicy
from shardformer.policies.models.timm_beit import BIASES
from shardformer.policies.role_policy import Attention, Inputs, Projections, Stack


class TimmSwinPolicy(TimmPolicy):
    attention = Attention(
        "attn",
        Projections(qkv="qkv", out="proj"),
        counts={"num_heads": "heads", "relative_position_bias_table": ("heads", -1)},
    )
    stack = Stack("layers.*.blocks", [attention, TIMM_MLP])
    whole = ("patch_embed", "layers.*.downsample", "head?")
    against_sequence = AGAINST_SEQUENCE


class TimmSwinV2Policy(TimmPolicy):
    attention = Attention(
        "attn",
        Projections(qkv="qkv", out="proj"),
        counts={
            "num_heads": "heads",
            **BIASES,
            "logit_scale": ("heads", 0),
            "cpb_mlp.0.weight": "inside",
            "cpb_mlp.2.weight": ("heads", 0),
        },
        inputs=Inputs(give_width=True),
    )
    stack = Stack("layers.*.blocks", [attention, TIMM_MLP])
    whole = ("patch_embed", "layers.*.downsample", "head?")
    against_sequence = AGAINST_SEQUENCE
