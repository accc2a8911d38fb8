"""Policy of GPT-Neo, a pre-norm decoder with learned positions and alternating global and local attention."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Q_K_V_OUT, Attention, LayerStack


class GPTNeoPolicy(RolePolicy):
    attention = Attention("attn.attention", Q_K_V_OUT, local_attrs={"num_heads": "heads"})
    stack = LayerStack(
        "h", [attention, MLP("mlp", up="c_fc", down="c_proj")], final_norm="ln_f", stages=PipelineHints(num_outputs=1)
    )
    embeddings = "wte"
    head = "lm_head"
    keep_replicated = ("wpe",)
