"""Sharding policies for Swin and Swin V2, image encoders with windowed attention and several stages."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Q_K_V_O, Attention, AttentionInputs, AttentionProjections, LayerStack

NO_SEQUENCE_PARALLEL = "its windows partition the image anew in every layer"
BIAS = "continuous_position_bias_mlp.2"


class SwinPolicy(RolePolicy):
    attention = Attention(
        "attention", Q_K_V_O, local_attrs={"relative_position_bias.relative_position_bias_table": "heads"}
    )
    stack = LayerStack(
        "encoder.layers.*.blocks", [attention, MLP("mlp", up="fc1", down="fc2")], stages=PipelineHints(num_outputs=2)
    )
    keep_replicated = ("embeddings", "encoder.layers.*.downsample?", ".decoder")
    num_heads = ".num_attention_heads"
    no_sequence_parallel = NO_SEQUENCE_PARALLEL


class Swinv2Policy(RolePolicy):
    """Policy for Swin V2, which uses cosine attention and computes the position biases with an MLP."""

    stack = LayerStack(
        "encoder.layers.*.blocks",
        [
            Attention(
                "attention.self",
                AttentionProjections(q="query", k="key", v="value", out=".attention.output.dense", gates=[BIAS]),
                local_attrs={"num_attention_heads": "heads", "all_head_size": "width", "logit_scale": "heads"},
                inputs=AttentionInputs(inner_inputs=[BIAS]),
            ),
            MLP("intermediate", up="dense", down=".output.dense"),
        ],
        stages=PipelineHints(num_outputs=1),
    )
    keep_replicated = (
        "embeddings",
        "encoder.layers.*.downsample?",
        "encoder.layers.*.blocks.*.attention.self.continuous_position_bias_mlp.0",
        ".decoder",
    )
    num_heads = ".num_attention_heads"
    no_sequence_parallel = NO_SEQUENCE_PARALLEL
