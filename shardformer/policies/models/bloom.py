"""Sharding policy for BLOOM, a decoder with ALiBi and a fused qkv projection that is interleaved by head."""

from __future__ import annotations

from shardformer.errors import ConfigError
from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack


class BloomPolicy(RolePolicy):
    attention = Attention(
        "self_attention",
        AttentionProjections(qkv="query_key_value", interleaved=True, out="dense"),
        local_attrs={"num_heads": "heads", "alibi": ("heads", 0)},
    )
    stack = LayerStack(
        "h",
        [attention, MLP("mlp", up="dense_h_to_4h", down="dense_4h_to_h")],
        final_norm="ln_f",
        stages=PipelineHints(num_outputs=1),
    )
    embeddings = "word_embeddings"
    head = "lm_head"

    def config_sanity_check(self) -> None:
        super().config_sanity_check()
        config = self.model.config
        if config.slow_but_exact and config.pretraining_tp > 1:
            raise ConfigError(
                f"BLOOM cannot be sharded with slow_but_exact=True and pretraining_tp={config.pretraining_tp}.",
                remedy="Build the model with slow_but_exact=False, which differs only by rounding.",
            )
