"""Policy of GPT-2, a pre-norm decoder with learned positions, a fused qkv Conv1D, and optional cross-attention."""

from __future__ import annotations

from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, LayerStack


class GPT2Policy(RolePolicy):
    stack = LayerStack(
        "h",
        [
            Attention("attn", AttentionProjections(qkv="c_attn", out="c_proj"), local_attrs={"split_size": "width"}),
            Attention(
                "crossattention",
                AttentionProjections(q="q_attn", kv="c_attn", out="c_proj"),
                local_attrs={"split_size": "width"},
                inputs=AttentionInputs(cross_attention=True),
                optional=True,
            ),
            MLP("mlp", up="c_fc", down="c_proj"),
        ],
        final_norm="ln_f",
        cross_states=("", "encoder_hidden_states"),
    )
    embeddings = "wte"
    head = "lm_head"
    keep_replicated = ("wpe",)
