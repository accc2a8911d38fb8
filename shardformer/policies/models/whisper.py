"""Sharding policy for Whisper, which has an audio encoder and a text decoder with cross-attention."""

from __future__ import annotations

from typing import Any

from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Q_K_V_OUT, Attention, AttentionInputs, LayerStack

CONTEXT = AttentionInputs(cross_attention=True)
FEED_FORWARD = MLP("fc1", up="", down=".fc2")


def _make_attention_role(at: str, **kwargs: Any) -> Attention:
    return Attention(at, Q_K_V_OUT, local_attrs={"num_heads": "heads"}, **kwargs)


class WhisperPolicy(RolePolicy):
    stack = (
        LayerStack(
            "encoder.layers",
            [_make_attention_role("self_attn"), FEED_FORWARD],
            final_norm="encoder.layer_norm",
            optional=True,
        ),
        LayerStack(
            "decoder.layers",
            [_make_attention_role("self_attn"), _make_attention_role("encoder_attn", inputs=CONTEXT), FEED_FORWARD],
            final_norm="decoder.layer_norm",
            cross_states=("decoder", "encoder_hidden_states"),
            optional=True,
        ),
    )
    embeddings = "decoder.embed_tokens?"
    head = ("proj_out", "lm_head")
    keep_replicated = ("encoder.conv1?", "encoder.conv2?", "encoder.embed_positions?", "decoder.embed_positions?")
    num_heads = num_kv_heads = ".num_heads"

    def reads_layer_outputs(self) -> bool:
        return bool(getattr(self.model.config, "use_weighted_layer_sum", False))
