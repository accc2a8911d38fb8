"""T5: encoder and decoder, pre-norm, a table of relative position biases in the first layer of each, no biases."""

from typing import Any

from shardformer.policies.role_policy import MLP, Attention, RolePolicy, Stack

TABLE = ("layer.0.SelfAttention.relative_attention_bias", "layer.0.SelfAttention.has_relative_attention_bias")
"""Only the first layer makes the biases, and hands them on: with a pipeline the first layer of each stage does."""


def _attention(at: str, **kwargs: Any) -> Attention:
    return Attention(at, q="q", k="k", v="v", out="o", attributes={"n_heads": "heads"}, **kwargs)


class T5Policy(RolePolicy):
    stack = (
        Stack(
            "encoder.block",
            [
                _attention("layer.0.SelfAttention", tables=["relative_attention_bias?"]),
                MLP("layer.1.DenseReluDense", up=["wi?", "wi_0?", "wi_1?"], down="wo"),
            ],
            final_norm="encoder.final_layer_norm",
            returns=3,
            from_first=TABLE,
        ),
        Stack(
            "decoder.block",
            [
                _attention("layer.0.SelfAttention", tables=["relative_attention_bias?"]),
                _attention("layer.1.EncDecAttention", reads_context=True),
                MLP("layer.2.DenseReluDense", up=["wi?", "wi_0?", "wi_1?"], down="wo"),
            ],
            final_norm="decoder.final_layer_norm",
            context=("decoder", "encoder_hidden_states"),
            returns=3,
            from_first=TABLE,
            optional=True,
        ),
    )
    embeddings = ("shared?", "encoder.embed_tokens", "decoder.embed_tokens?")
    head = "lm_head"
