"""Sharding policy for Falcon, a decoder whose fused qkv projection is grouped by KV head."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack


class FalconPolicy(RolePolicy):
    stack = LayerStack(
        "h",
        [
            Attention(
                "self_attention",
                AttentionProjections(qkv="query_key_value", interleaved=True, out="dense"),
                local_attrs={
                    "num_heads": "heads",
                    "num_kv_heads": "kv_heads",
                    "alibi": ("heads", 1),
                    "attention_mask": ("heads", 1),
                },
            ),
            MLP("mlp", up="dense_h_to_4h", down="dense_4h_to_h", shared_exit="self_attention.dense"),
        ],
        final_norm="ln_f",
        stages=PipelineHints(num_outputs=1),
    )
    embeddings = "word_embeddings"
    head = "lm_head"
    num_kv_heads = ".num_kv_heads"

    def sums_block_outputs(self) -> bool:
        return bool(self.model.config.new_decoder_architecture or self.model.config.parallel_attn)
