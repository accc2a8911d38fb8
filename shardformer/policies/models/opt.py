"""Sharding policy for OPT, a pre-norm or post-norm decoder with learned positions."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Q_K_V_OUT, Attention, LayerStack


class OPTPolicy(RolePolicy):
    attention = Attention("self_attn", Q_K_V_OUT, local_attrs={"num_heads": "heads"})
    stack = LayerStack(
        "decoder.layers",
        [attention, MLP("fc1", up="", down=".fc2")],
        final_norm="decoder.final_layer_norm?",
        stages=PipelineHints(with_last_layer=["decoder.project_out?"]),
    )
    embeddings = "decoder.embed_tokens"
    head = "lm_head"
    keep_replicated = ("decoder.embed_positions", "decoder.project_in?", "decoder.project_out?")
