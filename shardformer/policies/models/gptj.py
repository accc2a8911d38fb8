"""Policy of GPT-J, a decoder with rotary positions whose attention and MLP read the output of the same norm."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Q_K_V_OUT, Attention, LayerStack


class GPTJPolicy(RolePolicy):
    stack = LayerStack(
        "h",
        [
            Attention("attn", Q_K_V_OUT, local_attrs={"num_attention_heads": "heads"}),
            MLP("mlp", up="fc_in", down="fc_out", shared_exit="attn.out_proj"),
        ],
        final_norm="ln_f",
        stages=PipelineHints(num_outputs=None),  # from transformers 5.24 on, only the hidden states
    )
    embeddings = "wte"
    head = "lm_head"

    def sums_block_outputs(self) -> bool:
        return bool(self.model.config.resid_pdrop == 0)  # dropout is applied to each output before the sum
