"""Swin: windows of an image in stages, each with twice the heads, a bias a head of the relative position."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Q_K_V_O, Attention, AttentionInputs, AttentionProjections, LayerStack

AGAINST_SEQUENCE = "its windows cut the image anew in every layer, so no sequence stays cut between them"
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
    no_sequence_parallel = AGAINST_SEQUENCE


class Swinv2Policy(RolePolicy):
    """Swin V2: norms behind, cosine attention with a scale a head, and an MLP that makes the bias of every head."""

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
    no_sequence_parallel = AGAINST_SEQUENCE
