"""Sharding policy for T5, an encoder-decoder whose first layers compute relative position biases."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, LayerStack

TABLE = ("layer.0.SelfAttention.relative_attention_bias", "layer.0.SelfAttention.has_relative_attention_bias")
STAGES = PipelineHints(num_outputs=3, shared_from_first=TABLE)
"""Only the first layer computes the biases. In a pipeline the first layer of each stage computes them."""


def _make_attention_role(at: str, inputs: AttentionInputs = AttentionInputs()) -> Attention:
    counts = {"n_heads": "heads", "relative_attention_bias?": "heads"}
    return Attention(at, AttentionProjections(q="q", k="k", v="v", out="o"), counts, inputs)


class T5Policy(RolePolicy):
    stack = (
        LayerStack(
            "encoder.block",
            [
                _make_attention_role("layer.0.SelfAttention"),
                MLP("layer.1.DenseReluDense", up=["wi?", "wi_0?", "wi_1?"], down="wo"),
            ],
            final_norm="encoder.final_layer_norm",
            stages=STAGES,
        ),
        LayerStack(
            "decoder.block",
            [
                _make_attention_role("layer.0.SelfAttention"),
                _make_attention_role("layer.1.EncDecAttention", AttentionInputs(cross_attention=True)),
                MLP("layer.2.DenseReluDense", up=["wi?", "wi_0?", "wi_1?"], down="wo"),
            ],
            final_norm="decoder.final_layer_norm",
            cross_states=("decoder", "encoder_hidden_states"),
            stages=STAGES,
            optional=True,
        ),
    )
    embeddings = ("shared?", "encoder.embed_tokens", "decoder.embed_tokens?")
    head = "lm_head"
