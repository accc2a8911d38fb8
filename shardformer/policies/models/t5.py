"""T5: encoder and decoder, pre-norm, a table of relative position biases in the first layer of each, no biases."""

from shardformer.policies.roles import MLP, Attention, RolePolicy, Stack

_PROJECTIONS = {"q": "q", "k": "k", "v": "v", "out": "o"}
_COUNTS = {"n_heads": "heads"}


class T5Policy(RolePolicy):
    stack = (
        Stack(
            "encoder.block",
            [
                Attention(
                    "layer.0.SelfAttention", **_PROJECTIONS, attributes=_COUNTS, tables=["relative_attention_bias?"]
                ),
                MLP("layer.1.DenseReluDense", up=["wi?", "wi_0?", "wi_1?"], down="wo"),
            ],
            final_norm="encoder.final_layer_norm",
        ),
        Stack(
            "decoder.block",
            [
                Attention(
                    "layer.0.SelfAttention", **_PROJECTIONS, attributes=_COUNTS, tables=["relative_attention_bias?"]
                ),
                Attention("layer.1.EncDecAttention", **_PROJECTIONS, attributes=_COUNTS, reads_context=True),
                MLP("layer.2.DenseReluDense", up=["wi?", "wi_0?", "wi_1?"], down="wo"),
            ],
            final_norm="decoder.final_layer_norm",
            context=("decoder", "encoder_hidden_states"),
            optional=True,
        ),
    )
    embedding, head = ("shared?", "encoder.embed_tokens", "decoder.embed_tokens?"), "lm_head"
