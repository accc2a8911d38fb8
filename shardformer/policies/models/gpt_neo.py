"""GPT-Neo: pre-norm decoder, learned positions, every other attention local."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack


class GPTNeoPolicy(RolePolicy):
    stack = LayerStack(
        "h",
        [
            Attention(
                "attn.attention",
                AttentionProjections(q="q_proj", k="k_proj", v="v_proj", out="out_proj"),
                counts={"num_heads": "heads"},
            ),
            MLP("mlp", up="c_fc", down="c_proj"),
        ],
        final_norm="ln_f",
        stages=PipelineHints(returns=1),
    )
    embeddings = "wte"
    head = "lm_head"
    whole = ("wpe",)
