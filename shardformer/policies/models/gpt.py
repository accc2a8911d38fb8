"""Sharding policies for GPT-2, GPT-Neo and GPT-J."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Q_K_V_OUT, Attention, AttentionInputs, AttentionProjections, LayerStack


class GPT2Policy(RolePolicy):
    """Policy for GPT-2, a decoder with learned positions, a fused qkv Conv1D and optional cross-attention."""

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


class GPTNeoPolicy(RolePolicy):
    """Policy for GPT-Neo, a decoder with learned positions and alternating global and local attention."""

    attention = Attention("attn.attention", Q_K_V_OUT, local_attrs={"num_heads": "heads"})
    stack = LayerStack(
        "h", [attention, MLP("mlp", up="c_fc", down="c_proj")], final_norm="ln_f", stages=PipelineHints(num_outputs=1)
    )
    embeddings = "wte"
    head = "lm_head"
    keep_replicated = ("wpe",)


class GPTJPolicy(RolePolicy):
    """Policy for GPT-J, a decoder in which attention and MLP read the output of the same norm."""

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
