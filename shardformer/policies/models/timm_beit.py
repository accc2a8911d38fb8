"""timm's BEiT and EVA: biases of q and v alone beside a fused weight, whose module is then not called.

The width of the heads is taken from the input. EVA-02 has rotary positions and, from base on, a norm inside the MLP.
"""

from shardformer.policies.models.timm import TIMM_MLP, TimmPolicy
from shardformer.policies.role_policy import Attention, Stack

BIASES = {"q_bias?": "width", "k_bias?": "width", "v_bias?": "width"}
OUTSIDE = ("patch_embed", "pos_embed?", "cls_token?", "reg_token?", "attn_pool?", "head?")


class TimmBeitPolicy(TimmPolicy):
    attention = Attention(
        "attn",
        qkv="qkv",
        out="proj",
        attributes={"num_heads": "heads"},
        parameters={**BIASES, "relative_position_bias_table?": ("heads", -1)},
        width_of_input=True,
    )
    stack = Stack("blocks", [attention, TIMM_MLP], final_norm="norm", everywhere=["rel_pos_bias?"])
    per_head = {"rel_pos_bias.relative_position_bias_table?": ("heads", -1)}
    whole = OUTSIDE


class TimmEvaPolicy(TimmPolicy):
    attention = Attention(
        "attn",
        qkv="qkv?",
        q="q_proj?",
        k="k_proj?",
        v="v_proj?",
        out="proj",
        attributes={
            "num_heads": "heads",
            "num_kv_heads?": "kv_heads",
            "num_kv_groups?": "groups",
            "attn_dim?": "width",
        },
        parameters=BIASES,
        width_of_input=True,
        norms={"norm": "heads"},
        num_kv_heads=".num_kv_heads",
    )
    stack = Stack("blocks", [attention, TIMM_MLP], final_norm="norm", everywhere=["rope?"])
    per_head = {"rope.freqs?": ("heads", 2)}
    whole = OUTSIDE
