"""timm's BEiT and EVA: biases of q and v alone beside a fused weight, whose module is then not called.

The width of the heads is taken from the input. EVA-02 has rotary positions and, from base on, a norm inside the MLP.
"""

from shardformer.policies.models.timm import TIMM_MLP, TimmPolicy
from shardformer.policies.role_policy import Attention, Inputs, Projections, Stack, StageNeeds

BIASES = {"q_bias?": "width", "k_bias?": "width", "v_bias?": "width"}
OUTSIDE = ("patch_embed", "pos_embed?", "cls_token?", "reg_token?", "attn_pool?", "head?")


class TimmBeitPolicy(TimmPolicy):
    attention = Attention(
        "attn",
        Projections(qkv="qkv", out="proj"),
        counts={"num_heads": "heads", **BIASES, "relative_position_bias_table?": ("heads", -1)},
        inputs=Inputs(give_width=True),
    )
    stack = Stack("blocks", [attention, TIMM_MLP], final_norm="norm", stages=StageNeeds(everywhere=["rel_pos_bias?"]))
    per_head = {"rel_pos_bias.relative_position_bias_table": ("heads", -1)}
    whole = OUTSIDE


class TimmEvaPolicy(TimmPolicy):
    attention = Attention(
        "attn",
        Projections(qkv="qkv?", q="q_proj?", k="k_proj?", v="v_proj?", out="proj"),
        counts={
            "num_heads": "heads",
            "num_kv_heads?": "kv_heads",
            "num_kv_groups?": "groups",
            "attn_dim?": "width",
            **BIASES,
            "norm": "heads",
        },
        inputs=Inputs(give_width=True),
        num_kv_heads=".num_kv_heads",
    )
    stack = Stack("blocks", [attention, TIMM_MLP], final_norm="norm", stages=StageNeeds(everywhere=["rope?"]))
    per_head = {"rope.freqs": ("heads", 2)}
    whole = OUTSIDE
